"""A faster implementation that is compared with the plain one before its results are used."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable

import torch

from graftlm.kernels.jit.precompile import is_dry

MAX_ERROR = {torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Relative error between two results of 16 bits."""


class VerifiedPath:
    """A faster implementation, used while `enabled`; its first result of each kind is compared with the plain one.

    A failure or a different result disables it permanently, with one warning.

    fallback   text of the warning after the reason
    tolerance  times MAX_ERROR: the largest relative error between two results
    """

    def __init__(self, fallback: str, *, enabled: bool, tolerance: float = 1.0) -> None:
        self.enabled = enabled
        self._fallback, self._tolerance = fallback, tolerance
        self._checked: set[Hashable] = set()

    def verified(
        self, kind: Hashable, fast: Callable[[], torch.Tensor], plain: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Return the result of `fast`, or of `plain` if `fast` fails, differs, or is the first of its `kind`.

        Both return equal tensors of 16 bits and any shape, and may write to one output. Exceptions of `plain`
        propagate; an exception of `fast` becomes a warning.
        """
        try:
            found = fast()
        except Exception as error:  # a missing compiler, no memory, no kernel: any failure
            self.disable(": ".join([type(error).__name__, *str(error).splitlines()[:1]])[:200])
            return plain()
        if kind in self._checked or is_dry():
            return found
        first = found.float()
        expected = plain()
        difference = float((first - expected.float()).norm() / expected.float().norm())
        if difference < self._tolerance * MAX_ERROR[expected.dtype]:
            self._checked.add(kind)
        else:
            self.disable(f"its result differs by {difference:.1e}")
        return expected

    def disable(self, reason: str) -> None:
        self.enabled = False
        warnings.warn(f"{self._fallback}: {reason}", stacklevel=2)
