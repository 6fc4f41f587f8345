"""Long cold prompts beside other rows of a step; without a GPU, over the definition of dense attention."""

import pytest
import torch

from graftlm.core.execution.step_plan import PlanRow, StepPlan
from graftlm.core.kv.pages import Extent
from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.gpu.attention import cudnn_prefill
from graftlm.kernels.gpu.attention.backend import TritonAttention
from graftlm.kernels.gpu.attention.cudnn_prefill import Segment, segments_of
from graftlm.kernels.kv_store import KVStore, LayerKV
from tests.kernels.gpu.attention.test_attention import DEVICE, TOLERANCE, error, reference

HEADS, KV_HEADS, DIM = 4, 2, 64


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is long from 20 tokens on."""
    monkeypatch.setattr(cudnn_prefill, "MIN_TOKENS", 20)
    monkeypatch.setattr(cudnn_prefill, "STEP", 16)


def plan_of(*given: tuple[int, int]) -> StepPlan:
    """A step of rows (new tokens, cached tokens), one range of slots after the other."""
    rows: list[PlanRow] = []
    out_slots: list[int] = []
    start = slot = 0
    for num_new, past in given:
        rows.append(PlanRow(None, start, num_new, past, (Extent(slot, slot + past + num_new),)))
        out_slots += range(slot + past, slot + past + num_new)
        start, slot = start + num_new, slot + past + num_new
    ids = torch.zeros(start, dtype=torch.int64)
    return StepPlan(tuple(rows), ids, ids, torch.tensor(out_slots), torch.tensor([start - 1]), (), "mixed")


STEP = plan_of((1, 5), (3, 9), (7, 0), (21, 0), (4, 2), (34, 0))


def run(plan: StepPlan, dense: bool, sinks: torch.Tensor | None = None) -> tuple[TritonAttention, torch.Tensor]:
    """Attend all rows and compare each with the definition."""
    torch.manual_seed(0)
    store = KVStore([LayerKV(KV_HEADS, DIM, DIM)], 200, torch.float16, DEVICE)
    attention = TritonAttention(store)
    attention.dense.enabled = dense
    q, k, v = (torch.randn(plan.num_tokens, h, DIM, device=DEVICE).half() for h in (HEADS, KV_HEADS, KV_HEADS))
    for x in (store.k[0], store.v[0]):
        x.copy_(torch.randn(x.shape))
    attention.prepare(plan)
    out = attention.forward(0, q, k, v, plan, AttentionParams(0.1, sinks=sinks))
    for row in plan.rows:
        here, slots = slice(row.start, row.stop), slice(*row.extents[0])
        positions = torch.arange(row.past, row.kv_len, device=DEVICE)
        options = {"scale": 0.1, "window": None, "softcap": None, "sinks": sinks}
        expected = reference(q[here], store.k[0][slots], store.v[0][slots], positions, **options)
        assert error(out[here], expected) < TOLERANCE[torch.float16]
    return attention, out


def test_long_cold_rows_are_cut_out_of_the_step() -> None:
    assert segments_of(STEP.rows, 1) == (
        Segment(1, 3, 1, 11, False),
        Segment(3, 4, 11, 32, True),
        Segment(4, 5, 32, 36, False),
        Segment(5, 6, 36, 70, True),
    )


@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_step_with_long_rows_attends_each_row_to_its_own_tokens(with_sinks: bool) -> None:
    sinks = torch.randn(HEADS, device=DEVICE) if with_sinks else None
    run(STEP, dense=False, sinks=sinks)
    attention, _ = run(STEP, dense=True, sinks=sinks)
    assert attention.dense.enabled


def test_a_failure_falls_back_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise RuntimeError("no plan for this shape")

    monkeypatch.setattr(cudnn_prefill, "causal", refuse)
    with pytest.warns(UserWarning, match="more slowly than by cuDNN: RuntimeError: no plan for this shape") as caught:
        attention, _ = run(STEP, dense=True)
    assert len(caught) == 1 and not attention.dense.enabled


def test_a_wrong_result_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cudnn_prefill.causal
    monkeypatch.setattr(cudnn_prefill, "causal", lambda *args: right(*args)._replace(out=right(*args).out * 1.1))
    with pytest.warns(UserWarning, match="differs by"):
        run(STEP, dense=True)
