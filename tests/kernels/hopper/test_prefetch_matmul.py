"""Products of few rows whose weights are prefetched. Without a GPU the kernel is compiled only."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from graftlm.kernels.hopper.support import gluon_kernel, takes
from graftlm.kernels.jit.precompile import compile_together
from tests.kernels.gluon import check_chain, compile_for_hopper, error, random

HALF_DTYPES = [torch.bfloat16, torch.float16]
TOLERANCE = {torch.float16: 6e-4, torch.bfloat16: 5e-3}
"""One rounding of the result."""


def kernel() -> ModuleType:
    found = gluon_kernel("hopper.prefetch_matmul")
    assert found is not None
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 32, 33, 64])
@pytest.mark.parametrize(("n", "k"), [(1000, 128), (6144, 1024), (1024, 4096), (896, 4864), (520, 192)])
def test_every_row_and_output_is_its_sum(n: int, k: int, num_rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = random(num_rows, k, dtype=dtype), random(n, k, dtype=dtype) / k**0.5, random(n, dtype=dtype)
    assert takes(weight)
    product = x.double() @ weight.double().t()
    assert error(kernel().prefetch_matmul(x, weight), product) < TOLERANCE[dtype]
    assert error(kernel().prefetch_matmul(x, weight, bias), product + bias.double()) < TOLERANCE[dtype]
    parts = kernel().prefetch_parts(x, weight)
    assert len(parts) == kernel().num_parts(*weight.shape, weight.device)
    assert error(parts.sum(0), product) < 2e-5


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "k"), [(1, 1536), (20, 512), (20, 1152), (64, 1024), (64, 1088)])
def test_more_tiles_than_programs_run_at_once(num_rows: int, k: int) -> None:
    x, weight = random(num_rows, k), random(64 * 301, k)
    assert error(kernel().prefetch_matmul(x, weight), x.double() @ weight.double().t()) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
def test_nothing_is_written_beside_the_result() -> None:
    x, weight = random(20, 512), random(1000, 512)
    room = torch.full((21, 1000), 7.0, dtype=torch.bfloat16, device="cuda")
    kernel().launch(x, weight, room[None, :20])
    assert torch.equal(room[:20], kernel().prefetch_matmul(x, weight))
    assert bool((room[20:] == 7).all())


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16, 64])
def test_weights_read_early_see_all_that_the_kernels_before_wrote(num_rows: int) -> None:
    weights = [random(2048, 2048) / 2048**0.5 for _ in range(6)]
    check_chain(
        num_rows, weights, [lambda x, w=w: kernel().prefetch_parts(kernel().prefetch_matmul(x, w), w) for w in weights]
    )


@pytest.mark.gpu
def test_a_dry_run_finds_the_kernel() -> None:
    kernel()._prefetch.device_caches.clear()  # what other tests of this process have compiled
    x, weight = random(3, 640), random(520, 640)
    assert compile_together(lambda: kernel().prefetch_matmul(x, weight), x.device) == 1
    assert error(kernel().prefetch_matmul(x, weight), x.double() @ weight.double().t()) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
def test_weights_that_it_cannot_take_are_told_apart() -> None:
    taken = random(128, 512)
    assert takes(taken)
    assert not takes(taken.float())
    assert not takes(taken[:, :256])  # not dense
    assert not takes(random(128, 200))


def test_a_weight_on_the_cpu_is_not_taken() -> None:
    assert not takes(torch.empty(128, 512, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("rows", "kind", "out", "bias"),
    [(16, "bf16", "fp32", False), (64, "fp16", "fp16", True)],
)
def test_it_compiles_for_hopper_and_fits_its_shared_memory(rows: int, kind: str, out: str, bias: bool) -> None:
    arguments = f"""
signature = dict(x=tile({rows}, 64), weight=tile(64, 64), bias="*{kind}", out="*{out}")
signature |= dict.fromkeys(["num_rows", "n", "num_tiles", "num_items", "steps"], "i32")
given = dict(ROWS={rows}, OUTPUTS=64, K=64, BOXES=2, STAGES=kernel.stages_of({rows}), BIAS={bias}, PDL=True)
"""
    compile_for_hopper("hopper.prefetch_matmul", "_prefetch", arguments, kind, registers=64)
