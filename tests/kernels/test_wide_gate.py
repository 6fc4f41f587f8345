"""The gated product of 65 to 256 rows. Triton has no interpreter for it: without a GPU it is compiled only."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from graftlm.kernels.triton_compile import compile_together
from graftlm.kernels.wide_gate import can_gate, wide_gate

HALF_DTYPES = [torch.bfloat16, torch.float16]


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def error(x: torch.Tensor, weight: torch.Tensor) -> float:
    gate, up = (x.double() @ weight.double().t()).chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    return float((wide_gate(x, weight).double() - expected).norm() / expected.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("num_rows", [65, 96, 97, 128, 129, 160, 161, 192, 193, 256])
def test_every_row_and_output_is_the_gate_times_what_it_is_for(dtype: torch.dtype, num_rows: int) -> None:
    x, weight = random(num_rows, 448, dtype=dtype), random(2 * 1000, 448, dtype=dtype)
    assert can_gate(weight)
    # half precision: one rounding of each factor and of the result
    assert error(x, weight) < {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]


@pytest.mark.gpu
def test_a_weight_with_more_tiles_than_the_card_runs_at_once() -> None:
    x, weight = random(200, 448, dtype=torch.bfloat16), random(2 * 64 * 300, 448, dtype=torch.bfloat16)
    assert error(x, weight) < 1.6e-2


@pytest.mark.gpu
def test_a_graph_gives_what_the_call_gave_and_a_dry_run_finds_the_kernel() -> None:
    x, weight = random(96, 512, dtype=torch.bfloat16), random(2 * 520, 512, dtype=torch.bfloat16)
    assert compile_together(lambda: wide_gate(x, weight), x.device) == 1
    expected = wide_gate(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = wide_gate(x, weight)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.gpu
def test_weights_that_it_cannot_take_are_told_apart() -> None:
    taken = torch.empty(2 * 64, 512, dtype=torch.bfloat16, device="cuda")
    assert can_gate(taken)
    assert not can_gate(taken.float())
    assert not can_gate(taken[:, :256])  # not dense, and too few inputs
    assert not can_gate(taken[:24])
    assert not can_gate(torch.empty(2 * 64, 500, dtype=torch.bfloat16, device="cuda"))


def test_a_weight_on_the_cpu_is_not_taken() -> None:
    assert not can_gate(torch.empty(2 * 64, 512, dtype=torch.bfloat16))


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from graftlm.kernels import triton_gated as kernel

rows, more, stages = kernel.tile_of({num_rows})
tile = lambda *shape: f"tensordesc<bf16{{list(shape)}},{{kernel._layout(*shape)!r}}>"
signature = dict(
    x=tile(rows, 64), more_x=tile(more or rows, 64), weight=tile(4, 2, 8, 64), out=tile(rows, 32),
    more_out=tile(more or rows, 32), num_tiles="i32",
)
given = dict(ROWS=rows, MORE=more, K=64, STEPS=64, STAGES=stages, CHAINED=True)
constants = {{(kernel._gated.arg_names.index(name),): value for name, value in given.items()}}
source = GluonASTSource(kernel._gated, signature | dict.fromkeys(given, "constexpr"), constants, {{}})
found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4))
print(found.metadata.shared, found.asm["ptx"].count("wgmma.mma_async"))
"""


@pytest.mark.parametrize("num_rows", [192, 256])
def test_it_compiles_for_hopper_and_fits_its_shared_memory(num_rows: int) -> None:
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", _COMPILE.format(num_rows=num_rows)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    shared, products = (int(value) for value in found[-2:])
    assert shared <= 227 * 1024
    assert products > 0
