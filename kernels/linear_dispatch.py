"""The dispatcher of linear layers: the kernel for each number of rows and weight format.

`plan` looks up the tables of linear_kernels.py once a layer, when a model is loaded, and compares each kernel with
torch's matmul before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch.nn.functional import linear as torch_linear

from graftlm.kernels.activation import Activation
from graftlm.kernels.codes.fp8_rows import exact_rows
from graftlm.kernels.codes.tiled_weight import TiledWeight
from graftlm.kernels.gpu.elementwise import gate_mul
from graftlm.kernels.gpu.norm import add_norm
from graftlm.kernels.gpu.pdl import supports_pdl
from graftlm.kernels.linear_kernels import FEW_ROWS, MEASURED, STRICT, LinearKernel, Role, Rows, Run
from graftlm.kernels.norm import Addition, Norm
from graftlm.kernels.weight import Weight

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""torch's linear function: x, weight, bias -> x @ weight.T + bias."""


class SumParts(Protocol):
    """Sums parts [num_parts, num_rows, n] of this process and those of others."""

    def __call__(self, parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the sum [num_rows, n] in a dtype."""
        ...

    def add_norm(self, parts: torch.Tensor, residual: torch.Tensor, norm: Norm | None) -> torch.Tensor | None:
        """Add the sum to the residual [num_rows, n], in place; None, with nothing done, if one kernel cannot.

        -> the residual after `norm`; the residual itself without one
        """
        ...


AllClose = Callable[[torch.Tensor, torch.Tensor], bool]
"""A test of two results of one computation for equality within the tolerance."""


class Chosen(NamedTuple):
    """A kernel, prepared for a weight, with its numbers of rows."""

    kernel: LinearKernel
    rows: Rows
    run: Run


@dataclass(frozen=True)
class LinearPlan:
    """The kernels for one linear layer.

    weight  [n, k], bias [n] or None
    chosen  the kernels; the first that has a number of rows is used
    linear  multiplies the remaining numbers of rows; None is torch's own, which adds to the residual in its epilogue
    activation  of the gates
    strict  no sum depends on the number of rows, those of norms included
    reduce  adds the parts of other processes, which have the remaining inputs of the layer; None if it has all
    """

    weight: Weight
    bias: torch.Tensor | None
    chosen: tuple[Chosen, ...] = ()
    linear: Linear | None = None
    activation: Activation = "silu"
    strict: bool = False
    reduce: SumParts | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the names of the kernels."""
        return tuple(chosen.kernel.name for chosen in self.chosen)

    def reads(self, form: type[Weight]) -> bool:
        """Return True if one of the kernels reads the weight in this format."""
        return any(chosen.kernel.reads is form for chosen in self.chosen)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply: x [num_rows, k] @ weight.T + bias. -> [num_rows, n]"""
        found = self.product(x)
        return found if found.dim() == 2 else _sum(found, self.bias, x.dtype)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return `matmul`, or parts float32 [num_parts, num_rows, n] whose sum is `matmul` without its bias."""
        run = self._run(len(x))
        return run(x) if run is not None else self._all(x)

    def gate_up(self, x: torch.Tensor) -> torch.Tensor:
        """Return activation(gate) * up of x [num_rows, k] @ weight.T + bias, gates first. -> [num_rows, n / 2]

        Sums are in float32, and both factors are rounded before they are multiplied, as separate kernels do.
        """
        run = self._run(len(x))
        return run(x) if run is not None else gate_mul(self._all(x), self.activation)

    def add_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm: Norm | None,
        addition: Addition | None = None,
    ) -> torch.Tensor | None:
        """Add x [num_rows, k] @ weight.T + bias to the residual [num_rows, n], in place, as `addition` says.

        -> the residual after `norm`, where one kernel both adds and norms; else None
        """
        run = self._run(len(x))
        if self.reduce is not None:
            parts = self._parts(x, run)
            if addition is None and (normed := self.reduce.add_norm(parts, residual, norm)) is not None:
                return normed
            total = self.reduce(parts, x.dtype)
            if run is None and addition is None:
                residual.add_(total)
                return None
            return add_norm(total[None], residual, norm, addition=addition, strict=self.strict)
        if run is not None:
            return add_norm(run(x), residual, norm, self.bias, addition, strict=self.strict)
        if addition is not None:
            return add_norm(self._all(x)[None], residual, norm, addition=addition, strict=self.strict)
        if self.bias is None and self.linear is None:
            residual.addmm_(x, self.weight.dense().t())
        else:
            residual.add_(self._all(x))
        return None

    def _parts(self, x: torch.Tensor, run: Run | None) -> torch.Tensor:
        """Return parts [num_parts, num_rows, n] of `matmul`, its bias included."""
        if run is None:
            return self._all(x)[None]
        return run(x) if self.bias is None else _sum(run(x), self.bias, torch.float32)[None]

    def _run(self, num_rows: int) -> Run | None:
        return next((run for _, ranges, run in self.chosen if any(num_rows in rows for rows in ranges)), None)

    def _all(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear or torch_linear)(x, self.weight.dense(), self.bias)


def max_rows_of(weight: Weight) -> int:
    """Return the largest number of rows for kernels of few rows: 64 where dependent launches overlap, else 1."""
    if weight.dtype not in (torch.bfloat16, torch.float16):
        return 0
    return FEW_ROWS if supports_pdl(weight.device) else 1


def plan(
    weight: Weight,
    role: Role,
    bias: torch.Tensor | None = None,
    *,
    agree: AllClose,
    max_rows: int | None = None,
    linear: Linear | None = None,
    activation: Activation = "silu",
    reduce: SumParts | None = None,
) -> LinearPlan:
    """Choose the kernels for a linear layer of weight [n, k] and bias [n].

    agree     compares torch's result (first) with a kernel's
    max_rows  the largest number of rows for kernels of few rows; None takes the measured rule
    linear    multiplies all rows in one order of sums, where no kernel does so faster (strict mode)
    activation  of the gates
    reduce    adds the parts of other processes
    """
    few = max_rows_of(weight) if max_rows is None else max_rows
    check = _Check(weight, role, bias, activation, agree)
    gated_bias = bias is not None and role == "gate_up"
    if linear is not None:
        chosen = () if gated_bias else _in_one_order(check)
        return LinearPlan(weight, bias, chosen, linear, activation, strict=True, reduce=reduce)
    if few == 0 or gated_bias:
        return LinearPlan(weight, bias, activation=activation, reduce=reduce)
    found: list[Chosen] = []
    for kernel in MEASURED:
        rows = kernel.rows(weight, few) if role in kernel.roles else ()
        if not rows:
            continue
        served = [numbers for other in found for numbers in other.rows]
        probes = [n for n in kernel.probes if _within(n, rows) and not _within(n, served)]
        run = check.run(kernel, probes)
        if run is not None:
            found.append(Chosen(kernel, rows, run))
    return LinearPlan(weight, bias, tuple(found), activation=activation, reduce=reduce)


def _within(number: int, rows: Iterable[range]) -> bool:
    return any(number in numbers for numbers in rows)


@dataclass(frozen=True)
class _Check:
    """The check of a linear layer's kernels against torch's matmul on random input."""

    weight: Weight
    role: Role
    bias: torch.Tensor | None
    activation: Activation
    agree: AllClose

    def inputs(self, num_rows: int) -> torch.Tensor:
        """Return random rows [num_rows, k]."""
        weight = self.weight
        x = torch.randn(num_rows, weight.shape[1], device=weight.device, dtype=torch.float32).to(weight.dtype)
        return exact_rows(x) if isinstance(weight, TiledWeight) and weight.in_fp8 else x

    def run(self, kernel: LinearKernel, probes: Sequence[int]) -> Run | None:
        """Prepare a kernel; None if the weight is unsupported, it fails, or differs from torch for one of `probes`."""
        try:
            run = kernel.make(self.weight, self.role, self.bias, self.activation)
            if run is None or not probes:
                return run
            x, bias = self.inputs(max(probes)), self.bias if self.role != "add" else None
            expected = torch_linear(x, self.weight.dense(), bias)
            expected = gate_mul(expected, self.activation) if self.role == "gate_up" else expected
            for n in probes:
                found = run(x[:n])
                if found.dim() == 3:
                    found = _sum(found, bias, x.dtype)
                if not self.agree(expected[:n], found):
                    return None
            return run
        except Exception:  # this Triton does not support the kernel's source, or memory is short
            return None


def _in_one_order(check: _Check) -> tuple[Chosen, ...]:
    """Choose strict mode's kernels, equal to the bit for every batch; none if a format's first does not run here."""
    first, *others = [kernel for kernel in STRICT if kernel.rows(check.weight, FEW_ROWS)] or STRICT
    run = check.run(first, first.probes)
    if run is None:
        return ()
    chosen = [Chosen(first, first.rows(check.weight, FEW_ROWS), run)]
    for kernel in others:
        rows = kernel.rows(check.weight, FEW_ROWS)
        faster = check.run(kernel, kernel.probes) if rows else None
        if faster is not None and _same_bits(check, run, faster, kernel.probes):
            chosen.insert(0, Chosen(kernel, rows, faster))
    return tuple(chosen)


def _same_bits(check: _Check, run: Run, other: Run, probes: Sequence[int]) -> bool:
    x = check.inputs(max(probes))
    for n in probes:
        apart = other(x[:n]).float() - run(x[:n]).float()
        if not check.agree(torch.zeros_like(apart), apart):  # relative to 0, every difference counts
            return False
    return True


def _sum(parts: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Sum parts [num_parts, num_rows, n] and bias. -> [num_rows, n]"""
    total = parts.sum(0)
    return (total if bias is None else total + bias).to(dtype)
