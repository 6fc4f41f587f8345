"""RemoteUsage: the cost of calls to an endpoint, and the savings and waste of speculation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from operator import add, attrgetter

from graftlm.core.request import Usage


@dataclass(frozen=True)
class RemoteUsage(Usage):
    """The ledger of a set of calls. Ledgers add up; over all calls they equal the server's counts.

    api_calls           requests for answers, retries not included.
    retries             repeated requests.
    probe_calls         requests that detect capabilities.
    calls_saved         values taken from an earlier answer without a request.
    spec_tokens_used    completion tokens that went into values and matched texts after the first value of their call;
    spec_tokens_wasted  completion tokens that nothing used. Both are parts of `completion_tokens`.
    estimated           calls without a reported token count, which is then estimated from the text.
    cached_unknown      calls without a reported count of cached prompt tokens; 0 is counted.
    misses              reasons for unused surplus text, with their counts.
    cost                money, from the user's prices, the endpoint's report or genai-prices; None where the price of
                        any call is unknown.
    """

    api_calls: int = 0
    retries: int = 0
    probe_calls: int = 0
    calls_saved: int = 0
    spec_tokens_used: int = 0
    spec_tokens_wasted: int = 0
    estimated: int = 0
    cached_unknown: int = 0
    misses: Mapping[str, int] = field(default_factory=dict)
    cost: float | None = 0.0

    def __add__(self, other: Usage) -> RemoteUsage:
        if not isinstance(other, RemoteUsage):
            other = RemoteUsage(*(getattr(other, f.name) for f in fields(Usage)))
        misses = dict(Counter(self.misses) + Counter(other.misses)) if other.misses else self.misses
        cost = None if self.cost is None or other.cost is None else self.cost + other.cost
        counts: list[int] = list(map(add, _counts(self), _counts(other)))
        return RemoteUsage(*counts, misses=misses, cost=cost)  # type: ignore[arg-type, misc]


_counts = attrgetter(*(f.name for f in fields(RemoteUsage) if f.name not in ("misses", "cost")))
"""Getter of all numbers except the cost, in the order of the fields."""

Count = Callable[[RemoteUsage], None]
"""Receives the cost of a call as it becomes known; called on the loop's thread."""


def uncounted(usage: RemoteUsage) -> None:
    """Ignore a cost: the endpoint's total includes it."""
