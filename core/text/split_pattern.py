"""What the pattern of a pre-tokenizer can match side by side: Glushkov's construction over a few characters."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import MappingProxyType

LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
ASCII = frozenset(map(chr, range(128)))
_GRAPHIC = frozenset(map(chr, range(33, 127)))

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern of the ByteLevel pre-tokenizer. Source: GPT-2."""


class UnknownPattern(Exception):
    """The pattern uses syntax that this reader does not know, so nothing can be said about it."""


@dataclass(frozen=True)
class SplitPattern:
    """A pattern as its positions: which characters each takes, and which positions may come after it in a match.

    Only ASCII characters and `after` are looked at. A lookaround is a position that takes no character.
    """

    after: str
    chars: tuple[frozenset[str], ...]
    follow: tuple[frozenset[int], ...]
    lookarounds: frozenset[int]
    nullable: bool
    first: frozenset[int]
    last: frozenset[int]

    @classmethod
    def read(cls, pattern: str, after: str) -> SplitPattern:
        """Raises UnknownPattern where the syntax is not known."""
        return _read(pattern, after)

    @cached_property
    def respects_cut(self) -> bool:
        """Whether no match spans a letter and `after` behind it, and each side has the matches that it has alone."""
        if self.nullable:
            return False
        # A lookaround evaluated right after a letter would see the character behind the cut.
        return not any(
            right in self.lookarounds or self.after in self.chars[right]
            for left, taken in enumerate(self.chars)
            if taken & LETTERS
            for right in self.follow[left]
        )

    @property
    def always_matches(self) -> bool:
        """Whether each letter, or else `after`, is part of some match wherever it stands."""
        return self.alone >= LETTERS or self.after in self.alone

    @property
    def matches_beside(self) -> bool:
        """Whether a match can hold a letter, or `after` between a letter and a graphic character."""
        starts_there = any(
            self.after in taken and any(self.chars[right] & _GRAPHIC for right in self.follow[left])
            for left, taken in enumerate(self.chars)
        )
        return starts_there or self.after in self.alone or any(taken & LETTERS for taken in self.chars)

    @cached_property
    def apart(self) -> Mapping[str, frozenset[str]]:
        """By ASCII character, those that no match spans behind it, each side having the matches that it has alone."""
        if self.nullable:
            return MappingProxyType(dict.fromkeys(ASCII, frozenset[str]()))
        spanned: dict[str, set[str]] = {char: set() for char in ASCII}
        for left, taken in enumerate(self.chars):
            behind = set(ASCII) if self.follow[left] & self.lookarounds else set[str]()
            behind.update(*(self.chars[right] for right in self.follow[left]))
            for char in taken & ASCII:
                spanned[char] |= behind
        return MappingProxyType({char: ASCII - behind for char, behind in spanned.items()})

    @property
    def alone(self) -> frozenset[str]:
        """The characters that match by themselves, so that each is part of some match wherever it stands."""
        return frozenset[str]().union(*(self.chars[position] for position in self.first & self.last))


@lru_cache(maxsize=64)
def _read(pattern: str, after: str) -> SplitPattern:
    """Kept, because a load asks several times, and most tokenizers share a few patterns: reading takes milliseconds."""
    reader = _Reader(pattern, ASCII | {after})
    part = reader.read()
    chars, follow = tuple(reader.chars), tuple(map(frozenset, reader.follow))
    return SplitPattern(after, chars, follow, frozenset(reader.lookarounds), part.nullable, part.first, part.last)


@dataclass(frozen=True)
class _Part:
    """A piece of a pattern: whether it matches the empty text, and the positions that begin and end its matches."""

    nullable: bool = True
    first: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()


@dataclass
class _Reader:
    """A recursive-descent reader of Oniguruma's syntax, as far as pre-tokenizers use it."""

    pattern: str
    alphabet: frozenset[str]
    at: int = 0
    fold: bool = False
    chars: list[frozenset[str]] = field(default_factory=list)
    follow: list[set[int]] = field(default_factory=list)
    lookarounds: set[int] = field(default_factory=set)

    def read(self) -> _Part:
        part = self._alternatives()
        if self.at != len(self.pattern):
            raise UnknownPattern(self.pattern)
        return part

    def _peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.at)

    def _take(self, text: str) -> bool:
        if self._peek(text):
            self.at += len(text)
            return True
        return False

    def _alternatives(self) -> _Part:
        part = self._sequence()
        while self._take("|"):
            other = self._sequence()
            part = _Part(part.nullable or other.nullable, part.first | other.first, part.last | other.last)
        return part

    def _sequence(self) -> _Part:
        part = _Part()
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            part = self._joined(part, self._repeated())
        return part

    def _joined(self, left: _Part, right: _Part) -> _Part:
        for position in left.last:
            self.follow[position] |= right.first
        first = left.first | right.first if left.nullable else left.first
        last = left.last | right.last if right.nullable else right.last
        return _Part(left.nullable and right.nullable, first, last)

    def _repeated(self) -> _Part:
        start = self.at
        part = self._atom()
        end = self.at
        quantifier = re.compile(r"[*+?]|\{(\d*)(,?)(\d*)\}").match(self.pattern, self.at)
        if quantifier is None:
            return part
        self.at = quantifier.end()
        self.at += self._peek("?") or self._peek("+")  # lazy or possessive: matches no more than the greedy form
        sign = quantifier[0]
        least = int(quantifier[1] or 0) if sign[0] == "{" else int(sign == "+")
        most = quantifier[3] or ("" if quantifier[2] else quantifier[1]) if sign[0] == "{" else ""
        if least > 1:  # a second copy, so that one pass through the first is not taken for the whole
            after, self.at = self.at, start
            again = self._atom()
            if self.at != end:
                raise UnknownPattern(self.pattern)
            self.at = after
            self._joined(again, again)
            return self._joined(part, again)
        if sign != "?" and most != "1":
            self._joined(part, part)
        return _Part(part.nullable or least == 0, part.first, part.last)

    def _atom(self) -> _Part:
        if self._take("(?=") or self._take("(?!"):
            inside = self._one_character()
            if not self._take(")"):
                raise UnknownPattern(self.pattern)
            return self._position(inside, lookaround=True)
        if self._take("$"):
            return self._position(frozenset(), lookaround=True)
        if self._take("(?i:"):
            before, self.fold = self.fold, True
            part = self._group()
            self.fold = before
            return part
        if self._take("(?:") or (not self._peek("(?") and self._take("(")):
            return self._group()
        return self._position(self._one_character())

    def _group(self) -> _Part:
        part = self._alternatives()
        if not self._take(")"):
            raise UnknownPattern(self.pattern)
        return part

    def _position(self, chars: frozenset[str], lookaround: bool = False) -> _Part:
        position = len(self.chars)
        self.chars.append(frozenset() if lookaround else chars)
        self.follow.append(set())
        if lookaround:
            self.lookarounds.add(position)
        return _Part(False, frozenset({position}), frozenset({position}))

    def _one_character(self) -> frozenset[str]:
        if self._take("["):
            return self._bracket()
        if self._take("."):
            return self.alphabet - {"\n"}
        return self._where(self._single("^$*+?(){}|"))

    def _bracket(self) -> frozenset[str]:
        negated = self._take("^")
        inside: frozenset[str] = frozenset()
        begun = False
        while not (begun and self._take("]")):
            if self.at >= len(self.pattern) or self._peek("[:"):
                raise UnknownPattern(self.pattern)
            if self._take("&&"):  # the rest of the class restricts what came before
                inside &= self._bracket()
                break
            if self._take("["):
                inside |= self._bracket()
            else:
                inside |= self._range()
            begun = True
        return self.alphabet - inside if negated else inside

    def _range(self) -> frozenset[str]:
        low = self._single("")
        if isinstance(low, str) and self._peek("-") and not self._peek("-]"):
            self.at += 1
            high = self._single("")
            if not isinstance(high, str):
                raise UnknownPattern(self.pattern)
            return self._where(lambda char: low <= char <= high)
        return self._where(low)

    def _where(self, test: str | Callable[[str], bool]) -> frozenset[str]:
        if isinstance(test, str):
            wanted = {test, test.lower(), test.upper()} if self.fold else {test}
            return self.alphabet & wanted
        found = frozenset(char for char in self.alphabet if test(char))
        if self.fold:
            found |= self.alphabet & {other for char in found for other in (char.lower(), char.upper())}
        return found

    def _single(self, special: str) -> str | Callable[[str], bool]:
        """A literal character, or the test that stands for an escape."""
        if self.at >= len(self.pattern):
            raise UnknownPattern(self.pattern)
        char = self.pattern[self.at]
        self.at += 1
        if char in special:
            raise UnknownPattern(self.pattern)
        if char != "\\":
            return char
        kind = self.pattern[self.at : self.at + 1]
        self.at += 1
        if kind in ("p", "P"):
            name = re.compile(r"\{(\^?)(\w+)\}").match(self.pattern, self.at)
            if name is None:
                raise UnknownPattern(self.pattern)
            self.at = name.end()
            negated = (kind == "P") != bool(name[1])
            return _property(name[2], negated)
        if kind in ("x", "u"):
            digits = r"\{([0-9A-Fa-f]+)\}|" + (r"([0-9A-Fa-f]{2})" if kind == "x" else r"([0-9A-Fa-f]{4})")
            code = re.compile(digits).match(self.pattern, self.at)
            if code is None:
                raise UnknownPattern(self.pattern)
            self.at = code.end()
            return chr(int(code[1] or code[2], 16))
        if kind in _ESCAPES:
            return _ESCAPES[kind]
        if kind == "" or kind.isalnum():
            raise UnknownPattern(self.pattern)
        return kind


def _is_space(char: str) -> bool:
    return char.isspace() and not "\x1c" <= char <= "\x1f"  # separators, which are none of Unicode's white space


_ESCAPES: dict[str, str | Callable[[str], bool]] = {
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "f": "\f",
    "v": "\v",
    "s": _is_space,
    "S": lambda char: not _is_space(char),
    "d": str.isdigit,
    "D": lambda char: not char.isdigit(),
    "w": lambda char: char.isalnum() or char == "_",
    "W": lambda char: not (char.isalnum() or char == "_"),
}
_FOREIGN_SCRIPTS = {"Han", "Hiragana", "Katakana", "Hangul", "Thai", "Arabic", "Cyrillic", "Hebrew", "Greek"}


def _property(name: str, negated: bool) -> Callable[[str], bool]:
    """The test for a Unicode property: a general category, or a script that no character of the alphabets is of."""
    if name in _FOREIGN_SCRIPTS:
        return lambda char: negated
    if len(name) > 2 or name[0] not in "LMNPSZC":
        raise UnknownPattern(name)
    return lambda char: unicodedata.category(char).startswith(name) != negated
