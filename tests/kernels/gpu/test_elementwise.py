"""The small GPU kernels against their torch definitions; without a GPU, in Triton's interpreter."""

from typing import get_args

import pytest
import torch

from graftlm.kernels.activation import Activation, gate_by_torch
from graftlm.kernels.gpu.elementwise import gate_mul, rotate, rotate_all, store_kv

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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(4, 64), (3, 80)])
def test_rotate_all_heads_of_an_encoder(dtype: torch.dtype, num_heads: int, head_dim: int) -> None:
    q, k, _ = random(5, 3, num_heads, head_dim, dtype=dtype).unbind(1)
    cos, sin = random(2, 5, head_dim)

    def expected(x: torch.Tensor) -> torch.Tensor:
        a, b = x.double().chunk(2, -1)
        return x.double() * cos.double()[:, None] + torch.cat([-b, a], -1) * sin.double()[:, None]

    q_out, k_out = rotate_all(q, k, cos, sin)
    assert close(q_out, expected(q), dtype) and close(k_out, expected(k), dtype)
    assert q_out.is_contiguous() and q_out.dtype == dtype


def test_store_kv_writes_each_token_at_its_slot_and_nothing_else() -> None:
    k, v = random(3, 2, 80), random(3, 2, 64)
    k_store, v_store = torch.full((9, 2, 80), 7.0, device=DEVICE), torch.full((9, 2, 64), 7.0, device=DEVICE)
    slots = torch.tensor([8, 0, 4], dtype=torch.int32, device=DEVICE)
    store_kv(k, v, k_store, v_store, slots)
    assert torch.equal(k_store[slots.long()], k) and torch.equal(v_store[slots.long()], v)
    assert (k_store[[1, 2, 3, 5, 6, 7]] == 7).all()
