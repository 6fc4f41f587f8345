"""GreedySteps: the parameters of several greedy decode steps in one compiled call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class GreedySteps(NamedTuple):
    """The end conditions of several greedy steps in one call.

    ends       the tokens that end each row; the step that chooses one is the last
    interrupt  int64 [1]: any value but 0 makes the current step the last; another thread may set it
    """

    num_steps: int
    ends: Sequence[Sequence[int]]
    interrupt: NDArray[np.int64]
