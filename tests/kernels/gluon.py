"""Kernels in Gluon, for which Triton has no interpreter: without a GPU they are compiled only."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from graftlm.kernels.gpu.norm import add_norm, norm_rows
from graftlm.kernels.norm import Norm
from tests.kernels.compiling import run_compiler

_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
import graftlm.kernels.{module} as kernel
from graftlm.kernels.hopper.tiles import shared_layout

tile = lambda *shape: f"tensordesc<{kind}{{list(shape)}},{{shared_layout(*shape)!r}}>"
{arguments}
function = kernel.{name}
constants = {{(function.arg_names.index(name),): value for name, value in given.items()}}
source = GluonASTSource(function, signature | dict.fromkeys(given, "constexpr"), constants, {{}})
found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4, maxnreg={registers}))
ptx = found.asm["ptx"]
print(found.metadata.shared, ptx.count("mma_async") + ptx.count("mma.sync"), ptx.count("setmaxnreg"))
"""


def compile_for_hopper(module: str, name: str, arguments: str, kind: str, registers: int | None = None) -> None:
    """Compile kernel `name` of kernels/`module`: for the matrix units, and so that its shared memory is there.

    arguments  code that sets `signature` and `given`, the constants; it has `kernel`, and `tile` for the descriptors
    kind       "bf16" or "fp16"
    registers  of a thread when it starts; None leaves it to the compiler
    """
    program = _COMPILE.format(module=module, name=name, arguments=arguments, kind=kind, registers=registers)
    shared, products, changes = map(int, run_compiler(program)[-3:])
    assert shared <= 227 * 1024
    assert products > 0
    assert changes > 0  # warps that load leave registers to those that multiply


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, beside float64."""
    return float((found.double() - expected).norm() / expected.norm())


def check_chain(
    num_rows: int, weights: list[torch.Tensor], twice: list[Callable[[torch.Tensor], torch.Tensor]]
) -> None:
    """A chain of products and norms, as a layer has it, is right, and the same in each of many replays of a graph.

    weights  bfloat16 [n, n] each
    twice    for each weight what x [num_rows, n] @ weight.T @ weight.T is the sum of, [num_parts, num_rows, n]
    """
    size = len(weights[0])
    norm, start = random(size).abs(), random(num_rows, size)

    def chain() -> torch.Tensor:
        residual = start.clone()
        normed = norm_rows(residual, Norm(norm, 1e-5))
        for product in twice:
            normed = add_norm(product(normed), residual, Norm(norm, 1e-5))
        return normed

    exact, normed = start.double(), None
    for weight in [None, *weights]:
        if weight is not None:
            exact = (exact + (normed @ weight.double().t()) @ weight.double().t()).bfloat16().double()
        normed = norm.double() * exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-5)
    expected = chain()
    assert error(expected, normed) < 3e-2
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:
        return  # under memcheck: there are no graphs without torch's own memory
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(50):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
