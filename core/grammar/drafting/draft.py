"""A constraint compiled as far as no vocabulary is needed: what a process of its own can do and send back."""

from __future__ import annotations

import pickle
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import lru_cache, partial

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.automata.effort import Effort, TooMuchEffortError
from graftlm.core.grammar.automata.products.product import without_products
from graftlm.core.grammar.automata.stack.dpda import Dpda
from graftlm.core.grammar.automata.stack.dpda_builder import build_dpda
from graftlm.core.grammar.automata.stack.positions import Positions
from graftlm.core.grammar.automata.stack.pushdown import Pushdown
from graftlm.core.grammar.automata.stack.shortest import ShortestTexts
from graftlm.core.grammar.budget import limited
from graftlm.core.grammar.collector import paused
from graftlm.core.grammar.compile import (
    EDGES_OF_AUTOMATON,
    SHARE_OF_AUTOMATON,
    Grammar,
    Language,
    check_start,
    compile_spec,
    for_parsers,
    language_of,
    takes_many_states,
)
from graftlm.core.grammar.engines.automaton import AutomatonGrammar
from graftlm.core.grammar.engines.forced_texts import ForcedTexts
from graftlm.core.grammar.engines.fsm import FsmGrammar
from graftlm.core.grammar.engines.pda import PdaGrammar
from graftlm.core.grammar.schema.distinct.distinct_parts import has_distinct_parts
from graftlm.core.grammar.schema.lowering import any_value_rules
from graftlm.core.grammar.schema.reading.json_schema import SchemaReader
from graftlm.core.grammar.spec import Issue, JsonSchema, Options, Spec, Whitespace
from graftlm.core.grammar.vocabulary import Vocabulary


@dataclass(frozen=True)
class Draft:
    """What `finished` makes a grammar of.

    automaton None where no automaton holds the constraint
    lark      else its text for llguidance
    language  and its node, its rules but those of any value, and their lengths, pickled: most are never looked at
    error     why it has no automaton, raised where llguidance cannot take it either
    forced    forced texts of the automaton, in the tokens of one vocabulary
    """

    automaton: Dfa | Dpda | None = None
    lark: str = ""
    language: bytes = b""
    issues: tuple[Issue, ...] = ()
    annotations: tuple[Issue, ...] = ()
    error: GrammarError | None = None
    forced: ForcedTexts | None = None


def automaton_grammar(found: Draft, vocabulary: Vocabulary) -> AutomatonGrammar | None:
    """The grammar over `vocabulary` of a draft that is an automaton."""
    if found.automaton is None:
        return None
    grammar = finished(found, vocabulary).compiled
    assert isinstance(grammar, AutomatonGrammar)
    return grammar


def draft(spec: Spec, options: Options) -> Draft:
    """Compile for any vocabulary with a token for every byte. Raises GrammarError, as `compile_spec` does."""
    with limited(options.limits), paused():
        if not isinstance(spec, JsonSchema):
            return _automaton(language_of(spec, options), options)
        with closing(SchemaReader(spec, options, items_differ=True)) as reader:
            is_large = takes_many_states(spec, options)
            language = language_of(spec, options, token_rules=is_large, reader=reader)
            if is_large and language.rules:
                return _parsed(language, options)
            try:
                with limited(options.limits, SHARE_OF_AUTOMATON):
                    return _automaton(language, options, Effort(EDGES_OF_AUTOMATON))
            except GrammarError as error:
                try:
                    return _parsed(for_parsers(spec, options, reader), options, error)
                except GrammarError:
                    if isinstance(error, TooMuchEffortError):
                        return _automaton(language, options)
                    raise error from None


def _automaton(language: Language, options: Options, effort: Effort | None = None) -> Draft:
    found: Dfa | Dpda
    if language.rules:
        found = build_dpda(language.node, language.rules, options.limits, effort)
    else:
        node = without_products(language.node, options.limits.states, effort)
        found = Dfa.compile(node, options.limits, effort=effort)
    return Draft(found.measured(), issues=language.issues, annotations=language.annotations)


def _parsed(language: Language, options: Options, error: GrammarError | None = None) -> Draft:
    from graftlm.core.grammar.engines.fixed_texts import check_fixed_texts
    from graftlm.core.grammar.engines.lark.lark import to_lark

    check_fixed_texts(language.node, language.rules)
    lark = to_lark(language.node, language.rules)
    _, shared = any_value_rules(options.whitespace, options.bounded_numbers)  # which every process has already
    own = {name: body for name, body in language.rules.items() if shared.get(name) is not body}
    any_value = (options.whitespace, options.bounded_numbers) if len(own) < len(language.rules) else None
    lengths: dict[str, int] | None = None
    with suppress(GrammarError):  # too long to measure here
        known = None if any_value is None else _lengths(*any_value)
        of_rule = ShortestTexts(language.rules, Positions(), known).of_rule
        lengths = {name: of_rule[name] for name in own}
    data = pickle.dumps((language.node, own, lengths, any_value))
    return Draft(None, lark, data, language.issues, language.annotations, error)


@lru_cache(maxsize=8)
def _lengths(whitespace: Whitespace, bounded_numbers: bool) -> dict[str, int]:
    """The shortest texts of the rules of any value."""
    return ShortestTexts(any_value_rules(whitespace, bounded_numbers)[1], Positions()).of_rule


def finished(found: Draft, vocabulary: Vocabulary) -> Grammar:
    """The grammar over `vocabulary`, which has a token for every byte; that of the draft, if it was drafted for one."""
    if isinstance(found.automaton, Dfa):
        fsm = FsmGrammar(found.automaton, vocabulary, known=found.forced)
        return Grammar("fsm", fsm, found.issues, found.annotations)
    if found.automaton is not None:
        pda = PdaGrammar(found.automaton, vocabulary, known=found.forced)
        return Grammar("pda", pda, found.issues, found.annotations)
    from graftlm.core.grammar.engines.llguidance import LlguidanceGrammar

    try:
        compiled = LlguidanceGrammar.from_lark(found.lark, vocabulary, partial(_pushdown, found.language))
        grammar = Grammar("llguidance", compiled, found.issues, found.annotations)
        if found.error is not None:
            check_start(grammar, vocabulary)
    except GrammarError as error:
        raise found.error or error from None
    return grammar


def from_draft(found: Draft, spec: Spec, vocabulary: Vocabulary, options: Options) -> Grammar:
    """What `compile_spec` makes of the draft of an automaton, without what compiling needs."""
    if isinstance(spec, JsonSchema) and has_distinct_parts(spec):
        return compile_spec(spec, vocabulary, options, lambda *_: found)
    made = finished(found, vocabulary)
    check_start(made, vocabulary)
    return Grammar(made.engine, made.compiled, made.warnings, made.annotations, (spec, options))


def _pushdown(data: bytes) -> Pushdown:
    node, rules, lengths, any_value = pickle.loads(data)
    if any_value is not None:
        rules.update(any_value_rules(*any_value)[1])
        lengths = None if lengths is None else {**lengths, **_lengths(*any_value)}
    return Pushdown(node, rules, lengths)
