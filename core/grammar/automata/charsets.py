r"""Character classes with the meaning they have in Python's `re`: \d \w \s and letters without case."""

from __future__ import annotations

import re
from functools import cache, lru_cache

import numpy as np

from graftlm.core.grammar.ast import MAX_CODE_POINT, Range, complement, intersect, normalise

ASCII: tuple[Range, ...] = ((0, 0x7F),)
PORTABLE_BREAKS: tuple[Range, ...] = ((10, 10), (13, 13), (0x2028, 0x2029))
"""What the dot leaves out in one dialect or another."""


@cache
def category(letter: str, ascii_only: bool = False) -> tuple[Range, ...]:
    r"""The code points of \d, \w or \s, and of \D, \W or \S."""
    if letter.isupper():
        return complement(category(letter.lower(), ascii_only))
    if ascii_only:
        return intersect(category(letter), ASCII)
    runs = re.compile(rf"\{letter}+").finditer(_every_character(MAX_CODE_POINT + 1))
    return normalise((run.start(), run.end() - 1) for run in runs)


@cache
def portable_category(letter: str, wide: bool = False) -> tuple[Range, ...]:
    r"""The code points that \d, \w, \s or its capital takes in every dialect or, with `wide`, in some dialect."""
    if letter.isupper():
        return complement(portable_category(letter.lower(), not wide))
    if wide:
        return normalise((*category(letter), (0xFEFF, 0xFEFF))) if letter == "s" else category(letter)
    return ((9, 13), (32, 32)) if letter == "s" else category(letter, ascii_only=True)


@lru_cache(maxsize=2048)
def ignore_case(ranges: tuple[Range, ...], ascii_only: bool = False) -> tuple[Range, ...]:
    """`ranges` and every character that `re.IGNORECASE` takes for one of them."""
    if not ranges:
        return ranges
    # asking `re` itself keeps to its rules for the odd ones, such as the Kelvin sign and the dotless i
    members = "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges)
    flags = re.IGNORECASE | (re.ASCII if ascii_only else 0)
    found = re.compile(f"[{members}]", flags).findall(_cased_characters())
    return normalise((*ranges, *((ord(c), ord(c)) for c in found)))


def _every_character(limit: int) -> str:
    return np.arange(limit, dtype="<u4").tobytes().decode("utf-32-le", "surrogatepass")


@cache
def _cased_characters() -> str:
    """Characters that have another case; all of them are in the first two planes."""
    return "".join(c for c in _every_character(0x20000) if c.lower() != c or c.upper() != c or c.casefold() != c)
