"""QuantisedPanels: a quantised weight in the panels that compiled loops decode in registers; no dense copy exists.

A weight is packed once, when it is loaded, by some integer operations of torch on its codes.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from graftlm.kernels.cpu import PANEL
from graftlm.kernels.cpu.calls import FLOAT_ROWS, HALVES, INT8_ROWS, SUMS, GatherCall
from graftlm.kernels.cpu.compiled import object_code
from graftlm.kernels.cpu.compiled.loop_runtime import Loop, loop_address
from graftlm.kernels.cpu.element_format import ElementFormat
from graftlm.kernels.cpu.panel_kind import FACTOR_INPUTS, FOURS, INPUTS, TABLE, Arithmetic, Numbers, PanelKind
from graftlm.kernels.quantised_weight import VALUES, QuantisedWeight, Table

Activations = Literal["exact", "int8", "fp8"]
"""The rows that a quantised weight multiplies: those of its dtype, or int8 with a scale for every 32 inputs. "fp8" is
for Hopper GPUs; on a CPU rows keep their dtype."""

_BYTE_TABLES = {"e2m1": (2, 12), "iq4_nl": (1, 128)}
"""Tables of whole numbers: their factor and the offset that makes all of them positive."""
_DTYPES = {Numbers.FLOAT32: torch.float32, Numbers.FLOAT16: torch.float16, Numbers.INT8: torch.int8}
_FIRST_CODE = 128
"""The 8-bit code that is stored as 0 where a zero point does not fit."""


class QuantisedPanels(NamedTuple):
    """A quantised weight in panels; see panel_kind.py.

    packed      uint8 [num_panels, panel_bytes]; outputs after the last are 0
    table       uint8 [TABLE.SIZE], read by the loops
    order       int32 [num_in], the input of each position; None for the inputs' own order
    dtype       of the rows and results
    """

    packed: torch.Tensor
    table: torch.Tensor
    bias: torch.Tensor | None
    num_out: int
    num_in: int
    kind: PanelKind
    arithmetic: Arithmetic
    order: torch.Tensor | None
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_out, self.num_in

    @property
    def depth(self) -> int:
        return self.num_in

    @property
    def address(self) -> int:
        return self.packed.data_ptr()

    @property
    def num_bytes(self) -> int:
        return self.packed.nbytes

    @property
    def is_mkldnn(self) -> bool:
        return False

    @property
    def loop(self) -> tuple[int, ...]:
        """Return the numbers of a segment that select the loop of this weight."""
        function = loop_address("quantised_panel", self.arithmetic, *self.kind.arguments)
        return (function, self.packed.shape[1], self.table.data_ptr(), self.arithmetic, self.kind.block)

    @property
    def forms(self) -> int:
        """Return the forms of rows that the loop reads, as in MatmulCall."""
        if self.arithmetic is Arithmetic.INT8:
            return INT8_ROWS
        rows = HALVES if self.arithmetic is Arithmetic.DOTS else FLOAT_ROWS
        return rows | SUMS if self.kind.minimum else rows

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the values of outputs `ids` int64 [n]. -> [n, num_in], inputs at the positions of the codes"""
        out = torch.empty(len(ids), self.depth, dtype=self.dtype)
        Loop(self.gather_call(ids, out), self.gather_loop).run(single_thread=len(ids) < PANEL)
        return out

    def gather_call(self, ids: torch.Tensor, out: torch.Tensor) -> GatherCall:
        """Return the arguments of a gather to `out`, whose memory and that of `ids` must outlive it."""
        call: Any = GatherCall()
        call.num_tasks, call.ids, call.out, call.depth = len(ids), ids.data_ptr(), out.data_ptr(), self.depth
        call.weight, call.panel_bytes, call.table = self.address, self.packed.shape[1], self.table.data_ptr()
        found: GatherCall = call
        return found

    @property
    def gather_loop(self) -> int:
        """Return the address of the loop of GatherCalls."""
        return loop_address("quantised_gather", ElementFormat.of(self.dtype), *self.kind.arguments)

    def dense(self) -> torch.Tensor:
        """Return the values [num_out, num_in] of the weight."""
        values = self.gather(torch.arange(self.num_out))
        if self.order is not None:
            values = torch.empty_like(values).index_copy_(1, self.order.long(), values)
        return values


def arithmetic_of(weight: QuantisedWeight, activations: Activations = "exact") -> Arithmetic:
    """Return the fastest arithmetic for a weight on this processor; with "int8" activations where there is a loop."""
    has = object_code.processor()[1]
    # bfloat16 holds the values of each table but nf4's
    candidates = [Arithmetic.DOTS] if weight.dtype is torch.bfloat16 and weight.table != "nf4" else []
    by_bytes = weight.table is None or weight.table in _BYTE_TABLES
    if activations == "int8" and by_bytes and _block(weight) == 32:
        candidates.insert(0, Arithmetic.INT8)
    for arithmetic in candidates:
        alternatives = arithmetic.features(weight.bits)
        if arithmetic is Arithmetic.INT8 and weight.table is not None:
            alternatives = alternatives[:1]  # sums of pairs in 16 bits overflow
        if any(has >= needed for needed in alternatives):
            return arithmetic
    return Arithmetic.FLOATS


def _block(weight: QuantisedWeight) -> int | None:
    return next((block for block in (32, 16) if weight.group % block == 0), None)


def problem(weight: QuantisedWeight) -> str | None:
    """Return the reason why the loops cannot multiply with a weight; None if they can."""
    block = _block(weight)
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return f"no CPU kernels for {str(weight.dtype).removeprefix('torch.')}"
    if block is None:
        return f"groups of {weight.group} inputs, which are no multiple of 16"
    if block == 16 and _has_minima(weight):
        return f"minima of {weight.group} inputs, which are no multiple of 32"
    return None


def _has_minima(weight: QuantisedWeight) -> bool:
    return weight.minimum is not None or _centre(weight)[1]


def _centre(weight: QuantisedWeight) -> tuple[int, bool]:
    """Return the code that is stored as zero, and whether the zero points differ from it."""
    zero = weight.zero
    if isinstance(zero, torch.Tensor):
        return (8 if weight.bits == 4 else _FIRST_CODE) if weight.table is None else 0, True
    first = zero or 0
    if weight.bits == 4 or weight.table is not None or weight.codes.numel() == 0 or _fits_six_bits(weight):
        return first, False
    low, high = int(weight.codes.min()), int(weight.codes.max())
    fits = low - first >= -128 and high - first <= 127
    return (first, False) if fits else (_FIRST_CODE, first != _FIRST_CODE)


def _fits_six_bits(weight: QuantisedWeight) -> bool:
    """Return True if the 8-bit codes of a weight are whole numbers below 64, with one zero point."""
    if weight.bits == 4 or weight.table is not None or isinstance(weight.zero, torch.Tensor):
        return False
    return weight.codes.numel() > 0 and int(weight.codes.max()) < 64


def pack(weight: QuantisedWeight, bias: torch.Tensor | None, arithmetic: Arithmetic) -> QuantisedPanels:
    """Copy a weight without `problem` into panels."""
    n, k = weight.shape
    block = _block(weight)
    assert block is not None
    centre, differs = _centre(weight)
    scale = weight.scale
    if weight.block_n > 1:
        outputs = torch.arange(n) // weight.block_n
        scale = scale.contiguous().view(torch.uint8)[outputs].view(scale.dtype)  # of any dtype
    minimum = weight.minimum
    if differs:
        zero = weight.zero if isinstance(weight.zero, torch.Tensor) else torch.tensor(weight.zero or 0)
        shift = scale.float() * (centre - zero.float())
        minimum = shift if minimum is None else shift + minimum.float()
    if weight.scale.dtype is getattr(torch, "float8_e8m0fnu", None):
        scale = scale.float()
    halves = scale.dtype is torch.float16 and (minimum is None or minimum.dtype is torch.float16)
    numbers = Numbers.FLOAT16 if halves else Numbers.FLOAT32
    whole = _multiples(weight, scale, minimum)
    if whole is not None:
        numbers, (scale, minimum) = Numbers.INT8, whole
    has_table = weight.table is not None
    bits = 6 if _fits_six_bits(weight) else weight.bits
    kind = PanelKind(bits, block, numbers, minimum is not None, has_table)
    num_panels, per_span = -(-n // PANEL), kind.span // block
    packed = torch.zeros(num_panels, k // kind.span, kind.span_bytes, dtype=torch.uint8)
    blocks = packed[:, :, kind.factor_bytes :].unflatten(2, (per_span, kind.block_bytes))
    words = _words(weight, bits, centre).view(n, -1, per_span, kind.codes_bytes // (4 * PANEL))
    _put(blocks.view(torch.int32)[..., : kind.codes_bytes // 4], words)
    dtype = _DTYPES[numbers]
    for i, values in enumerate((scale, minimum)):
        if values is not None:
            first = kind.codes_bytes + i * PANEL * numbers.size
            place = blocks[..., first : first + PANEL * numbers.size].view(dtype)
            each = values.to(dtype).repeat_interleave(weight.group // block, 1)
            _put(place, each.view(n, -1, per_span, 1))
    if whole is not None and weight.factors is not None:
        for i, factor in enumerate(weight.factors):
            if factor is not None:
                _put(packed[..., i * 2 * PANEL : (i + 1) * 2 * PANEL].view(torch.float16), factor[..., None])
    table = _table(weight, bits, centre)
    packed = packed.view(num_panels, -1)
    return QuantisedPanels(packed, table, bias, n, k, kind, arithmetic, weight.order, weight.dtype)


def _multiples(
    weight: QuantisedWeight, scale: torch.Tensor, minimum: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Return scale and minimum in int8, as multiples of the weight's factors; None if they are not such."""
    n, k = weight.shape
    found: list[torch.Tensor | None] = []
    for values, factor in zip((scale, minimum), weight.factors or (None, None), strict=True):
        if values is None:
            found.append(None)
            continue
        if factor is None or factor.shape != (n, k // FACTOR_INPUTS) or FACTOR_INPUTS % weight.group:
            return None
        wide = factor.float().repeat_interleave(FACTOR_INPUTS // weight.group, 1)
        whole = (values.float() / wide).nan_to_num().round().clamp(-128, 127)
        if not torch.equal(whole * wide, values.float()):
            return None
        found.append(whole.to(torch.int8))
    assert found[0] is not None
    return found[0], found[1]


def _put(place: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values [n, ..., m] to [num_panels, ..., m * PANEL], the outputs of a panel side by side."""
    n, m = values.shape[0], values.shape[-1]
    whole = n // PANEL
    place = place.unflatten(-1, (m, PANEL))
    if whole:
        place[:whole].copy_(values[: whole * PANEL].unflatten(0, (whole, PANEL)).movedim(1, -1))
    if n > whole * PANEL:
        place[whole, ..., : n - whole * PANEL].copy_(values[whole * PANEL :].movedim(0, -1))


def _words(weight: QuantisedWeight, bits: int, centre: int) -> torch.Tensor:
    """Return the words of codes in `bits`, int32 [n, k / 8] of 4 bits, [n, k / 16, 3] of 6, [n, k / 8, 2] of 8."""
    codes = weight.codes
    n = len(codes)
    if bits == 6:
        order = torch.tensor([i for four in FOURS for i in four])
        four = codes.view(n, -1, 2, INPUTS).index_select(3, order).view(torch.int32).view(n, -1, 4)
        upper = (four[..., 3:] >> torch.tensor([0, 2, 4], dtype=torch.int32)) & 0x03030303
        return four[..., :3] | upper << 6
    if bits == 8:
        if weight.table is None:
            codes = codes - centre  # modulo 256: the bits of int8
        order = torch.tensor([i for four in FOURS for i in four])
        return codes.view(n, -1, INPUTS).index_select(2, order).view(torch.int32)
    word = codes.contiguous().view(torch.int32).numpy()  # threads of torch would wait for each other in each operation
    found = np.zeros_like(word)
    for half in range(2):  # even inputs lie in the low nibbles, odd ones in the high
        nibbles = (word >> np.int32(4 * half)) & np.int32(0x0F0F0F0F)
        nibbles = (nibbles | (nibbles >> np.int32(4))) & np.int32(0x00FF00FF)
        found |= ((nibbles | (nibbles >> np.int32(8))) & np.int32(0xFFFF)) << np.int32(16 * half)
    return torch.from_numpy(found)


def _table(weight: QuantisedWeight, bits: int, centre: int) -> torch.Tensor:
    """Return the table of a weight with codes in `bits`, as `TABLE` lays it out."""
    table = np.zeros(TABLE.SIZE, np.uint8)
    factor, offset = 1.0, centre if bits < 8 else _FIRST_CODE
    if bits == 6:
        values = np.arange(64, dtype=np.float32) - np.float32(centre)
        table[TABLE.FLOATS : TABLE.FLOATS + 64] = values[:16].view(np.uint8)
        halves = torch.from_numpy(values).bfloat16().view(torch.uint8).numpy()
        table[TABLE.HALVES : TABLE.HALVES + 128] = halves
    if weight.bits == 4:
        named = weight.table
        values = np.array(VALUES[named] if named is not None else range(16), np.float32) - np.float32(centre)
        table[TABLE.FLOATS : TABLE.FLOATS + 64] = values.view(np.uint8)
        halves = torch.from_numpy(np.tile(values, 2)).bfloat16().view(torch.uint8).numpy()
        table[TABLE.HALVES : TABLE.HALVES + 64] = halves
        if named in _BYTE_TABLES:
            times, offset = _BYTE_TABLES[named]
            factor = 1 / times
            table[TABLE.BYTES : TABLE.BYTES + 64] = np.tile((values * times + offset).astype(np.uint8), 4)
    table[TABLE.OFFSET : TABLE.OFFSET + 4] = np.array([offset], np.int32).view(np.uint8)
    table[TABLE.FACTOR : TABLE.FACTOR + 4] = np.array([factor], np.float32).view(np.uint8)
    return torch.from_numpy(table)


def unpack(panels: QuantisedPanels) -> QuantisedWeight:
    """Return the weight of panels: equal values, with a group for every scale in the panels."""
    kind, n, k = panels.kind, panels.num_out, panels.num_in
    spans = panels.packed.view(len(panels.packed), -1, kind.span_bytes)
    blocks = spans[:, :, kind.factor_bytes :].unflatten(2, (-1, kind.block_bytes)).flatten(1, 2)
    numbers, factors = [], []
    for i in range(2 if kind.minimum else 1):
        first = kind.codes_bytes + i * PANEL * kind.numbers.size
        place = blocks[:, :, first : first + PANEL * kind.numbers.size].contiguous().view(_DTYPES[kind.numbers])
        number = place.transpose(1, 2).reshape(-1, k // kind.block)[:n].contiguous()
        if kind.numbers is Numbers.INT8:
            place = spans[:, :, i * 2 * PANEL : (i + 1) * 2 * PANEL].contiguous().view(torch.float16)
            factors.append(place.transpose(1, 2).reshape(-1, k // kind.span)[:n].contiguous())
            number = number.float() * factors[i].float().repeat_interleave(kind.span // kind.block, 1)
        numbers.append(number)
    words = blocks.contiguous().view(torch.int32)[:, :, : kind.codes_bytes // 4].unflatten(2, (-1, PANEL))
    words = words.permute(0, 3, 1, 2).reshape(len(panels.packed) * PANEL, -1)[:n].contiguous()
    table = panels.table.numpy()
    name: Table | None = None
    if kind.bits == 8:
        name, zero = ("e4m3", None) if kind.table else (None, 128)
        order = torch.tensor([i for four in FOURS for i in four]).argsort()
        codes = words.view(torch.uint8).view(n, -1, INPUTS).index_select(2, order).view(n, k)
        codes = codes if kind.table else codes ^ 0x80
    elif kind.bits == 6:
        order = torch.tensor([i for four in FOURS for i in four]).argsort()
        parts = words.view(n, -1, 3)
        last = ((parts >> 6) & 0x03030303) << torch.tensor([0, 2, 4], dtype=torch.int32)
        four = torch.cat([parts & 0x3F3F3F3F, last.sum(-1, keepdim=True, dtype=torch.int32)], -1)
        codes = four.view(torch.uint8).view(n, -1, INPUTS).index_select(2, order).view(n, k)
        zero = -int(table[TABLE.FLOATS : TABLE.FLOATS + 4].view(np.float32)[0])
    else:
        values = table[TABLE.FLOATS : TABLE.FLOATS + 64].view(np.float32)
        if kind.table:
            name = next(
                x for x, of in VALUES.items() if np.array_equal(np.array(of, np.float32) - of[0], values - values[0])
            )
        zero = int((VALUES[name][0] if name is not None else 0) - values[0])
        low, high = words & 0xFFFF, (words >> 16) & 0xFFFF
        found = torch.zeros_like(words)
        for half, nibbles in enumerate((low, high)):
            spread = (nibbles | (nibbles << 8)) & 0x00FF00FF
            found |= ((spread | (spread << 4)) & 0x0F0F0F0F) << (4 * half)
        codes = found.view(torch.uint8).view(n, k // 2)
    minimum = numbers[1] if kind.minimum else None
    bits: Literal[4, 8] = 4 if kind.bits == 4 else 8
    order_of = panels.order
    both = (factors[0], factors[1] if kind.minimum else None) if factors else None
    return QuantisedWeight(
        codes, bits, name, kind.block, 1, numbers[0], zero or None, minimum, order_of, panels.dtype, both
    )
