"""Rules as a deterministic pushdown automaton."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata.dfa import UNREACHABLE, EmptyLanguage, Exploration
from graftlm.core.grammar.automata.nfa.builder import NfaBuilder
from graftlm.core.grammar.automata.products.product import product
from graftlm.core.grammar.automata.stack.call_plan import plan_calls
from graftlm.core.grammar.automata.stack.call_sites import place_calls
from graftlm.core.grammar.automata.stack.dpda import Dpda
from graftlm.core.grammar.automata.stack.rule_distances import measure_rules
from graftlm.core.grammar.budget import limited
from graftlm.core.grammar.nodes.nodes import Node
from graftlm.core.grammar.spec import Limits

_MAX_ROUNDS = 6
_MAX_SHORTEST = 1 << 20


class NotDeterministicError(GrammarError):
    """One byte does not tell which of `rules` to call, or whether one has ended."""

    rules: frozenset[str] = frozenset()

    @classmethod
    def of(cls, rules: Iterable[str]) -> NotDeterministicError:
        error = cls("one byte does not tell which of the constraint's rules goes on; let another engine keep it")
        error.rules = frozenset(rules)
        return error


def build_dpda(node: Node, rules: Mapping[str, Node], limits: Limits | None = None) -> Dpda:
    """The automaton of `node` and the rules that it names.

    Where two rules that begin alike may be called at one place, or a rule may go on with a byte that may follow it,
    those rules are written out where they are named, one level deep.

    Raises NotDeterministicError where that does not help; GrammarError when nothing can match, or when it costs more
    than `limits`.
    """
    limits = limits or Limits()
    with limited(limits):
        plan = plan_calls(node, rules, limits)
        bodies = {name: rules[name] for name in plan.order}
        expanded: frozenset[str] = frozenset()
        for _ in range(_MAX_ROUNDS):
            try:
                return _Builder(node, bodies, plan.called, expanded, limits).build()
            except NotDeterministicError as error:
                if error.rules & expanded:  # a rule is never written out inside itself
                    raise
                expanded |= error.rules
    raise NotDeterministicError.of(expanded)


class _Builder:
    """One attempt: all rules in one subset construction, in which calls are symbols beyond the bytes."""

    def __init__(
        self,
        node: Node,
        bodies: Mapping[str, Node],
        called: frozenset[str],
        expanded: frozenset[str],
        limits: Limits,
    ) -> None:
        self._limits = limits
        self._names = [name for name in bodies if name in called]
        symbols = {name: 256 + i for i, name in enumerate(self._names)}
        written = {name: body for name, body in bodies.items() if name not in called or name in expanded}
        end = 256 + len(self._names)
        builder = NfaBuilder(2 * limits.states, counters=False, symbols=symbols, bodies=written, product=product)
        self._nfa = builder.build_rules(node, [(name, bodies[name]) for name in self._names], end)

    def build(self) -> Dpda:
        exploration = Exploration(self._nfa, self._limits)
        exploration.run()
        table = exploration.table
        num_rules = len(self._names)
        num_classes = self._nfa.num_classes - num_rules - 1
        accepting, entries = np.empty(len(table), np.bool_), np.empty(num_rules + 1, np.int32)
        distance, rule = np.empty(len(table), np.int32), np.empty(len(table), np.int32)
        num_dead = measure_rules(*exploration.ways, num_classes, entries, accepting, distance, rule)
        if distance[entries[0]] == UNREACHABLE:
            raise EmptyLanguage("nothing can satisfy the constraint: no text of less than 2 GiB matches it")
        if distance[entries[0]] > _MAX_SHORTEST:
            raise GrammarError(
                f"the shortest text has {distance[entries[0]]:,} bytes, the limit is {_MAX_SHORTEST:,}; "
                "lower minItems, or let fewer definitions name others several times"
            )
        if num_dead:  # within a rule: what follows its end belongs to none
            dead = (distance == UNREACHABLE) & (rule >= 0)
            table[dead[table]] = 0
            table[:, num_classes:-1][:, dead[entries[1:]]] = 0
        faults = np.zeros(num_rules, np.bool_)
        moves, calls = place_calls(table, accepting, entries, rule, faults)
        if faults.any():
            raise NotDeterministicError.of([self._names[i] for i in np.flatnonzero(faults).tolist()])
        return Dpda(self._nfa.classes, moves, accepting, calls, distance, int(entries[0]))
