"""Attention in one order of sums against its definition; without a GPU, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.gpu.attention.extend import ExtendRows
from graftlm.kernels.gpu.attention.one_order import (
    BLOCK,
    OneOrder,
    has_pieces,
    num_splits,
    one_order_attention,
    tile_of,
)
from graftlm.kernels.gpu.attention.softmax_pieces import Room, Rooms, num_pieces
from tests.kernels.gpu.attention.test_attention import DEVICE, DTYPES, GRID, TOLERANCE, Case, error, reference

LENS = [1, 70, 300, 257]
SPLITS = (2, 8, 32) if DEVICE.type == "cuda" else (2, 8)
"""How many programs share a row: fewer and more than it has pieces; in the interpreter each program takes its time."""


def params_of(case: Case, variant: dict) -> AttentionParams:
    sinks = torch.randn(case.heads, device=DEVICE) if variant.get("sinks") else None
    options = {"window": variant.get("window"), "softcap": variant.get("softcap")}
    return AttentionParams(case.k.shape[2] ** -0.5, sinks=sinks, **options)


def expected(case: Case, i: int, q: torch.Tensor, positions: torch.Tensor, params: AttentionParams) -> torch.Tensor:
    options = {"window": params.window, "softcap": params.softcap, "sinks": params.sinks}
    return reference(q, *case.kv(i), positions, scale=params.scale, **options)


@pytest.mark.parametrize(("shape", "dtype", "variant"), GRID)
def test_rows_that_decode_are_the_same_however_many_programs_share_them(shape, dtype, variant) -> None:
    heads, kv_heads, k_dim, v_dim = shape
    case = Case(LENS, heads, kv_heads, k_dim, v_dim, dtype)
    q, params = case.queries(4), params_of(case, variant)
    step = ExtendRows(case.table, case.rows, case.ints(LENS), case.ints([0, 1, 2, 3, 4]), 1)
    alone = one_order_attention(q, case.k, case.v, step, params)
    for i, length in enumerate(LENS):
        last = torch.tensor([length - 1], device=DEVICE)
        assert error(alone[i : i + 1], expected(case, i, q[i : i + 1], last, params)) < TOLERANCE[dtype]
    for splits in SPLITS if has_pieces(max(k_dim, v_dim)) else ():
        room = Room.allocate(4, heads, v_dim, num_pieces(max(LENS)), DEVICE)
        room.out.fill_(float("nan"))
        out = torch.full_like(alone, float("nan"))
        one_order_attention(q, case.k, case.v, step, params, room=room, splits=splits, out=out)
        assert torch.equal(out, alone)
        assert not room.counters.any()


@pytest.mark.parametrize("window", [None, 1100])
def test_a_long_row_has_longer_pieces_further_on(window: int | None) -> None:
    case = Case([1], 2, 1, 64, 64, torch.float16)
    case.lens = [1400]
    case.table = torch.randint(len(case.k), (2, 1400), dtype=torch.int32, device=DEVICE)
    q, params = case.queries(3), AttentionParams(0.2, window=window)
    positions = torch.arange(1397, 1400, device=DEVICE)
    whole = ExtendRows(case.table, case.rows, case.ints([1400]), case.ints([0, 3]), 3)
    assert error(one_order_attention(q, case.k, case.v, whole, params), expected(case, 0, q, positions, params)) < 3e-3
    last = ExtendRows(case.table, case.rows, case.ints([1400]), case.ints([0, 1]), 1)
    alone = one_order_attention(q[2:], case.k, case.v, last, params)
    assert error(alone, expected(case, 0, q[2:], positions[2:], params)) < 3e-3
    for splits in (2, 5, 32):
        room = Room.allocate(1, 2, 64, num_pieces(1400), DEVICE)
        room.out.fill_(float("nan"))
        assert torch.equal(one_order_attention(q[2:], case.k, case.v, last, params, room=room, splits=splits), alone)


def test_rows_are_not_shared_out_where_a_program_does_not_have_all_heads() -> None:
    case = Case([90], 40, 1, 64, 64, torch.float32)  # tiles of 32 queries
    q, out, params = case.queries(1), torch.empty(1, 40, 64, device=DEVICE), AttentionParams(0.1)
    step = ExtendRows(case.table, case.rows, case.ints([90]), case.ints([0, 1]), 1)
    OneOrder(132).attend(q, case.k, case.v, step, params, scales=None, out=out)
    assert error(out, expected(case, 0, q, torch.tensor([89], device=DEVICE), params)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("shape", "dtype", "variant"), GRID)
def test_rows_of_several_tokens_equal_their_definition(shape, dtype, variant) -> None:
    heads, kv_heads, k_dim, v_dim = shape
    case = Case([5, 70, 300], heads, kv_heads, k_dim, v_dim, dtype)
    new = [5, 1, 67]
    q, params = case.queries(sum(new)), params_of(case, variant)
    step = ExtendRows(case.table, case.rows, case.ints(case.lens), case.ints([0, 5, 6, 73]), max(new))
    out = one_order_attention(q, case.k, case.v, step, params)
    begin = 0
    for i, (length, num) in enumerate(zip(case.lens, new, strict=True)):
        here = slice(begin, begin + num)
        positions = torch.arange(length - num, length, device=DEVICE)
        assert error(out[here], expected(case, i, q[here], positions, params)) < TOLERANCE[dtype]
        begin += num


@pytest.mark.gpu  # the products of Triton's interpreter do depend on where a row is
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", [{}, {"window": 100}, {"softcap": 2.0, "sinks": True}])
@pytest.mark.parametrize(
    "shape", [(32, 8, 128), (8, 1, 64), (6, 2, 80), (4, 4, 128), (40, 1, 64), (4, 2, 256), (8, 1, 512)]
)
def test_a_token_has_the_same_bits_decoded_and_in_a_prompt_however_that_is_cut(shape, variant, dtype) -> None:
    heads, kv_heads, dim = shape
    case = Case([300], heads, kv_heads, dim, dim, dtype)
    q, params, order = case.queries(300), params_of(case, variant), OneOrder(132)

    def attend(tokens: list[int]) -> torch.Tensor:
        """These tokens, each as the last of a row, or all of a range in one row."""
        first, last = tokens[0], tokens[-1] + 1
        out = torch.empty_like(q[first:last])
        step = ExtendRows(case.table, case.rows, case.ints([last]), case.ints([0, last - first]), last - first)
        order.attend(q[first:last], case.k, case.v, step, params, scales=None, out=out)
        return out

    whole = attend(list(range(300)))
    for first, last in ((0, 1), (0, 31), (31, 32), (32, 133), (133, 134), (134, 299), (299, 300), (127, 128)):
        assert torch.equal(attend(list(range(first, last))), whole[first:last]), (first, last)


def test_pieces_are_shared_out_where_rows_are_few() -> None:
    assert [num_splits(rows, 8, 132, 128) for rows in (1, 2, 16, 32, 64, 256)] == [32, 32, 8, 4, 1, 1]
    assert num_splits(1, 8, 132, 256) == 1
    assert [num_pieces(length) for length in (1, 64, 65, 1024, 1025, 1281, 2048)] == [1, 1, 2, 16, 17, 18, 20]


def test_room_grows_and_is_then_kept() -> None:
    rooms = Rooms()

    def find(num_rows: int, max_len: int) -> Room:
        found = rooms.find(num_rows, 4, 8, max_len, DEVICE)
        assert found is not None and found.most_pieces == num_pieces(max_len)
        assert len(found.out) >= num_rows * 4 * found.most_pieces and len(found.counters) >= num_rows * 4
        return found

    find(2, 500), find(20, 100)
    last = find(3, 1000)
    assert all(find(*size).out is last.out for size in ((2, 500), (20, 100), (3, 1000)))
    assert rooms.find(1 << 20, 4, 8, 500, DEVICE) is None  # more than such rows are worth


def test_tiles_differ_in_what_does_not_change_the_order_of_sums() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for dim in (64, 128, 256):
            tiles = [tile_of(dtype, dim, 4, DEVICE, decodes=decodes) for decodes in (False, True)]
            assert {tile.block for tile in tiles} == {BLOCK}
            assert tiles[0] == tiles[1] or all(tile.queries == 16 * tile.warps for tile in tiles)
