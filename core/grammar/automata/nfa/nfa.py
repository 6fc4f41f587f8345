"""A byte automaton with epsilon edges and counters.

A counted repeat that would cost many states when unrolled becomes a loop with a counter: `enter` sets it to 0, `tick`
adds one each time the body has been passed, and what may follow depends on the value:

    low   below the minimum: only the body again
    mid   the body again, or what comes after the loop
    top   at the maximum: only what comes after

The deterministic automaton keeps one value per counter beside its state. Where one value is not enough (two places
inside the same loop with different counts), building it reports a conflict and that repeat is unrolled after all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.grammar.automata.jit import Int32Array

if TYPE_CHECKING:
    import numpy.typing as npt

Path = tuple[int, ...]


@dataclass(frozen=True)
class Loop:
    """A counted repeat: `path` names its place in the tree; `maximum` -1 is without end."""

    path: Path
    minimum: int
    maximum: int
    cost: int
    register: int
    parent: int
    body: int
    exit: int


@dataclass(frozen=True, eq=False)
class Nfa:
    """Byte edges over classes of bytes that no edge tells apart, in CSR form.

    classes   uint8 [256], class of each byte
    edges     int32 [num_edges, 3]: first class, last class, target; those of state q are rows edge_ptr[q] to
              edge_ptr[q + 1]. Epsilon targets likewise.
    mark      int32 [num_states]: loop + 1 where a loop is entered, -(loop + 1) where it ticks, else 0
    region    int32 [num_states]: the innermost loop a state belongs to, or -1
    relevant  int32 [num_states]: two bits for the register of each loop around a state
    """

    num_states: int
    start: int
    final: int
    classes: npt.NDArray[np.uint8]
    num_classes: int
    edge_ptr: Int32Array
    edges: Int32Array
    epsilon_ptr: Int32Array
    epsilons: Int32Array
    mark: Int32Array
    region: Int32Array
    relevant: Int32Array
    loops: tuple[Loop, ...]

    @property
    def num_registers(self) -> int:
        return 1 + max((loop.register for loop in self.loops), default=-1)
