"""Kernels that are compiled side by side are those that the call needs, and it gives the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from triton import knobs

from graftlm.kernels.gpu.elementwise import _gate, gate_mul, store_kv
from graftlm.kernels.gpu.norm import _norm, norm_rows
from graftlm.kernels.jit.compile_server import CompileServer
from graftlm.kernels.jit.precompile import compile_meanwhile, compile_together
from graftlm.kernels.norm import Norm

pytestmark = pytest.mark.gpu


def test_a_call_whose_kernels_were_compiled_together_compiles_none_and_gives_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cuda")
    for kernel in (_norm, _gate):
        kernel.device_caches.clear()  # what other tests of this process have compiled
    x = torch.randn(3, 1136, device=device)
    weight = torch.rand(1136, device=device)

    def run() -> torch.Tensor:
        return gate_mul(norm_rows(x, Norm(weight, 1e-5)).repeat(1, 2))

    assert compile_together(run, device) == 2
    compiled: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda *, repr, **_: compiled.append(repr))
    found = run()
    assert not compiled
    norm = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    assert torch.allclose(found, torch.nn.functional.silu(norm) * norm, atol=1e-5)
    assert compile_together(run, device) == 0


def test_a_dry_run_launches_no_kernel_even_if_it_is_compiled() -> None:
    device = torch.device("cuda")
    x = torch.ones(3, 1136, device=device)
    norm = Norm(torch.rand(1136, device=device), 1e-5)
    heads, kept = torch.ones(3, 2, 64, device=device), torch.zeros(3, 2, 64, device=device)
    seen: list[torch.Tensor] = []

    def run() -> None:
        slots = torch.arange(3, dtype=torch.int32, device=device)
        seen.append(norm_rows(x, norm))
        store_kv(heads, heads, kept, kept, slots)

    run()
    assert kept.eq(1).all()
    kept.zero_()
    assert compile_together(run, device) == 0
    assert len(seen) == 2 and kept.eq(0).all()
    run()
    assert kept.eq(1).all()


def test_processes_compile_once_a_kernel_was_missing_in_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device, hits = torch.device("cuda"), list[bool]()
    monkeypatch.setattr("graftlm.kernels.jit.compile_server.FEWEST_CORES", 1)
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, cache_hit, **_: hits.append(cache_hit))
    for kernel in (_norm, _gate):
        kernel.device_caches.clear()
    x = torch.randn(3, 1136, device=device)

    def run() -> torch.Tensor:
        return gate_mul(norm_rows(x, Norm(x[0], 1e-5)).repeat(1, 2))

    with CompileServer() as server:
        assert compile_meanwhile(lambda: norm_rows(x[:, :80], Norm(x[0, :80], 1e-5)), device, server).wait() == 1
        assert hits == [False]
        assert compile_meanwhile(run, device, server).wait() == 2
        assert hits == [False, True, True]
    norm = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * x[0]
    assert torch.allclose(run(), torch.nn.functional.silu(norm) * norm, atol=1e-5)


def test_what_a_dry_call_raises_is_left_to_the_call_that_counts() -> None:
    def fails() -> Any:
        raise ValueError("needs what the kernels left out would have computed")

    assert compile_together(fails, torch.device("cuda")) == 0
    assert knobs.runtime.jit_cache_hook is None
