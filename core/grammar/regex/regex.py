r"""Regular expressions in the dialect of Python's `re`, as far as it is regular.

    a . [a-z^] [^...] \d \D \w \W \s \S \p{L} \P{L} \n \t \x41 \u0041 \U00000041 \u{41} \N{BULLET} \101 \.
    (...) (?:...) (?P<name>...) (?<name>...) (?#...) (?i) (?s:...) (?-i:...) \1 (?P=name) \k<name>
    (?=...) (?!...) (?<=...) (?<!...) \b \B ^ $ \A \Z
    | * + ? {m} {m,} {,n} {m,n} and their lazy forms

`re` has no \p{...}, \cJ, \u{...} and \x{...}; they mean what they mean in ECMA-262, Rust and PCRE.

Which text matches does not depend on greediness, so lazy and greedy repeats are the same. A lookahead intersects what
follows to the end, or is taken from it; threads.py keeps lookbehinds, lookaheads in repeats, and lookarounds inside
others. A backreference to a group of few texts is an alternative for each. Others, conditionals, atomic groups and
possessive repeats of more than one character are refused, with their position.
"""

from __future__ import annotations

import re

from graftlm.core.grammar.ast import (
    ANY_CHAR,
    EMPTY,
    NOTHING,
    CharSet,
    Literal,
    Node,
    Range,
    alternation,
    char_set,
    complement,
    concat,
    literal,
    normalise,
    repeat,
)
from graftlm.core.grammar.automata import charsets
from graftlm.core.grammar.budget import check
from graftlm.core.grammar.regex import anchors, backreferences, line_ends, lookarounds, threads
from graftlm.core.grammar.regex.characters import Characters
from graftlm.core.grammar.regex.escapes import is_octal, surrogate_pair
from graftlm.core.grammar.regex.flags import NAMES, Flags

_PLACES = frozenset(("^", "$", r"\A", r"\Z", r"\z", r"\b", r"\B"))
_REFUSED_GROUPS = {">": "atomic group", "(": "conditional"}
_REFERENCE = re.compile(r"\\[1-9]|\\k<|\(\?P=")
_LETTERS = re.compile(r"[A-Za-z0-9_/:;,@%&=~\"'`!<> -]{2,}(?![*+?{])")
"""Characters that stand for themselves, but for one that a quantifier may follow."""


def parse(
    pattern: str, *, search: bool = False, portable: bool = False, wide: bool = False, max_depth: int = 64
) -> Node:
    r"""The texts that `pattern` matches as a whole or, with `search`, that contain a match of it.

    portable  only texts that match in Python, ECMA-262 and Rust alike: they differ in how much of Unicode \d, \w, \s
              and the dot take.
    wide      with `portable`: all texts that match in one of them.

    Raises GrammarError with the position of what cannot be parsed or kept.
    """
    try:
        node = _Parser(pattern, max_depth, portable, wide).parse()
    except backreferences.ManyTextsError:
        among = _Parser(pattern, max_depth, portable, wide).characters(search=search)
        if among is None:
            raise
        node = _Parser(pattern, max_depth, portable, wide, among).parse()
    useless = None
    ahead = lookarounds.without_lookbehinds(node)
    if not lookarounds.looks_behind(ahead):
        try:
            return anchors.found_anywhere(ahead, wide=wide) if search else anchors.anchored(ahead)
        except anchors.InThreadsError as error:
            useless = error.useless
    found = threads.language(node, search=search, wide=wide)
    if useless is not None and not found.accepting:
        raise useless
    return found


class _Parser(Characters):
    def __init__(
        self,
        pattern: str,
        max_depth: int,
        portable: bool,
        wide: bool = False,
        among: tuple[Range, ...] | None = None,
    ) -> None:
        super().__init__(pattern, portable, wide)
        self._among = among  # what all characters of a text are, where that is known
        self._skims = False  # past lookarounds
        self._depth = 0
        self._max_depth = max_depth
        self._refers = _REFERENCE.search(pattern) is not None
        self._has_comments = "(?#" in pattern
        self._has_line_ends = False  # `$` of Python
        self._num_groups = 0
        self._closed: set[int] = set()  # groups that a backreference may name
        self._names: dict[str, int] = {}

    def parse(self) -> Node:
        if self._text.startswith("(?"):
            self._global_flags()
        node = self._alternatives()
        if self._at < len(self._text):
            self._fail("')' closes no group; escape it as \\)")
        node = self._resolved(node)
        return line_ends.in_pattern(node) if self._has_line_ends else node

    def characters(self, *, search: bool) -> tuple[Range, ...] | None:
        """What the characters of a text are that the pattern matches from end to end; None where it need not."""
        self._skims = True
        if self._text.startswith("(?"):
            self._global_flags()
        node = self._alternatives()
        if search and not anchors.is_bound(node):
            return None
        return normalise((*backreferences.characters_of(node), (10, 10)))  # `$` may leave a line break

    def _resolved(self, node: Node) -> Node:
        return backreferences.resolved(node, self._among) if self._refers else node

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
                # a lookahead and an anchor at the same place may change places
                return concat(*anchors.sorted_anchors(items))
            start = self._at
            item = self._letters() or self._repeats(self._atom(), start)
            here, before = before, self._text[start : self._at]
            if here != before or before not in _PLACES:  # the same place twice asks for nothing new
                items.append(item)

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
            if isinstance(item, CharSet) or isinstance(item, Literal) and len(item.data.decode()) == 1:
                return lookarounds.possessive(item, self._unlike(start), *bounds, start)
            self._fail("a possessive repeat is kept of one character or class; use the plain repeat", start)
        self._take("?")  # a lazy repeat matches the same texts
        self._skip_blanks()
        again = self._at
        if self._quantifier() is not None:
            self._fail("multiple repeat; put the first one in a group (?:...)", again)
        if anchors.is_place(item):  # a place holds as often as one likes
            return EMPTY if bounds[0] == 0 else item
        return repeat(item, *bounds)

    def _unlike(self, start: int) -> Node:
        """The atom at `start` once more, as what must not stand there: where dialects differ, what some take."""
        here, self._at, self._wide = self._at, start, not self._wide
        found = self._atom()
        self._at, self._wide = here, not self._wide
        return found

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
                breaks = charsets.PORTABLE_BREAKS if self._portable and self._wide else ((10, 10),)
                return lookarounds.line_edge(start, is_start=c == "^", breaks=breaks)
            if c == "^" or self._portable:
                return anchors.start_anchor(start) if c == "^" else anchors.end_anchor(start)
            self._has_line_ends = True
            return line_ends.line_end(start)
        if c in "*+?" or c == "{" and self._counts_at(start):
            self._fail("there is nothing to repeat before the quantifier; escape it to match it as a character", start)
        return self._character(ord(c))

    # -- groups ------------------------------------------------------------------------------------------------

    def _group(self, start: int) -> Node:
        outer = self._flags
        look = next((kind for sign, kind in lookarounds.KINDS.items() if self._take(sign)), None)
        if look is not None:
            self._wide = self._wide != look[1]  # less may follow where more is refused
        number = self._num_groups + 1
        if look is None and not self._take("?"):
            self._num_groups += 1
        elif look is None and (whole := self._extension(start)) is not None:
            return whole
        is_counted = look is None and self._num_groups == number
        node = self._alternatives()
        if not self._take(")"):
            self._fail("the group is not closed; add ) or escape the ( as \\(", start)
        self._flags = outer
        if is_counted and self._refers:
            self._closed.add(number)
            return backreferences.Group(number, node)
        if look is None:
            return node
        if self._skims:
            self._wide = self._wide != look[1]
            return EMPTY
        node = lookarounds.without_lookbehinds(self._resolved(node))
        node = line_ends.in_look(node, look[0]) if self._has_line_ends else node
        found = look[0](node, look[1], start, wide=self._portable and self._wide)
        self._wide = self._wide != look[1]
        return found

    def _extension(self, start: int) -> Node | None:
        """Read what stands between `(?` and the body of a group; what all of it is if there is no body."""
        for sign, name in _REFUSED_GROUPS.items():
            if self._text.startswith(sign, self._at):
                self._fail(f"{name} (?{sign}...) is not regular; write the alternatives out", start)
        if self._take("P="):
            return self._reference(self._names.get(self._until(")"), 0), start)
        if self._take("P<") or self._take("<"):
            self._name(start)
        elif not self._take(":"):
            self._flags = self._read_flags(start)
            if self._portable and self._take(")"):
                return EMPTY  # of those who take (?i) here, all hold it to the end of the group around it
            if not self._take(":"):
                self._fail("flags for the whole pattern stand at its beginning; use (?flags:...) here", start)
        return None

    def _reference(self, number: int, start: int) -> Node:
        if number not in self._closed:
            self._fail("the backreference names no group that is closed before it; check its number or name", start)
        unset = EMPTY if self._portable and self._wide else NOTHING  # ECMA-262 takes no text then
        return backreferences.Backreference(number, start, self._flags, unset=unset)

    def _name(self, start: int) -> None:
        name = self._until(">")
        if not name.isidentifier():
            self._fail(f"the group name {name!r} is not an identifier; write (?P<name>...)", start)
        if name in self._names:
            self._fail(f"the group name {name!r} is used twice; names must differ", start)
        self._num_groups += 1
        self._names[name] = self._num_groups

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
                self._fail(f"(?{c} begins no group that is known; flags are {', '.join(NAMES)} and u", start)
            flags = changed
        return flags

    def _escape(self, start: int) -> Node:
        c = self._text[self._at] if self._at < len(self._text) else ""
        if c in ("A", "Z", "z"):
            self._at += 1
            return anchors.start_anchor(start) if c == "A" else anchors.end_anchor(start)
        if c in ("b", "B"):
            self._at += 1
            wide = self._wide if self._portable else None
            return lookarounds.boundary(start, is_one=c == "b", wide=wide, ascii_only=self._flags.ascii_only)
        if c.isdigit() and c != "0" and not is_octal(self._text, self._at):
            self._at += 1 + self._text[self._at + 1 : self._at + 2].isdecimal()
            return self._reference(int(self._text[start + 1 : self._at]), start)
        if self._take("k<"):
            return self._reference(self._names.get(self._until(">"), 0), start)
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
