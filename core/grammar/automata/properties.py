r"""Unicode properties that are no general categories: scripts, \p{Emoji}, \p{Alnum} and what else `regex` knows."""

from __future__ import annotations

import re
from functools import cache, lru_cache

import numpy as np

from graftlm.core.grammar.nodes.nodes import MAX_CODE_POINT, Range, normalise

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_ ]*(?:=[A-Za-z][A-Za-z0-9_ ]*)?", re.ASCII)
_OF_ASCII = frozenset(("alnum", "blank", "cntrl", "digit", "graph", "print", "punct", "xdigit"))
"""Classes of POSIX, which some dialects keep to ASCII; ECMA-262 has none of them."""


@lru_cache(maxsize=256)
def readings(name: str) -> tuple[tuple[Range, ...], ...]:
    r"""The code points of \p{name}, for each meaning that it has in some dialect; none for a name that has none."""
    if _NAME.fullmatch(name) is None:
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
    """What the package `regex` takes for the property; None where it knows none."""
    import regex  # few patterns ask for it

    try:
        runs = regex.compile(f"\\p{{{name}}}+").finditer(_every_character())
    except regex.error:
        return None
    return tuple((run.start(), run.end() - 1) for run in runs)


@cache
def _every_character() -> str:
    return np.arange(MAX_CODE_POINT + 1, dtype="<u4").tobytes().decode("utf-32-le", "surrogatepass")
