"""The kernels of linear layers on GPUs, with the weights, roles and numbers of rows of each.

`MEASURED` is the table of the fastest kernels, `STRICT` the table of strict mode. A weight format adds a class for each
of its kernels, and one entry in a table. linear_dispatch.py reads the tables once a layer when a model is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Literal, Protocol

import torch

from graftlm.kernels.activation import Activation
from graftlm.kernels.bits12.weight import Bits12Weight
from graftlm.kernels.codes.products import CodesProduct, ScaledProduct
from graftlm.kernels.codes.tiled_weight import TiledParts, TiledWeight
from graftlm.kernels.gpu.elementwise import gate_mul
from graftlm.kernels.gpu.linear.gemv import gemv
from graftlm.kernels.gpu.linear.skinny_matmul import skinny_gate_up, skinny_matmul, skinny_parts
from graftlm.kernels.gpu.support import SLOW_MEMORY, card_of, memory_rate
from graftlm.kernels.hopper.support import gluon_kernel, takes
from graftlm.kernels.weight import PlainWeight, Weight

Role = Literal["qkv", "gate_up", "add", "head"]
"""The use of a linear layer's output: unchanged (qkv, head), gated, or added to the residual stream."""

Run = Callable[[torch.Tensor], torch.Tensor]
"""A prepared kernel of rows x [num_rows, k]. For head -> [num_rows, n], for gate_up activation(gate) * up
[num_rows, n / 2], for add float32 [num_parts, num_rows, n], which the next norm sums; for qkv that of head or add."""

Rows = tuple[range, ...]
"""Numbers of rows."""

FEW_ROWS = 64
"""The largest number of rows of kernels for few rows."""

_LARGE = 1 << 25
"""Elements of a weight from which on 12 bits are faster than 16 for up to 64 rows on a card with an H100's memory: gate
and up of Llama 8B take 74 us instead of 87, the logits 310 instead of 366."""


_FP8_ROWS = 3072
"""Rows from which on torch's library is faster with rows and weights in E4M3, whose codes it needs by output."""
_WIDENED_ROWS = 2049
"""Rows from which on a matmul is faster with a weight's values, which are computed for it."""

CodesKernel = Literal["codes.matmul", "codes.wide_matmul"]
_CODES: dict[CodesKernel, tuple[range, tuple[int, ...]]] = {
    "codes.matmul": (range(1, FEW_ROWS + 1), (1, 9, 17, 33)),
    "codes.wide_matmul": (range(FEW_ROWS + 1, _WIDENED_ROWS), (100, 200)),
}
"""Numbers of rows of the kernels of quantised weights, and those that cover their variants."""


class LinearKernel(Protocol):
    """One kernel of linear layers."""

    @property
    def name(self) -> str:
        """Return the kernel's name in LinearPlan.kinds."""
        ...

    @property
    def roles(self) -> tuple[Role, ...]:
        """Return the roles in which the kernel is the fastest."""
        ...

    @property
    def reads(self) -> type[Weight]:
        """Return the weight format that the kernel reads."""
        ...

    @property
    def probes(self) -> tuple[int, ...]:
        """Return numbers of rows that cover the kernel's variants: its result is compared with torch's for each."""
        ...

    def rows(self, weight: Weight, few: int) -> Rows:
        """Return the numbers of rows for which the kernel is the fastest; () if it does not read the format.

        few  the largest number of rows for kernels of few rows: 1 where dependent launches do not overlap
        """
        ...

    def make(
        self, weight: Weight, role: Role, bias: torch.Tensor | None = None, activation: Activation = "silu"
    ) -> Run | None:
        """Prepare the kernel for a weight [n, k]; None if unsupported. For role "add" the caller adds the bias.

        activation  of the gates, for role "gate_up"
        """
        ...


class _PlainKernel:
    """A kernel that reads a weight as a tensor."""

    name: ClassVar[str]
    roles: ClassVar[tuple[Role, ...]] = ("qkv", "gate_up", "add", "head")
    reads: ClassVar[type[Weight]] = PlainWeight
    probes: ClassVar[tuple[int, ...]] = ()

    def rows(self, weight: Weight, few: int) -> Rows:
        return self.plain_rows(few) if isinstance(weight, PlainWeight) else ()

    def plain_rows(self, few: int) -> Rows:
        raise NotImplementedError

    def make(
        self, weight: Weight, role: Role, bias: torch.Tensor | None = None, activation: Activation = "silu"
    ) -> Run | None:
        return self.of(weight.values, role, bias, activation) if isinstance(weight, PlainWeight) else None

    def of(self, weight: torch.Tensor, role: Role, bias: torch.Tensor | None, activation: Activation) -> Run | None:
        """Prepare the kernel for a tensor [n, k]."""
        raise NotImplementedError


class Skinny(_PlainKernel):
    name = "skinny"

    def plain_rows(self, few: int) -> Rows:
        return (range(1, few + 1),)

    def of(self, weight: torch.Tensor, role: Role, bias: torch.Tensor | None, activation: Activation) -> Run:
        if role == "gate_up":
            return lambda x: skinny_gate_up(x, weight, activation)
        return (lambda x: skinny_parts(x, weight)) if role == "add" else lambda x: skinny_matmul(x, weight, bias)


class Gemv(_PlainKernel):
    name = "gemv"
    roles = ("gate_up", "head")

    def plain_rows(self, few: int) -> Rows:
        return (range(1, 2),)

    def of(self, weight: torch.Tensor, role: Role, bias: torch.Tensor | None, activation: Activation) -> Run:
        return lambda x: gemv(x, weight, bias, activation=activation if role == "gate_up" else None)


class Prefetch(_PlainKernel):
    name = "prefetch"
    roles = ("qkv", "add")
    probes = (16, 32, FEW_ROWS)

    def plain_rows(self, few: int) -> Rows:
        return (range(1, few + 1),) if few > 1 else ()

    def of(self, weight: torch.Tensor, role: Role, bias: torch.Tensor | None, activation: Activation) -> Run | None:
        kernel = gluon_kernel("hopper.prefetch_matmul") if takes(weight) else None
        if kernel is None:
            return None
        if role == "add" or (role == "qkv" and _has_few_outputs(weight)):
            return lambda x: kernel.prefetch_parts(x, weight)
        return lambda x: kernel.prefetch_matmul(x, weight, bias)


class TiledGate(_PlainKernel):
    name = "tiled_gate"
    roles = ("gate_up",)
    probes = (64, 96, 128, 160, 192, 256)

    def plain_rows(self, few: int) -> Rows:
        return (range(33, 257),) if few > 1 else ()

    def of(self, weight: torch.Tensor, role: Role, bias: torch.Tensor | None, activation: Activation) -> Run | None:
        kernel = gluon_kernel("hopper.gate_up_decode")
        if kernel is None or not takes(weight) or weight.shape[0] % 16:
            return None
        return lambda x: kernel.gate_up(x, weight, activation)


class PrefillGate(_PlainKernel):
    """The gated matmul of more than 512 rows; a prefill takes 2 % longer without it."""

    name = "prefill_gate"
    roles = ("gate_up",)
    probes = (513,)

    def plain_rows(self, few: int) -> Rows:
        return (range(513, sys.maxsize),) if few > 1 else ()

    def of(self, weight: torch.Tensor, role: Role, bias: torch.Tensor | None, activation: Activation) -> Run | None:
        kernel = gluon_kernel("hopper.gate_up_prefill")
        if kernel is None or not takes(weight) or weight.shape[0] % 16:
            return None
        return lambda x: kernel.gate_up(x, weight, activation)


class Halves(_PlainKernel):
    """The library's matmul with K split in two: one matmul of 65 to 256 rows has fewer tiles than multiprocessors.

    The library's own split K ends with a kernel for the sum, which the next norm computes anyway.
    """

    name = "halves"
    roles = ("add",)
    probes = (96, 256)

    def plain_rows(self, few: int) -> Rows:
        return (range(FEW_ROWS + 1, 257),) if few > 1 else ()

    def of(self, weight: torch.Tensor, role: Role, bias: torch.Tensor | None, activation: Activation) -> Run | None:
        n, k = weight.shape
        if k < n or k % 2:
            return None
        halves = weight.view(n, 2, k // 2).permute(1, 2, 0)
        return lambda x: torch.bmm(x.view(len(x), 2, k // 2).transpose(0, 1), halves)


class Bits12(_PlainKernel):
    name = "bits12"
    reads = Bits12Weight
    probes = (1, 17, 33, FEW_ROWS)

    def rows(self, weight: Weight, few: int) -> Rows:
        if not isinstance(weight, Bits12Weight) or few <= 1:
            return ()
        return (range(1, min(self.max_rows(weight.values), few) + 1),)

    @staticmethod
    def max_rows(weight: torch.Tensor) -> int:
        """Return the largest number of rows for which 12-bit weights are faster than 16-bit ones."""
        if weight.device.type != "cuda":
            return 32
        return FEW_ROWS if 0 < memory_rate(weight.device) < SLOW_MEMORY and weight.numel() >= _LARGE else 32

    def make(
        self, weight: Weight, role: Role, bias: torch.Tensor | None = None, activation: Activation = "silu"
    ) -> Run | None:
        kernel = gluon_kernel("bits12.matmul")
        codes = weight.codes(gates=role == "gate_up") if isinstance(weight, Bits12Weight) else None
        if codes is None or kernel is None:
            return None
        if role == "gate_up":
            return lambda x: kernel.compact_gate_up(x, codes, activation)
        if role == "add" or (role == "qkv" and _has_few_outputs(weight.dense())):
            return lambda x: kernel.compact_parts(x, codes)
        return lambda x: kernel.compact_matmul(x, codes, bias)


class Codes:
    """Matmuls with quantised weights that decode codes in registers."""

    roles: ClassVar[tuple[Role, ...]] = ("qkv", "gate_up", "add", "head")

    def __init__(self, reads: type[TiledWeight] | type[TiledParts], name: CodesKernel) -> None:
        self.reads: type[Weight] = reads
        self.name = name
        self.served, self.probes = _CODES[name]

    def rows(self, weight: Weight, few: int) -> Rows:
        if not isinstance(weight, self.reads) or few <= 1:
            return ()
        in_fp8 = self.served.start > 1 and isinstance(weight, TiledWeight) and weight.in_fp8
        return (range(self.served.start, sys.maxsize),) if in_fp8 else (self.served,)

    def make(
        self, weight: Weight, role: Role, bias: torch.Tensor | None = None, activation: Activation = "silu"
    ) -> Run | None:
        kernel = gluon_kernel(self.name)
        if kernel is None or not isinstance(weight, TiledWeight | TiledParts):
            return None
        gates = isinstance(weight, TiledWeight) and weight.gates
        if gates != (role == "gate_up"):
            return None
        return CodesProduct(kernel, weight, bias, activation if gates else None, role == "add")


class WidenedGate:
    """The gated matmul of many rows with the values of a quantised weight."""

    name = "widened_gate"
    roles: ClassVar[tuple[Role, ...]] = ("gate_up",)
    reads: ClassVar[type[Weight]] = TiledWeight
    probes = (_WIDENED_ROWS,)

    def rows(self, weight: Weight, few: int) -> Rows:
        return (range(_WIDENED_ROWS, sys.maxsize),) if isinstance(weight, TiledWeight) and few > 1 else ()

    def make(
        self, weight: Weight, role: Role, bias: torch.Tensor | None = None, activation: Activation = "silu"
    ) -> Run | None:
        kernel = gluon_kernel("hopper.gate_up_prefill")
        if kernel is None or weight.shape[0] % 16 or weight.shape[1] % 64:
            return None
        return lambda x: kernel.gate_up(x, weight.dense(), activation)


class CodesOneOrder(Codes):
    """Matmuls with quantised weights that sum every output in one order for every number of rows."""

    def __init__(self, reads: type[TiledWeight] | type[TiledParts]) -> None:
        super().__init__(reads, "codes.wide_matmul")
        self.served, self.probes = range(1, sys.maxsize), (1, *self.probes)

    def make(
        self, weight: Weight, role: Role, bias: torch.Tensor | None = None, activation: Activation = "silu"
    ) -> Run | None:
        run = super().make(weight, role, bias, activation)
        return replace(run, one_order=True) if isinstance(run, CodesProduct) else None


class Fp8:
    """Matmuls of many rows with a weight in E4M3 whose rows are rounded to E4M3 too."""

    name = "fp8"
    roles: ClassVar[tuple[Role, ...]] = ("qkv", "gate_up", "add", "head")
    reads: ClassVar[type[Weight]] = TiledWeight
    probes = (_FP8_ROWS,)

    def rows(self, weight: Weight, few: int) -> Rows:
        suits = isinstance(weight, TiledWeight) and weight.in_fp8 and not weight.groups and weight.order is None
        return (range(_FP8_ROWS, sys.maxsize),) if suits and few > 1 else ()

    def make(
        self, weight: Weight, role: Role, bias: torch.Tensor | None = None, activation: Activation = "silu"
    ) -> Run | None:
        if not isinstance(weight, TiledWeight) or weight.gates != (role == "gate_up"):
            return None
        return ScaledProduct.of(weight, bias, activation if weight.gates else None, in_parts=role == "add")


class OneOrder(_PlainKernel):
    """Matmuls that sum every output in one order for every number of rows, by kernels for few and for many rows."""

    name = "one_order"
    probes = (16, 32, FEW_ROWS, 96, 128, 160, 192, 256, 300, 640)

    def plain_rows(self, few: int) -> Rows:
        return (range(1, sys.maxsize),)

    def of(self, weight: torch.Tensor, role: Role, bias: torch.Tensor | None, activation: Activation) -> Run | None:
        few, many, gates = (
            gluon_kernel(name) for name in ("hopper.prefetch_matmul", "hopper.tiled_matmul", "hopper.gate_up_decode")
        )
        n, k = weight.shape
        if few is None or many is None or gates is None or not takes(weight) or (role == "gate_up" and n % 16):
            return None
        parts = few.num_parts(n, k, weight.device) if role == "add" else 1

        def matmul(x: torch.Tensor) -> torch.Tensor:
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
            if len(x) <= gates.MAX_ROWS:
                found: torch.Tensor = gates.gate_up(x, weight, activation)
                return found
            return gate_mul(matmul(x), activation)

        return gated if role == "gate_up" else matmul


class Bits12OneOrder(_PlainKernel):
    """Matmuls of up to 32 rows with a 12-bit weight, equal to `OneOrder` to the bit."""

    name = "bits12_one_order"
    reads = Bits12Weight
    probes = (1, 16, 17, 32)

    def rows(self, weight: Weight, few: int) -> Rows:
        return (range(1, max(self.probes) + 1),) if isinstance(weight, Bits12Weight) else ()

    def make(
        self, weight: Weight, role: Role, bias: torch.Tensor | None = None, activation: Activation = "silu"
    ) -> Run | None:
        few, kernel = gluon_kernel("hopper.prefetch_matmul"), gluon_kernel("bits12.one_order")
        if kernel is None or few is None or not isinstance(weight, Bits12Weight):
            return None
        held = kernel.held(weight.codes(gates=role == "gate_up"))
        if held is None:
            return None
        n, k = weight.shape
        parts = few.num_parts(n, k, weight.device) if role == "add" else 1
        outputs, kind = (n // 2 if role == "gate_up" else n), (torch.float32 if role == "add" else weight.dtype)

        def matmul(x: torch.Tensor) -> torch.Tensor:
            out = torch.empty(parts, len(x), outputs, dtype=kind, device=x.device)
            if role == "gate_up":
                kernel.launch(x, held, out, activation=activation)
            else:
                kernel.launch(x, held, out, bias if role != "add" else None)
            return out if role == "add" else out[0]

        return matmul


def _has_few_outputs(weight: torch.Tensor) -> bool:
    """Return True if programs of 64 outputs and all inputs would leave half of the multiprocessors idle."""
    return 2 * -(-weight.shape[0] // 64) <= card_of(weight.device).num_sms


MEASURED: tuple[LinearKernel, ...] = (
    Bits12(), Fp8(), Codes(TiledWeight, "codes.matmul"), Codes(TiledWeight, "codes.wide_matmul"),
    Codes(TiledParts, "codes.matmul"), Codes(TiledParts, "codes.wide_matmul"), WidenedGate(),
    TiledGate(), PrefillGate(), Gemv(), Halves(), Prefetch(), Skinny(),
)  # fmt: skip
"""Kernels in order of precedence: the first that supports weight and number of rows is used, else torch's library.
Measured on an H200 with bfloat16 weights of Llama 8B; bench/notes/gpu.md has the figures."""

STRICT: tuple[LinearKernel, ...] = (
    OneOrder(), Bits12OneOrder(), CodesOneOrder(TiledWeight), CodesOneOrder(TiledParts),
)  # fmt: skip
"""Kernels of strict mode: the first of a format has all numbers of rows; a later one precedes it if it yields equal
bits."""
