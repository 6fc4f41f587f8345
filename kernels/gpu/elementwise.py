"""The small fused kernels between matmuls: activation, rotary embedding, KV store."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftlm.kernels.activation import Activation
from graftlm.kernels.bits12 import kv_codec
from graftlm.kernels.bits12.kv_pack import store_packed
from graftlm.kernels.gpu.activation import activated
from graftlm.kernels.gpu.pdl import launch_and_wait, pdl_options


@triton.jit
def _gate(x, out, n, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr):
    launch_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < n
    gate = tl.load(x + row * 2 * n + i, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * n + n + i, mask=ok, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(out + row * n + i, (activated(gate, ACTIVATION).to(kind).to(tl.float32) * up).to(kind), mask=ok)


def gate_mul(x: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """Compute activation(gate) * up of packed projections. x [..., 2 n], contiguous -> [..., n], dtype of x."""
    n = x.shape[-1] // 2
    rows = x.reshape(-1, 2 * n)
    num_rows = rows.shape[0]
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    block = 4096 if num_rows > 256 else 2048 if num_rows > 64 else 1024  # small steps need many programs
    _gate[(num_rows, triton.cdiv(n, block))](
        rows, out, n, BLOCK=block, ACTIVATION=activation, num_warps=block // 256, **pdl_options(rows)
    )
    return out.view(*x.shape[:-1], n)


@triton.jit
def _sigmoid_gate(x, gates, x_row, gates_row, gates_head, n, DIM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < n
    kind = x.dtype.element_ty
    gate = tl.load(gates + row * gates_row + i // DIM * gates_head + i % DIM, mask=ok, other=0.0).to(tl.float32)
    gate = (1.0 / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    place = x + row * x_row + i
    tl.store(place, (tl.load(place, mask=ok, other=0.0).to(tl.float32) * gate).to(kind), mask=ok)


def sigmoid_gate_(x: torch.Tensor, gates: torch.Tensor) -> None:
    """Multiply x [num_rows, num_heads * dim] by the sigmoid of gates [num_rows, num_heads, dim], in place.

    The last dimensions are dense.
    """
    num_rows, n = x.shape
    block = 1024
    _sigmoid_gate[(num_rows, triton.cdiv(n, block))](
        x, gates, x.stride(0), gates.stride(0), gates.stride(1), n, DIM=gates.shape[2], BLOCK=block, num_warps=4,
        **pdl_options(x),
    )  # fmt: skip


@triton.jit
def _rotate(
    q, k, cos, sin, q_out, k_out, q_token, q_head, k_token, k_head, table_row,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, HALF_PAD)
    ok = d < HALF
    c = tl.load(cos + token * table_row + d, mask=ok, other=0.0).to(tl.float32)
    s = tl.load(sin + token * table_row + d, mask=ok, other=0.0).to(tl.float32)
    if head < Q_HEADS:
        source = q + token * q_token + head * q_head
        target = q_out + (token * Q_HEADS + head) * 2 * HALF
    else:
        source = k + token * k_token + (head - Q_HEADS) * k_head
        target = k_out + (token * K_HEADS + head - Q_HEADS) * 2 * HALF
    a = tl.load(source + d, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(source + HALF + d, mask=ok, other=0.0).to(tl.float32)
    kind = q_out.dtype.element_ty
    # products are rounded as in the models' own code
    ac, bs, bc, as_ = (a * c).to(kind), (b * s).to(kind), (b * c).to(kind), (a * s).to(kind)
    tl.store(target + d, (ac.to(tl.float32) - bs.to(tl.float32)).to(kind), mask=ok)
    tl.store(target + HALF + d, (bc.to(tl.float32) + as_.to(tl.float32)).to(kind), mask=ok)


def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the half-split rotary embedding.

    q    [num_tokens, num_heads, head_dim], k [num_tokens, num_kv_heads, head_dim]; last dimension dense
    cos  [num_tokens, head_dim], both halves equal; sin of the same shape
    -> q and k rotated, contiguous, dtype of q
    """
    num_tokens, q_heads, head_dim = q.shape
    k_heads = k.shape[1]
    q_out, k_out = (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        torch.empty_like(k, memory_format=torch.contiguous_format),
    )
    half = head_dim // 2
    _rotate[(num_tokens, q_heads + k_heads)](
        q, k, cos, sin, q_out, k_out, q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos.stride(0),
        Q_HEADS=q_heads, K_HEADS=k_heads, HALF=half, HALF_PAD=triton.next_power_of_2(half), num_warps=1,
        enable_fp_fusion=False,  # a fused multiply-add would omit the rounding between product and sum
    )  # fmt: skip
    return q_out, k_out


@triton.jit
def _rotate_all(
    q, k, cos, sin, q_out, k_out, q_token, q_head, k_token, k_head, table_row,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
):  # fmt: skip
    """Program (token, q or k): all heads, rounded once."""
    token = tl.program_id(0).to(tl.int64)
    head, d = tl.arange(0, HEADS_PAD)[:, None], tl.arange(0, HALF_PAD)[None, :]
    ok = (head < HEADS) & (d < HALF)
    table = token * table_row + d
    c, s = tl.load(cos + table, mask=d < HALF).to(tl.float32), tl.load(sin + table, mask=d < HALF).to(tl.float32)
    c_b = tl.load(cos + table + HALF, mask=d < HALF).to(tl.float32)
    s_b = tl.load(sin + table + HALF, mask=d < HALF).to(tl.float32)
    if tl.program_id(1) == 0:
        source, target = q + token * q_token + head * q_head + d, q_out
    else:
        source, target = k + token * k_token + head * k_head + d, k_out
    place = target + (token * HEADS + head) * 2 * HALF + d
    a = tl.load(source, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(source + HALF, mask=ok, other=0.0).to(tl.float32)
    kind = q_out.dtype.element_ty
    tl.store(place, (a * c - b * s).to(kind), mask=ok)
    tl.store(place + HALF, (b * c_b + a * s_b).to(kind), mask=ok)


def rotate_all(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the half-split rotary embedding of encoders of pictures, which computes in float32.

    q, k      [num_tokens, num_heads, head_dim]; last dimension dense
    cos, sin  [num_tokens, head_dim], dense
    -> q and k rotated, contiguous, their dtype
    """
    num_tokens, num_heads, head_dim = q.shape
    q_out, k_out = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
    half = head_dim // 2
    _rotate_all[(num_tokens, 2)](
        q, k, cos, sin, q_out, k_out, q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos.stride(0),
        HEADS=num_heads, HEADS_PAD=triton.next_power_of_2(num_heads), HALF=half,
        HALF_PAD=triton.next_power_of_2(half), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return q_out, k_out


@triton.jit
def saturate(x):
    """Clamp to the range of float8_e4m3fn."""
    return tl.minimum(tl.maximum(x, -448.0), 448.0)


@triton.jit
def _store_kv(
    k, v, k_store, v_store, slots, k_scale, v_scale,
    k_token, k_head, v_token, v_head, ks_slot, ks_head, vs_slot, vs_head,
    D: tl.constexpr, D_PAD: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    d, e = tl.arange(0, D_PAD), tl.arange(0, E_PAD)
    key = tl.load(k + token * k_token + head * k_head + d, mask=d < D)
    value = tl.load(v + token * v_token + head * v_head + e, mask=e < E)
    if SCALED:
        key = saturate(key.to(tl.float32) / tl.load(k_scale + head))
        value = saturate(value.to(tl.float32) / tl.load(v_scale + head))
    tl.store(k_store + slot * ks_slot + head * ks_head + d, key.to(k_store.dtype.element_ty), mask=d < D)
    tl.store(v_store + slot * vs_slot + head * vs_head + e, value.to(v_store.dtype.element_ty), mask=e < E)


@triton.jit(do_not_specialize=["num_tokens", "e_head"])
def _store_compact(
    k, v, k_store, v_store, exponents, slots, num_tokens,
    k_token, k_head, v_token, v_head, ks_slot, ks_head, vs_slot, vs_head, e_head,
    HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (block of tokens, head): k and v are packed and stored."""
    token, head = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None], tl.program_id(1)
    ok = token < num_tokens
    slot = tl.load(slots + token, mask=ok, other=0).to(tl.int64)
    d = tl.arange(0, HALF)[None, :]
    exponent = exponents + head.to(tl.int64) * e_head + slot * 2
    key = k + token * k_token + head * k_head + d
    a, b = tl.load(key, mask=ok, other=0.0), tl.load(key + HALF, mask=ok, other=0.0)
    store_packed(a, b, k_store + slot * ks_slot + head * ks_head, exponent, ok)
    value = v + token * v_token + head * v_head + d
    a, b = tl.load(value, mask=ok, other=0.0), tl.load(value + HALF, mask=ok, other=0.0)
    store_packed(a, b, v_store + slot * vs_slot + head * vs_head, exponent + 1, ok)


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_store: torch.Tensor,
    v_store: torch.Tensor,
    slots: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    exponents: torch.Tensor | None = None,
) -> None:
    """Write each token's K and V at its slot, in the store's dtype.

    k        [num_tokens, num_kv_heads, k_dim], v [num_tokens, num_kv_heads, v_dim]; last dimension dense
    slots    int32 or int64 [num_tokens]
    k_scale  float32 [num_kv_heads]: the store holds k / k_scale in float8; v_scale of the same shape
    exponents  uint8 [num_kv_heads, num_slots, 2]: the store is compact, k_store and v_store are int32
               [num_slots, num_kv_heads, words] (kv_codec.py), for bfloat16 heads of its supported dimensions
    """
    num_tokens, num_heads, k_dim = k.shape
    v_dim = v.shape[2]
    if exponents is not None:
        assert k_dim == v_dim and k_dim in kv_codec.DIMS
        block = 1 if num_tokens == 1 else 4 if num_tokens <= 16 else 16
        _store_compact[(triton.cdiv(num_tokens, block), num_heads)](
            k, v, k_store, v_store, exponents, slots, num_tokens, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            k_store.stride(0), k_store.stride(1), v_store.stride(0), v_store.stride(1), exponents.stride(0),
            HALF=k_dim // 2, BLOCK=block, num_warps=4 if block > 4 else 1,
        )  # fmt: skip
        return
    _store_kv[(num_tokens, num_heads)](
        k, v, k_store, v_store, slots, k_scale if k_scale is not None else k, v_scale if v_scale is not None else v,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        k_store.stride(0), k_store.stride(1), v_store.stride(0), v_store.stride(1),
        D=k_dim, D_PAD=triton.next_power_of_2(k_dim), E=v_dim, E_PAD=triton.next_power_of_2(v_dim),
        SCALED=k_scale is not None, num_warps=1,
    )  # fmt: skip
