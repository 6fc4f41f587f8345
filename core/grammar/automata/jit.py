"""Compile the hot loops with numba where it is installed; elsewhere the same functions run as plain Python."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

Int32Array: TypeAlias = "npt.NDArray[np.int32]"
F = TypeVar("F", bound=Callable[..., object])

COMPILED = importlib.util.find_spec("numba") is not None


def jit(function: F) -> F:
    """Compile `function` at its first call; the machine code is kept on disk for later processes where that can be."""
    if not COMPILED:
        return function
    njit = importlib.import_module("numba").njit
    try:
        return cast(F, njit(cache=True, nogil=True)(function))
    except RuntimeError:  # no folder to keep compiled code in: neither beside the source nor the user's cache
        return cast(F, njit(nogil=True)(function))
