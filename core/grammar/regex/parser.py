r"""Parse regular expressions in the dialect of Python's `re`, as far as it is regular.

    a . [a-z^] [^...] \d \D \w \W \s \S \p{L} \P{L} \n \t \x41 \u0041 \U00000041 \u{41} \N{BULLET} \101 \.
    (...) (?:...) (?P<name>...) (?<name>...) (?#...) (?i) (?s:...) (?-i:...)
    (?=...) (?!...) \b ^ $ \A \Z
    | * + ? {m} {m,} {,n} {m,n} and their lazy forms

`re` has no \p{...}, \cJ, \u{...} and \x{...}; they mean what they mean in ECMA-262, Rust and PCRE.

Greediness does not change which texts match, so lazy and greedy repeats are the same. Lookaheads are supported outside
of repeats, anchors at the ends of alternatives, \b at the start and after a character. Backreferences, lookbehinds, \B,
conditionals, atomic groups and possessive repeats raise GrammarError with their position and a remedy.
"""

from __future__ import annotations

import re
from typing import NoReturn

from graftlm.core.grammar.automata import charsets
from graftlm.core.grammar.budget import check
from graftlm.core.grammar.nodes.nodes import (
    ANY_CHAR,
    EMPTY,
    NOTHING,
    Node,
    Rule,
    alternation,
    char_set,
    complement,
    concat,
    literal,
    optional,
    repeat,
)
from graftlm.core.grammar.regex import anchors
from graftlm.core.grammar.regex.classes import Characters
from graftlm.core.grammar.regex.escapes import FLAGS, Flags, is_octal, surrogate_pair

_PLACES = frozenset(("^", "$", r"\A", r"\Z", r"\z", r"\b"))
_REFUSED_GROUPS = {
    ">": "an atomic group (?>...) is not supported; write a plain group (?:...)",
    "(": "a conditional (?(...)...) is not supported; write the alternatives out",
    "<=": "a lookbehind (?<=...) is not supported; write the text before it into the pattern",
    "<!": "a lookbehind (?<!...) is not supported; write the text that may stand before it into the pattern",
}
_LETTERS = re.compile(r"[A-Za-z0-9_/:;,@%&=~\"'`!<> -]{2,}(?![*+?{])")
"""Characters that stand for themselves, but for one that a quantifier may follow."""


def parse(
    pattern: str, *, search: bool = False, portable: bool = False, wide: bool = False, max_depth: int = 64
) -> Node:
    r"""Return the texts that `pattern` matches as a whole or, with `search`, that contain a match of it.

    portable  only texts that match in Python, ECMA-262 and Rust alike: they differ in how much of Unicode \d, \w, \s
              and the dot take.
    wide      with `portable`: all texts that match in one of them.

    Raises GrammarError with the position of a part that cannot be parsed or is not supported.
    """
    node = _Parser(pattern, max_depth, search=search, portable=portable, wide=wide).parse()
    return anchors.found_anywhere(node, wide=wide) if search else anchors.anchored(node)


class _Parser(Characters):
    def __init__(self, pattern: str, max_depth: int, *, search: bool, portable: bool, wide: bool) -> None:
        super().__init__(pattern, portable, wide)
        self._search = search
        self._depth = 0
        self._num_looks = 0  # lookaheads around this position
        self._max_depth = max_depth
        self._has_comments = "(?#" in pattern
        self._names: set[str] = set()

    def parse(self) -> Node:
        if self._text.startswith("(?"):
            self._global_flags()
        node = self._alternatives()
        if self._at < len(self._text):
            self._fail("')' closes no group; escape it as \\)")
        return node

    # -- structure ---------------------------------------------------------------------------------------------

    def _alternatives(self) -> Node:
        self._depth += 1
        if self._depth > self._max_depth:
            self._fail(f"groups nest deeper than {self._max_depth}; flatten the pattern or raise limits.depth")
        branches = [self._sequence()]
        while self._take("|"):
            branches.append(self._sequence())
        self._depth -= 1
        return alternation(*branches)

    def _sequence(self) -> Node:
        items: list[Node] = []
        before = ""
        while True:
            check()
            self._skip_blanks()
            if self._at >= len(self._text) or self._text[self._at] in "|)":
                return concat(*items)
            start = self._at
            if self._text.startswith(r"\b", start):
                if before != r"\b":
                    items = self._with_boundary(items)
                self._at, before = start + 2, r"\b"
                self._refuse_quantifier(start)
                continue
            item = self._letters() or self._repeats(self._atom(), start)
            here, before = before, self._text[start : self._at]
            if here != before or before not in _PLACES:  # an anchor twice is that anchor
                items.append(item)

    def _with_boundary(self, items: list[Node]) -> list[Node]:
        return anchors.with_boundary(
            items,
            self._at,
            is_first=self._depth == 1,
            search=self._search,
            wide=self._wide if self._portable else None,
            ascii_only=self._flags.ascii_only,
        )

    def _refuse_quantifier(self, start: int) -> None:
        """Raise GrammarError if a quantifier follows, where the atom at `start` takes no text."""
        if self._quantifier() is not None:
            self._fail("there is nothing to repeat before the quantifier; escape it to match it as a character", start)

    def _letters(self) -> Node | None:
        """Several characters that stand for themselves, if that is what comes next."""
        if self._has_comments or self._flags.ignore_case or self._flags.verbose:  # a quantifier may stand behind those
            return None
        found = _LETTERS.match(self._text, self._at)
        if found is None:
            return None
        self._at = found.end()
        return literal(found[0])

    def _repeats(self, item: Node, start: int) -> Node:
        self._skip_blanks()
        bounds = self._quantifier()
        if bounds is None:
            return item
        if self._text[start] in "^$" or self._text[start : start + 2] in _PLACES:
            self._fail("there is nothing to repeat before the quantifier; escape it to match it as a character", start)
        if self._take("+"):
            self._fail("a possessive repeat is not supported; use the plain repeat", start)
        self._take("?")  # a lazy repeat matches the same texts
        self._skip_blanks()
        again = self._at
        if self._quantifier() is not None:
            self._fail("multiple repeat; put the first one in a group (?:...)", again)
        if isinstance(item, Rule):  # an anchor or a lookahead holds as often as once
            return EMPTY if bounds[0] == 0 else item
        return repeat(item, *bounds)

    def _atom(self) -> Node:
        start, c = self._at, self._text[self._at]
        self._at += 1
        if c == "(":
            return self._group(start)
        if c == "[":
            return self._class(start)
        if c == "\\":
            return self._escape(start)
        if c == ".":
            breaks = charsets.PORTABLE_BREAKS if self._portable and not self._wide else ((10, 10),)
            return ANY_CHAR if self._flags.dot_all else char_set(complement(breaks))
        if c in "^$":
            if self._flags.multiline:
                self._fail("^ and $ at line breaks (?m) are not supported; write (?:^|\\n) or (?:\\n|$)", start)
            if c == "^":
                return anchors.start_anchor(start)
            end = anchors.end_anchor(start)  # in `re`, `$` also matches before a line break that ends the text
            return concat(optional(literal("\n")), end) if self._num_looks and not self._portable else end
        if c in "*+?" or c == "{" and self._counts_at(start):
            self._fail("there is nothing to repeat before the quantifier; escape it to match it as a character", start)
        return self._character(ord(c))

    # -- groups ------------------------------------------------------------------------------------------------

    def _group(self, start: int) -> Node:
        outer = self._flags
        if self._take("?=") or self._take("?!"):
            return self._lookahead(start, refused=self._text[self._at - 1] == "!")
        if self._take("?") and (whole := self._extension(start)) is not None:
            return whole
        node = self._alternatives()
        self._close(start)
        self._flags = outer
        return node

    def _lookahead(self, start: int, *, refused: bool) -> Node:
        outer = self._flags
        self._wide = self._wide != refused  # less may follow where more is refused
        self._num_looks += 1
        body = self._alternatives()
        self._num_looks -= 1
        self._close(start)
        self._flags = outer
        found = anchors.Lookahead(body, refused, start, wide=self._portable and self._wide)
        self._wide = self._wide != refused
        return found

    def _close(self, start: int) -> None:
        if not self._take(")"):
            self._fail("the group is not closed; add ) or escape the ( as \\(", start)

    def _extension(self, start: int) -> Node | None:
        """Read the part of a group between `(?` and its body. Return the node of a group without a body."""
        for sign, reason in _REFUSED_GROUPS.items():
            if self._text.startswith(sign, self._at):
                self._fail(reason, start)
        if self._take("P="):
            self._refuse_reference(start)
        if self._take("P<") or self._take("<"):
            self._name(start)
        elif not self._take(":"):
            self._flags = self._read_flags(start)
            if self._portable and self._take(")"):
                return EMPTY  # of those who take (?i) here, all hold it to the end of the group around it
            if not self._take(":"):
                self._fail("flags for the whole pattern stand at its beginning; use (?flags:...) here", start)
        return None

    def _refuse_reference(self, start: int) -> NoReturn:
        self._fail("a backreference is not supported; write the alternatives of its group out", start)

    def _name(self, start: int) -> None:
        name = self._until(">")
        if not name.isidentifier():
            self._fail(f"the group name {name!r} is not an identifier; write (?P<name>...)", start)
        if name in self._names:
            self._fail(f"the group name {name!r} is used twice; names must differ", start)
        self._names.add(name)

    def _global_flags(self) -> None:
        """Read `(?flags)` at the beginning of the pattern, if that is what stands there."""
        end = self._at + 2
        while self._text[end : end + 1].isalpha():
            end += 1
        if end > 2 and self._text[end : end + 1] == ")":
            self._at = 2
            self._flags = self._read_flags(0)
            self._at += 1

    def _read_flags(self, start: int) -> Flags:
        flags, value = self._flags, True
        while self._text[self._at : self._at + 1] not in (":", ")", ""):
            c = self._text[self._at]
            self._at += 1
            if c == "-":
                value = False
                continue
            changed = flags.changed(c, value)
            if changed is None:
                self._fail(f"(?{c} begins no group that is known; flags are {', '.join(FLAGS)} and u", start)
            flags = changed
        return flags

    def _escape(self, start: int) -> Node:
        c = self._text[self._at] if self._at < len(self._text) else ""
        if c in ("A", "Z", "z"):
            self._at += 1
            return anchors.start_anchor(start) if c == "A" else anchors.end_anchor(start)
        if c == "B":
            self._fail(r"\B is not supported; write the characters out that may stand beside it", start)
        if c.isdigit() and c != "0" and not is_octal(self._text, self._at) or self._take("k<"):
            self._refuse_reference(start)
        pair = surrogate_pair(self._text, start) if self._portable else None
        if pair is not None:
            self._at = pair[1]
            return self._character(pair[0]) if self._wide else NOTHING
        found = self._escaped(start, in_class=False)
        return self._character(found) if isinstance(found, int) else char_set(found)

    # -- text --------------------------------------------------------------------------------------------------

    def _skip_blanks(self) -> None:
        """Skip comments (?#...) and, with the flag x, blanks and comments that end with the line."""
        while (self._has_comments or self._flags.verbose) and self._at < len(self._text):
            if self._text.startswith("(?#", self._at):
                end = self._text.find(")", self._at)
                if end < 0:
                    self._fail("the comment is not closed; add )")
                self._at = end + 1
            elif self._flags.verbose and self._text[self._at] == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            elif self._flags.verbose and self._text[self._at] in " \t\n\r\v\f":
                self._at += 1
            else:
                return
