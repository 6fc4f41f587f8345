"""The compressed FSM of one constraint: a byte-level DFA with counters beside its states, and forced bytes as runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import numpy as np

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata import determinize, state_sets
from graftlm.core.grammar.automata.distances import Ways, measure
from graftlm.core.grammar.automata.jit import Int32Array
from graftlm.core.grammar.automata.nfa.builder import NfaBuilder
from graftlm.core.grammar.automata.nfa.nfa import Loop, Nfa, Path
from graftlm.core.grammar.automata.state_table import LONGEST_RUN, StateTable
from graftlm.core.grammar.budget import TooManyStates, check, limited
from graftlm.core.grammar.nodes.nodes import Node
from graftlm.core.grammar.spec import Limits

if TYPE_CHECKING:
    import numpy.typing as npt

# A state and the value of every counter; counters that do not run are 0.
Place: TypeAlias = tuple[int, ...]

START = 1
UNREACHABLE = np.iinfo(np.int32).max
_SLICE, _SLICE_IN_PYTHON = 10_000_000, 100_000
"""Edges and states that are looked at between two looks at the clock: about a tenth of a second."""
_MAX_CAPACITY = 1 << 15
"""Rows of the first table; it doubles as states are found."""
_MAX_CONFLICTS = 12  # conflicts settled one by one; after that every repeat is unrolled


class EmptyLanguage(GrammarError):
    """No text matches."""


@dataclass(frozen=True, eq=False)
class Dfa(StateTable):
    """A deterministic automaton over classes of bytes, in which every state can still reach an accepting one.

    classes    uint8 [256], class of each byte
    table      int32 [num_states, num_classes]: next state, 0 for none, -a for row a of `actions`; state 1 starts
    accepting  bool [num_states]
    actions    int32 [num_actions, 9], see `graftlm.core.grammar.automata.determinize.explore`
    owners     int32 [num_states, num_registers]: the loop whose count a register holds, -1 for none
    loops      the counted repeats
    distance   int32 [num_states]: fewest bytes to an accepting state, were counters free
    """

    actions: Int32Array
    owners: Int32Array
    loops: tuple[Loop, ...]
    distance: Int32Array

    @classmethod
    def compile(cls, node: Node, limits: Limits | None = None, *, counters: bool = True) -> Dfa:
        """Build the automaton of `node`; without `counters` every repeat is unrolled.

        Raises GrammarError when nothing can match, or when it costs more than `limits`.
        """
        limits = limits or Limits()
        unrolled: set[Path] = set()
        num_conflicts = 0
        with limited(limits):
            while True:
                nfa = NfaBuilder(2 * limits.states, unrolled, counters).build(node)
                exploration = Exploration(nfa, limits)
                conflict = exploration.run()
                if conflict is None:
                    return exploration.finish()
                num_conflicts += 1
                cheapest = min((nfa.loops[k] for k in conflict), key=lambda loop: loop.cost)
                # those that cost about as much are mostly of the same kind, and would be in conflict next
                unrolled.update(loop.path for loop in nfa.loops if loop.cost <= 2 * cheapest.cost)
                counters = counters and num_conflicts < _MAX_CONFLICTS

    @property
    def moves(self) -> tuple[Int32Array, npt.NDArray[np.uint8], Int32Array]:
        """`table`, `classes` and `actions`."""
        return self.table, self.classes, self.actions

    @property
    def num_registers(self) -> int:
        return self.owners.shape[1] if self.loops else 0

    @property
    def start(self) -> Place:
        return (START,) + (0,) * self.num_registers

    @cached_property
    def num_bytes(self) -> int:
        arrays = (self.table, self.accepting, self.actions, self.owners, self.distance, self.classes)
        return sum(array.nbytes for array in arrays)

    def step(self, place: Place, byte: int) -> Place | None:
        """The place after one more byte, or None where there is none."""
        target = self._flat[place[0] * self._width + self._class_of[byte]]
        if target >= 0:
            return (target, *place[1:]) if target else None
        return self.act(place, -target)

    def act(self, place: Place, action: int) -> Place:
        """The place after a transition that changes counters."""
        fields = self._action_rows[action]
        counts = list(place[1:])
        register, zone = fields[determinize.REGISTER], determinize.MID
        if register >= 0:
            minimum, maximum = fields[determinize.MINIMUM], fields[determinize.MAXIMUM]
            value = counts[register] + 1
            if value < minimum:
                zone = determinize.LOW
            elif value >= maximum >= 0:
                zone = determinize.TOP
            elif maximum < 0:
                value = minimum  # without an upper bound, more does not differ
            counts[register] = value
        zero = fields[determinize.ZERO + zone]
        if zero:
            counts = [0 if zero >> i & 1 else count for i, count in enumerate(counts)]
        return (fields[determinize.TARGET + zone], *counts)

    def walk(self, place: Place, data: bytes) -> Place | None:
        """The place after `data`, or None when it is not allowed."""
        flat, width, class_of, state, counts = self._flat, self._width, self._class_of, place[0], place[1:]
        for byte in data:
            target = flat[state * width + class_of[byte]]
            if target > 0:
                state = target
            elif target:
                after = self.act((state, *counts), -target)
                state, counts = after[0], after[1:]
            else:
                return None
        return (state, *counts)

    def run(self, place: Place) -> tuple[bytes, Place]:
        """The bytes that must follow, and where they lead."""
        flat, width, class_of, singles = self._flat, self._width, self._class_of, self._singles
        data = bytearray()
        state, counts = place[0], place[1:]
        while (byte := singles[state]) >= 0 and len(data) < LONGEST_RUN:
            target = flat[state * width + class_of[byte]]
            if target < 0:
                after = self.act((state, *counts), -target)
                state, counts = after[0], after[1:]
            else:
                state = target
            data.append(byte)
        return bytes(data), (state, *counts)

    def accepts(self, place: Place) -> bool:
        """Whether the text may end here."""
        return bool(self.accepting[place[0]])

    def is_final(self, place: Place) -> bool:
        """Whether nothing can follow."""
        return not self.degree(place[0])

    def ending_bound(self, place: Place) -> int:
        """At least as many bytes as the shortest way to an accepting state has; without counters, exactly as many."""
        return self._distances[place[0]] + self._rounds

    @cached_property
    def _distances(self) -> memoryview[int]:
        return self.distance.data

    @cached_property
    def _rounds(self) -> int:
        """Bytes that the minimums of all counters ask for, at most: the shortest way free of counters skips them."""
        total = 0
        for counted in self.loops:
            rounds, outer = counted.minimum, counted.parent
            while outer >= 0:
                rounds *= max(1, self.loops[outer].minimum)
                outer = self.loops[outer].parent
            total += rounds * counted.cost // (counted.minimum if counted.maximum < 0 else counted.maximum)
        return total

    @cached_property
    def _action_rows(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(tuple, self.actions.tolist()))

    def ways_on(self, state: int) -> bytes:
        """One byte for each transition of a state that differs from that of the class before."""
        found = self._ways_on.get(state)
        if found is None:
            row = self.table[state]
            changes = np.ones(len(row), bool)
            changes[1:] = row[1:] != row[:-1]
            found = self._ways_on[state] = bytes([self.first_bytes[c] for c in np.nonzero(changes & (row != 0))[0]])
        return found

    @cached_property
    def _ways_on(self) -> dict[int, bytes]:
        return {}

    @cached_property
    def _owner_rows(self) -> dict[int, tuple[int, ...]]:
        return {}

    def owners_at(self, state: int) -> tuple[int, ...]:
        """The row of `owners` for a state."""
        found = self._owner_rows.get(state)
        if found is None:
            found = self._owner_rows[state] = tuple(self.owners[state].tolist())
        return found


class Exploration:
    """One subset construction, and the arrays that it fills."""

    def __init__(self, nfa: Nfa, limits: Limits) -> None:
        self._nfa = nfa
        self._limits = limits
        num_registers = max(nfa.num_registers, 1)
        capacity = min(2 * nfa.num_states + 64, _MAX_CAPACITY)
        self._table = np.empty((capacity, nfa.num_classes), np.int32)
        self._accepting = np.zeros(capacity, np.bool_)
        self._owners = np.full((capacity, num_registers), -1, np.int32)
        self._ways = np.empty((2 * len(nfa.edges) + 4 * nfa.num_classes, 2), np.int32)
        self._way_ptr = np.zeros(capacity + 1, np.int64)
        self._actions = np.zeros((256 if nfa.loops else 1, determinize.ACTION_WIDTH), np.int32)
        self._pool = np.empty(4 * capacity, np.int32)
        self._set_ptr = np.zeros(capacity + 1, np.int64)
        self._slots = np.zeros(_table_size(capacity), np.int32)
        self._control = np.array([1, 0, 1, 1, -1, -1, 0, 0, 0, 1 << 60], np.int64)

    def run(self) -> tuple[int, int] | None:
        """Explore everything; the loops that are in conflict, if two are."""
        nfa, control = self._nfa, self._control
        num_bytes = int(nfa.classes[-1]) + 1  # classes grow with their bytes
        loops = np.array(
            [(k.minimum, k.maximum, k.register, k.parent, k.body, k.exit) for k in nfa.loops], np.int32
        ).reshape(-1, 6)
        while True:
            compiled = determinize.explore.machine_code is not None
            budget = _SLICE if compiled else _SLICE_IN_PYTHON
            status = determinize.explore(
                nfa.start, nfa.final, nfa.edge_ptr, nfa.edges, nfa.epsilon_ptr, nfa.epsilons, nfa.mark, nfa.region,
                nfa.relevant, loops, self._table, self._accepting, self._owners, self._actions, self._pool,
                self._set_ptr, self._slots, self._ways, self._way_ptr, control, budget, self._limits.states, num_bytes,
            )  # fmt: skip
            if status in (determinize.DONE, determinize.CONFLICT):
                done = status == determinize.DONE
                return None if done else (int(control[determinize.CONFLICT_A]), int(control[determinize.CONFLICT_B]))
            self._check_limits()
            if status == determinize.GROW:
                self._grow()

    def _grow(self) -> None:
        check(2 * (self._table.nbytes + self._pool.nbytes + self._ways.nbytes))
        num_states = int(self._control[state_sets.NUM_STATES])
        if 2 * (num_states + 3 * self._nfa.num_classes) > len(self._table):
            self._table = _doubled(self._table)
            self._accepting = _doubled(self._accepting)
            self._owners = _doubled(self._owners)
            self._set_ptr = _doubled(self._set_ptr)
            self._way_ptr = _doubled(self._way_ptr)
        self._actions = _doubled(self._actions)
        self._pool = _doubled(self._pool)
        self._ways = _doubled(self._ways)
        self._slots = np.zeros(_table_size(len(self._table)), np.int32)
        state_sets.rehash(self._pool, self._set_ptr, num_states, self._slots)

    def _check_limits(self) -> None:
        num_states = int(self._control[state_sets.NUM_STATES])
        if num_states - 1 > self._limits.states:
            raise TooManyStates(
                f"the constraint needs more than {self._limits.states:,} states; "
                "simplify it (counted repeats of overlapping parts cost most) or raise limits.states"
            )
        used = (self._table, self._pool, self._ways, self._owners, self._actions, self._slots)
        check(sum([array.nbytes for array in used]))

    @property
    def table(self) -> Int32Array:
        """The states that were found; row 0 is of none."""
        self._check_limits()
        table = self._table[: int(self._control[state_sets.NUM_STATES])]
        table[0] = 0
        return table

    @property
    def ways(self) -> Ways:
        """The transitions of all states, as `determinize.explore` lists them."""
        return self._way_ptr, self._ways

    def finish(self) -> Dfa:
        table = self.table
        n = len(table)
        num_actions = int(self._control[determinize.NUM_ACTIONS])
        accepting, actions = self._accepting[:n], self._actions[:num_actions]
        distance = np.where(accepting, 0, UNREACHABLE).astype(np.int32)
        measure(*self.ways, actions, distance)
        if num_actions > 1:
            actions = _share_actions(table, actions)
        if distance[START] == UNREACHABLE:
            raise EmptyLanguage("nothing can satisfy the constraint: no text matches it")
        if (distance[1:] == UNREACHABLE).any():
            _drop_dead_ends(table, actions, distance)
        return Dfa(
            classes=self._nfa.classes,
            table=table.copy(),
            accepting=accepting.copy(),
            actions=np.ascontiguousarray(actions),
            owners=self._owners[:n].copy(),
            loops=self._nfa.loops,
            distance=distance,
        )


def _table_size(capacity: int) -> int:
    return 1 << (2 * capacity).bit_length()


Array = TypeVar("Array", bound="npt.NDArray[Any]")


def _doubled(array: Array) -> Array:
    larger = np.zeros((2 * len(array), *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return cast(Array, larger)


def _share_actions(table: Int32Array, actions: Int32Array) -> Int32Array:
    """Keep equal actions once, so that equal transitions have equal numbers in all states."""
    numbers: dict[bytes, int] = {}
    renumbered = np.zeros(len(actions), np.int32)
    for old in range(1, len(actions)):
        renumbered[old] = -numbers.setdefault(actions[old].tobytes(), len(numbers) + 1)
    acting = table < 0
    table[acting] = renumbered[-table[acting]]
    distinct = np.frombuffer(b"".join(numbers), np.int32).reshape(-1, actions.shape[1])
    return np.concatenate([actions[:1], distinct])


def _drop_dead_ends(table: Int32Array, actions: Int32Array, distance: Int32Array) -> None:
    """Remove transitions into states that reach no accepting one. Only nodes built by hand make such states."""
    dead = distance == UNREACHABLE
    dead[0] = False
    targets = actions[:, determinize.TARGET : determinize.ZERO]
    targets[dead[targets]] = 0
    alive = (targets != 0).any(axis=1)
    table[(table > 0) & dead[np.maximum(table, 0)]] = 0
    table[(table < 0) & ~alive[np.maximum(-table, 0)]] = 0
