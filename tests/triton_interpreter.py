"""Triton's interpreter without work that changes nothing: most of the time of kernel tests without a GPU.

It looks through all of triton.language for built-in functions before each call of a device function, and checks the
integers of each sum and product for overflow only to drop the finding, as its `debug` is off.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from triton.runtime import interpreter


def quicken() -> None:
    """Find built-in functions once per module or class, and do not check what nobody is told."""
    interpreter._patch_builtin = _patch_builtin
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


@functools.cache
def _builtins_of(holder: Any) -> list[str]:
    """Asked for first while nothing of `holder` is patched."""
    return [name for name, member in interpreter.inspect.getmembers(holder) if interpreter.tl.core.is_builtin(member)]


def _patch_builtin(holder: Any, *rest: Any) -> None:
    for name in _builtins_of(holder):
        member = getattr(holder, name)
        if interpreter.tl.core.is_builtin(member):  # not patched yet
            interpreter._patch_attr(holder, name, member, *rest)
