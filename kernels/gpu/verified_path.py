"""A faster way to compute something, left alone from when it fails or gives something else than the plain way."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable

import torch

from graftlm.kernels.jit.precompile import is_dry

MAX_ERROR = {torch.bfloat16: 2e-2, torch.float16: 5e-3}


class FasterWay:
    """Takes the faster way while it is `enabled`, and compares its first result of each kind with the plain one.

    otherwise  what is said, with the reason, when it is given up
    tolerance  times MAX_ERROR, how far two results may be apart, relatively
    """

    def __init__(self, otherwise: str, *, enabled: bool, tolerance: float = 1.0) -> None:
        self.enabled = enabled
        self._otherwise, self._tolerance = otherwise, tolerance
        self._checked: set[Hashable] = set()

    def take(self, kind: Hashable, fast: Callable[[], torch.Tensor], plain: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `fast` gives; what `plain` gives if it fails, differs, or is the first of its `kind`.

        Both give the same, a tensor of 16 bits and any shape, and may write it to the same memory. Raises what
        `plain` raises; what `fast` raises is warned of.
        """
        try:
            found = fast()
        except Exception as error:  # a compiler that is missing, no memory, no kernel: whatever it raises
            self._give_up((str(error).splitlines() or [type(error).__name__])[0][:200])
            return plain()
        if kind in self._checked or is_dry():
            return found
        first = found.float()
        expected = plain()
        difference = float((first - expected.float()).norm() / expected.float().norm())
        if difference < self._tolerance * MAX_ERROR[expected.dtype]:
            self._checked.add(kind)
        else:
            self._give_up(f"its result differs by {difference:.1e}")
        return expected

    def _give_up(self, reason: str) -> None:
        self.enabled = False
        warnings.warn(f"{self._otherwise}: {reason}", stacklevel=2)
