"""The small GPU kernels against their torch definitions; without a GPU, in Triton's interpreter."""

from typing import get_args

import pytest
import torch

from graftlm.kernels.activation import Activation, gate_by_torch
from graftlm.kernels.attention import ROTATIONS, PackedQKV, Rotation
from graftlm.kernels.gpu.attention.qkv_rope_store import rotate_store
from graftlm.kernels.gpu.elementwise import gate_mul, rotate, store_kv
from graftlm.kernels.gpu.linear.batch_invariant_matmul import FixedProduct
from graftlm.kernels.gpu.linear.gemv import gemv
from graftlm.kernels.gpu.linear.skinny_matmul import SkinnyTile, parts_tile, skinny_gate_up, skinny_matmul, skinny_parts
from graftlm.kernels.gpu.sampling.token_mask import apply_mask, walk_mask
from graftlm.kernels.norm import Norm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])
# half precision: one rounding of the result
HALF_DTYPES = [torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]  # the interpreter cuts bfloat16 off
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def close(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    difference = (out.double() - expected.double()).norm() / expected.double().norm()
    return bool(difference < TOLERANCE[dtype])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(dtype: torch.dtype, activation: Activation) -> None:
    x = 2 * random(3, 2 * 70, dtype=dtype)
    assert close(gate_mul(x, activation), gate_by_torch(x.double(), activation), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_rotate(dtype: torch.dtype, head_dim: int) -> None:
    q, k = random(5, 4, head_dim, dtype=dtype), random(5, 2, head_dim, dtype=dtype)
    angle = random(5, head_dim // 2)
    cos, sin = (torch.cat([f(angle)] * 2, -1).to(dtype) for f in (torch.cos, torch.sin))

    def expected(x: torch.Tensor) -> torch.Tensor:
        a, b = x.double().chunk(2, -1)
        return x.double() * cos.double()[:, None] + torch.cat([-b, a], -1) * sin.double()[:, None]

    q_out, k_out = rotate(q, k, cos, sin)
    assert close(q_out, expected(q), dtype) and close(k_out, expected(k), dtype)


def test_store_kv_writes_each_token_at_its_slot_and_nothing_else() -> None:
    k, v = random(3, 2, 80), random(3, 2, 64)
    k_store, v_store = torch.full((9, 2, 80), 7.0, device=DEVICE), torch.full((9, 2, 64), 7.0, device=DEVICE)
    slots = torch.tensor([8, 0, 4], dtype=torch.int32, device=DEVICE)
    store_kv(k, v, k_store, v_store, slots)
    assert torch.equal(k_store[slots.long()], k) and torch.equal(v_store[slots.long()], v)
    assert (k_store[[1, 2, 3, 5, 6, 7]] == 7).all()


def test_a_packed_mask_forbids_the_tokens_whose_bit_is_clear() -> None:
    logits = random(3, 70)
    before = logits.clone()
    allowed = torch.rand(2, 70, device=DEVICE) < 0.5
    bits = torch.zeros(2, 96, dtype=torch.int64, device=DEVICE)
    bits[:, :70] = allowed
    words = (bits.view(2, 3, 32) << torch.arange(32, device=DEVICE)).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    apply_mask(logits, words, torch.tensor([2, 0], dtype=torch.int32, device=DEVICE))
    assert torch.equal(logits[1], before[1])
    for row, keep in ((2, allowed[0]), (0, allowed[1])):
        assert torch.equal(logits[row], before[row].masked_fill(~keep, float("-inf")))


def test_walking_an_automaton_allows_exactly_the_tokens_that_stay_in_it() -> None:
    tokens = [b"", b"a", b"b", b"ab", b"aa", b"ba", b"abab", b"c"]
    token_bytes = torch.zeros(4, len(tokens), dtype=torch.uint8)
    for i, token in enumerate(tokens):
        for position, byte in enumerate(token):
            token_bytes[position, i] = byte
    classes = torch.zeros(256, dtype=torch.int32)
    classes[ord("a")], classes[ord("b")] = 1, 2
    transitions = torch.tensor([[-1, 1, -1], [-1, -1, 0]], dtype=torch.int32)  # (ab)*: state 1 follows an a
    logits = torch.zeros(2, len(tokens), device=DEVICE)
    int32 = {"dtype": torch.int32, "device": DEVICE}
    lens = torch.tensor([len(t) for t in tokens], **int32)
    tables = (transitions.to(DEVICE), classes.to(DEVICE), token_bytes.to(DEVICE), lens)
    walk_mask(logits, torch.tensor([0, 1], **int32), torch.tensor([0, 1], **int32), *tables)
    kept = [[tokens[i] for i in row.isfinite().nonzero().flatten()] for row in logits]
    assert kept == [[b"a", b"ab", b"abab"], [b"b", b"ba"]]


@pytest.mark.parametrize("norm", ["none", "rounded", "not rounded"])
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize(("head_dim", "rotary"), [(64, 64), (80, 80), (96, 32)])
@pytest.mark.parametrize("num_tokens", [5, 37])  # programs of 4 tokens, of 16
def test_heads_are_normed_rotated_and_stored(
    head_dim: int, rotary: int, rotation: Rotation, norm: str, num_tokens: int
) -> None:
    heads, kv_heads = 3, 1
    qkv = random(num_tokens, (heads + 2 * kv_heads) * head_dim)
    q, k, v = (x.clone() for x in PackedQKV(qkv, heads, kv_heads, head_dim, qkv, qkv).split())
    angle = random(num_tokens, rotary // 2)
    cos, sin = (torch.cat([f(angle)] * 2, -1) for f in (torch.cos, torch.sin))
    if rotation == "spread":
        cos, sin = (f(angle).repeat_interleave(2, -1) for f in (torch.cos, torch.sin))
    norms = [Norm(random(head_dim), 1e-5, norm == "rounded") if norm != "none" else None for _ in range(2)]
    packed = PackedQKV(qkv, heads, kv_heads, head_dim, cos, sin, *norms, rotation)
    stores = [torch.full((num_tokens + 2, kv_heads, head_dim), 7.0, device=DEVICE) for _ in "kv"]
    slots = torch.randperm(num_tokens, device=DEVICE).int() + 1
    found = rotate_store(packed, *stores, slots)

    def expected(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        x = norm(x) if norm is not None else x
        turned, rest = x[..., :rotary].reshape(*x.shape[:2], -1, 2), x[..., rotary:]
        if rotation == "none":
            return x
        c, s = angle.cos()[:, None], angle.sin()[:, None]
        a, b = turned.unbind(-1) if rotation != "halves" else x[..., :rotary].chunk(2, -1)
        pair = a * c - b * s, b * c + a * s
        return torch.cat([torch.stack(pair, -1).flatten(-2) if rotation != "halves" else torch.cat(pair, -1), rest], -1)

    wanted = (expected(q, norms[0]), expected(k, norms[1]), v)
    assert all(close(a, b, torch.float32) for a, b in zip(found, wanted, strict=True))
    assert all(close(s[slots.long()], w, torch.float32) for s, w in zip(stores, wanted[1:], strict=True))
    assert all((s[[0, -1]] == 7).all() for s in stores)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_heads_are_rotated_to_the_bit_as_by_the_models_own_code(dtype: torch.dtype) -> None:
    qkv, angle = random(33, 4 * 64, dtype=dtype), random(33, 32)
    cos, sin = (torch.cat([f(angle)] * 2, -1).to(dtype) for f in (torch.cos, torch.sin))
    before = PackedQKV(qkv.clone(), 2, 1, 64, cos, sin).split()
    stores = [torch.empty(33, 1, 64, dtype=dtype, device=DEVICE) for _ in "kv"]
    found = rotate_store(PackedQKV(qkv, 2, 1, 64, cos, sin), *stores, torch.arange(33, device=DEVICE))
    plain = rotate(*before[:2], cos, sin)
    for x, out, unpacked in zip(before[:2], found[:2], plain, strict=True):
        a, b = x.chunk(2, -1)  # what is fused into one instruction is rounded once less
        assert torch.equal(out, x * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None])
        assert torch.equal(unpacked, out)
    assert torch.equal(stores[0], found[1]) and torch.equal(stores[1], before[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [96, 1100])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_product_of_one_row_takes_in_the_gate(activation: Activation, k: int, dtype: torch.dtype) -> None:
    x, weight, bias = random(1, k, dtype=dtype), random(2 * 40, k, dtype=dtype) / k**0.5, random(80, dtype=dtype)
    product = x.double() @ weight.double().T + bias.double()
    assert close(gemv(x, weight, bias), product, dtype)
    assert close(gemv(x, weight, bias, activation=activation), gate_by_torch(product, activation), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "n", "k"), [(1, 64, 256), (2, 64, 256), (17, 40, 200), (64, 130, 72)])
def test_a_product_of_few_rows_takes_in_the_gate_and_leaves_its_parts_to_be_summed(
    num_rows: int, n: int, k: int, dtype: torch.dtype
) -> None:
    x, weight = random(num_rows, k, dtype=dtype), random(2 * n, k, dtype=dtype) / k**0.5
    product = x.double() @ weight.double().T
    bias = random(2 * n, dtype=dtype)
    assert close(skinny_matmul(x, weight), product, dtype)
    assert close(skinny_matmul(x, weight, bias), product + bias.double(), dtype)
    for activation in ACTIVATIONS:
        assert close(skinny_gate_up(x, weight, activation), gate_by_torch(product, activation), dtype)
    for splits in (1, 2, 3):
        parts = skinny_parts(x, weight, SkinnyTile(64, 32, splits, 2))
        assert parts.shape == (splits, num_rows, 2 * n) and parts.dtype is torch.float32
        assert close(parts.sum(0), product, dtype)


@pytest.mark.parametrize(("n", "splits"), [(64, 8), (1000, 8), (4096, 2), (5120, 1), (16384, 1)])
def test_a_product_is_cut_into_as_many_parts_as_can_run_at_once(n: int, splits: int) -> None:
    assert parts_tile(n, 16, 132).splits == parts_tile(n, 17, 132).splits == splits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 70, 130])
def test_a_fixed_product(num_rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = random(2, num_rows, 72, dtype=dtype), random(45, 72, dtype=dtype), random(45, dtype=dtype)
    linear = FixedProduct(DEVICE, dtype)
    out = linear(x, weight, bias)
    assert close(out, x.double() @ weight.double().T + bias.double(), dtype)


@pytest.mark.gpu  # the products of Triton's interpreter do depend on where a row is
def test_a_fixed_product_gives_a_row_the_same_bits_alone_and_among_others() -> None:
    x, weight = random(300, 4096, dtype=torch.bfloat16), random(500, 4096, dtype=torch.bfloat16)
    linear = FixedProduct(DEVICE, torch.bfloat16)
    out = linear(x, weight)
    for first, last in ((0, 1), (7, 20), (100, 299), (299, 300)):
        assert torch.equal(linear(x[first:last], weight), out[first:last])
