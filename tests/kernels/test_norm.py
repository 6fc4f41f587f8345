"""Which norm a module computes is found by what it gives."""

import pytest
import torch

from graftlm.kernels.norm import Norm
from tests.kernels.gpu.test_norm import norm_of


@pytest.mark.parametrize("kind", ["Llama", "OLMo 2", "Gemma", "LayerNorm", "Cohere"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_arithmetic_of_a_module_is_found_by_what_it_gives(kind: str, dtype: torch.dtype) -> None:
    norm = norm_of(kind, 64, dtype)

    class SomeNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(norm.weight.to(dtype) if kind != "Gemma" else (norm.weight - 1).to(dtype))
            self.bias = torch.nn.Parameter(norm.bias) if norm.bias is not None else None
            self.eps = norm.eps

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return norm(x)

    found = Norm.of(SomeNorm())
    assert found is not None
    same = found.centered, found.bias is None, found.rounded, torch.equal(found.weight, norm.weight)
    preferred = norm.rounded or (kind == "OLMo 2" and dtype is torch.float32)  # nothing is rounded in float32
    assert same == (norm.centered, norm.bias is None, preferred, True)


def test_a_module_that_computes_something_else_is_no_norm() -> None:
    class OtherNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.rand(64)), 1e-5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    assert Norm.of(OtherNorm()) is None and Norm.of(torch.nn.Linear(3, 3)) is None
