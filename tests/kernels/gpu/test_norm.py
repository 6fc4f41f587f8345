"""Norms and sums in one kernel against their definitions; without a GPU, in Triton's interpreter."""

import pytest
import torch

from graftlm.kernels.gpu.norm import Beside, add_norm, norm_rows, norm_rows_
from graftlm.kernels.norm import Addition, Norm
from tests.kernels.gpu.test_elementwise import DTYPES, close, random


def norm_of(kind: str, n: int, dtype: torch.dtype = torch.float32) -> Norm:
    weight, bias = random(n, dtype=dtype), random(n, dtype=dtype)
    return {
        "Llama": Norm(weight, 1e-5),
        "OLMo 2": Norm(weight, 1e-5, rounded=False),
        "Gemma": Norm(1.0 + weight.float(), 1e-5, rounded=False),
        "LayerNorm": Norm(weight, 1e-5, False, bias, centered=True),
        "Cohere": Norm(weight, 1e-5, False, centered=True),
    }[kind]


@pytest.mark.parametrize("kind", ["Llama", "OLMo 2", "Gemma", "LayerNorm", "Cohere"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [64, 100])
def test_norms(dtype: torch.dtype, n: int, kind: str) -> None:
    x, norm = random(2, 3, n, dtype=dtype) + 0.5, norm_of(kind, n, dtype)
    assert close(norm_rows(x, norm), norm(x.double()), dtype)
    turned = x[:1].mT.contiguous().mT  # its numbers are not side by side
    assert close(norm_rows(turned, norm), norm(x[:1].double()), dtype)


def test_a_part_of_each_row_is_normed_in_place() -> None:
    x, norm = random(5, 64), norm_of("Llama", 20)
    before = x.clone()
    norm_rows_(x[:, 8:28], norm)
    assert close(x[:, 8:28], norm(before[:, 8:28]), torch.float32)
    assert torch.equal(x[:, :8], before[:, :8]) and torch.equal(x[:, 28:], before[:, 28:])


@pytest.mark.parametrize("addition", [None, "post", "factor", "both"])
@pytest.mark.parametrize(("num_parts", "biased"), [(1, False), (3, True)])
@pytest.mark.parametrize("kind", ["Llama", "Gemma", "LayerNorm", None])
def test_parts_are_added_to_the_residual_and_normed(
    num_parts: int, biased: bool, kind: str | None, addition: str | None
) -> None:
    parts, residual, bias = random(num_parts, 4, 100), random(4, 100), random(100) if biased else None
    norm = norm_of(kind, 100) if kind is not None else None
    added = Addition(
        norm_of("Gemma", 100) if addition in ("post", "both") else None, 1.0 if addition == "post" else 0.3
    )
    total = parts.sum(0) + (bias if bias is not None else 0)
    if addition is not None:
        total = added.factor * (added.post(total) if added.post is not None else total)
    total = total + residual
    out = add_norm(parts, residual, norm, bias, added if addition is not None else None)
    assert close(residual, total, torch.float32)
    assert close(out, norm(total) if norm is not None else total, torch.float32)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_experts_are_added_beside_the_parts(dtype: torch.dtype, gated: bool) -> None:
    parts, residual, shared, x = (random(*size, 100, dtype=dtype) for size in ((3, 4), (4,), (4,), (4,)))
    gate, norm = random(100, dtype=dtype), norm_of("Llama", 100, dtype)
    total = parts.double().sum(0) + residual.double()
    total += shared.double() * ((x.double() @ gate.double()).sigmoid()[:, None] if gated else 1.0)
    out = add_norm(parts.float(), residual, norm, beside=Beside(shared, *((x, gate) if gated else ())))
    assert close(residual, total, dtype)
    assert close(out, norm(total), dtype)
