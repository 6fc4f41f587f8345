"""Steps of many new tokens laid out densely. Without a Hopper GPU by the definition of the kernel that attends them."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.bits12.kv_codec import pack, unpack
from graftlm.kernels.gpu.attention.backend import TritonAttention
from graftlm.kernels.hopper import prompt_attention, prompt_layout
from graftlm.kernels.hopper.gather_kv import lay_out
from graftlm.kernels.hopper.prompt_layout import BLOCK, padded
from graftlm.kernels.hopper.support import gluon_kernel
from graftlm.kernels.jit.precompile import compile_together, is_dry
from graftlm.kernels.kv_store import CompactKV, LayerKV, allocate_kv
from graftlm.kernels.wire_plan import Extent, Row, SharedPrefix, WirePlan
from tests.kernels.gluon import compile_for_hopper
from tests.kernels.gpu.attention.test_attention import DEVICE, TOLERANCE, error, reference

ON_HOPPER = DEVICE.type == "cuda" and torch.cuda.get_device_capability() == (9, 0)
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter has no products in bfloat16


def definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: torch.Tensor, scale: float, out: torch.Tensor
) -> None:
    """What `prompt_attention` is to write, tile by tile."""
    for token, tokens, prefix, length, own, before, *_ in tiles.tolist():
        keys, values = (torch.cat([x[prefix : prefix + length], x[own : own + before + tokens]]) for x in (k, v))
        positions = torch.arange(length + before, length + before + tokens, device=q.device)
        here = slice(token, token + tokens)
        out[here] = reference(q[here], keys, values, positions, scale=scale).to(out.dtype)


DEFINITION = SimpleNamespace(HEAD_DIMS=(64, 128), MAX_GROUP=64, prompt_attention=definition)


def fails(*_: Any) -> None:
    raise ValueError("no room")


@pytest.fixture(autouse=True)
def any_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is worth it however small it is."""
    monkeypatch.setattr(prompt_attention, "MIN_TOKENS", 2)
    monkeypatch.setattr(prompt_attention, "MIN_QUERIES", 0)
    monkeypatch.setattr(prompt_attention, "FILLED", 0.0)


def plan_of(*given: tuple[int, int], shared: tuple[int, tuple[int, ...]] | None = None) -> WirePlan:
    """A step of rows (new tokens, cached tokens); `shared`: the first tokens of some rows lie in the same slots."""
    length, sharing = shared or (0, ())
    rows: list[Row] = []
    start, slot = 0, length
    for index, (num_new, past) in enumerate(given):
        own = past + num_new - (length if index in sharing else 0)
        # in two places, the later tokens first
        extents = [Extent(slot + own // 2, slot + own), Extent(slot, slot + own // 2)]
        extents = ([Extent(0, length)] if index in sharing else []) + [e for e in extents if e.stop > e.start]
        rows.append(Row(start, num_new, past, extents))
        start, slot = start + num_new, slot + own
    return WirePlan.of(rows, [0] * start, [start - 1], [SharedPrefix(length, sharing)] if shared else ())


class Step:
    """One step over random K and V, attended by the fast way, and by its definition."""

    def __init__(
        self,
        plan: WirePlan,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 64,
        dtype: torch.dtype = HALF,
        compact: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.plan = plan
        num_slots = int(plan.extents.max())
        self.store = allocate_kv([LayerKV(kv_heads, dim, dim)], num_slots, dtype, DEVICE, compact=compact)
        # one product gives all three; what follows a step's tokens in memory is not finite
        packed = torch.full((plan.num_tokens + 3, heads + 2 * kv_heads, dim), float("nan"), dtype=dtype, device=DEVICE)
        packed[:-3] = torch.randn(plan.num_tokens, *packed.shape[1:], device=DEVICE)
        self.q, self.k, self.v = packed[:-3].split([heads, kv_heads, kv_heads], 1)
        self.kept = []
        for index, held in enumerate((self.store.k[0], self.store.v[0])):
            x = torch.randn(num_slots, kv_heads, dim, device=DEVICE).to(dtype)
            if compact:
                words, exponents = pack(x)
                held.copy_(words)
                self.store.exponents[0][:, :, index] = exponents.T
                x = unpack(words, exponents)
            else:
                held.copy_(x)
            self.kept.append(x.float())
        self.attention = TritonAttention(self.store)
        if not ON_HOPPER:
            self.attention.prompts._kernel = DEFINITION
            self.attention.prompts.enabled, self.attention.prompts._max_bytes = True, 1 << 30
        self.taken = 0
        self._count()

    def _count(self) -> None:
        kernel: Any = self.attention.prompts._kernel

        def counted(*args: Any) -> None:
            self.taken += 1
            kernel.prompt_attention(*args)

        self.attention.prompts._kernel = SimpleNamespace(**vars(kernel) | {"prompt_attention": counted})

    def run(self, **options: Any) -> torch.Tensor:
        self.attention.prepare(self.plan)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return self.attention.forward(0, self.q, self.k, self.v, self.plan, AttentionParams(0.1, **options))

    def error(self, out: torch.Tensor, **options: Any) -> float:
        """The largest relative error of a row."""
        found = []
        for row in self.plan.rows:
            here = slice(row.start, row.stop)
            slots = [s for start, stop in row.extents for s in range(start, stop)][: row.past]
            seen = [
                torch.cat([x[slots], new[here].float()]) for x, new in zip(self.kept, (self.k, self.v), strict=True)
            ]
            positions = torch.arange(row.past, row.kv_len, device=DEVICE)
            found.append(error(out[here], reference(self.q[here], *seen, positions, **{"scale": 0.1} | options)))
        return max(found)


STEPS = [
    plan_of((5, 0)),
    plan_of((1, 4), (1, 9), (130, 0), (7, 260), (64, 64), (2, 126)),
    plan_of((129, 127), (3, 128), (128, 0)),
    plan_of((1, 150), (40, 128), (33, 131), (9, 0), (12, 300), shared=(128, (0, 1, 2, 4))),
    plan_of((40, 100), (33, 107), (70, 100), shared=(100, (0, 1, 2))),
    plan_of((1, 70), (9, 70), shared=(70, (0, 1))),
]


@pytest.mark.parametrize("plan", STEPS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (3, 3, 128), (8, 1, 128), (14, 2, 64), (6, 2, 128)])
def test_every_row_attends_to_its_cached_tokens_and_to_its_own(
    plan: WirePlan, heads: int, kv_heads: int, dim: int
) -> None:
    step = Step(plan, heads, kv_heads, dim)
    for _ in range(2):  # the first result is compared with the plain way's, which is given; the second one is its own
        assert step.error(step.run()) < TOLERANCE[HALF]
    assert step.taken == 2


@pytest.mark.parametrize("plan", STEPS)
def test_cached_tokens_in_12_bits_are_laid_out_as_they_are_kept(plan: WirePlan) -> None:
    if DEVICE.type != "cuda":
        pytest.skip("a compact store is of bfloat16")
    step = Step(plan, 8, 2, 128, compact=True)
    for _ in range(2):
        assert step.error(step.run()) < TOLERANCE[HALF]
    assert step.taken == 2


@pytest.mark.parametrize("num_decode", [0, 1])
@pytest.mark.parametrize("num_new", [2, 200, 384])
def test_one_row_without_cached_tokens_lies_densely_as_it_is(
    num_new: int, num_decode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_attention, "lay_out", fails)
    step = Step(plan_of(*((1, 30),) * num_decode, (num_new, 0)))
    for _ in range(2):
        assert step.error(step.run()) < TOLERANCE[HALF]
    assert step.taken == 2


def test_numbers_in_12_bits_are_laid_out_to_the_bit() -> None:
    torch.manual_seed(0)
    store = CompactKV([LayerKV(2, 128, 128)], 300, DEVICE)
    kept = []
    for index, held in enumerate((store.k[0], store.v[0])):
        words, exponents = pack(torch.randn(300, 2, 128, device=DEVICE).bfloat16())
        held.copy_(words)
        store.exponents[0][:, :, index] = exponents.T
        kept.append(unpack(words, exponents))
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    new = [torch.randn(12, 2, 128, device=DEVICE).to(dtype) for _ in range(2)]
    table = torch.randperm(300, device=DEVICE).int()[None].repeat(2, 1)
    blocks = torch.tensor([[1, 7, 0, 140, 6, 5, 0, 0], [1, 7, 128, 140, 6, 5, 0, 0]], dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    found = lay_out(store.k[0], store.v[0], store.exponents[0], table, rows, *new, blocks)
    slots = table[1, 7:147].long()
    for laid_out, held, own in zip(found, kept, new, strict=True):
        assert laid_out.dtype == dtype
        assert torch.equal(laid_out[:140], held[slots].to(dtype))
        assert torch.equal(laid_out[140:146], own[5:11])
        assert not laid_out[146:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(32, 8, 128), (14, 7, 64), (64, 1, 128), (5, 5, 64), (28, 4, 128)]
)
def test_more_tiles_than_the_card_runs_at_once(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    if not ON_HOPPER:
        pytest.skip("needs a Hopper GPU")
    plan = plan_of((1, 700), *((700, 300),) * 3, (1500, 0), *((60, 500),) * 20, shared=(290, (1, 2, 3)))
    step = Step(plan, heads, kv_heads, dim, dtype)
    for _ in range(2):
        assert step.error(step.run()) < TOLERANCE[dtype]
    first = step.run()
    assert all(torch.equal(step.run(), first) for _ in range(20))


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, {"window": 50}),
        ({}, {"softcap": 20.0}),
        ({}, {"sinks": torch.ones(4, device=DEVICE)}),
        ({"dim": 32}, {}),
        ({"heads": 10}, {}),  # five share a KV head: three of eight places would be empty
        ({"dtype": torch.float32}, {}),
    ],
)
def test_other_layers_go_another_way(given: dict[str, Any], options: dict[str, Any]) -> None:
    step = Step(plan_of((60, 30), (5, 0)), **given)
    assert step.error(step.run(**options), **options) < TOLERANCE[step.q.dtype]
    assert step.taken == 0


def test_a_window_that_no_row_reaches_changes_nothing() -> None:
    step = Step(plan_of((60, 30), (5, 0)))
    assert step.error(step.run(window=90)) < TOLERANCE[HALF]
    assert step.taken == 1


def test_a_step_goes_this_way_where_many_queries_see_what_is_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_attention, "MIN_QUERIES", 80)
    for plan, heads, taken in (
        (plan_of((100, 156)), 4, 1),  # 100 tokens see 206 of 256: 80 for each of two heads of a KV head
        (plan_of((100, 156)), 2, 1),
        (plan_of((98, 158)), 2, 0),
        (plan_of((98, 158)), 4, 1),
        (plan_of((16, 300)), 4, 0),  # 16 see 308 of 384
        (plan_of((16, 256), (16, 256), shared=(256, (0, 1))), 4, 0),  # 16 each see 264, of 512 in all
        (plan_of(*((32, 256),) * 4, shared=(256, (0, 1, 2, 3))), 4, 1),  # 32 each see 272, of 768: 45
    ):
        step = Step(plan, heads)
        step.run()
        assert step.taken == taken
    monkeypatch.setattr(prompt_attention, "MIN_TOKENS", 101)
    step = Step(plan_of((100, 156)))
    step.run()
    assert step.taken == 0


def test_a_step_whose_rows_end_early_in_their_tiles_goes_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_attention, "FILLED", 0.6)
    for rows, taken in (((38, 9), (39, 0)), 1), (((38, 9), (38, 0)), 0):  # of twice 64 tokens, for two query heads
        step = Step(plan_of(*rows))
        step.run()
        assert step.taken == taken


def test_what_takes_too_much_memory_goes_another_way() -> None:
    step = Step(plan_of((60, 30), (5, 0)))
    step.attention.prompts._max_bytes = 2 * 2 * BLOCK * 2 * 64 * 2
    step.run()
    step.attention.prompts._max_bytes -= 1
    step.run()
    assert step.taken == 1


def test_a_captured_step_is_none_that_was_laid_out() -> None:
    step = Step(plan_of((60, 30), (5, 0)))
    step.attention.prepare(step.plan)
    assert step.attention._step is not None and step.attention._layout is not None
    step.attention.bind(step.attention._step, step.attention._layout)
    step.attention.forward(0, step.q, step.k, step.v, step.plan, AttentionParams(0.1))
    assert step.taken == 0


def is_wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: torch.Tensor, scale: float, out: Any) -> None:
    definition(q, k, v, tiles, 1.5 * scale, out)


@pytest.mark.parametrize(("kernel", "reason"), [(fails, "ValueError: no room"), (is_wrong, "its result differs by")])
def test_a_kernel_that_fails_or_differs_is_left_alone(kernel: Any, reason: str) -> None:
    step = Step(plan_of((60, 30), (5, 0)))
    step.attention.prompts._kernel = SimpleNamespace(**vars(DEFINITION) | {"prompt_attention": kernel})
    step.attention.prepare(step.plan)
    with pytest.warns(UserWarning, match=f"long prompts are attended more slowly: {reason}"):
        out = step.attention.forward(0, step.q, step.k, step.v, step.plan, AttentionParams(0.1))
    assert step.error(out) < TOLERANCE[HALF]
    assert not step.attention.prompts.enabled
    assert step.error(step.run()) < TOLERANCE[HALF]


@pytest.mark.gpu
def test_nothing_is_compared_where_all_is_void() -> None:
    if not ON_HOPPER:
        pytest.skip("needs a Hopper GPU")
    step = Step(plan_of((60, 30), (5, 0)))
    seen: list[bool] = []

    def dry() -> None:
        seen.append(is_dry())
        step.run()
        seen.append(step.attention.prompts.enabled)

    compile_together(dry, DEVICE)
    assert seen == [True, True] and not is_dry()
    step = Step(plan_of((60, 30), (5, 0)))  # the buffers of the other one count as written
    assert step.error(step.run()) < TOLERANCE[HALF]


def test_a_prefix_is_laid_out_once() -> None:
    plan = plan_of((1, 150), (40, 128), (33, 131), (9, 0), (12, 300), shared=(128, (0, 1, 2, 4)))
    layout = prompt_layout.prompt_layout(plan, 1, torch.device("cpu"))
    assert layout.first_token == 1 and layout.longest == 312
    assert layout.num_pairs == sum(sum(range(row.past + 1, row.kv_len + 1)) for row in plan.rows[1:])
    assert layout.blocks[:, :6].tolist() == [
        [1, 0, 0, 128, 0, 0],
        [1, 128, 0, 0, 40, 1],
        [2, 128, 0, 3, 33, 41],
        [3, 0, 0, 0, 9, 74],
        [4, 128, 0, 172, 12, 83],
        [4, 128, 128, 172, 12, 83],
    ]
    assert layout.num_tokens == 6 * BLOCK
    tiles = layout.tiles(4)[:, :6].tolist()  # 32 tokens each
    assert tiles == [
        [83, 12, 0, 128, 512, 172],
        [73, 1, 0, 128, 256, 35],
        [33, 8, 0, 128, 128, 32],
        [41, 32, 0, 128, 256, 3],
        [1, 32, 0, 128, 128, 0],
        [74, 9, 0, 0, 384, 0],
    ]
    assert layout.tiles(4) is layout.tiles(4)


@pytest.mark.parametrize(("heads", "dim"), [(1, 128), (4, 128), (7, 128), (8, 64), (64, 128)])
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_it_compiles_for_the_matrix_units(heads: int, dim: int, kind: str) -> None:
    if gluon_kernel("hopper.prompt_kernel") is None:
        pytest.skip("needs Triton 3.6")
    arguments = f"""
lanes = {padded(heads)}
block = tile({BLOCK}, {dim})
signature = dict(
    q=tile(64 // lanes, lanes, {dim}), k=block, v=block, out="*{kind}", tiles="*i32",
    num_tiles="i32", num_work="i32", scale="fp32", out_token="i32", out_head="i32",
)
given = dict(HEADS={heads}, STAGES=kernel.STAGES)
"""
    compile_for_hopper("hopper.prompt_kernel", "_attend", arguments, kind, registers=168)
