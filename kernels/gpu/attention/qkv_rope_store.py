"""Queries, keys and values out of one packed product: norm of heads, rotary embedding and KV store in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftlm.kernels.attention import PackedQKV
from graftlm.kernels.bits12 import kv_codec
from graftlm.kernels.bits12.kv_pack import store_packed
from graftlm.kernels.gpu.elementwise import saturate, store_kv
from graftlm.kernels.gpu.pdl import grid_wait, launch_dependents, pdl_options


@triton.jit
def _round(x, KIND: tl.constexpr):
    return x.to(KIND).to(tl.float32)


@triton.jit
def _take(source, part, bias, i, ok, PARTS: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr):
    """The numbers at source + i [BLOCK, n] in float32, or the sum of their parts, `part` apart, rounded to KIND."""
    value = tl.load(source + i, mask=ok, other=0.0).to(tl.float32)
    if PARTS:
        for p in tl.static_range(1, PARTS):
            value += tl.load(source + p * part + i, mask=ok, other=0.0)
        if BIAS:
            value += bias.to(tl.float32)
        value = _round(value, KIND)
    return value


@triton.jit(do_not_specialize=["num_tokens", "e_head", "part"])
def _rotate_store(
    parts, bias, qkv, cos, sin, q_weight, k_weight, k_store, v_store, k_scale, v_scale, exponents, slots, num_tokens,
    eps, part, parts_token, qkv_token, table_token, ks_slot, ks_head, vs_slot, vs_head, e_head,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    REST: tl.constexpr, REST_PAD: tl.constexpr, NORM: tl.constexpr, ROUNDED: tl.constexpr, SCALED: tl.constexpr,
    STORES: tl.constexpr, COMPACT: tl.constexpr, ROTATION: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr,
    GATED: tl.constexpr, V_NORM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of tokens, head): q is turned where it lies; k too, and stored; v is stored.

    Cosines, sines, slots, biases and the weights of norms are read early, whatever the head takes of them.
    """
    launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    column = head * D
    if GATED:  # behind each head of q its gate
        column += tl.minimum(head, Q_HEADS) * D
    t_ok = token < num_tokens
    kind = qkv.dtype.element_ty
    d, r = tl.arange(0, HALF_PAD), tl.arange(0, REST_PAD)
    ok = t_ok[:, None] & (d < HALF)[None, :]
    rest_ok = t_ok[:, None] & (r < REST)[None, :]
    at, second = d, HALF + d  # the numbers that are turned together
    if ROTATION == "pairs" or ROTATION == "spread":
        at, second = 2 * d, 2 * d + 1
    table = token[:, None] * table_token + (at if ROTATION == "spread" else d)[None, :]
    cosine = tl.load(cos + table, mask=ok, other=0.0)
    sine = tl.load(sin + table, mask=ok, other=0.0)
    slot = tl.load(slots + token, mask=t_ok, other=0).to(tl.int64)[:, None]
    if NORM:
        weight = q_weight if head < Q_HEADS else k_weight
        wa = tl.load(weight + at, mask=d < HALF, other=0.0)
        wb = tl.load(weight + second, mask=d < HALF, other=0.0)
        wr = tl.load(weight + 2 * HALF + r, mask=r < REST, other=0.0)
    bias_a, bias_b, bias_rest = 0.0, 0.0, 0.0
    if BIAS:
        bias_a = tl.load(bias + column + at, mask=d < HALF, other=0.0)[None, :]
        bias_b = tl.load(bias + column + second, mask=d < HALF, other=0.0)[None, :]
        bias_rest = tl.load(bias + column + 2 * HALF + r, mask=r < REST, other=0.0)[None, :]
    grid_wait(PDL)
    here = qkv + token[:, None] * qkv_token + column
    source = parts + token[:, None] * parts_token + column
    a = _take(source, part, bias_a, at[None, :], ok, PARTS, BIAS, kind)
    b = _take(source, part, bias_b, second[None, :], ok, PARTS, BIAS, kind)
    rest = tl.zeros([BLOCK, REST_PAD], tl.float32)
    if REST:
        rest = _take(source, part, bias_rest, 2 * HALF + r[None, :], rest_ok, PARTS, BIAS, kind)
    is_v = head >= Q_HEADS + K_HEADS
    if V_NORM and is_v:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(rest * rest, 1)
        factor = tl.rsqrt(squares / D + eps)[:, None]
        a, b, rest = _round(a * factor, kind), _round(b * factor, kind), _round(rest * factor, kind)
    if (PARTS or V_NORM) and is_v:
        tl.store(here + at[None, :], a.to(kind), mask=ok)
        tl.store(here + second[None, :], b.to(kind), mask=ok)
    if (PARTS or V_NORM) and REST:
        tl.store(here + 2 * HALF + r[None, :], rest.to(kind), mask=rest_ok)
    if not is_v:
        if NORM:
            squares = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(rest * rest, 1)
            factor = tl.rsqrt(squares / D + eps)[:, None]
            a, b, rest = a * factor, b * factor, rest * factor
            if ROUNDED:
                a, b, rest = _round(a, kind), _round(b, kind), _round(rest, kind)
            a = _round(wa.to(tl.float32)[None, :] * a, kind)
            b = _round(wb.to(tl.float32)[None, :] * b, kind)
            if REST:
                rest = _round(wr.to(tl.float32)[None, :] * rest, kind)
                tl.store(here + 2 * HALF + r[None, :], rest.to(kind), mask=rest_ok)
        if ROTATION != "none":
            c, s = cosine.to(tl.float32), sine.to(tl.float32)
            turned = _round(_round(a * c, kind) - _round(b * s, kind), kind)
            b = _round(_round(b * c, kind) + _round(a * s, kind), kind)
            a = turned
        tl.store(here + at[None, :], a.to(kind), mask=ok)
        tl.store(here + second[None, :], b.to(kind), mask=ok)
    if STORES and head >= Q_HEADS:
        if is_v:
            kv_head = head - Q_HEADS - K_HEADS
            there = v_store + slot * vs_slot + kv_head * vs_head
            scales = v_scale
        else:
            kv_head = head - Q_HEADS
            there = k_store + slot * ks_slot + kv_head * ks_head
            scales = k_scale
        if SCALED:
            inverse = 1.0 / tl.load(scales + kv_head)
            a, b, rest = saturate(a * inverse), saturate(b * inverse), saturate(rest * inverse)
        if COMPACT:
            exponent = exponents + kv_head.to(tl.int64) * e_head + slot * 2 + is_v.to(tl.int32)
            store_packed(a, b, there, exponent, t_ok[:, None])
        else:
            stored = k_store.dtype.element_ty
            tl.store(there + at[None, :], a.to(stored), mask=ok)
            tl.store(there + second[None, :], b.to(stored), mask=ok)
            if REST:
                tl.store(there + 2 * HALF + r[None, :], rest.to(stored), mask=rest_ok)


def rotate_store(
    packed: PackedQKV,
    k_store: torch.Tensor,
    v_store: torch.Tensor,
    slots: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    block: int | None = None,
    exponents: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm and rotate the heads of q and k in place, and write k and v at their slots. Parts are summed up into qkv.

    k_store  [num_slots, num_kv_heads, head_dim]; v_store likewise
    slots    int32 or int64, at least [num_tokens]
    k_scale  float32 [num_kv_heads]: the store holds k / k_scale, in float8; v_scale likewise
    block    tokens of one program; None takes the measured rule
    exponents  uint8 [num_kv_heads, num_slots, 2]: the store is compact, k_store and v_store are int32
               [num_slots, num_kv_heads, words] (kv_codec.py), for heads of as many dimensions as it takes, in bfloat16
    -> q [num_tokens, num_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim]: views of `packed.qkv`

    Raises ValueError for a rotation of more numbers than a head has.
    """
    qkv, dim, q_norm, k_norm = packed.qkv, packed.head_dim, packed.q_norm, packed.k_norm
    num_tokens = qkv.shape[0]
    assert exponents is None or (dim in kv_codec.DIMS and qkv.dtype is torch.bfloat16)
    half = packed.num_angles
    if 2 * half > dim:
        raise ValueError(f"a {packed.rotation!r} rotation of {2 * half} numbers does not fit heads of {dim}")
    rest = dim - 2 * half
    # halves of a head that is turned as a whole are packed where they are turned; others afterwards
    assert not packed.v_norm or (q_norm is not None and exponents is None)
    stores = exponents is None or (rest == 0 and packed.rotation in ("halves", "short", "none"))
    parts, bias = packed.parts, packed.bias
    heads = packed.num_heads + packed.num_kv_heads * (2 if stores or parts is not None else 1)
    source = parts[0] if parts is not None else qkv
    block = block or (1 if num_tokens == 1 else 4 if num_tokens <= 16 else 16)
    _rotate_store[(triton.cdiv(num_tokens, block), heads)](
        source, bias if bias is not None else qkv, qkv, packed.cos, packed.sin,
        q_norm.weight if q_norm is not None else qkv, k_norm.weight if k_norm is not None else qkv,
        k_store, v_store, k_scale if k_scale is not None else qkv, v_scale if v_scale is not None else qkv,
        exponents if exponents is not None else qkv,
        slots, num_tokens, q_norm.eps if q_norm is not None else 0.0,
        parts.stride(0) if parts is not None else 0, source.stride(0), qkv.stride(0), packed.cos.stride(-2),
        k_store.stride(0), k_store.stride(1), v_store.stride(0), v_store.stride(1),
        exponents.stride(0) if exponents is not None else 0,
        Q_HEADS=packed.num_heads, K_HEADS=packed.num_kv_heads, D=dim, HALF=half,
        HALF_PAD=triton.next_power_of_2(half), REST=rest, REST_PAD=triton.next_power_of_2(max(rest, 1)),
        NORM=q_norm is not None, ROUNDED=q_norm is not None and q_norm.rounded, SCALED=k_scale is not None,
        STORES=stores, COMPACT=exponents is not None, ROTATION=packed.rotation,
        PARTS=len(parts) if parts is not None else 0, BIAS=parts is not None and bias is not None,
        GATED=packed.gated, V_NORM=packed.v_norm, BLOCK=block,
        num_warps=4 if block > 4 else 1,
        enable_fp_fusion=False,  # a product and a sum in one instruction would leave out the rounding between them
        **pdl_options(qkv),
    )  # fmt: skip
    q, k, v = packed.split()
    if not stores:
        store_kv(k, v, k_store, v_store, slots, exponents=exponents)
    return q, k, v
