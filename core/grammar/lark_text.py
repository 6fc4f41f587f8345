"""Constraints written as the text of a grammar, in Lark or EBNF. llguidance matches both.

A Lark text goes to llguidance unchanged. EBNF (GBNF, as llama.cpp and xgrammar write it) goes through llguidance's
converter, after the escapes that the converter gets wrong are rewritten.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import NoReturn

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.budget import check
from graftlm.core.grammar.compile import Grammar
from graftlm.core.grammar.engines.llguidance import LlguidanceGrammar, LlguidanceRefusal
from graftlm.core.grammar.vocabulary import Vocabulary

_MAX_DEPTH = 1_000
"""Rules and groups inside one another. llguidance compiles recursively: 2,000 overflow a stack of 8 MB."""
_MAX_TERMINALS = 20_000
"""Distinct strings and patterns between rules: llguidance compares all pairs, 2.5 s for this many."""
_MAX_RULE_VISITS = 1_000_000
"""Rules times depth: the converter visits every rule once per level, about 3 us each."""
_MAX_LEXER_STATES = 50_000
"""States of llguidance's lexer, about 2 kB each: a pattern of 10**6 equal characters stops after 4 s."""

_EBNF = re.compile(r"^[ \t]*[A-Za-z0-9_][\w-]*\s*::=", re.MULTILINE)
_EBNF_TOKEN = re.compile(
    r"""(?P<gap>(?:\s+|\#[^\n]*)+)|(?P<string>"(?:\\.|[^"\\\n])*")|(?P<set>\[(?:\\.|[^\]\\\n])*\])
    |(?P<braces>\{\s*(?P<low>\d+)\s*(?:,\s*(?P<high>\d*)\s*)?\})|(?P<name>[A-Za-z0-9_][\w-]*)|(?P<any>\.)
    |(?P<mark>::=|[^\s])""",
    re.VERBOSE,
)
_EBNF_DEFINITION = re.compile(r"([A-Za-z0-9_][\w-]*)(?:\s|#[^\n]*\n)*::=")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {char: char for char in "\"'\\[]-/^"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_CONVERTER_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "\\": "\\\\"}

_LARK_LINE = re.compile(r"^[ \t]*[?!]*([A-Za-z_][\w-]*)[^:\n]*:", re.MULTILINE)
_LARK_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"i?|(?://|\#)[^\n]*|/(?:\\.|[^/\\\n])+/', re.VERBOSE)
_LARK_NAME = re.compile(r"[A-Za-z_][\w-]*|[(\[]|[)\]]")
_LARK_POSITION = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*)", re.DOTALL)
_REMEDIES = {
    "unknown name": "define it, or put it in double quotes if it is text",
    "duplicate rule": "join the two definitions with |",
    "no start rule": "name one of the rules 'start'",
    "lexer error": "close strings and patterns on their line; escapes in strings are those of JSON",
    "invalid regex": "patterns are in the dialect of Rust's regex, without lookarounds and backreferences",
    "circular reference in token": "write its name in lower case: only rules may contain themselves",
    "range end must be": "swap the two counts",
    "& is only": "write its name in upper case",
    "Unknown common": "import one of these, or write the terminal out",
    "not supported yet": "write the rule out where it is used",
    "too deeply nested": "give the inner groups rules of their own",
    "JSON schema": "correct the schema",
    'parse "%json"': "write a whole JSON value after %json",
    "panic": "write tokens of the vocabulary by their numbers, as <[12]>, and other text in double quotes",
    "Expected": "a line is name: ..., | ... or a statement such as %ignore; text stands in double quotes",
}
"""Remedies by a part of llguidance's message."""


def is_ebnf(text: str) -> bool:
    """Return True for a grammar in EBNF, False for Lark."""
    return _EBNF.search(text) is not None


def compile_grammar_text(text: str, vocabulary: Vocabulary) -> Grammar:
    """Compile a grammar in Lark or EBNF with llguidance.

    Raises GrammarError with line, column and remedy for a text that cannot be read, and with the limit for one that
    nests too deep or has too many strings and patterns.
    """
    ebnf = _Ebnf(text).rewritten() if is_ebnf(text) else None
    lark = text if ebnf is None else ebnf.to_lark()
    _check_rules(lark)
    try:
        compiled = LlguidanceGrammar.from_lark(lark, vocabulary, limits={"max_lexer_states": _MAX_LEXER_STATES})
    except LlguidanceRefusal as error:
        raise _located(text, lark, ebnf, str(error)) from error
    return Grammar("llguidance", compiled)


def _fail(text: str, at: int, reason: str) -> NoReturn:
    raise _error(text, at, reason)


def _error(text: str, at: int, reason: str) -> GrammarError:
    line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
    return GrammarError(f"line {line}, column {column}: {reason}", position=at)


def _located(text: str, lark: str, ebnf: _Ebnf | None, refusal: str) -> GrammarError:
    """Return llguidance's complaint about `lark` with its position in `text` and a remedy."""
    from llguidance import LLMatcher

    # a refusal is the first line only; of what llguidance finds with the vocabulary alone, there is no more
    report = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(lark)).strip() or refusal
    remedy = next((remedy for sign, remedy in _REMEDIES.items() if sign in report), "correct the grammar")
    found = _LARK_POSITION.match(report)
    if found is None:
        at = max(text.find("<|"), 0) if "panic" in report else 0
        return _error(text, at, f"{report.partition(chr(10))[0].split(': removal index')[0]}; {remedy}")
    line, column, rest = int(found[1]), int(found[2]), found[3]
    reason = re.split(r"\n +\d+ \| ", rest)[0].strip()
    reason = re.sub(r"(.*?) \(in regex\):.*\nerror: (.*)", r"\1: \2", reason, flags=re.DOTALL)
    reason = re.sub(r' \(at ".*', "", reason, flags=re.DOTALL)
    names = _LARK_LINE.findall(lark)
    if near := re.match(r'unknown name: "(.*)"', reason):
        similar = get_close_matches(near[1], names, n=1)
        if near[1] in names:
            remedy = "a terminal, in upper case, may name terminals only"
        elif similar:
            remedy = f"did you mean {similar[0]!r}?"
    lines = lark.split("\n")
    before = lines[line - 1].encode()[: column - 1].decode(errors="ignore") if line <= len(lines) else ""
    at = min(sum(len(one) + 1 for one in lines[: line - 1]) + len(before), len(lark))
    if ebnf is not None:
        at = ebnf.rule_at(len(_LARK_LINE.findall(lark, 0, at + 1)) - 1)
    return _error(text, at, f"{reason}; {remedy}")


def _check_rules(lark: str) -> None:
    """Raise GrammarError where rules nest deeper, or hold more strings and patterns, than llguidance can compile."""
    terminals = set[str]()
    uses: dict[str, tuple[int, list[str]]] = {}
    position: dict[str, int] = {}
    starts = list(_LARK_LINE.finditer(lark))
    for i, found in enumerate(starts):
        check()
        body = lark[found.end() : starts[i + 1].start() if i + 1 < len(starts) else len(lark)]
        if not found[1].isupper():
            terminals.update(quoted for quoted in _LARK_QUOTED.findall(body) if quoted[0] in '"/' and quoted[1] != "/")
        level = deepest = 0
        names = list[str]()
        for name in _LARK_NAME.findall(_LARK_QUOTED.sub(" ", body)):
            level += (name in "([") - (name in ")]")
            deepest = max(deepest, level)
            names.append(name)
        uses[found[1]] = 1 + deepest, names
        position[found[1]] = found.start(1)
    if len(terminals) > _MAX_TERMINALS:
        raise GrammarError(
            f"the rules hold {len(terminals):,} strings and patterns, the limit is {_MAX_TERMINALS:,}; "
            "put alternatives that are strings into a terminal, whose name is upper case"
        )
    _depth(lark, uses, position, "start")


def _depth(text: str, uses: dict[str, tuple[int, list[str]]], position: dict[str, int], start: str) -> int:
    """Return how deep rules and groups nest below `start`. Raises GrammarError above the limit.

    uses  of each rule, the levels that its own groups take, and the names in its body.
    """
    if start not in uses:
        return 0
    visited, depth = {start}, uses[start][0]
    most, stack = depth, [(start, iter(uses[start][1]))]
    while stack:
        name, left = stack[-1]
        below = next(left, None)
        if below is None:
            stack.pop()
            depth -= uses[name][0]
        elif below in uses and below not in visited:
            visited.add(below)
            depth += uses[below][0]
            most = max(most, depth)
            if depth > _MAX_DEPTH:
                reason = f"the rule {below!r} lies more than {_MAX_DEPTH:,} rules and groups deep in {start!r}"
                _fail(text, position[below], f"{reason}; flatten them, for example by repeats")
            stack.append((below, iter(uses[below][1])))
    return most


@dataclass
class _Ebnf:
    """An EBNF text, and the same grammar in the notation that llguidance's converter reads.

    pieces   the converter's text
    offsets  of each piece, its offset in the converter's text and in the user's
    rules    offset of each rule's definition, in order
    uses     of each rule, the levels of its groups and the names in its body; as `_depth` takes them
    """

    text: str
    pieces: list[str] = field(default_factory=list)
    offsets: list[tuple[int, int]] = field(default_factory=list)
    rules: dict[str, int] = field(default_factory=dict)
    uses: dict[str, tuple[int, list[str]]] = field(default_factory=dict)

    def rewritten(self) -> _Ebnf:
        """Read the text. Raises GrammarError with line and column of what is wrong."""
        length, level, rule, named = 0, 0, "", list[tuple[str, int]]()
        is_defined = True  # the next name begins a rule
        for token in _EBNF_TOKEN.finditer(self.text):
            check()
            at, piece = token.start(), token.group()
            match token.lastgroup:
                case "gap":
                    is_defined = not level and _EBNF_DEFINITION.match(self.text, token.end()) is not None
                    piece = "\n" if is_defined or token.end() == len(self.text) else " "
                case "string":
                    piece = self._string(token)
                case "set":
                    piece = self._set(token)
                case "any":
                    piece = r"(. | [\n])"  # the converter's dot has no line break
                case "braces" | "high":
                    if token["high"] and int(token["high"]) < int(token["low"]):
                        _fail(self.text, at, f"the repeat {piece} has its minimum above its maximum; swap them")
                case "name" if is_defined:
                    is_defined, rule = False, piece
                    self._define(rule, at)
                case "name":
                    self.uses.get(rule, (0, []))[1].append(piece)
                    named.append((piece, at))
                case _:
                    level += (piece == "(") - (piece == ")")
                    if rule in self.uses and level >= self.uses[rule][0]:
                        self.uses[rule] = level + 1, self.uses[rule][1]
                    if piece == "{":
                        _fail(self.text, at, "a repeat holds counts, as in {3}, {2,} or {2,5}")
                    if piece in ('"', "["):
                        kind = "class" if piece == "[" else "string"
                        _fail(self.text, at, f"the {kind} is not closed on its line; write line breaks as \\n")
            self.pieces.append(piece)
            self.offsets.append((length, at))
            length += len(piece)
        self._check_names(named)
        return self

    def to_lark(self) -> str:
        """Return the grammar in Lark. Raises GrammarError with line and column of what the converter cannot read."""
        from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

        try:
            return gbnf_to_lark("".join(self.pieces).lstrip())
        except GbnfToLarkError as error:
            blanks = len(joined := "".join(self.pieces)) - len(joined.lstrip())
            at = self._origin(error.pos.pos + blanks)
            reason = str(error).split(" at line ")[0]
            shown = repr(self.text[at : at + 20]) if at < len(self.text) else "the end of the grammar"
            _fail(self.text, at, f"{reason}, found {shown}; a rule is name ::= ..., text stands in double quotes")
        except RecursionError:
            raise
        except Exception as error:  # the converter has no class of its own for equal names
            raise GrammarError(
                f"the grammar cannot be converted: {error}; names of rules must differ in more than case and '-', "
                "and none but the first rule may be named 'start'"
            ) from error

    def rule_at(self, number: int) -> int:
        """Return the offset of a rule's definition, by its number in order."""
        at = list(self.rules.values())
        return at[min(max(number, 0), len(at) - 1)]

    def _origin(self, at: int) -> int:
        """Return the offset in the user's text for one in the converter's text."""
        i = bisect_right(self.offsets, (at, len(self.text))) - 1
        return min(self.offsets[i][1] + at - self.offsets[i][0], len(self.text)) if i >= 0 else 0

    def _define(self, name: str, at: int) -> None:
        if name in self.rules:
            line = self.text.count("\n", 0, self.rules[name]) + 1
            reason = f"the rule {name!r} is defined twice (first in line {line})"
            _fail(self.text, at, f"{reason}; join the two with |")
        self.rules[name] = at
        self.uses[name] = 1, []

    def _check_names(self, named: list[tuple[str, int]]) -> None:
        if "root" not in self.rules:
            known = ", ".join(list(self.rules)[:8])
            _fail(self.text, 0, f"there is no rule 'root', which the text is derived from; name one so (of {known})")
        for name, at in named:
            if name not in self.rules:
                near = get_close_matches(name, self.rules, n=1)
                hint = f"did you mean {near[0]!r}?" if near else _REMEDIES["unknown name"]
                _fail(self.text, at, f"there is no rule {name!r}; {hint}")
        depth = _depth(self.text, self.uses, self.rules, "root")
        if depth * len(self.rules) > _MAX_RULE_VISITS:
            raise GrammarError(
                f"the grammar has {len(self.rules):,} rules, {depth:,} deep; the limit of the two multiplied is "
                f"{_MAX_RULE_VISITS:,}; write it in Lark, or with fewer rules"
            )

    def _string(self, token: re.Match[str]) -> str:
        chars = [char for _, char in self._characters(token, 1)]
        if control := next((char for char in chars if char < " " and char not in "\n\r\t" or char == "\x7f"), None):
            _fail(
                self.text, token.start(), f"a string holds {control!r}; write it as the class [\\x{ord(control):02x}]"
            )
        return '"' + "".join(_CONVERTER_ESCAPES.get(char, char) for char in chars) + '"'

    def _set(self, token: re.Match[str]) -> str:
        """Return a class in which only the dashes of ranges are bare."""
        is_negated = token.group().startswith("[^")
        chars = self._characters(token, 1 + is_negated)
        parts, i = list[str](), 0
        while i < len(chars):
            low = chars[i][1]
            if i + 2 < len(chars) and chars[i + 1][0] == "-":
                high = chars[i + 2][1]
                if high < low:
                    _fail(self.text, token.start(), f"the range {low}-{high} runs backwards; swap its ends")
                parts.append(f"{_in_class(low)}-{_in_class(high)}")
                i += 3
            else:
                parts.append(_in_class(low))
                i += 1
        if not parts:
            _fail(self.text, token.start(), 'a class without characters matches nothing; write "" for the empty text')
        return f"[{'^' if is_negated else ''}{''.join(parts)}]"

    def _characters(self, token: re.Match[str], begin: int) -> list[tuple[str, str]]:
        """Return the characters between quotes or brackets: as written, and as meant."""
        text, at, found = token.group(), begin, list[tuple[str, str]]()
        while at < len(text) - 1:
            start, letter = at, text[at + 1]
            if text[at] != "\\":
                char, at = text[at], at + 1
            elif letter in _HEX_DIGITS:
                at += 2 + _HEX_DIGITS[letter]
                digits = text[start + 2 : at]
                if not re.fullmatch(f"[0-9a-fA-F]{{{_HEX_DIGITS[letter]}}}", digits):
                    reason = f"\\{letter} needs {_HEX_DIGITS[letter]} hexadecimal digits"
                    _fail(self.text, token.start() + start, f"{reason}, as in \\x41, \\u0041 or \\U00000041")
                code = int(digits, 16)
                if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                    reason = f"\\{letter}{digits} is no character that UTF-8 can write"
                    _fail(self.text, token.start() + start, f"{reason}; remove it")
                char = chr(code)
            elif letter in _ESCAPES:
                char, at = _ESCAPES[letter], at + 2
            else:
                reason = f"{text[at : at + 2]} is no known escape"
                _fail(self.text, token.start() + at, f"{reason}; write {letter} alone, or \\\\ for the \\")
            found.append((text[start:at], char))
        return found


def _in_class(char: str) -> str:
    """Return a character as it stands in a class of Rust's regex, in an escape that the converter keeps."""
    return char if char.isalnum() or ord(char) > 0xFF else f"\\x{ord(char):02x}"
