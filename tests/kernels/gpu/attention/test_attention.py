"""The GPU attention kernels against their definition; without a GPU, in Triton's interpreter."""

import itertools

import pytest
import torch

from graftlm.core.config import CacheConfig
from graftlm.core.runtime import Runtime
from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.gpu.attention.decode import (
    AT_ONCE,
    LARGE_MANY,
    DecodeRows,
    Tile,
    Workspace,
    decode_attention,
    num_splits,
    tile_of,
    whole_tile,
)
from graftlm.kernels.gpu.attention.extend import ExtendRows, ExtendTile, extend_attention
from graftlm.kernels.gpu.attention.one_order import one_order_attention
from graftlm.kernels.gpu.attention.shared_prefix import PrefixRows, decode_prefix
from graftlm.kernels.wire_plan import Extent, Row, WirePlan
from tests.models import byte_tokenizer, greedy_reference, random_prompt, tiny_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])
# float32: rounding of one softmax; half precision: the product p @ v is in half precision, as in every flash kernel
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
NUM_SLOTS = 320


def plan_of(*given: tuple[int, int]) -> WirePlan:
    """A step of rows (new tokens, cached tokens), one range of slots after the other."""
    rows: list[Row] = []
    start = slot = 0
    for num_new, past in given:
        rows.append(Row(start, num_new, past, (Extent(slot, slot + past + num_new),)))
        start, slot = start + num_new, slot + past + num_new
    return WirePlan.of(rows, [0] * start, [start - 1])


def scores_of(q, keys, scale: float, softcap: float | None) -> torch.Tensor:
    """float64 [Hq, n, N] of q [n, Hq, D] and keys [N, Hkv, D]."""
    group = q.shape[1] // keys.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys.double().repeat_interleave(group, 1)) * scale
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def reference(q, keys, values, positions, *, scale, window=None, softcap=None, sinks=None, until=None) -> torch.Tensor:
    """Attention of q [n, Hq, D] over one sequence's keys [N, Hkv, D] in float64; query i sees up to positions[i].

    until  the number of tokens that query i sees instead
    """
    scores = scores_of(q, keys, scale, softcap)
    column = torch.arange(len(keys), device=q.device)
    hidden = column[None] >= (positions + 1 if until is None else until)[:, None]
    if window is not None:
        hidden |= column[None] <= positions[:, None] - window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(q), 1)], -1)
    weights = scores.softmax(-1)[..., : len(keys)]
    return torch.einsum("hqk,khd->qhd", weights, values.double().repeat_interleave(q.shape[1] // keys.shape[1], 1))


class Case:
    """Random KV, and sequences of these lengths scattered over it."""

    def __init__(self, lens: list[int], heads: int, kv_heads: int, k_dim: int, v_dim: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.lens = lens
        self.k = torch.randn(NUM_SLOTS, kv_heads, k_dim, device=DEVICE, dtype=dtype)
        self.v = torch.randn(NUM_SLOTS, kv_heads, v_dim, device=DEVICE, dtype=dtype)
        self.table = torch.zeros(len(lens) + 1, max(lens) + 3, dtype=torch.int32, device=DEVICE)
        self.rows = torch.arange(len(lens), 0, -1, dtype=torch.int32, device=DEVICE)  # not in batch order
        for i, length in enumerate(lens):
            self.table[len(lens) - i, :length] = torch.randperm(NUM_SLOTS, device=DEVICE)[:length].int()
        self.heads, self.v_dim, self.dtype = heads, v_dim, dtype

    def kv(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        slots = self.table[self.rows[i].item(), : self.lens[i]].long()
        return self.k[slots], self.v[slots]

    def ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    def queries(self, num: int) -> torch.Tensor:
        return torch.randn(num, self.heads, self.k.shape[2], device=DEVICE, dtype=self.dtype)


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    assert torch.isfinite(out).all()
    return float((out.double() - expected).norm() / expected.norm())


SHAPES = [(4, 4, 64, 64), (8, 2, 64, 64), (16, 1, 64, 64), (6, 2, 80, 80), (4, 2, 96, 96), (4, 2, 128, 128),
          (2, 1, 256, 256), (2, 1, 112, 112), (2, 1, 192, 192), (5, 1, 64, 64),
          (4, 4, 96, 64), (14, 2, 64, 64), (8, 1, 512, 512)]  # fmt: skip
VARIANTS = [{}, {"window": 7}, {"window": 100}, {"softcap": 2.0}, {"sinks": True},
            {"window": 7, "softcap": 2.0, "sinks": True}]  # fmt: skip
if DEVICE.type == "cuda":
    GRID = list(itertools.product(SHAPES, DTYPES, VARIANTS))
else:
    GRID = [(s, DTYPES[0], v) for s, v in itertools.product(SHAPES[:2], VARIANTS[1:])]
    GRID += [(s, d, {}) for s, d in itertools.product(SHAPES, DTYPES)]


@pytest.mark.parametrize(("shape", "dtype", "variant"), GRID)
def test_decode_equals_its_definition(shape, dtype, variant) -> None:
    heads, kv_heads, k_dim, v_dim = shape
    case = Case([1, 70, 131], heads, kv_heads, k_dim, v_dim, dtype)
    q, scale = case.queries(3), k_dim**-0.5
    options = {"window": variant.get("window"), "softcap": variant.get("softcap")}
    sinks = torch.randn(heads, device=DEVICE) if variant.get("sinks") else None
    workspace = Workspace.allocate(3, heads, v_dim, 4, DEVICE)
    workspace.out.fill_(float("nan"))
    step = DecodeRows(case.table, case.rows, case.ints(case.lens), case.ints([0, 0, 0]))
    params = AttentionParams(scale, sinks=sinks, **options)
    out = decode_attention(q, case.k, case.v, step, workspace, params, splits=4)
    for i, length in enumerate(case.lens):
        last = torch.tensor([length - 1], device=DEVICE)
        expected = reference(q[i : i + 1], *case.kv(i), last, scale=scale, sinks=sinks, **options)
        assert error(out[i : i + 1], expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("tile", AT_ONCE.values())
def test_rows_that_are_not_split_are_the_same_by_every_tile(tile: Tile) -> None:
    case = Case([1, 70, 131], 4, 2, 128, 128, torch.float16)
    q = case.queries(3)
    workspace = Workspace.allocate(3, 4, 128, 1, DEVICE)
    step = DecodeRows(case.table, case.rows, case.ints(case.lens), case.ints([0, 0, 0]))
    out = decode_attention(q, case.k, case.v, step, workspace, AttentionParams(0.1), splits=1, tile=tile)
    for i, length in enumerate(case.lens):
        last = torch.tensor([length - 1], device=DEVICE)
        expected = reference(q[i : i + 1], *case.kv(i), last, scale=0.1)
        assert error(out[i : i + 1], expected) < TOLERANCE[torch.float16]


def test_rows_that_are_not_split_take_the_tile_that_is_done_first() -> None:
    base = tile_of(torch.bfloat16, 128)
    assert [whole_tile(base, 128, n) for n in (0.5, 3.9, 4.0)] == [base] * 3
    assert [whole_tile(base, 128, n) for n in (4.8, 5.8, 7.7, 9.7, 15.5)] == [AT_ONCE[n] for n in (5, 6, 8, 5, 6)]
    assert whole_tile(base, 64, 4.8) == base
    large = tile_of(torch.bfloat16, 256)
    assert [whole_tile(large, 256, n) for n in (1.9, 3.9)] == [large, LARGE_MANY]


def test_large_heads_are_cut_into_fewer_parts() -> None:
    assert [num_splits(rows, 4, 132, 256) for rows in (1, 8, 32, 64, 128)] == [32, 8, 2, 1, 1]
    assert [num_splits(rows, 4, 132) for rows in (1, 8, 32, 64, 128)] == [32, 16, 4, 2, 1]


@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_shared_prefix_read_once_gives_what_each_row_reads_by_itself(num_splits: int) -> None:
    case = Case([90, 100, 40, 111], 8, 2, 64, 64, torch.float32)
    for i in (1, 3):  # rows 0, 1 and 3 share their first 80 tokens
        case.table[case.rows[i].item(), :80] = case.table[case.rows[0].item(), :80]
    q = case.queries(4)
    workspace = Workspace.allocate(4, 8, 64, 2 + num_splits, DEVICE)
    workspace.out.fill_(float("nan"))
    starts = case.ints([80, 80, 0, 80])
    step = DecodeRows(case.table, case.rows, case.ints(case.lens), starts)
    prefix = PrefixRows(case.ints([80]), case.ints([0, 1, 3, 99]), case.ints([3]))
    where = (q, case.k, case.v, step)
    params = AttentionParams(0.1)
    decode_prefix(*where, prefix, workspace, params, splits=num_splits, num_parts=2 + num_splits)
    out = decode_attention(*where, workspace, params, splits=2, num_prefix=num_splits)
    for i, length in enumerate(case.lens):
        last = torch.tensor([length - 1], device=DEVICE)
        expected = reference(q[i : i + 1], *case.kv(i), last, scale=0.1)
        assert error(out[i : i + 1], expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("shape", "dtype", "variant"), GRID)
def test_extend_equals_its_definition(shape, dtype, variant) -> None:
    heads, kv_heads, k_dim, v_dim = shape
    case = Case([5, 70, 131], heads, kv_heads, k_dim, v_dim, dtype)
    new = [5, 1, 67]
    q, scale = case.queries(sum(new)), k_dim**-0.5
    options = {"window": variant.get("window"), "softcap": variant.get("softcap")}
    sinks = torch.randn(heads, device=DEVICE) if variant.get("sinks") else None
    step = ExtendRows(case.table, case.rows, case.ints(case.lens), case.ints([0, 5, 6, 73]), max(new))
    out = extend_attention(q, case.k, case.v, step, AttentionParams(scale, sinks=sinks, **options))
    begin = 0
    for i, (length, num) in enumerate(zip(case.lens, new, strict=True)):
        here = slice(begin, begin + num)
        positions = torch.arange(length - num, length, device=DEVICE)
        expected = reference(q[here], *case.kv(i), positions, scale=scale, sinks=sinks, **options)
        assert error(out[here], expected) < TOLERANCE[dtype]
        begin += num


def test_parts_of_a_head_are_those_of_the_whole() -> None:
    case, new = Case([5, 70], 4, 2, 64, 48, torch.float32), [5, 30]
    q = case.queries(sum(new))
    step = ExtendRows(case.table, case.rows, case.ints(case.lens), case.ints([0, 5, 35]), max(new))
    whole, parts = (
        extend_attention(q, case.k, case.v, step, AttentionParams(0.1), tile=ExtendTile(16, 16, 4, 1, parts))
        for parts in (1, 3)
    )
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("attend", [extend_attention, one_order_attention])
def test_new_tokens_may_see_to_the_end_of_their_span(attend, dtype, window) -> None:
    case = Case([5, 70, 131], 4, 2, 64, 64, dtype)
    new = [5, 1, 67]
    q = case.queries(sum(new))
    until = [5, 5, 5, 4, 5, 70, *range(65, 75), *[100] * 26, *range(101, 112), *[131] * 20]
    step = ExtendRows(case.table, case.rows, case.ints(case.lens), case.ints([0, 5, 6, 73]), 67, case.ints(until))
    out = attend(q, case.k, case.v, step, AttentionParams(0.1, window))
    begin = 0
    for i, (length, num) in enumerate(zip(case.lens, new, strict=True)):
        here = slice(begin, begin + num)
        positions = torch.arange(length - num, length, device=DEVICE)
        seen = case.ints(until)[here]
        expected = reference(q[here], *case.kv(i), positions, scale=0.1, window=window, until=seen)
        assert error(out[here], expected) < TOLERANCE[dtype]
        begin += num


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt_oss"])
def test_an_engine_over_the_kernels_gives_the_tokens_of_transformers(kind: str) -> None:
    prefix = random_prompt(9, seed=1)
    prompts = [prefix + random_prompt(4 + i, seed=i) for i in range(3)]
    model = tiny_model(kind).to(DEVICE)
    options = {"cache": CacheConfig(max_tokens=300), "max_step_tokens": 8, "attention": "triton"}
    with Runtime(model, tokenizer=byte_tokenizer(), **options) as rt:
        answers = rt.generate(prompts, temperature=0, max_tokens=4, ignore_eos=True)
    reference = tiny_model(kind)
    assert [c.token_ids for c in answers] == [greedy_reference(reference, p, 4) for p in prompts]
