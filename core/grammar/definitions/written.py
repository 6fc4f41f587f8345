"""A grammar's text, read and compiled: as an automaton where one keeps it, else by llguidance."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata.dfa import EmptyLanguage
from graftlm.core.grammar.automata.effort import Effort
from graftlm.core.grammar.automata.stack.pushdown import Pushdown
from graftlm.core.grammar.budget import limited
from graftlm.core.grammar.compile import (
    EDGES_OF_AUTOMATON,
    SHARE_OF_AUTOMATON,
    Grammar,
    Language,
    automaton,
)
from graftlm.core.grammar.definitions.definitions import Definitions
from graftlm.core.grammar.definitions.ebnf import is_ebnf, read_ebnf
from graftlm.core.grammar.definitions.lark import Unread, read_lark
from graftlm.core.grammar.definitions.left_recursion import is_left_recursive
from graftlm.core.grammar.definitions.tokens import place_of
from graftlm.core.grammar.engines.fixed_texts import check_fixed_texts
from graftlm.core.grammar.engines.lark.lark import MAX_TERMINALS, to_lark
from graftlm.core.grammar.engines.llguidance import LlguidanceGrammar, LlguidanceRefusal
from graftlm.core.grammar.spec import Options
from graftlm.core.grammar.vocabulary import Vocabulary


def written_language(text: str, options: Options) -> Language:
    """The language of a grammar's text. Raises GrammarError where only llguidance keeps it."""
    found = _read(text)
    if found is None or found.opaque:
        raise GrammarError(
            f"{found.opaque if found else 'a parameter'} in the grammar is kept by llguidance alone; "
            "let the engine be chosen"
        )
    return _language(found, options)


def compile_written(text: str, vocabulary: Vocabulary, options: Options) -> Grammar:
    """Compile a grammar's text with the fastest engine that keeps it."""
    found = _read(text)
    if found is not None and not found.opaque:
        try:
            with limited(options.limits, SHARE_OF_AUTOMATON):
                return automaton(_language(found, options), vocabulary, options, Effort(EDGES_OF_AUTOMATON))
        except EmptyLanguage:
            raise
        except (GrammarError, RecursionError):
            pass  # mostly as one byte does not tell which rule goes on
    return _by_llguidance(text, found, vocabulary, options)


def compile_by_llguidance(text: str, vocabulary: Vocabulary, options: Options) -> Grammar:
    """Compile a grammar's text with llguidance."""
    return _by_llguidance(text, _read(text), vocabulary, options)


def _read(text: str) -> Definitions | None:
    """What the text defines; None where it has parts that are not read here."""
    if is_ebnf(text):
        return read_ebnf(text)
    try:
        return read_lark(text)
    except Unread:
        return None


def _language(found: Definitions, options: Options) -> Language:
    node, rules = found.language(options.limits.states)
    return Language(node, rules, (), found.unused())


def _by_llguidance(text: str, found: Definitions | None, vocabulary: Vocabulary, options: Options) -> Grammar:
    if found is None:
        return Grammar("llguidance", LlguidanceGrammar.from_lark(text, vocabulary))
    found.check_depth()
    language = None
    if is_ebnf(text) or not found.opaque:
        with suppress(*(() if is_ebnf(text) else (GrammarError, RecursionError))):
            language = _language(found, options)
    known = None
    if language is not None:
        with suppress(RecursionError):  # rules of many choices, as they nest so deep
            check_fixed_texts(language.node, language.rules)
        if not is_left_recursive(language.rules):
            known = partial(Pushdown, language.node, language.rules)
    if language is not None and is_ebnf(text):
        source = to_lark(language.node, language.rules)
        return language.grammar("llguidance", LlguidanceGrammar.from_lark(source, vocabulary, known, is_wider=True))
    if found.num_terminals > MAX_TERMINALS:
        raise GrammarError(
            f"the rules hold {found.num_terminals:,} texts and patterns, the limit is {MAX_TERMINALS:,}; "
            "put alternatives that are texts into a terminal, whose name is upper case"
        )
    try:
        compiled = LlguidanceGrammar.from_lark(text, vocabulary, known, is_wider=True)
    except LlguidanceRefusal as error:
        if not found.doubts:
            raise
        at, reason = found.doubts[0]  # llguidance found this wrong as well, and says less
        message = f"{place_of(text, at)}: the pattern cannot be kept: {reason}"
        raise GrammarError(message, position=at) from error
    return Grammar("llguidance", compiled, (), found.unused())
