"""Norm of heads, rotary embedding and KV store in one kernel, against their torch definitions."""

import pytest
import torch

from graftlm.kernels.attention import ROTATIONS, PackedQKV, Rotation
from graftlm.kernels.gpu.attention.qkv_rope_store import rotate_store
from graftlm.kernels.gpu.elementwise import rotate
from graftlm.kernels.norm import Norm
from tests.kernels.gpu.test_elementwise import DEVICE, HALF_DTYPES, close, random


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
    elif rotation == "short":
        cos, sin = angle.cos(), angle.sin()
    in_halves = rotation in ("halves", "short")
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
        a, b = turned.unbind(-1) if not in_halves else x[..., :rotary].chunk(2, -1)
        pair = a * c - b * s, b * c + a * s
        return torch.cat([torch.stack(pair, -1).flatten(-2) if not in_halves else torch.cat(pair, -1), rest], -1)

    wanted = (expected(q, norms[0]), expected(k, norms[1]), v)
    assert all(close(a, b, torch.float32) for a, b in zip(found, wanted, strict=True))
    assert all(close(s[slots.long()], w, torch.float32) for s, w in zip(stores, wanted[1:], strict=True))
    assert all((s[[0, -1]] == 7).all() for s in stores)


def test_gates_behind_the_heads_of_queries_stay_where_they_are() -> None:
    heads, kv_heads, dim = 3, 2, 64
    qkv, angle = random(5, (heads + 2 * kv_heads) * dim), random(5, 16)
    cos, sin = (torch.cat([f(angle)] * 2, -1) for f in (torch.cos, torch.sin))
    gates, norms = random(5, heads, dim), [Norm(random(dim), 1e-5)] * 2
    queries, rest = qkv.view(5, -1, dim).split([heads, 2 * kv_heads], 1)
    mixed = torch.cat([torch.stack([queries, gates], 2).flatten(1), rest.flatten(1)], 1)
    stores = [[torch.empty(5, kv_heads, dim, device=DEVICE) for _ in "kv"] for _ in range(2)]
    slots = torch.arange(5, device=DEVICE)
    expected = rotate_store(PackedQKV(qkv, heads, kv_heads, dim, cos, sin, *norms), *stores[0], slots)
    packed = PackedQKV(mixed, heads, kv_heads, dim, cos, sin, *norms, gated=True)
    found = rotate_store(packed, *stores[1], slots)
    assert all(torch.equal(a, b) for a, b in zip((*expected, *stores[0]), (*found, *stores[1]), strict=True))
    assert torch.equal(packed.gates, gates)


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


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("num_parts", "num_tokens", "rotary"), [(1, 1, 64), (2, 1, 64), (3, 5, 48), (2, 37, 64)])
def test_parts_are_summed_into_what_is_rotated(num_parts: int, num_tokens: int, rotary: int, biased: bool) -> None:
    parts, angle = random(num_parts, num_tokens, 4 * 64), random(num_tokens, rotary // 2)
    dtype = HALF_DTYPES[-1]
    cos, sin = (torch.cat([f(angle)] * 2, -1).to(dtype) for f in (torch.cos, torch.sin))
    bias = random(4 * 64, dtype=dtype) if biased else None
    whole = parts[0].clone()
    for part in parts[1:]:
        whole += part
    if bias is not None:
        whole += bias.float()
    norms = [Norm(random(64, dtype=dtype), 1e-5)] * 2 if num_parts == 3 else [None] * 2
    shape = 2, 1, 64, cos, sin, *norms
    stores = [[torch.zeros(num_tokens, 1, 64, dtype=dtype, device=DEVICE) for _ in "kv"] for _ in "ab"]
    slots = torch.arange(num_tokens, device=DEVICE)
    expected = rotate_store(PackedQKV(whole.to(dtype), *shape), *stores[0], slots)
    empty = torch.full_like(whole, 7.0).to(dtype)
    found = rotate_store(PackedQKV(empty, *shape, parts=parts, bias=bias), *stores[1], slots)
    assert all(torch.equal(a, b) for a, b in zip([*expected, *stores[0]], [*found, *stores[1]], strict=True))


@pytest.mark.gpu
def test_parts_are_summed_for_a_store_that_is_packed_afterwards() -> None:
    parts, angle = random(2, 3, 4 * 64), random(3, 24)
    cos, sin = (torch.cat([f(angle)] * 2, -1).bfloat16() for f in (torch.cos, torch.sin))
    words = torch.zeros(3, 1, 24, dtype=torch.int32, device=DEVICE)
    exponents = torch.zeros(1, 3, 2, dtype=torch.uint8, device=DEVICE)
    found = []
    for packed in (
        PackedQKV(parts.sum(0).bfloat16(), 2, 1, 64, cos, sin),
        PackedQKV(parts.sum(0).bfloat16() * 0, 2, 1, 64, cos, sin, parts=parts),
    ):
        stores = words.clone(), words.clone(), exponents.clone()
        out = rotate_store(packed, *stores[:2], torch.arange(3, device=DEVICE), exponents=stores[2])
        found.append([*out, *stores])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_rotation_wider_than_a_head_is_an_error() -> None:
    table = torch.zeros(2, 16)
    packed = PackedQKV(torch.zeros(2, 48), 1, 1, 16, table, table, rotation="short")
    with pytest.raises(ValueError, match="32 numbers does not fit heads of 16"):
        rotate_store(packed, torch.zeros(2, 1, 16), torch.zeros(2, 1, 16), torch.arange(2))
