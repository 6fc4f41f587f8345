from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from graftlm.core.config import EngineConfig
from graftlm.core.execution.paged import PagedRunner
from graftlm.core.fusion.cpu_layers import FusedCpuLayer
from graftlm.core.loaded_model import LoadedModel
from graftlm.core.model.load import load_model
from graftlm.core.model.qualify import probe_plan
from graftlm.kernels.cpu.attention.backend import TorchAttention
from graftlm.kernels.cpu.compiled import loop_runtime
from graftlm.kernels.cpu.decoder import decoder_layer
from graftlm.kernels.cpu.decoder.decoder_stack import DecoderStack, _KindOfLayers
from graftlm.kernels.cpu.linear.packed_linear import PackedLinear
from graftlm.kernels.kv_store import KVStore, allocate_kv
from graftlm.kernels.wire_plan import Extent, SharedPrefix, WirePlan
from tests.models import byte_tokenizer, tiny_model

pytestmark = pytest.mark.skipif(
    PackedLinear(torch.nn.Linear(64, 64)).panels() is None, reason="oneDNN lays weights out otherwise on this CPU"
)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
SLOTS = 300


def load(kind: str = "llama", dtype: torch.dtype = torch.float32, **config: Any) -> LoadedModel:
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN packs no bfloat16 on this CPU")
    # 66: wider than a panel, and by no multiple of one
    loaded = load_model(
        tiny_model(kind, **{"intermediate_size": 66, **config}).to(dtype), EngineConfig(device="cpu"), byte_tokenizer()
    )
    assert loaded.stack is not None
    return loaded


def filled(loaded: LoadedModel) -> KVStore:
    """A store of garbage that both ways find the same."""
    store = allocate_kv(loaded.kv_layout, SLOTS, loaded.dtype)
    generator = torch.Generator().manual_seed(5)
    for x in (*store.k, *store.v):
        x.copy_(torch.randn(x.shape, generator=generator))
    return store


def compare(loaded: LoadedModel, *plans: WirePlan) -> None:
    """Run the steps in one call each and through the modules; logits, keys and values are the same."""
    stores = [filled(loaded), filled(loaded)]
    ours, theirs = (PagedRunner(loaded, TorchAttention(store)) for store in stores)
    theirs._stack = None
    before = [x.clone() for x in (*stores[0].k, *stores[0].v)]
    limit = TOLERANCE[loaded.dtype]
    for plan in plans:
        assert loaded.stack is not None
        ours.attention.prepare(plan)
        ids, wanted = torch.from_numpy(plan.input_ids), torch.from_numpy(plan.logits_rows)
        assert loaded.stack.run(plan, ids, wanted, ours.attention) is not None
        torch.testing.assert_close(ours.forward(plan), theirs.forward(plan), rtol=limit, atol=limit)
    for old, mine, other in zip(before, *([*s.k, *s.v] for s in stores), strict=True):
        torch.testing.assert_close(mine, other, rtol=limit, atol=limit)
        assert not torch.equal(mine, old)


def rows_of(*lengths: tuple[int, int], start: int = 0) -> WirePlan:
    """A step with a row (past, new) for each, whose slots lie in two ranges."""
    places, sequences = [], []
    for past, new in lengths:
        half = (past + new) // 2
        places.append([Extent(start, start + half), Extent(start + half + 3, start + 3 + past + new)])
        sequences.append([(7 * start + i) % 250 for i in range(past + new)])
        start += past + new + 3
    return probe_plan(sequences, tuple(places), [(past, past + new) for past, new in lengths])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
        ("llama", {"head_dim": 24, "attention_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"num_hidden_layers": 3}),
        ("mistral", {"sliding_window": 8}),
    ],
)
def test_a_decode_step_gives_what_the_modules_give(kind: str, config: dict[str, Any], dtype: torch.dtype) -> None:
    compare(load(kind, dtype, **config), rows_of((5, 1)), rows_of((0, 1), (17, 1), (90, 1)))


@pytest.mark.parametrize(("layer_types", "num"), [(None, 1), (["sliding_attention", "full_attention"] * 2, 2)])
def test_layers_that_attend_alike_lay_out_a_step_once(
    layer_types: list[str] | None, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"layer_types": layer_types, "sliding_window": 8, "use_sliding_window": True} if layer_types else {}
    loaded = load("qwen2", num_hidden_layers=4, **config)
    read, seen = _KindOfLayers.read, list[list[int]]()

    def noted(kind: _KindOfLayers, plan: Any, attention: TorchAttention) -> bool:
        seen.append(kind.index.tolist())
        return read(kind, plan, attention)

    monkeypatch.setattr(_KindOfLayers, "read", noted)
    plan = rows_of((17, 1))
    runner = PagedRunner(loaded, TorchAttention(filled(loaded)))
    runner.attention.prepare(plan)
    runner.forward(plan)
    assert len(seen) == num
    assert sorted(index for kind in seen for index in kind) == [0, 1, 2, 3]


def test_single_tokens_short_runs_and_blocks_of_queries_share_a_step() -> None:
    compare(load(), rows_of((9, 1), (20, 4), (0, 30), (33, 17)), rows_of((40, 1), (1, 1)))


def test_the_widest_step() -> None:
    compare(load(), rows_of(*[(1, 1)] * 32, (2, 32)))


def shared_step(window: int | None = None) -> WirePlan:
    """Rows of which two share 70 tokens, two others 66, and one shares nothing."""
    shared = [Extent(0, 70)], [Extent(70, 100), Extent(104, 140)]
    places = [[*shared[i], Extent(150 + 9 * n, 159 + 9 * n)] for n, i in enumerate((0, 1, 0, 1))] + [[Extent(200, 212)]]
    pasts = [73, 66, 70, 70, 11]
    sequences = [[(i * 3 + n) % 250 for i in range(past + 2)] for n, past in enumerate(pasts)]
    news = [1, 1, 2, 1, 1]
    plan = probe_plan(sequences, tuple(places), [(p, p + n) for p, n in zip(pasts, news, strict=True)])
    return plan.sharing([SharedPrefix(70, (0, 2)), SharedPrefix(66, (1, 3))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefixes_that_rows_share_are_read_once_and_joined(dtype: torch.dtype) -> None:
    compare(load(dtype=dtype), shared_step())


def test_a_window_that_ends_within_a_shared_prefix_reads_it_row_by_row() -> None:
    compare(load("mistral", sliding_window=16), shared_step())


def test_only_the_wanted_rows_have_logits() -> None:
    loaded, plan = load(), rows_of((9, 1), (3, 20))
    compare(loaded, replace(plan, logits_rows=np.array([0, 20])))
    nothing = PagedRunner(loaded, TorchAttention(filled(loaded))).forward(
        replace(plan, logits_rows=np.empty(0, np.int64))
    )
    assert nothing.shape == (0, loaded.vocab_size)


def test_a_step_of_more_rows_is_left_to_the_modules() -> None:
    loaded, plan = load(), rows_of((0, decoder_layer.MAX_DECODE_ROWS[torch.float32] + 1))
    attention = TorchAttention(filled(loaded))
    attention.prepare(plan)
    assert loaded.stack is not None
    assert loaded.stack.run(plan, *map(torch.from_numpy, (plan.input_ids, plan.logits_rows)), attention) is None
    assert PagedRunner(loaded, attention).forward(plan).isfinite().all()


def test_rotations_are_there_for_positions_beyond_those_of_the_first_steps() -> None:
    compare(load(), rows_of((2, 1)), rows_of((260, 1)), rows_of((4, 1)))


def test_rotations_that_change_beyond_the_context_are_those_within_it() -> None:
    # tables of 512 positions would be those of a longer context
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 300,
    }
    model = tiny_model(rope_parameters=longrope, max_position_embeddings=600, intermediate_size=66)
    loaded = load_model(model, EngineConfig(device="cpu", max_model_len=300), byte_tokenizer())
    assert loaded.stack is not None
    compare(loaded, rows_of((2, 1)), rows_of((280, 1)), rows_of((4, 1)))


@pytest.mark.parametrize("token_id", [-1, 272, 1 << 40])
def test_an_id_that_the_embedding_does_not_have_is_an_error(token_id: int) -> None:
    loaded, plan = load(), rows_of((9, 1), (3, 1))
    attention = TorchAttention(filled(loaded))
    attention.prepare(plan)
    assert loaded.stack is not None
    with pytest.raises(IndexError, match=f"token id {token_id} is no row of the embedding, which has 272"):
        loaded.stack.run(plan, torch.tensor([5, token_id]), torch.from_numpy(plan.logits_rows), attention)


@pytest.mark.parametrize("num_threads", [1, 3, 7])
def test_any_number_of_threads_gives_the_same(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(decoder_layer, "SMALL_BYTES", 0)
    loaded = load()  # with the threads that there are: oneDNN's layout may depend on their number
    torch.set_num_threads(num_threads)
    try:
        compare(loaded, rows_of((9, 1), (20, 4), (33, 17)), rows_of((30, 1), (2, 1), (3, 1)))
    finally:
        torch.set_num_threads(before)


def test_without_openmp_one_thread_does_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_layer, "barrier", lambda: 0)
    monkeypatch.setattr(loop_runtime, "parallel_region", lambda: None)
    compare(load(), rows_of((9, 1), (20, 4)))


def test_two_stores_of_one_model_are_kept_apart() -> None:
    loaded, plan = load(), rows_of((9, 1), (3, 1))
    first, second = (PagedRunner(loaded, TorchAttention(filled(loaded))) for _ in range(2))
    expected = first.forward(plan)
    second.attention.store.k[0].zero_()  # type: ignore[attr-defined]
    assert not torch.equal(second.forward(plan), expected)
    assert torch.equal(first.forward(plan), expected)
    assert isinstance(loaded.stack, DecoderStack)


def test_a_layer_alone_leaves_the_calls_of_a_stack_that_is_gone_alone() -> None:
    """The end of a step wrote zeros where they had been: into memory that another object had meanwhile."""
    loaded = load()
    fused = next(m.forward for m in loaded.model.modules() if isinstance(m.forward, FusedCpuLayer))
    layers, elsewhere = fused.decode.layers, np.full((3, 64), 7)
    for name, place in zip(("singles", "blocks", "prefixes"), elsewhere, strict=True):
        layers.layers[name] = place.ctypes.data
    cos = sin = torch.ones(1, fused.decode.weights.head_dim)
    fused.decode.before(torch.ones(1, fused.decode.weights.hidden_size), cos, sin)
    assert (elsewhere == 7).all()
