"""Grammars in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re

from graftlm.core.errors import GrammarError
from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Node
from graftlm.core.grammar.automata import charsets
from graftlm.core.grammar.definitions import common
from graftlm.core.grammar.definitions.definitions import Definitions
from graftlm.core.grammar.definitions.reader import REPEATS, Reader
from graftlm.core.grammar.definitions.rust_regex import Untold, read_regex
from graftlm.core.grammar.definitions.tokens import Token, tokenise

_NOTATION = re.compile(
    r"""(?P<skip>[ \t\f\r]+|(?:\#|//)[^\n]*)|(?P<newline>(?:\r?\n)+)|(?P<string>"(?:\\.|[^"\\\x00-\x1f\x7f])*"i?)
    |(?P<regex>/(?:\\.|[^/\\])+/[imslux]*)|(?P<special><[^<>\s]+>)|(?P<grammar>@[\w-]+)
    |(?P<statement>%[a-z]+)|(?P<number>[+-]?[0-9]+)|(?P<arrow>->)|(?P<mark>\.\.|::|[:,.(){}\[\]~|&=!?+*])
    |(?P<rule>_?[a-z][_a-z0-9-]*)|(?P<terminal>_?[A-Z][_A-Z0-9-]*)|(?P<parameter>_)""",
    re.VERBOSE,
)
_ENDS = frozenset({")", "]", "}", "|", "&"})
_BLACK_BOX = ast.repeat(ast.ANY_CHAR)  # what only llguidance knows
_NOT_KEPT = {
    "%override": "write the rule once, as it shall be",
    "%extend": "add the alternatives to the rule itself",
    "%declare": "define the terminal by a pattern",
}
_ATTRIBUTES = ("capture", "lazy", "stop", "stop_capture", "suffix", "max_tokens", "temperature")


class Unread(Exception):
    """The grammar has a part whose names and texts are not read here: parameters of rules, or a grammar inside."""


def read_lark(text: str) -> Definitions:
    """What `text` defines. Raises GrammarError with line and column of what is wrong, Unread where that is not read."""
    tokens = tokenise(text, _NOTATION, before_json={"%json", "%regex", "%llguidance"})
    return _LarkReader(text, tokens, "start").read()


class _LarkReader(Reader):
    _is_terminal = False  # of the rule that is read

    def read(self) -> Definitions:
        while not self._is("end"):
            if self._take("newline"):
                continue
            if token := self._take("statement"):
                self._statement(token)
            else:
                self._definition()
            if not self._is("end") and self._take("newline") is None:
                self._fail(f"{self._shown()} stands where the line should end; is a quote or a bracket missing?")
        return self._found.checked()

    def _definition(self) -> None:
        while self._take("mark", "?") or self._take("mark", "!"):
            pass
        token = self._take("rule") or self._take("terminal")
        if token is None:
            self._fail(
                f"{self._shown()} begins nothing here; a line is name: ..., | ... or a statement such as %ignore"
            )
        self._check_case(token)
        self._rule, self._is_terminal = token.text, token.kind == "terminal"
        if self._is("mark", "::"):
            raise Unread
        if self._is("mark", "{"):
            self._fail("templates are not kept; write the rule out for each use")
        if self._is("mark", "."):
            self._fail("priorities are not kept; leave the number out")
        if opening := self._take("mark", "["):
            self._attributes(opening)
        self._expect("mark", ":", "the : after a rule's name")
        self._found.define(token.text, self._alternatives(), token.at)

    def _check_case(self, token: Token) -> None:
        after = self._here
        if after.at == token.at + len(token.text) and after.kind in ("rule", "terminal", "parameter"):
            self._fail(
                f"{token.text + after.text!r} mixes cases: names of rules are lower case, those of terminals "
                "upper case",
                token.at,
            )

    def _attributes(self, opening: Token) -> None:
        while not self._take("mark", "]"):
            token = self._expect("rule", None, "an attribute or ]")
            if token.text not in _ATTRIBUTES:
                self._fail(f"there is no attribute {token.text!r}; known are {', '.join(_ATTRIBUTES)}", token.at)
            if token.text != "capture":
                self._found.opaque = self._found.opaque or token.text
            if self._take("mark", "="):
                if name := self._take("rule") or self._take("terminal"):
                    self._named(name)
                elif not (self._take("string") or self._take("regex") or self._take("json") or self._decimal()):
                    self._fail(f"{self._shown()} is no value of an attribute; values are text, patterns and numbers")
            self._take("mark", ",")
            if self._is("end") or self._is("newline"):
                self._fail("the attributes are not closed; add ]", opening.at)

    def _decimal(self) -> bool:
        found = self._take("number")
        if found and self._take("mark", "."):
            self._take("number")
        return found is not None

    def _statement(self, token: Token) -> None:
        name = token.text
        if name == "%ignore":
            self._found.opaque = self._found.opaque or name
            self._rule, self._is_terminal = name, True
            self._found.roots.append(self._alternatives())
        elif name == "%import":
            self._import(token)
        elif name == "%llguidance":
            self._take("json")
            if json.loads(self._tokens[self._next - 1].text):
                self._found.opaque = self._found.opaque or name
        elif name in _NOT_KEPT:
            self._fail(f"{name} is not kept; {_NOT_KEPT[name]}", token.at)
        else:
            self._fail(f"there is no statement {name}; known are %ignore, %import and %llguidance", token.at)

    def _import(self, token: Token) -> None:
        library = self._take("rule")
        if library is None or library.text != "common":
            self._fail("only %import common.NAME is known; write the terminals out", token.at)
        if self._take("mark", "."):
            name = self._take("terminal") or self._fail(f"{self._shown()} stands where a terminal's name should")
            renamed = self._take("terminal") or self._take("rule") if self._take("arrow") else name
            self._imported(name, renamed or self._fail("a name should follow ->"))
            return
        self._expect("mark", "(", "the .NAME or (NAME, ...) of an import")
        while not self._take("mark", ")"):
            name = self._take("terminal") or self._fail(f"{self._shown()} stands where a terminal's name should")
            self._imported(name, name)
            self._take("mark", ",")

    def _imported(self, name: Token, renamed: Token) -> None:
        pattern = common.PATTERNS.get(name.text)
        if pattern is None:
            self._fail(f"common has no {name.text}; it has {', '.join(common.PATTERNS)}", name.at)
        self._found.define(renamed.text, read_regex(pattern), renamed.at)
        self._found.imported.add(renamed.text)

    # -- bodies ------------------------------------------------------------------------------------------------

    def _alternatives(self) -> Node:
        ways = [self._way()]
        while self._take("mark", "|") or self._continued():
            ways.append(self._way())
        return ast.alternation(*ways)

    def _continued(self) -> bool:
        """Whether the next line begins with `|`, which is then read."""
        goes_on = self._is("newline") and self._tokens[self._next + 1].text == "|"
        self._next += 2 * goes_on
        return goes_on

    def _way(self) -> Node:
        parts = [self._sequence()]
        while sign := self._take("mark", "&"):
            if not self._is_terminal:
                self._fail("& joins terminals, and this is a rule; give its name in upper case", sign.at)
            parts.append(self._sequence())
        if self._take("arrow"):
            self._expect("rule", None, "a name in lower case after ->")
        if self._is("statement", "%if"):
            raise Unread
        return parts[0] if len(parts) == 1 else ast.Intersection(tuple(parts))

    def _sequence(self) -> Node:
        items: list[Node] = []
        while not (
            self._here.kind in ("newline", "end", "arrow") or self._here.text in _ENDS or self._is("statement", "%if")
        ):
            items.append(self._repeated(self._item()))
        return ast.concat(*items)

    def _repeated(self, item: Node) -> Node:
        sign = next((sign for sign in REPEATS if self._take("mark", sign)), None)
        if sign is not None:
            return ast.repeat(item, *REPEATS[sign])
        if opening := self._take("mark", "{"):
            return self._braces(item, opening)
        if self._is("mark", "~") and self._tokens[self._next + 1].kind == "number":
            at = self._here.at
            self._next += 2
            if self._is("mark", "..") or self._is("mark", "."):
                self._fail("write a repeat of 2 to 5 times as {2,5}", at)
            count = int(self._tokens[self._next - 1].text)
            return self._counted(item, count, count, at)
        return item

    def _item(self) -> Node:
        self._found.num_terminals += not self._is_terminal and self._here.kind in ("string", "regex")
        if token := self._take("string"):
            return self._string(token)
        if token := self._take("regex"):
            return self._regex(token)
        if token := self._take("rule") or self._take("terminal"):
            self._check_case(token)
            if self._is("mark", "::"):
                raise Unread
            if self._is_terminal and token.kind == "rule":
                self._fail(
                    f"the terminal {self._rule} names the rule {token.text}; name that in upper case, "
                    "or this in lower case",
                    token.at,
                )
            return self._named(token)
        if token := self._take("mark", "("):
            return self._group(token, ")")
        if token := self._take("mark", "["):
            return ast.optional(self._group(token, "]"))
        if self._take("mark", "~"):
            self._found.opaque = self._found.opaque or "~"
            self._item()
            return _BLACK_BOX
        if self._is("special") or self._is("grammar") or self._is("statement"):
            return self._foreign(self._here)
        if self._here.text in REPEATS:
            self._fail(f"there is nothing to repeat before {self._here.text!r}; put text in double quotes")
        self._fail(f"{self._shown()} is no part of a rule; put text in double quotes, patterns between slashes")

    def _foreign(self, token: Token) -> Node:
        """A part that llguidance alone keeps."""
        if token.text == "%lark":
            raise Unread
        if token.kind == "grammar":
            self._fail(f"there is no grammar {token.text}; write its rules into this one")
        if token.kind == "statement" and token.text not in ("%json", "%regex"):
            self._fail(f"{token.text} stands at the beginning of a line")
        if self._is_terminal and token.text != "%regex":
            self._fail(f"the terminal {self._rule} cannot hold {token.text}; name it in lower case, as a rule")
        if token.kind == "special" and not token.text.startswith("<["):
            self._fail(f"tokens of the vocabulary are known by number here; write {token.text} as <[its number]>")
        self._found.opaque = self._found.opaque or token.text
        self._next += 1
        self._take("json")
        return _BLACK_BOX

    def _string(self, token: Token) -> Node:
        text = self._characters(token)
        if self._take("mark", ".."):
            end = self._characters(self._expect("string", None, "text after .."))
            if len(text) != 1 or len(end) != 1 or end < text:
                self._fail("a range has one character on each side of .., the smaller one first", token.at)
            return ast.char_set([(ord(text), ord(end))])
        if token.text.endswith("i"):
            return ast.concat(*[ast.char_set(charsets.ignore_case(((ord(char), ord(char)),))) for char in text])
        return ast.literal(text)

    def _characters(self, token: Token) -> str:
        try:
            found = str(json.loads(token.text.removesuffix("i")))
            found.encode()
        except json.JSONDecodeError as error:
            self._fail(
                f'the text is no JSON string ({error.msg}); known escapes are \\" \\\\ \\/ \\b \\f \\n \\r \\t '
                "and \\u0041",
                token.at + error.pos,
            )
        except UnicodeEncodeError:
            self._fail(
                "the text holds half of a surrogate pair, which UTF-8 cannot write; write both or none", token.at
            )
        return found

    def _regex(self, token: Token) -> Node:
        pattern, _, flags = token.text[1:].rpartition("/")
        try:
            return read_regex(pattern, flags)
        except Untold as error:
            self._found.opaque = self._found.opaque or str(error)
        except GrammarError as error:
            reason = str(error).partition(": ")[2] or str(error)
            self._found.doubts.append((token.at + 1 + (error.position or 0), reason))
            self._found.opaque = self._found.opaque or "a pattern"
        return _BLACK_BOX
