r"""Read the parts of a pattern that match one character: literals, escapes, \p{...} and classes."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from graftlm.core.grammar.automata import charsets
from graftlm.core.grammar.nodes.nodes import (
    ANY_CHAR,
    MAX_CODE_POINT,
    NOTHING,
    Node,
    Range,
    char_set,
    complement,
    literal,
    normalise,
)
from graftlm.core.grammar.regex.escapes import (
    CONTROLS,
    HEX_DIGITS,
    Flags,
    Scanner,
    is_octal,
    octal_digits,
    ranges_of,
    surrogate_pair,
    surrogate_range,
)

_PLAIN_CLASS = re.compile(r"((?:[A-Za-z0-9_](?:-[A-Za-z0-9_])?)+)\]")
_PLAIN_MEMBER = re.compile(r".(?:-.)?")
_BRACED = re.compile(r"\\[ux]\{([0-9a-fA-F]{1,8})\}")


class Characters(Scanner):
    """Reads characters and classes, with the flags that hold where they stand.

    portable, wide  as in `parser.parse`
    """

    def __init__(self, text: str, portable: bool, wide: bool) -> None:
        super().__init__(text)
        self._portable = portable
        self._wide = wide
        self._negated = False  # inside [^...]
        self._flags = Flags()

    def _character(self, code_point: int) -> Node:
        if self._flags.ignore_case:
            return char_set(charsets.ignore_case(((code_point, code_point),), self._flags.ascii_only))
        if 0xD800 <= code_point <= 0xDFFF:
            return NOTHING  # no UTF-8 text has a surrogate
        return literal(chr(code_point))

    def _escaped(self, start: int, in_class: bool) -> int | tuple[Range, ...]:
        """What follows a backslash: a code point, or the ranges of a category."""
        if self._at >= len(self._text):
            self._fail("the pattern ends in a backslash; escape it as \\\\", start)
        c = self._text[self._at]
        self._at += 1
        if c in "dDwWsS" and self._portable:
            return charsets.portable_category(c, wide=self._negated != self._wide)
        if c in "dDwWsS":
            return charsets.category(c, self._flags.ascii_only)
        if c == "c" and (control := self._text[self._at : self._at + 1]).isascii() and control.isalpha():
            self._at += 1
            return ord(control) & 31
        braced = _BRACED.match(self._text, start)
        if braced is not None:
            self._at = braced.end()
            return self._code_point(braced[1], start)
        if c in HEX_DIGITS:
            digits = self._text[self._at : self._at + HEX_DIGITS[c]]
            if len(digits) < HEX_DIGITS[c] or not all(d in "0123456789abcdefABCDEF" for d in digits):
                self._fail(f"\\{c} needs {HEX_DIGITS[c]} hexadecimal digits", start)
            self._at += len(digits)
            return self._code_point(digits, start)
        if c == "N":
            end = self._text.find("}", self._at)
            name = self._text[self._at + 1 : end] if self._text[self._at : self._at + 1] == "{" and end > 0 else ""
            try:
                found = ord(unicodedata.lookup(name))
            except KeyError:
                self._fail(f"there is no character named {name!r}; write \\N{{NAME}} or the character", start)
            self._at = end + 1
            return found
        if c == "0" or c.isdigit() and is_octal(self._text, self._at - 1):
            digits = octal_digits(self._text, self._at - 1)
            self._at += len(digits) - 1
            return int(digits, 8)
        if c in CONTROLS and (c != "b" or in_class):
            return ord(CONTROLS[c])
        if c in "pP":
            return self._property(c, start)
        if c.isascii() and c.isalnum():
            self._fail(f"\\{c} is no known escape; write {c} alone to match the letter", start)
        return ord(c)

    def _code_point(self, digits: str, start: int) -> int:
        if int(digits, 16) > MAX_CODE_POINT:
            self._fail(f"{self._text[start : self._at]} is beyond the last code point, 10FFFF", start)
        return int(digits, 16)

    def _property(self, letter: str, start: int) -> tuple[Range, ...]:
        """What follows `\\p` or `\\P`: one letter, or a name in braces."""
        name, end = self._text[self._at : self._at + 1], self._at + 1
        if name == "{":
            end = self._text.find("}", self._at) + 1
            name = self._text[self._at + 1 : end - 1] if end else ""
        wide = self._negated != self._wide if self._portable else None
        found = charsets.property_ranges(name, complemented=letter == "P", wide=wide)
        if found is None:
            self._fail(
                f"\\{letter} takes a Unicode property, as in \\p{{L}}, \\p{{Letter}} or \\p{{Script=Greek}}, "
                f"not {name!r}; write other properties as ranges",
                start,
            )
        self._at = end
        return found

    def _class(self, start: int) -> Node:
        plain = None if self._flags.ignore_case else _PLAIN_CLASS.match(self._text, self._at)
        if plain is not None and (node := _plain_class(plain[1])) is not None:
            self._at = plain.end()
            return node
        negated = self._negated = self._take("^")
        ranges: list[Range] = []
        categories: list[Range] = []  # case makes no difference to these
        letters: set[str] = set()
        first = self._at
        while True:
            at = self._at
            if at >= len(self._text):
                if self._portable and self._text.startswith("]", first):  # ECMA-262 closes it there, and no one else
                    self._at, self._negated = first + 1, False
                    return ANY_CHAR if negated else NOTHING
                self._fail("the class is not closed; add ] or escape the [ as \\[", start)
            if self._text[at] == "]" and at > first:
                self._at += 1
                self._negated = False
                break
            pairs = surrogate_range(self._text, at) if self._portable else None
            if pairs is not None:
                ranges.append(pairs[0])
                self._at = pairs[1]
                continue
            pair = surrogate_pair(self._text, at) if self._portable else None
            if pair is not None and not self._text.startswith("-", pair[1]):
                ranges += [(pair[0], pair[0])] if self._negated != self._wide else []
                self._at = pair[1]
                continue
            low = self._class_member()
            if self._text.startswith("-", self._at) and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._class_member()
                if isinstance(low, int) and isinstance(high, int):
                    if high < low:
                        self._fail(f"the range {self._text[at : self._at]} runs backwards; swap its ends", at)
                    ranges.append((low, high))
                elif not self._portable or self._text.startswith("-", self._at):
                    self._fail("a range needs a character on both sides; put the - last in the class", at)
                else:  # those who take such a class take the - as itself
                    ranges += [*ranges_of(low), *ranges_of(ord("-")), *ranges_of(high)]
            elif self._text[at] == "\\" and self._text[at + 1] in "dDwWsS":
                categories += ranges_of(low)
                letter = self._text[at + 1]
                if letter.swapcase() in letters:  # all there is, also where dialects draw the line elsewhere
                    categories.append((0, MAX_CODE_POINT))
                letters.add(letter)
            else:
                ranges += ranges_of(low)
        if self._flags.ignore_case:
            ranges = list(charsets.ignore_case(normalise(ranges), self._flags.ascii_only))
        ranges += categories
        return char_set(complement(ranges) if negated else ranges)

    def _class_member(self) -> int | tuple[Range, ...]:
        at = self._at
        self._at += 1
        if self._text[at] == "\\":
            return self._escaped(at, in_class=True)
        return ord(self._text[at])


@lru_cache(maxsize=1024)
def _plain_class(members: str) -> Node | None:
    """The class of these members, as `_PLAIN_CLASS` finds them; None where a range runs backwards."""
    ranges = [(ord(member[0]), ord(member[-1])) for member in _PLAIN_MEMBER.findall(members)]
    return None if any(high < low for low, high in ranges) else char_set(ranges)
