"""The dispatcher of linear layers: which kernel multiplies how many rows with a weight.

`MEASURED` is the table of what is the fastest, `KINDS` what can multiply; a weight of another kind (a quantised one) is
one more entry of each. `plan` looks both up once, when a model is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch.nn.functional import linear as torch_linear

from graftlm.kernels.activation import Activation
from graftlm.kernels.bits12.weight_codec import INPUTS, compacted
from graftlm.kernels.gpu.elementwise import gate_mul
from graftlm.kernels.gpu.linear.gemv import gemv
from graftlm.kernels.gpu.linear.skinny_matmul import skinny_gate_up, skinny_matmul, skinny_parts
from graftlm.kernels.gpu.norm import add_norm
from graftlm.kernels.gpu.pdl import supports_pdl
from graftlm.kernels.gpu.support import SLOW_MEMORY, card_of, memory_rate
from graftlm.kernels.hopper.support import gluon_kernel, takes
from graftlm.kernels.norm import Addition, Norm

Role = Literal["qkv", "gate_up", "add", "head"]
"""How a product is used: as it is (qkv, head), gated, or added to the residual stream."""

Kind = Literal["bits12", "tiled_gate", "gemv", "halves", "prefetch", "skinny", "one_order", "bits12_one_order"]

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""A linear layer as torch has it: x, weight, bias -> x @ weight.T + bias."""

AllClose = Callable[[torch.Tensor, torch.Tensor], bool]
"""Tells whether two results of the same computation are equal within the tolerance."""

Run = Callable[[torch.Tensor], torch.Tensor]
"""What a kernel does with rows x [num_rows, k]. For head -> [num_rows, n], for gate_up activation(gate) * up
[num_rows, n / 2], for add float32 [num_parts, num_rows, n], which the norm that follows sums up; for qkv either."""

Chosen = tuple[Kind, tuple[range, ...], Run]
"""A kernel, the numbers of rows that it multiplies, what it does."""

Make = Callable[[torch.Tensor, torch.Tensor | None, Role, Activation], Run | None]
"""weight [n, k], bias [n], role, activation of the gates -> what multiplies with it; None where the kernel cannot take
the weight. The bias is left to the sum of parts."""

FEW_ROWS = 64
"""Kernels for few rows go up to so many."""


class Measured(NamedTuple):
    """For how many rows a kernel is the fastest in these roles.

    probes  numbers of rows that the kernel multiplies in different ways: it must give what torch does for each
    """

    kind: Kind
    roles: tuple[Role, ...]
    rows: tuple[range, ...]
    probes: tuple[int, ...] = ()


MEASURED = (
    Measured("bits12", ("qkv", "gate_up", "add", "head"), (range(1, 33),), (1, 17, 33, FEW_ROWS)),
    Measured("tiled_gate", ("gate_up",), (range(33, 257),), (64, 96, 128, 160, 192, 256)),
    Measured("gemv", ("gate_up", "head"), (range(1, 2),)),
    Measured("halves", ("add",), (range(FEW_ROWS + 1, 257),), (96, 256)),
    Measured("prefetch", ("qkv", "add"), (range(1, FEW_ROWS + 1),), (16, 32, FEW_ROWS)),
    Measured("skinny", ("qkv", "gate_up", "add", "head"), (range(1, FEW_ROWS + 1),)),
)
"""Measured on an H200 with bfloat16 weights of Llama 8B; bench/gpu-notes.md has the figures. The first entry that has
the number of rows and takes the weight is used; torch's library multiplies all other rows."""

_LARGE = 1 << 25
"""A weight of so many numbers: with an H100's memory up to 64 rows of it take less time in 12 bits than in 16, gate and
up of Llama 8B 74 us instead of 87, the logits 310 instead of 366."""


ORDER_PROBES = (16, 32, FEW_ROWS, 96, 128, 160, 192, 256, 300, 640)
"""Numbers of rows that strict mode's kernels multiply in different ways."""


COMPACT_ORDER_PROBES = (1, 16, 17, 32)
"""Numbers of rows for which weights in 12 bits must give the bits of those in 16 in strict mode."""


def _skinny(weight: torch.Tensor, bias: torch.Tensor | None, role: Role, activation: Activation) -> Run:
    if role == "gate_up":
        return lambda x: skinny_gate_up(x, weight, activation)
    return (lambda x: skinny_parts(x, weight)) if role == "add" else lambda x: skinny_matmul(x, weight, bias)


def _gemv(weight: torch.Tensor, bias: torch.Tensor | None, role: Role, activation: Activation) -> Run:
    return lambda x: gemv(x, weight, bias, activation=activation if role == "gate_up" else None)


def _prefetch(weight: torch.Tensor, bias: torch.Tensor | None, role: Role, activation: Activation) -> Run | None:
    kernel = gluon_kernel("hopper.prefetch_matmul") if takes(weight) else None
    if kernel is None:
        return None
    if role == "add" or (role == "qkv" and _has_few_outputs(weight)):
        return lambda x: kernel.prefetch_parts(x, weight)
    return lambda x: kernel.prefetch_matmul(x, weight, bias)


def _tiled_gate(weight: torch.Tensor, bias: torch.Tensor | None, role: Role, activation: Activation) -> Run | None:
    kernel = gluon_kernel("hopper.gate_up_decode")
    if kernel is None or not takes(weight) or weight.shape[0] % 16:
        return None
    return lambda x: kernel.gate_up(x, weight, activation)


def _halves(weight: torch.Tensor, bias: torch.Tensor | None, role: Role, activation: Activation) -> Run | None:
    """Split K in two. With 65 to 256 rows one product has fewer tiles than the GPU has multiprocessors. The library's
    own split K ends with a kernel that sums up, which the norm that follows does anyway.
    """
    n, k = weight.shape
    if k < n or k % 2:
        return None
    halves = weight.view(n, 2, k // 2).permute(1, 2, 0)
    return lambda x: torch.bmm(x.view(len(x), 2, k // 2).transpose(0, 1), halves)


def _bits12(weight: torch.Tensor, bias: torch.Tensor | None, role: Role, activation: Activation) -> Run | None:
    held = compacted(weight, gates=role == "gate_up") if can_compact(weight) else None
    kernel = gluon_kernel("bits12.matmul")
    if held is None or kernel is None:
        return None
    if role == "gate_up":
        return lambda x: kernel.compact_gate_up(x, held, activation)
    if role == "add" or (role == "qkv" and _has_few_outputs(weight)):
        return lambda x: kernel.compact_parts(x, held)
    return lambda x: kernel.compact_matmul(x, held, bias)


def _one_order(weight: torch.Tensor, bias: torch.Tensor | None, role: Role, activation: Activation) -> Run | None:
    """Sum each output in one order for every number of rows: the kernels for few rows and for many agree in it."""
    few, many, gates = (
        gluon_kernel(name) for name in ("hopper.prefetch_matmul", "hopper.tiled_matmul", "hopper.gate_up_decode")
    )
    n, k = weight.shape
    if few is None or many is None or gates is None or not takes(weight) or (role == "gate_up" and n % 16):
        return None
    parts = few.num_parts(n, k, weight.device) if role == "add" else 1

    def product(x: torch.Tensor) -> torch.Tensor:
        num_rows = len(x)
        summed = role != "add" or num_rows > gates.MAX_ROWS
        kind = torch.float32 if role == "add" else x.dtype
        out = torch.empty(1 if summed else parts, num_rows, n, dtype=kind, device=x.device)
        if num_rows <= FEW_ROWS:
            few.launch(x, weight, out, bias if role != "add" else None)
        else:
            many.launch(x, weight, out, bias if role != "add" else None, num_parts=parts)
        return out if role == "add" else out[0]

    def gated(x: torch.Tensor) -> torch.Tensor:
        return gates.gate_up(x, weight, activation) if len(x) <= gates.MAX_ROWS else gate_mul(product(x), activation)

    return gated if role == "gate_up" else product


def _bits12_one_order(
    weight: torch.Tensor, bias: torch.Tensor | None, role: Role, activation: Activation
) -> Run | None:
    """What `_one_order` computes for up to 32 rows, from a weight in 12 bits."""
    few, kernel = gluon_kernel("hopper.prefetch_matmul"), gluon_kernel("bits12.one_order")
    held = kernel.held(weight, gates=role == "gate_up") if kernel is not None and can_compact(weight) else None
    if kernel is None or few is None or held is None:
        return None
    n, k = weight.shape
    parts = few.num_parts(n, k, weight.device) if role == "add" else 1
    outputs, kind = (n // 2 if role == "gate_up" else n), (torch.float32 if role == "add" else weight.dtype)

    def product(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(parts, len(x), outputs, dtype=kind, device=x.device)
        if role == "gate_up":
            kernel.launch(x, held, out, activation=activation)
        else:
            kernel.launch(x, held, out, bias if role != "add" else None)
        return out if role == "add" else out[0]

    return product


def _has_few_outputs(weight: torch.Tensor) -> bool:
    """Whether programs of 64 outputs and all inputs would leave half of the multiprocessors without work."""
    return 2 * -(-weight.shape[0] // 64) <= card_of(weight.device).num_sms


def can_compact(weight: torch.Tensor) -> bool:
    """Whether `weight` [n, k] could be held in 12 bits: bfloat16 on Hopper, dense, k in 64s and at least 256."""
    suits = weight.dtype is torch.bfloat16 and takes(weight) and weight.shape[1] >= 2 * INPUTS
    return suits and gluon_kernel("bits12.matmul") is not None


KINDS: dict[Kind, Make] = {
    "bits12": _bits12,
    "tiled_gate": _tiled_gate,
    "gemv": _gemv,
    "halves": _halves,
    "prefetch": _prefetch,
    "skinny": _skinny,
    "one_order": _one_order,
    "bits12_one_order": _bits12_one_order,
}


@dataclass(frozen=True)
class LinearPlan:
    """The kernels for one linear layer.

    weight  [n, k], bias [n] or None
    chosen  the kernels with the rows that they multiply, the first that has a number of rows is used
    linear  multiplies all other rows; None is torch's own, which adds to the residual in its epilogue
    activation  that of gates
    strict  no sum depends on the number of rows, those of norms included
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    chosen: tuple[Chosen, ...] = ()
    linear: Linear | None = None
    activation: Activation = "silu"
    strict: bool = False

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(kind for kind, _, _ in self.chosen)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_rows, k] @ weight.T + bias. -> [num_rows, n]"""
        found = self.product(x)
        return found if found.dim() == 2 else _sum(found, self.bias, x.dtype)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_rows, k] @ weight.T + bias, or what that is the sum of: float32 [num_parts, num_rows, n], and bias."""
        run = self._run(len(x))
        return run(x) if run is not None else self._all(x)

    def gate_up(self, x: torch.Tensor) -> torch.Tensor:
        """activation(gate) * up, where x [num_rows, k] @ weight.T + bias is both, the gates first. -> [num_rows, n / 2]

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
        if run is not None:
            return add_norm(run(x), residual, norm, self.bias, addition, strict=self.strict)
        if addition is not None:
            return add_norm(self._all(x)[None], residual, norm, addition=addition, strict=self.strict)
        if self.bias is None and self.linear is None:
            residual.addmm_(x, self.weight.t())
        else:
            residual.add_(self._all(x))
        return None

    def _run(self, num_rows: int) -> Run | None:
        return next((run for _, ranges, run in self.chosen if any(num_rows in rows for rows in ranges)), None)

    def _all(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear or torch_linear)(x, self.weight, self.bias)


def holds_compact(kinds: Sequence[str]) -> bool:
    """Whether one of these kernels reads the weight in 12 bits."""
    return any(kind in ("bits12", "bits12_one_order") for kind in kinds)


def compact_rows_of(weight: torch.Tensor) -> int:
    """Up to how many rows a weight in 12 bits is the faster one."""
    if weight.device.type != "cuda":
        return 32
    return FEW_ROWS if 0 < memory_rate(weight.device) < SLOW_MEMORY and weight.numel() >= _LARGE else 32


def max_rows_of(weight: torch.Tensor) -> int:
    """Up to how many rows kernels for few rows are faster: 64 where dependent launches overlap, else 1."""
    if weight.dtype not in (torch.bfloat16, torch.float16):
        return 0
    return FEW_ROWS if supports_pdl(weight.device) else 1


def plan(
    weight: torch.Tensor,
    role: Role,
    bias: torch.Tensor | None = None,
    *,
    agree: AllClose,
    max_rows: int | None = None,
    compact: bool = False,
    linear: Linear | None = None,
    activation: Activation = "silu",
) -> LinearPlan:
    """Choose the kernels for a linear layer of weight [n, k] and bias [n].

    agree     compares torch's result (first) with a kernel's
    max_rows  up to how many rows kernels for few rows are used; None takes the measured rule
    compact   whether a copy of the weight in 12 bits may be held for few rows
    linear    multiplies all rows in one order of sums, where no kernel does so faster (strict mode)
    activation  that of gates
    """
    few = max_rows_of(weight) if max_rows is None else max_rows
    gated_bias = bias is not None and role == "gate_up"
    if linear is not None:
        one = _in_one_order(weight, bias, role, activation, agree, compact=compact) if not gated_bias else ()
        return LinearPlan(weight, bias, one, linear, activation, strict=True)
    if few == 0 or gated_bias:
        return LinearPlan(weight, bias, activation=activation)
    chosen: list[Chosen] = []
    for kind, roles, rows, probes in MEASURED:
        special = kind not in ("gemv", "skinny")
        if role not in roles or (special and few == 1) or (kind == "bits12" and not compact):
            continue
        if kind == "bits12":
            rows = (range(1, compact_rows_of(weight) + 1),)
        if kind not in ("tiled_gate", "halves"):
            rows = tuple(range(r.start, min(r.stop, few + 1)) for r in rows)
        served = [ranges for _, ranges, _ in chosen]
        probes = tuple(n for n in probes if not any(n in r for ranges in served for r in ranges))
        probes = tuple(n for n in probes if any(n in r for r in rows)) if kind == "bits12" else probes
        run = _checked(kind, weight, bias, role, activation, probes, agree)
        if run is not None:
            chosen.append((kind, rows, run))
    return LinearPlan(weight, bias, tuple(chosen), activation=activation)


def _in_one_order(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    role: Role,
    activation: Activation,
    agree: AllClose,
    *,
    compact: bool,
) -> tuple[Chosen, ...]:
    """The kernels of strict mode, which give a row the same bits; none where there is none for all rows."""
    run = _checked("one_order", weight, bias, role, activation, ORDER_PROBES, agree)
    if run is None:
        return ()
    every: Chosen = ("one_order", (range(1, sys.maxsize),), run)
    few = _checked("bits12_one_order", weight, bias, role, activation, COMPACT_ORDER_PROBES, agree) if compact else None
    if few is None:
        return (every,)
    x = torch.randn(max(COMPACT_ORDER_PROBES), weight.shape[1], device=weight.device).to(weight.dtype)
    for n in COMPACT_ORDER_PROBES:
        apart = few(x[:n]).float() - run(x[:n]).float()
        if not agree(torch.zeros_like(apart), apart):  # relative to 0 no difference is small
            return (every,)
    return ("bits12_one_order", (range(1, max(COMPACT_ORDER_PROBES) + 1),), few), every


def _sum(parts: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The sum of parts [num_parts, num_rows, n] and bias. -> [num_rows, n]"""
    total = parts.sum(0)
    return (total if bias is None else total + bias).to(dtype)


def _checked(
    kind: Kind,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    role: Role,
    activation: Activation,
    probes: tuple[int, ...],
    agree: AllClose,
) -> Run | None:
    """What multiplies with `weight`; None if the kernel does not take it, fails, or differs from torch."""
    try:
        run = KINDS[kind](weight, bias, role, activation)
        if run is None or not probes:
            return run
        x = torch.randn(max(probes), weight.shape[1], device=weight.device).to(weight.dtype)
        expected = torch_linear(x, weight, bias if role != "add" else None)
        expected = gate_mul(expected, activation) if role == "gate_up" else expected
        for n in probes:
            found = run(x[:n])
            if found.dim() == 3:
                found = _sum(found, bias if role != "add" else None, x.dtype)
            if not agree(expected[:n], found):
                return None
        return run
    except Exception:  # Triton has another form of what the kernel is written in, or memory is short
        return None
