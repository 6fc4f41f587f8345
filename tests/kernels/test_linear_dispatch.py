"""Which kernel multiplies how many rows of a linear layer. The kernels have tests of their own."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from graftlm.kernels import linear_dispatch
from graftlm.kernels.activation import Activation
from graftlm.kernels.bits12.weight import Bits12Weight
from graftlm.kernels.linear_dispatch import LinearPlan, plan
from graftlm.kernels.linear_kernels import MEASURED, STRICT, Halves, LinearKernel, Role, Rows, Run
from graftlm.kernels.norm import Norm
from graftlm.kernels.weight import PlainWeight, Weight

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, atol=1e-5)


def weight_of(*shape: int, bits12: bool = False) -> PlainWeight:
    return (Bits12Weight if bits12 else PlainWeight)(randn(*shape))


class Named:
    """Stands for a kernel: torch's product times `factor`; notes its name when it is called."""

    def __init__(self, kernel: LinearKernel, calls: list[str], factor: float = 1.0) -> None:
        self.name, self.roles, self.reads, self.probes = kernel.name, kernel.roles, kernel.reads, kernel.probes
        self._kernel, self._calls, self._factor = kernel, calls, factor

    def rows(self, weight: Weight, few: int) -> Rows:
        return self._kernel.rows(weight, few)

    def make(
        self, weight: Weight, role: Role, bias: torch.Tensor | None = None, activation: Activation = "silu"
    ) -> Run | None:
        def run(x: torch.Tensor) -> torch.Tensor:
            self._calls.append(self.name)
            out = torch.nn.functional.linear(x, weight.dense(), bias)
            if role == "gate_up":
                gate, up = out.chunk(2, -1)
                out = torch.nn.functional.silu(gate) * up
            return self._factor * (out[None] if role == "add" else out)

        return run


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every kernel takes every weight; -> the names of those that were called."""
    found: list[str] = []
    for table, kernels in (("MEASURED", MEASURED), ("STRICT", STRICT)):
        monkeypatch.setattr(linear_dispatch, table, tuple(Named(kernel, found) for kernel in kernels))
    return found


def replaced(monkeypatch: pytest.MonkeyPatch, kernel: LinearKernel) -> None:
    """Put a kernel into the table in place of that of its name."""
    table = tuple(kernel if other.name == kernel.name else other for other in linear_dispatch.MEASURED)
    monkeypatch.setattr(linear_dispatch, "MEASURED", table)


def kernel_of(name: str) -> LinearKernel:
    return next(kernel for kernel in MEASURED if kernel.name == name)


def chosen(linear: LinearPlan, num_rows: int) -> str | None:
    found = (x.kernel.name for x in linear.chosen if any(num_rows in rows for rows in x.rows))
    return next(found, None)


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize(
    ("role", "bits12", "expected"),
    [
        ("qkv", True, {1: "bits12", 32: "bits12", 33: "prefetch", 64: "prefetch", 65: None, 5000: None}),
        ("qkv", False, {1: "prefetch", 64: "prefetch", 65: None}),
        ("add", True, {1: "bits12", 33: "prefetch", 65: "halves", 256: "halves", 257: None}),
        (
            "gate_up",
            True,
            {1: "bits12", 32: "bits12", 33: "tiled_gate", 256: "tiled_gate", 512: None, 513: "prefill_gate"},
        ),
        (
            "gate_up",
            False,
            {1: "gemv", 2: "skinny", 32: "skinny", 33: "tiled_gate", 257: None, 512: None, 5000: "prefill_gate"},
        ),
        ("head", True, {1: "bits12", 32: "bits12", 33: "skinny", 64: "skinny", 65: None}),
        ("head", False, {1: "gemv", 2: "skinny", 64: "skinny", 65: None}),
    ],
)
def test_on_hopper_each_number_of_rows_has_its_kernel(role: Role, bits12: bool, expected: dict[int, str]) -> None:
    linear = plan(weight_of(16, 8, bits12=bits12), role, agree=close, max_rows=64)
    assert {rows: chosen(linear, rows) for rows in expected} == expected


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize(
    ("role", "kind"), [("qkv", "skinny"), ("add", "skinny"), ("gate_up", "gemv"), ("head", "gemv")]
)
def test_without_dependent_launches_kernels_are_for_one_row(role: Role, kind: str) -> None:
    linear = plan(weight_of(16, 8, bits12=True), role, agree=close, max_rows=1)
    assert [chosen(linear, rows) for rows in (1, 2, 64, 600)] == [kind, None, None, None]


@pytest.mark.usefixtures("calls")
def test_a_bias_keeps_gates_with_torch() -> None:
    assert not plan(weight_of(16, 8), "gate_up", randn(16), agree=close, max_rows=64).chosen
    assert plan(weight_of(16, 8), "qkv", randn(16), agree=close, max_rows=64).kinds == ("prefetch", "skinny")


@pytest.mark.usefixtures("calls")
def test_float32_has_no_kernels() -> None:
    assert not plan(weight_of(16, 8), "qkv", agree=close).chosen


@pytest.mark.parametrize("role", ["qkv", "gate_up", "add", "head"])
def test_in_strict_mode_one_kernel_has_all_rows_or_none(role: Role, calls: list[str]) -> None:
    linear = plan(weight_of(16, 8), role, agree=close, linear=torch.nn.functional.linear)
    assert [chosen(linear, rows) for rows in (1, 64, 65, 256, 5000)] == ["one_order"] * 5
    assert set(calls) == {"one_order"}


def test_in_strict_mode_a_product_that_no_kernel_takes_goes_through_the_fixed_one() -> None:
    calls: list[int] = []

    def fixed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        calls.append(len(x))
        return torch.nn.functional.linear(x, weight, bias)

    x, weight = randn(3, 8), weight_of(16, 8)
    linear = plan(weight, "qkv", agree=close, linear=fixed)  # float32
    assert not linear.chosen and close(linear.matmul(x), x @ weight.values.T)
    assert not plan(weight, "gate_up", randn(16), agree=close, linear=fixed).chosen
    assert calls == [3]


def test_a_kernel_that_differs_or_fails_is_left_out(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    class Fails(Named):
        def make(self, *_: object, **__: object) -> Run:
            raise RuntimeError("no such layout")

    weight = weight_of(16, 8)
    replaced(monkeypatch, Named(kernel_of("prefetch"), calls, 1.001))
    assert plan(weight, "qkv", agree=close, max_rows=64).kinds == ("skinny",)
    replaced(monkeypatch, Fails(kernel_of("prefetch"), calls))
    assert plan(weight, "qkv", agree=close, max_rows=64).kinds == ("skinny",)


@pytest.mark.parametrize("num_rows", [3, 70])
def test_a_plan_computes_what_the_layer_does(calls: list[str], num_rows: int) -> None:
    x, weight, residual = randn(num_rows, 8), weight_of(16, 8), randn(num_rows, 16)
    expected, norm = x @ weight.values.T, Norm(torch.ones(16, device=DEVICE), 1e-5)
    assert close(plan(weight, "qkv", agree=close, max_rows=64).matmul(x), expected)
    gate, up = expected.chunk(2, -1)
    silu = torch.nn.functional.silu(gate) * up
    calls.clear()
    assert close(plan(weight, "gate_up", agree=close, max_rows=64).gate_up(x), silu)
    assert calls[-1] == ("skinny" if num_rows == 3 else "tiled_gate")
    total = residual + expected
    normed = plan(weight, "add", agree=close, max_rows=64).add_norm(x, residual, norm)
    assert close(residual, total)
    assert normed is not None and close(normed, torch.nn.functional.rms_norm(total, (16,), eps=1e-5))
    assert calls[-1] == ("prefetch" if num_rows == 3 else "halves")
    assert plan(weight, "add", agree=close).add_norm(x, residual, norm) is None  # torch adds in its epilogue


def test_parts_are_summed_for_who_wants_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = randn(3, 8), randn(16, 8), randn(16)
    parts = torch.stack([x[:, :4] @ weight[:, :4].T, x[:, 4:] @ weight[:, 4:].T])

    class InParts(Named):
        def make(self, *_: object, **__: object) -> Run:
            return lambda rows: parts[:, : len(rows)]

    kernel = InParts(kernel_of("prefetch"), [])
    kernel.probes = ()
    monkeypatch.setattr(linear_dispatch, "MEASURED", (kernel,))
    linear = plan(PlainWeight(weight), "qkv", bias, agree=close, max_rows=64)
    assert torch.equal(linear.product(x), parts)
    assert close(linear.matmul(x), x @ weight.T + bias)


def test_halves_of_the_inputs_add_up_to_the_product() -> None:
    x, weight, bfloat16 = randn(70, 96), randn(40, 96), torch.bfloat16
    for dtype, tolerance in ((torch.float32, 1e-5), (bfloat16, 1e-2)):
        linear = plan(PlainWeight(weight.to(dtype)), "add", agree=lambda a, b: a.shape == b.shape, max_rows=64)
        halves = linear._run(70) if dtype is bfloat16 else Halves().make(PlainWeight(weight), "add")
        assert halves is not None
        parts = halves(x.to(dtype))
        assert parts.shape == (2, 70, 40) and parts[0].is_contiguous()
        exact = x.to(dtype).double() @ weight.to(dtype).double().T
        assert float((parts.double().sum(0) - exact).norm() / exact.norm()) < tolerance
    assert Halves().make(weight_of(40, 38), "add") is None  # fewer inputs than outputs
    assert Halves().make(weight_of(40, 81), "add") is None


@pytest.mark.usefixtures("calls")
def test_a_plan_says_which_format_its_kernels_read() -> None:
    plain, held = (plan(weight_of(16, 8, bits12=bits12), "qkv", agree=close, max_rows=64) for bits12 in (False, True))
    assert held.reads(Bits12Weight) and not plain.reads(Bits12Weight)


class Tripled:
    """A format that no kernel reads: it keeps a third of each number."""

    def __init__(self, thirds: torch.Tensor) -> None:
        self.thirds, self.shape, self.dtype, self.device = thirds, tuple(thirds.shape), thirds.dtype, thirds.device

    def dense(self, rows: slice = slice(None)) -> torch.Tensor:
        return 3 * self.thirds[rows]


@pytest.mark.parametrize("num_rows", [1, 70])
def test_a_format_without_kernels_is_multiplied_by_torch(calls: list[str], num_rows: int) -> None:
    thirds, x = randn(16, 8), randn(num_rows, 8)
    weight: Any = Tripled(thirds)
    for role in get_args(Role):
        assert not plan(weight, role, agree=close, max_rows=64).chosen
    assert close(plan(weight, "qkv", agree=close, max_rows=64).matmul(x), x @ (3 * thirds).T)
    residual = torch.zeros(num_rows, 16, device=DEVICE)
    plan(weight, "add", agree=close, max_rows=64).add_norm(x, residual, None)
    assert close(residual, x @ (3 * thirds).T) and not calls
