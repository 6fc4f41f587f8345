"""Gate and up projections of more than 32 rows. Triton has no interpreter for it: without a GPU it is compiled only."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from graftlm.kernels.activation import Activation, gate_by_torch
from graftlm.kernels.hopper.support import gluon_kernel
from graftlm.kernels.jit.precompile import compile_together
from graftlm.kernels.linear_kernels import PrefillGate, TiledGate
from graftlm.kernels.weight import PlainWeight
from tests.kernels.gluon import compile_for_hopper

HALF_DTYPES = [torch.bfloat16, torch.float16]


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def gate_up(x: torch.Tensor, weight: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    kernel = TiledGate() if len(x) <= 256 else PrefillGate()
    run = kernel.make(PlainWeight(weight), "gate_up", None, activation)
    assert run is not None
    return run(x)


def can_gate(weight: torch.Tensor) -> bool:
    few, many = (kernel.make(PlainWeight(weight), "gate_up") for kernel in (TiledGate(), PrefillGate()))
    assert (few is None) == (many is None)
    return few is not None


def error(x: torch.Tensor, weight: torch.Tensor, activation: Activation = "silu") -> float:
    expected = gate_by_torch(x.double() @ weight.double().t(), activation)
    return float((gate_up(x, weight, activation).double() - expected).norm() / expected.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("num_rows", [33, 64, 65, 96, 97, 128, 129, 160, 161, 192, 193, 256, 513, 640, 1000])
def test_every_row_and_output_is_the_gate_times_what_it_is_for(
    dtype: torch.dtype, num_rows: int, activation: Activation
) -> None:
    x, weight = random(num_rows, 448, dtype=dtype), random(2 * 1000, 448, dtype=dtype) / 8
    # half precision: one rounding of each factor and of the result
    assert error(x, weight, activation) < {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_rows", "k"), [(40, 1088), (64, 448), (90, 576), (200, 448), (200, 128), (256, 640), (5000, 448)]
)
def test_more_tiles_than_the_card_runs_at_once(num_rows: int, k: int) -> None:
    x, weight = random(num_rows, k, dtype=torch.bfloat16), random(2 * 64 * 300, k, dtype=torch.bfloat16)
    assert error(x, weight) < 1.6e-2


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [40, 100, 200, 513, 600])
def test_nothing_is_written_beside_the_result(num_rows: int) -> None:
    x, weight = random(num_rows, 384, dtype=torch.bfloat16), random(2 * 1000, 384, dtype=torch.bfloat16)
    room = torch.full((num_rows + 300, 1000), 7.0, dtype=torch.bfloat16, device="cuda")
    kernel = gluon_kernel("hopper.gate_up_decode" if num_rows <= 256 else "hopper.gate_up_prefill")
    assert kernel is not None
    kernel.launch(x, weight, room[:num_rows])
    assert torch.equal(room[:num_rows], gate_up(x, weight))
    assert bool((room[num_rows:] == 7).all())


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [96, 230, 600])
def test_a_graph_gives_what_the_call_gave_and_a_dry_run_finds_the_kernel(num_rows: int) -> None:
    x, weight = random(num_rows, 512, dtype=torch.bfloat16), random(2 * 520, 512, dtype=torch.bfloat16)
    for name in ("hopper.gate_up_decode", "hopper.gate_up_prefill"):
        gluon_kernel(name)._gated.device_caches.clear()  # kernels that other tests have compiled
    assert compile_together(lambda: gate_up(x, weight), x.device) == 1
    expected = gate_up(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gate_up(x, weight)
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.gpu
def test_weights_that_it_cannot_take_are_told_apart() -> None:
    taken = torch.empty(2 * 64, 512, dtype=torch.bfloat16, device="cuda")
    assert can_gate(taken)
    assert not can_gate(taken.float())
    assert not can_gate(taken[:, :256])  # not dense
    assert not can_gate(taken[:24])
    assert not can_gate(torch.empty(2 * 64, 500, dtype=torch.bfloat16, device="cuda"))


def test_a_weight_on_the_cpu_is_not_taken() -> None:
    assert not can_gate(torch.empty(2 * 64, 512, dtype=torch.bfloat16))


_DECODE = """
rows, more, stages, registers = kernel.tile_of(num_rows)
signature = dict(
    x=tile(rows, 64), more_x=tile(more or rows, 64), weight=tile(4, 2, 8, 64), out=tile(rows, 32),
    more_out=tile(more or rows, 32), num_tiles="i32",
)
given = dict(ROWS=rows, MORE=more, K=64, STEPS=64, STAGES=stages, ACTIVATION=activation,
    REGISTERS=registers[0], PDL=True)
"""

_PREFILL = """
signature = dict(x=tile(64, 64), weight=tile(16, 2, 8, 64), out=tile(64, 128), across="i32", down="i32")
given = dict(K=64, STEPS=64, STAGES=kernel.STAGES, BAND=kernel.BAND, ACTIVATION=activation)
"""


@pytest.mark.parametrize(
    ("module", "arguments", "kind", "registers"),
    [
        ("hopper.gate_up_decode", "num_rows, activation = 64, 'silu'" + _DECODE, "bf16", 80),
        ("hopper.gate_up_decode", "num_rows, activation = 64, 'gelu_tanh'" + _DECODE, "fp16", 80),
        ("hopper.gate_up_decode", "num_rows, activation = 192, 'silu'" + _DECODE, "bf16", 168),
        ("hopper.gate_up_prefill", "activation = 'silu'" + _PREFILL, "fp16", None),
        ("hopper.gate_up_prefill", "activation = 'gelu_tanh'" + _PREFILL, "bf16", None),
    ],
)
def test_it_compiles_for_hopper_and_fits_its_shared_memory(
    module: str, arguments: str, kind: str, registers: int | None
) -> None:
    compile_for_hopper(module, "_gated", arguments, kind, registers)
