"""FlashInfer for prefill: what it is asked, and what happens without it.

Where it is not installed, a stand-in with its interface answers by the definition.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graftlm.core.config import CacheConfig
from graftlm.core.runtime import Runtime
from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.kv_store import LayerKV, allocate_kv
from tests.kernels.gpu.attention.test_attention import DEVICE, TOLERANCE, error, plan_of, reference
from tests.models import byte_tokenizer, tiny_model

HEADS, KV_HEADS, DIM = 4, 2, 128
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # Triton's interpreter has no bfloat16
INSTALLED = importlib.util.find_spec("flashinfer") is not None and DEVICE.type == "cuda"


@pytest.fixture(autouse=True)
def imported_anew() -> Iterator[None]:
    """No module keeps a stand-in."""
    sys.modules.pop("graftlm.kernels.gpu.attention.flashinfer", None)
    yield
    sys.modules.pop("graftlm.kernels.gpu.attention.flashinfer", None)


class Wrapper:
    """BatchPrefillWithPagedKVCacheWrapper, by its definition; pages of one token."""

    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert layout == "NHD" and workspace.dtype == torch.uint8

    def plan(self, *args: Any, **options: Any) -> None:
        self.queries, self.pages, self.slots, last, *sizes = args
        assert sizes == [HEADS, KV_HEADS, DIM, 1] and options["causal"] and last.tolist() == [1] * len(last)
        self.options = options

    def run(self, q: torch.Tensor, kv: Any, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty_like(q)
        for i in range(len(self.queries) - 1):
            here = slice(int(self.queries[i]), int(self.queries[i + 1]))
            slots = self.slots[self.pages[i] : self.pages[i + 1]].long()
            positions = torch.arange(len(slots) - (here.stop - here.start), len(slots), device=q.device)
            k, v = (x[:, 0][slots] for x in kv)
            window = self.options["window_left"] + 1 or None
            scale, cap = self.options["sm_scale"], self.options["logits_soft_cap"]
            expected = reference(q[here], k, v, positions, scale=scale, window=window, softcap=cap, sinks=None)
            out[here] = expected.to(q.dtype)
        return out * self.factor, torch.zeros(q.shape[:2], device=q.device)

    factor = 1.0


class Broken(Wrapper):
    def plan(self, *args: Any, **options: Any) -> None:
        raise FileNotFoundError("nvcc")


class Wrong(Wrapper):
    factor = 1.1


def attend(
    monkeypatch: pytest.MonkeyPatch,
    wrapper: type[Wrapper] | None,
    head_dims: tuple[int, ...] = (DIM,),
    min_new: int = 0,
    **options: Any,
) -> Any:
    """Attend two steps of decode rows and others, compare each row with the definition; -> the attention."""
    if wrapper is not None:
        stand_in: Any = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=wrapper)
        monkeypatch.setitem(sys.modules, "flashinfer", stand_in)
    module = importlib.import_module("graftlm.kernels.gpu.attention.flashinfer")
    monkeypatch.setattr(module, "HEAD_DIMS", head_dims)
    monkeypatch.setattr(module, "MIN_NEW", min_new)
    torch.manual_seed(0)
    attention = module.FlashInferAttention(allocate_kv([LayerKV(KV_HEADS, DIM, DIM)], 200, DTYPE, DEVICE))
    for plan in (plan_of((1, 5), (3, 9), (7, 0)), plan_of((4, 30), (5, 2))):
        store = attention.store
        q, k, v = (torch.randn(plan.num_tokens, h, DIM, device=DEVICE).to(DTYPE) for h in (HEADS, KV_HEADS, KV_HEADS))
        for x in (store.k[0], store.v[0]):
            x.copy_(torch.randn(x.shape))
        attention.prepare(plan)
        out = attention.forward(0, q, k, v, plan, AttentionParams(0.1, **options))
        for row in plan.rows:
            here, slots = slice(row.start, row.stop), slice(*row.extents[0])
            positions = torch.arange(row.past, row.kv_len, device=DEVICE)
            asked = {"scale": 0.1, "window": None, "softcap": None, "sinks": None} | options
            expected = reference(q[here], store.k[0][slots], store.v[0][slots], positions, **asked)
            assert error(out[here], expected) < TOLERANCE[DTYPE]
    return attention


@pytest.mark.parametrize("options", [{}, {"window": 6}, {"softcap": 2.0}])
def test_prefill_goes_through_it(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    assert attend(monkeypatch, None if INSTALLED else Wrapper, **options).flashinfer.enabled


@pytest.mark.parametrize(("wrapper", "reason"), [(Broken, "FileNotFoundError: nvcc"), (Wrong, "differs by")])
def test_what_it_cannot_do_goes_through_triton_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, wrapper: type[Wrapper], reason: str
) -> None:
    with pytest.warns(UserWarning, match=f"FlashInfer is left out.*{reason}") as caught:
        assert not attend(monkeypatch, wrapper).flashinfer.enabled
    assert len(caught) == 1


def test_steps_of_few_new_tokens_in_each_row_go_through_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = attend(monkeypatch, Wrong, min_new=8)  # its factor would be found out
    assert attention.flashinfer.enabled and not attention.flashinfer._wrappers


def test_each_kind_of_layer_is_planned_once_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[int] = []

    class Counting(Wrapper):
        def plan(self, *args: Any, **options: Any) -> None:
            super().plan(*args, **options)
            plans.append(options["window_left"])

    attention = attend(monkeypatch, Counting, window=6)
    plan = plan_of((3, 9), (7, 0))
    q, k, v = (torch.randn(plan.num_tokens, h, DIM, device=DEVICE).to(DTYPE) for h in (HEADS, KV_HEADS, KV_HEADS))
    for _ in range(2):
        plans.clear()
        attention.prepare(plan)
        for window in (6, None, 6, None):
            attention.forward(0, q, k, v, plan, AttentionParams(0.1, window))
        assert plans == [5, -1]


def test_a_head_size_that_it_has_no_kernels_for_is_not_compiled_for_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="left out.*no kernels for heads of 128 and 128 dimensions") as caught:
        assert not attend(monkeypatch, Broken, head_dims=(64,)).flashinfer.enabled
    assert len(caught) == 1


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="it is installed")
def test_asked_for_and_missing_the_next_best_answers_with_one_warning() -> None:
    options: dict[str, Any] = {"attention": "flashinfer", "device": DEVICE.type, "cache": CacheConfig(max_tokens=64)}
    with (
        pytest.warns(UserWarning, match="is used, more slowly: attention 'flashinfer'.*cannot be loaded") as caught,
        Runtime(tiny_model(), tokenizer=byte_tokenizer(), **options) as made,
    ):
        assert len(made.generate([1, 2, 3], max_tokens=2, ignore_eos=True).token_ids) == 2
    assert len(caught) == 1
