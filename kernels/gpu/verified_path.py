"""A faster implementation, compared with the plain one before its results are used."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable

import torch

from graftlm.kernels.jit.precompile import is_dry

MAX_ERROR = {torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Relative error between two results of 16 bits."""


class VerifiedPath:
    """Runs a faster implementation while it is `enabled`, its first result of each kind compared with the plain one.

    It is disabled for good, with one warning, when it fails or gives something else.

    fallback   what the warning says beside the reason
    tolerance  times MAX_ERROR: how far two results may be apart, relatively
    """

    def __init__(self, fallback: str, *, enabled: bool, tolerance: float = 1.0) -> None:
        self.enabled = enabled
        self._fallback, self._tolerance = fallback, tolerance
        self._checked: set[Hashable] = set()

    def verified(
        self, kind: Hashable, fast: Callable[[], torch.Tensor], plain: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Return what `fast` gives, or what `plain` gives if `fast` fails, differs, or is the first of its `kind`.

        Both give the same, a tensor of 16 bits and any shape, and may write it to the same memory. Raises what
        `plain` raises; what `fast` raises becomes a warning.
        """
        try:
            found = fast()
        except Exception as error:  # a compiler that is missing, no memory, no kernel: whatever it raises
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
