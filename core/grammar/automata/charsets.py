r"""Character classes with the meaning they have in Python's `re`: \d \w \s and letters without case; and \p{...}."""

from __future__ import annotations

import re
import unicodedata
from functools import cache, lru_cache, reduce
from itertools import groupby

import numpy as np

from graftlm.core.grammar.nodes.nodes import MAX_CODE_POINT, Range, complement, intersect, normalise

PORTABLE_BREAKS: tuple[Range, ...] = ((10, 10), (13, 13), (0x2028, 0x2029))
"""What the dot leaves out in one dialect or another."""
LETTERS_END = 0x40000
"""From here on Unicode has no letters, digits or spaces, and plans none."""


@cache
def category(letter: str, ascii_only: bool = False) -> tuple[Range, ...]:
    r"""The code points of \d, \w or \s, and of \D, \W or \S."""
    if letter.isupper():
        return complement(category(letter.lower(), ascii_only))
    pattern = re.compile(rf"\{letter}+", re.ASCII if ascii_only else 0)
    runs = pattern.finditer(_every_character(0x80 if ascii_only else LETTERS_END))
    return normalise((run.start(), run.end() - 1) for run in runs)


@cache
def portable_category(letter: str, wide: bool = False) -> tuple[Range, ...]:
    r"""The code points that \d, \w, \s or its capital takes in every dialect or, with `wide`, in some dialect."""
    if letter.isupper():
        return complement(portable_category(letter.lower(), not wide))
    if wide:
        return normalise((*category(letter), (0xFEFF, 0xFEFF))) if letter == "s" else category(letter)
    return ((9, 13), (32, 32)) if letter == "s" else category(letter, ascii_only=True)


_CATEGORIES = {
    **{"C": "Other", "Cc": "Control", "Cf": "Format", "Cn": "Unassigned", "Co": "Private_Use", "Cs": "Surrogate"},
    **{
        "L": "Letter",
        "Ll": "Lowercase_Letter",
        "Lm": "Modifier_Letter",
        "Lo": "Other_Letter",
        "Lt": "Titlecase_Letter",
    },
    **{"Lu": "Uppercase_Letter", "LC": "Cased_Letter", "M": "Mark", "Mc": "Spacing_Mark", "Me": "Enclosing_Mark"},
    **{"Mn": "Nonspacing_Mark", "N": "Number", "Nd": "Decimal_Number", "Nl": "Letter_Number", "No": "Other_Number"},
    **{"P": "Punctuation", "Pc": "Connector_Punctuation", "Pd": "Dash_Punctuation", "Pe": "Close_Punctuation"},
    **{"Pf": "Final_Punctuation", "Pi": "Initial_Punctuation", "Po": "Other_Punctuation", "Ps": "Open_Punctuation"},
    **{"S": "Symbol", "Sc": "Currency_Symbol", "Sk": "Modifier_Symbol", "Sm": "Math_Symbol", "So": "Other_Symbol"},
    **{"Z": "Separator", "Zl": "Line_Separator", "Zp": "Paragraph_Separator", "Zs": "Space_Separator", "Any": "Any"},
}
_SHORT_NAMES = {name: short for short, long in _CATEGORIES.items() for name in (short, long)}


@lru_cache(maxsize=256)
def property_ranges(name: str, complemented: bool = False, wide: bool | None = None) -> tuple[Range, ...] | None:
    r"""The code points of \p{name} or, `complemented`, of \P{name}; None for a name that is no property.

    wide  with True also, and with False never, what only some dialects take, and code points without a character:
          another version of Unicode may put one there.
    """
    short = _SHORT_NAMES.get(name.removeprefix("General_Category=").removeprefix("gc="))
    if short == "Any":
        return () if complemented else ((0, MAX_CODE_POINT),)
    meanings = _properties(name) if short is None else (_category(short),)
    if not meanings:
        return None
    found = meanings[0]
    if wide is not None and wide != complemented:
        found = normalise(span for ranges in meanings for span in ranges)
    elif wide is not None:
        found = reduce(intersect, meanings)
    if complemented:
        found = complement(found)
    if wide is None or name == "ASCII":
        return found
    unassigned = _runs_of_categories()["Cn"]
    return normalise((*found, *unassigned)) if wide else intersect(found, complement(unassigned))


def _category(short: str) -> tuple[Range, ...]:
    """The code points of a general category."""
    runs = _runs_of_categories()
    members = ("Lu", "Ll", "Lt") if short == "LC" else tuple(one for one in runs if one.startswith(short))
    return normalise(span for one in members for span in runs[one])


@cache
def _runs_of_categories() -> dict[str, tuple[Range, ...]]:
    """For each general category the code points that this Python's Unicode puts there."""
    found: dict[str, list[Range]] = {}
    first = 0
    for one, run in groupby(map(unicodedata.category, map(chr, range(MAX_CODE_POINT + 1)))):
        last = first + sum(1 for _ in run)
        found.setdefault(one, []).append((first, last - 1))
        first = last
    return {one: tuple(spans) for one, spans in found.items()}


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


_PROPERTY_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_ ]*(?:=[A-Za-z][A-Za-z0-9_ ]*)?", re.ASCII)
_OF_ASCII = frozenset(("alnum", "blank", "cntrl", "digit", "graph", "print", "punct", "xdigit"))
"""Classes of POSIX, which some dialects keep to ASCII; ECMA-262 has none of them."""


@lru_cache(maxsize=256)
def _properties(name: str) -> tuple[tuple[Range, ...], ...]:
    r"""Return the code points of \p{name} for each dialect's meaning of it; empty if no dialect defines it.

    For properties that are no general categories: scripts, \p{Emoji}, \p{Alnum} and others of the package `regex`.
    """
    if _PROPERTY_NAME.fullmatch(name) is None:
        return ()
    found = [_code_points(name)]
    if found[0] is None:
        return ()
    if name.startswith("Is") and _code_points(name[2:]) is not None:  # a script to some, a block to others
        found.append(_code_points(f"In{name[2:]}"))
    if name.startswith(("Script_Extensions=", "scx=")):  # versions of Unicode differ in what scripts share
        found.append(_code_points(f"Script={name.partition('=')[2]}"))
        shared = [_code_points(script) for script in ("Common", "Inherited")]
        found.append(normalise(span for ranges in (found[0], *shared) for span in ranges or ()))
    kept = [ranges for ranges in found if ranges is not None]
    if kept and name.lower() in _OF_ASCII:
        kept.append(tuple((low, min(high, 0x7F)) for low, high in kept[0] if low <= 0x7F))
    return tuple(kept)


def _code_points(name: str) -> tuple[Range, ...] | None:
    """Return the code points that the package `regex` assigns to the property, None if it has no such property."""
    import regex  # few patterns ask for it

    try:
        runs = regex.compile(f"\\p{{{name}}}+").finditer(_all_code_points())
    except regex.error:
        return None
    return tuple((run.start(), run.end() - 1) for run in runs)


@cache
def _all_code_points() -> str:
    return np.arange(MAX_CODE_POINT + 1, dtype="<u4").tobytes().decode("utf-32-le", "surrogatepass")
