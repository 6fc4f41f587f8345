r"""`$` as Python's `re` has it: it holds at the end of the text, and before a line break that ends it.

While a pattern is parsed such a place is a rule named "~" and its position. At the end of a pattern it is `\Z`, as
nothing may follow there. Before what may take the line break it is the lookahead `(?=\n?\Z)`.
"""

from __future__ import annotations

from graftlm.core.grammar.ast import (
    Alternation,
    CharSet,
    Concat,
    Literal,
    Node,
    Repeat,
    Rule,
    alternation,
    concat,
    literal,
    nullable,
    optional,
    repeat,
)
from graftlm.core.grammar.regex.anchors import end_anchor
from graftlm.core.grammar.regex.lookarounds import Lookahead, Lookbehind


def line_end(position: int) -> Node:
    """The placeholder of a `$` at `position` in the pattern."""
    return Rule(f"~{position}")


def in_pattern(node: Node) -> Node:
    """`node`, a whole pattern, with each `$` replaced by nodes that `re` would match alike."""
    return _LineEnds(ahead=False).replaced(node, last=True, taken=False)


def in_look(node: Node, kind: type) -> Node:
    """The same for the body of a lookaround of this kind, after which any text may follow."""
    return _LineEnds(ahead=True).replaced(node, last=kind is not Lookbehind, taken=False)


class _LineEnds:
    """Replaces placeholders: in the body of a lookahead if `ahead`, else in a whole pattern."""

    def __init__(self, *, ahead: bool) -> None:
        self._ahead = ahead

    def replaced(self, node: Node, *, last: bool, taken: bool) -> Node:
        """`node` with each `$` replaced by lookaheads and ends of the text.

        last   whether it is the last part
        taken  whether what comes after it may take a line break
        """
        match node:
            case Rule(name) if name[0] == "~":
                position = int(name[1:])
                here = concat(optional(literal("\n")), end_anchor(position))
                if self._ahead:
                    return here if last else Lookahead(here, False, position)
                return Lookahead(here, False, position) if taken else end_anchor(position)
            case Concat(items):
                parts: list[Node] = []
                for item in reversed(items):
                    parts.append(self.replaced(item, last=last, taken=taken))
                    last, taken = False, _takes_break(item) or taken and _is_empty(item)
                return concat(*reversed(parts))
            case Alternation(items):
                return alternation(*(self.replaced(item, last=last, taken=taken) for item in items))
            case Repeat(item, low, 1):
                return repeat(self.replaced(item, last=last, taken=taken), low, 1)
            case Repeat(item, low, high):
                return repeat(self.replaced(item, last=False, taken=taken or _takes_break(item)), low, high)
        return node


def _takes_break(node: Node) -> bool:
    """Whether a text of `node` may begin with a line break."""
    match node:
        case Literal(data):
            return data[:1] == b"\n"
        case CharSet(ranges):
            return any(low <= 10 <= high for low, high in ranges)
        case Concat(items):
            for item in items:
                if _takes_break(item):
                    return True
                if not _is_empty(item):
                    return False
            return False
        case Alternation(items):
            return any(map(_takes_break, items))
        case Repeat(item, _, _):
            return _takes_break(item)
    return False


def _is_empty(node: Node) -> bool:
    """Whether `node` may take no text."""
    match node:
        case Rule():
            return True
        case Concat(items):
            return all(map(_is_empty, items))
        case Alternation(items):
            return any(map(_is_empty, items))
        case Repeat(item, low, _):
            return low == 0 or _is_empty(item)
    return nullable(node)
