"""Which kernel multiplies how many rows of a linear layer. The kernels have tests of their own."""

from __future__ import annotations

import pytest
import torch

from graftlm.kernels import linear_dispatch
from graftlm.kernels.activation import Activation
from graftlm.kernels.linear_dispatch import Kind, LinearPlan, Role, Run, plan
from graftlm.kernels.norm import Norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, atol=1e-5)


def named(kind: Kind, calls: list[Kind], factor: float = 1.0) -> linear_dispatch.Make:
    """A kernel that notes that it was called, and gives `factor` times what it should."""

    def make(weight: torch.Tensor, bias: torch.Tensor | None, role: Role, activation: Activation) -> Run:
        def run(x: torch.Tensor) -> torch.Tensor:
            calls.append(kind)
            out = torch.nn.functional.linear(x, weight, bias)
            if role == "gate_up":
                gate, up = out.chunk(2, -1)
                out = torch.nn.functional.silu(gate) * up
            return factor * (out[None] if role == "add" else out)

        return run

    return make


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Kind]:
    """Every kernel takes every weight; -> those that were called."""
    found: list[Kind] = []
    for kind in linear_dispatch.KINDS:
        monkeypatch.setitem(linear_dispatch.KINDS, kind, named(kind, found))
    return found


def chosen(linear: LinearPlan, num_rows: int) -> Kind | None:
    return next((kind for kind, ranges, _ in linear.chosen if any(num_rows in rows for rows in ranges)), None)


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize(
    ("role", "compact", "expected"),
    [
        ("qkv", True, {1: "bits12", 32: "bits12", 33: "prefetch", 64: "prefetch", 65: None, 5000: None}),
        ("qkv", False, {1: "prefetch", 64: "prefetch", 65: None}),
        ("add", True, {1: "bits12", 33: "prefetch", 65: "halves", 256: "halves", 257: None}),
        ("gate_up", True, {1: "bits12", 32: "bits12", 33: "tiled_gate", 256: "tiled_gate", 257: None}),
        ("gate_up", False, {1: "gemv", 2: "skinny", 32: "skinny", 33: "tiled_gate", 257: None, 5000: None}),
        ("head", True, {1: "bits12", 32: "bits12", 33: "skinny", 64: "skinny", 65: None}),
        ("head", False, {1: "gemv", 2: "skinny", 64: "skinny", 65: None}),
    ],
)
def test_on_hopper_each_number_of_rows_has_its_kernel(role: Role, compact: bool, expected: dict[int, Kind]) -> None:
    linear = plan(randn(16, 8), role, agree=close, max_rows=64, compact=compact)
    assert {rows: chosen(linear, rows) for rows in expected} == expected


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize(
    ("role", "kind"), [("qkv", "skinny"), ("add", "skinny"), ("gate_up", "gemv"), ("head", "gemv")]
)
def test_without_dependent_launches_kernels_are_for_one_row(role: Role, kind: Kind) -> None:
    linear = plan(randn(16, 8), role, agree=close, max_rows=1, compact=True)
    assert [chosen(linear, rows) for rows in (1, 2, 64, 600)] == [kind, None, None, None]


@pytest.mark.usefixtures("calls")
def test_a_bias_keeps_gates_with_torch() -> None:
    assert not plan(randn(16, 8), "gate_up", randn(16), agree=close, max_rows=64).chosen
    assert plan(randn(16, 8), "qkv", randn(16), agree=close, max_rows=64).kinds == ("prefetch", "skinny")


@pytest.mark.usefixtures("calls")
def test_float32_has_no_kernels() -> None:
    assert not plan(randn(16, 8), "qkv", agree=close).chosen


@pytest.mark.parametrize("role", ["qkv", "gate_up", "add", "head"])
def test_in_strict_mode_one_kernel_has_all_rows_or_none(role: Role, calls: list[Kind]) -> None:
    linear = plan(randn(16, 8), role, agree=close, linear=torch.nn.functional.linear)
    assert [chosen(linear, rows) for rows in (1, 64, 65, 256, 5000)] == ["one_order"] * 5
    assert set(calls) == {"one_order"}


def test_in_strict_mode_a_product_that_no_kernel_takes_goes_through_the_fixed_one() -> None:
    calls: list[int] = []

    def fixed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        calls.append(len(x))
        return torch.nn.functional.linear(x, weight, bias)

    x, weight = randn(3, 8), randn(16, 8)
    linear = plan(weight, "qkv", agree=close, linear=fixed)  # float32
    assert not linear.chosen and close(linear.matmul(x), x @ weight.T)
    assert not plan(weight, "gate_up", randn(16), agree=close, linear=fixed).chosen
    assert calls == [3]


def test_a_kernel_that_differs_or_fails_is_left_out(monkeypatch: pytest.MonkeyPatch, calls: list[Kind]) -> None:
    def fails(*_: object) -> Run:
        raise RuntimeError("no such layout")

    weight = randn(16, 8)
    monkeypatch.setitem(linear_dispatch.KINDS, "prefetch", named("prefetch", calls, 1.001))
    assert plan(weight, "qkv", agree=close, max_rows=64).kinds == ("skinny",)
    monkeypatch.setitem(linear_dispatch.KINDS, "prefetch", fails)
    assert plan(weight, "qkv", agree=close, max_rows=64).kinds == ("skinny",)


@pytest.mark.parametrize("num_rows", [3, 70])
def test_a_plan_computes_what_the_layer_does(calls: list[Kind], num_rows: int) -> None:
    x, weight, residual = randn(num_rows, 8), randn(16, 8), randn(num_rows, 16)
    expected, norm = x @ weight.T, Norm(torch.ones(16, device=DEVICE), 1e-5)
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
    monkeypatch.setitem(linear_dispatch.KINDS, "prefetch", lambda *_: lambda rows: parts[:, : len(rows)])
    monkeypatch.setattr(linear_dispatch, "MEASURED", [linear_dispatch.Measured("prefetch", ("qkv",), (range(1, 65),))])
    linear = plan(weight, "qkv", bias, agree=close, max_rows=64)
    assert torch.equal(linear.product(x), parts)
    assert close(linear.matmul(x), x @ weight.T + bias)


def test_halves_of_the_inputs_add_up_to_the_product() -> None:
    x, weight, bfloat16 = randn(70, 96), randn(40, 96), torch.bfloat16
    for dtype, tolerance in ((torch.float32, 1e-5), (bfloat16, 1e-2)):
        linear = plan(weight.to(dtype), "add", agree=lambda a, b: a.shape == b.shape, max_rows=64)
        halves = linear._run(70) if dtype is bfloat16 else linear_dispatch._halves(weight, None, "add", "silu")
        assert halves is not None
        parts = halves(x.to(dtype))
        assert parts.shape == (2, 70, 40) and parts[0].is_contiguous()
        exact = x.to(dtype).double() @ weight.to(dtype).double().T
        assert float((parts.double().sum(0) - exact).norm() / exact.norm()) < tolerance
    assert linear_dispatch._halves(randn(40, 38), None, "add", "silu") is None  # fewer inputs than outputs
    assert linear_dispatch._halves(randn(40, 81), None, "add", "silu") is None
