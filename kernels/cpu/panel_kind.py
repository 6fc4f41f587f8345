"""PanelKind: the memory format of quantised panels, and the arithmetic of the loop that multiplies with them.

A panel holds 64 outputs in blocks of inputs; the numbers of a block follow its codes, so that a panel is one stream:

    codes     per 8 inputs: 4 vectors of 64 bytes with 4 bits a code, or 2 x 4 vectors with 8 bits; per 16 inputs:
              3 x 4 vectors with 6 bits; a vector has 16 outputs, a word of 32 bits each; the codes of a word belong to
              the inputs in `POSITIONS`
    scales    64 numbers
    minima    64 numbers, if the kind has them

Numbers in int8 are whole multiples of float16 factors, 64 of the scales and 64 of the minima, which lie before the
blocks of each 256 inputs.

Every arithmetic reads this format. This module imports no torch: processes compile loops without it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from graftlm.kernels.cpu import PANEL

INPUTS = 8
"""Inputs whose codes lie together, with 4 and 8 bits."""

POSITIONS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Inputs of the eight nibbles of a word, from the lowest: a 16-bit lane holds even inputs, the other odd ones, which
bfloat16 dots multiply in pairs. The low nibbles of the four bytes are those of the inputs 0, 4, 1, 5, the high ones of
2, 6, 3, 7; with 8 bits, these are the bytes of a first and a second word.

With 6 bits, 16 inputs have four words of four bytes. The lowest bits of three words are the codes of the first three;
their upper bits are those of the fourth, two in each word, the lowest first."""

FACTOR_INPUTS = 256
"""Inputs of a factor of scales in int8, as in the K types of GGUF."""

FOURS = ((0, 4, 1, 5), (2, 6, 3, 7))
"""Inputs of the four bytes that a dot product of int8 multiplies at once."""


class Arithmetic(IntEnum):
    """The operands of a loop; its number is part of the names of loops on disk.

    FLOATS  codes become float32 and multiply float32 rows: every processor
    DOTS    codes become bfloat16 and multiply bfloat16 rows: AVX-512 BF16
    INT8    codes multiply rows in int8 with a scale for every 32 inputs: AVX-512 VNNI, or AVX2 with 4 bits
    """

    FLOATS = 0
    DOTS = 1
    INT8 = 2

    __repr__ = int.__repr__  # an argument in the programs that compile loops

    def features(self, bits: int) -> tuple[frozenset[str], ...]:
        """Return the alternatives of processor features, by LLVM's names, that loops with codes of `bits` need."""
        if self is Arithmetic.FLOATS:
            return (frozenset(),)
        if self is Arithmetic.DOTS:
            return (frozenset(("avx512f", "avx512bw", "avx512bf16")),)
        vnni = frozenset(("avx512f", "avx512bw", "avx512vnni"))
        return (vnni, frozenset(("avx2",))) if bits == 4 else (vnni,)


class Numbers(IntEnum):
    """The dtype of scales and minima; numbers in INT8 have factors."""

    FLOAT32 = 0
    FLOAT16 = 1
    INT8 = 2

    __repr__ = int.__repr__

    @property
    def size(self) -> int:
        """Return the bytes of a number."""
        return {Numbers.FLOAT32: 4, Numbers.FLOAT16: 2, Numbers.INT8: 1}[self]


class PanelKind(NamedTuple):
    """A format of panels and the table of its codes.

    bits     of a code: 4, 6 or 8
    block    inputs of a scale: 32 or 16. Larger groups repeat their scale
    numbers  dtype of scales and minima
    minimum  whether a minimum follows each scale
    table    whether codes are indices of a table: 4 bits of e2m1, nf4, iq4_nl, or 8 bits of e4m3. Other codes are whole
             numbers: unsigned with 4 and 6 bits, signed with 8
    """

    bits: int
    block: int
    numbers: Numbers
    minimum: bool
    table: bool

    @property
    def line(self) -> int:
        """Return the inputs whose codes lie together."""
        return 2 * INPUTS if self.bits == 6 else INPUTS

    @property
    def line_bytes(self) -> int:
        """Return the bytes of the codes of a line."""
        return PANEL * self.bits * self.line // 8

    @property
    def codes_bytes(self) -> int:
        """Return the bytes of the codes of a block."""
        return self.block // self.line * self.line_bytes

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block."""
        return self.codes_bytes + (2 if self.minimum else 1) * PANEL * self.numbers.size

    @property
    def span(self) -> int:
        """Return the inputs of a factor, or those of a block in kinds without factors."""
        return FACTOR_INPUTS if self.numbers is Numbers.INT8 else self.block

    @property
    def factor_bytes(self) -> int:
        """Return the bytes of the factors before a span's blocks."""
        return (2 if self.minimum else 1) * PANEL * 2 if self.numbers is Numbers.INT8 else 0

    @property
    def span_bytes(self) -> int:
        """Return the bytes of a span: its factors and blocks."""
        return self.factor_bytes + self.span // self.block * self.block_bytes

    def panel_bytes(self, depth: int) -> int:
        """Return the bytes of a panel of `depth` inputs, a multiple of the span."""
        return depth // self.span * self.span_bytes

    @property
    def arguments(self) -> tuple[int, ...]:
        """Return the kind as compile-time arguments of a loop."""
        return tuple(int(x) for x in self)

    @classmethod
    def of(cls, bits: int, block: int, numbers: int, minimum: int, table: int) -> PanelKind:
        """Return the kind with these `arguments`."""
        return cls(bits, block, Numbers(numbers), bool(minimum), bool(table))


COMMON = (
    PanelKind(4, 32, Numbers.FLOAT16, minimum=False, table=False),  # Q4_0
    PanelKind(4, 32, Numbers.FLOAT16, minimum=True, table=False),  # Q4_1
    PanelKind(4, 32, Numbers.INT8, minimum=True, table=False),  # Q4_K
    PanelKind(4, 32, Numbers.FLOAT32, minimum=True, table=False),  # AWQ, GPTQ
    PanelKind(4, 32, Numbers.FLOAT32, minimum=False, table=False),  # W4A16
    PanelKind(4, 32, Numbers.FLOAT16, minimum=False, table=True),  # IQ4_NL
    PanelKind(4, 32, Numbers.FLOAT32, minimum=False, table=True),  # MXFP4, nf4
    PanelKind(6, 32, Numbers.FLOAT16, minimum=False, table=False),  # Q5_0
    PanelKind(6, 32, Numbers.FLOAT16, minimum=True, table=False),  # Q5_1
    PanelKind(6, 32, Numbers.INT8, minimum=True, table=False),  # Q5_K
    PanelKind(6, 16, Numbers.INT8, minimum=False, table=False),  # Q6_K
    PanelKind(8, 32, Numbers.FLOAT16, minimum=False, table=False),  # Q8_0
    PanelKind(8, 32, Numbers.FLOAT32, minimum=False, table=False),  # W8A8, torchao
    PanelKind(8, 32, Numbers.FLOAT32, minimum=False, table=True),  # FP8
)
"""The kinds of common files, whose loops published packages have."""


class Table(NamedTuple):
    """Offsets in bytes of the table of a weight, which its loops read at run time.

    FLOATS   16 float32, the values of 4-bit codes; the first ones of 6-bit codes
    HALVES   32 bfloat16, the same twice; 64 bfloat16, the values of 6-bit codes, which have no `BYTES`
    BYTES    64 uint8, four times the values of 4-bit codes that are whole numbers, plus `OFFSET`
    OFFSET   int32, the zero point of the codes in INT8 arithmetic
    FACTOR   float32, of scales in INT8 arithmetic
    SIZE     of the table
    """

    FLOATS: int = 0
    HALVES: int = 64
    BYTES: int = 128
    OFFSET: int = 192
    FACTOR: int = 196
    SIZE: int = 256


TABLE = Table()
