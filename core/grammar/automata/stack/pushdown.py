"""A pushdown automaton: where a text stands in a language with rules, and its shortest ending, for other engines.

Rules are called on a stack that all ways to read the text share (a graph-structured stack, as in GLL parsing): two ways
that call one rule at one place of the text go on as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from graftlm.core.grammar.ast import Literal, Node, Rule
from graftlm.core.grammar.automata.stack.positions import END, INFINITE, Positions, Rest
from graftlm.core.grammar.automata.stack.shortest import ShortestTexts


@dataclass(eq=False, slots=True)
class Frame:
    """A rule that is being read, and where to go on after it: in `callers`, each in a frame of its own."""

    callers: list[tuple[Rest, Frame]] = field(default_factory=list)
    distance: int = -1


Leaf = tuple[Rest, Frame]
_MAX_FOLLOWED = 16


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """All ways to have read a text: what each may go on with, and whether the text may end here."""

    leaves: tuple[Leaf, ...]
    accepting: bool


class Pushdown:
    """The language of `node` and the rules that it names. Shared by threads; places are immutable."""

    def __init__(self, node: Node, rules: Mapping[str, Node], lengths: Mapping[str, int] | None = None) -> None:
        """Measure the rules that are not in `lengths`, as `ShortestTexts` does."""
        self._positions = Positions()
        self._node = node
        self._rules = rules
        self._shortest = ShortestTexts(rules, self._positions, lengths)
        self._bodies = {name: self._positions.rest(body, 0, END) for name, body in rules.items()}
        self._bottom = Frame(distance=0)
        begin = self._positions.leaves(self._positions.rest(node, 0, END))
        self.start = Place(*self._leaves([(begin, self._bottom)]))

    def renewed(self) -> Pushdown:
        """The same language, which knows none of the texts that were read. Its places are its own."""
        return Pushdown(self._node, self._rules, self._shortest.of_rule)

    def walk(self, place: Place, data: bytes) -> Place | None:
        """The place after `data`; None where it is not allowed."""
        positions, leaves, accepting = self._positions, place.leaves, place.accepting
        nodes, at, size = positions.nodes, 0, len(data)
        while at < size:
            if len(leaves) == 1:
                rest, frame = leaves[0]
                node, index = positions.part(rest)
                if isinstance(node, Literal):  # most of JSON: as many bytes at once as there are
                    num_bytes = min(len(node.data) - index, size - at)
                    if node.data[index : index + num_bytes] != data[at : at + num_bytes]:
                        return None
                    at += num_bytes
                    found = [(positions.literal(rest, num_bytes), frame)]
                else:
                    found = [(positions.step(rest, data[at]), frame)]
                    at += 1
            else:
                found = [(after, frame) for rest, frame in leaves if (after := positions.step(rest, data[at]))]
                at += 1
            if len(found) == 1:
                found = [self._followed(*found[0])]
            if len(found) == 1 and all([rest != END and type(nodes[rest]) is not Rule for rest in found[0][0]]):
                rests, frame = found[0]
                leaves, accepting = tuple([(rest, frame) for rest in rests]), False
            else:
                leaves, accepting = self._leaves(found)
            if not leaves and not accepting:
                return None
        return Place(leaves, accepting)

    def _followed(self, rests: tuple[Rest, ...], frame: Frame) -> tuple[tuple[Rest, ...], Frame]:
        """The same once rules are called and ended, as long as there is one way: most tokens of JSON are rules."""
        positions = self._positions
        for _ in range(_MAX_FOLLOWED):  # a rule that calls itself first would never end
            if len(rests) != 1:
                break
            (rest,) = rests
            node = positions.nodes[rest]
            if rest == END:
                if len(frame.callers) != 1:
                    break
                after, frame = frame.callers[0]
                rests = positions.leaves(after)
            elif isinstance(node, Rule):
                frame = Frame([(positions.nexts[rest], frame)])
                rests = positions.leaves(self._bodies[node.name])
            else:
                break
        return rests, frame

    def distance(self, place: Place) -> int:
        """Bytes of the shortest ending."""
        if place.accepting:
            return 0
        return min((self._left(leaf) for leaf in place.leaves), default=INFINITE)

    def ending(self, place: Place) -> bytes:
        """The shortest text that completes what was read."""
        if place.accepting:
            return b""
        rest, frame = min(place.leaves, key=self._left)
        data = bytearray(self._shortest.text(rest))
        while frame.callers:
            rest, frame = min(frame.callers, key=self._left)
            data += self._shortest.text(rest)
        return bytes(data)

    def _leaves(self, found: list[tuple[tuple[Rest, ...], Frame]]) -> tuple[tuple[Leaf, ...], bool]:
        """What may be read next, rules called and ended, and whether the text may end here."""
        leaves: dict[tuple[int, int], Leaf] = {}
        called: dict[str, Frame] = {}
        seen: set[tuple[int, int]] = set()
        passed: set[int] = set()  # frames of rules that derived the empty text
        accepting = False
        positions = self._positions
        while found:
            rests, frame = found.pop()
            for rest in rests:
                key = (rest, id(frame))
                if key in seen:
                    continue
                seen.add(key)
                node = positions.nodes[rest]
                if rest == END:
                    accepting = accepting or frame is self._bottom
                    passed.add(id(frame))
                    found += [(positions.leaves(after), caller) for after, caller in frame.callers]
                elif isinstance(node, Rule):
                    name, after = node.name, positions.nexts[rest]
                    if name not in called:
                        called[name] = Frame()
                        found.append((positions.leaves(self._bodies[name]), called[name]))
                    called[name].callers.append((after, frame))
                    if id(called[name]) in passed:
                        found.append((positions.leaves(after), frame))
                else:
                    leaves[key] = (rest, frame)
        return tuple(leaves.values()), accepting

    def _left(self, leaf: Leaf) -> int:
        rest, frame = leaf
        if frame.distance < 0:
            self._measure(frame)
        return min(self._shortest.left(rest) + frame.distance, INFINITE)

    def _measure(self, frame: Frame) -> None:
        work = [frame]
        met = {id(frame)}
        while work:  # by hand: texts nest deeper than Python's calls
            here = work[-1]
            unknown = [caller for _, caller in here.callers if caller.distance < 0 and id(caller) not in met]
            if unknown:
                work += unknown
                met |= set(map(id, unknown))
                continue
            work.pop()
            known = [(after, caller) for after, caller in here.callers if caller.distance >= 0]
            here.distance = min(
                (self._shortest.left(after) + caller.distance for after, caller in known), default=INFINITE
            )
