"""How much work an automaton may take where another engine can take the constraint."""

from __future__ import annotations

from graftlm.core.errors import GrammarError


class TooMuchEffortError(GrammarError):
    """An automaton may have few enough states, but another engine has the constraint sooner."""


class Effort:
    """How many edges the subset constructions of one constraint may look at; each takes 40 ns, about.

    They are counted, and no time is, so that a constraint always has the same engine.

    is_long  whether the constraint is long enough to count its places before an automaton is built
    """

    def __init__(self, num_edges: int = 1 << 60, *, is_long: bool = False) -> None:
        self.num_edges = self.num_left = num_edges
        self.is_long = is_long

    def too_much(self) -> TooMuchEffortError:
        return TooMuchEffortError(
            f"the constraint takes more than {self.num_edges:,} steps to become an automaton; "
            "simplify it (counted repeats of overlapping parts cost most)"
        )
