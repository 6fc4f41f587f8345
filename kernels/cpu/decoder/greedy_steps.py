"""GreedySteps: decode steps of which each takes the likeliest tokens of the one before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class GreedySteps(NamedTuple):
    """What several steps need to know that choose their tokens themselves.

    ends       for each row the tokens that end it; the step that chooses one is the last
    interrupt  int64 [1], not 0 if the step under way is to be the last; another thread may set it
    """

    num_steps: int
    ends: Sequence[Sequence[int]]
    interrupt: NDArray[np.int64]
