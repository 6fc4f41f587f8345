"""Compile a constraint: choose the grammar engine, check the limits, return a Grammar."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from graftlm.core.config import reject_unknown
from graftlm.core.errors import ConfigError, GrammarError, PluginError
from graftlm.core.grammar.automata.dfa import EmptyLanguage
from graftlm.core.grammar.budget import TooManyStates, limited
from graftlm.core.grammar.collector import paused
from graftlm.core.grammar.engines.automaton import AutomatonMatcher
from graftlm.core.grammar.engines.fsm import FsmGrammar
from graftlm.core.grammar.engines.pda import PdaGrammar
from graftlm.core.grammar.matcher import Matcher
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.rules import written_out
from graftlm.core.grammar.spec import Choices, Composite, Issue, JsonSchema, Lark, Limits, Options, Regex, Spec
from graftlm.core.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from graftlm.core.grammar.explain import Explanation
    from graftlm.core.grammar.schema.reading.json_schema import SchemaReader

_USUAL = Options()
_AUTOMATON_STATES = 64_000
"""States of an automaton that is built before llguidance is tried: about 0.1 s and 50 MB."""


class EngineGrammar(Protocol):
    """A constraint as one grammar engine compiled it; shared by threads."""

    @property
    def num_bytes(self) -> int:
        """Memory in use now, approximately."""
        ...

    def matcher(self) -> Matcher: ...


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled constraint over one vocabulary. Thread-safe; each sequence takes a matcher of its own.

    engine    "fsm", "llguidance" or the name of a plugin
    warnings  what `on_unsupported="warn"` left out of the schema
    annotations  keywords of the schema that the standard does not know: notes, which restrict nothing
    compiled  what the engine made of it: an FsmGrammar has the automaton and its masks
    source    what it was compiled from
    """

    engine: str
    compiled: EngineGrammar
    warnings: tuple[Issue, ...] = field(default=())
    annotations: tuple[Issue, ...] = field(default=())
    source: tuple[Spec, Options] | None = field(default=None, repr=False)

    @classmethod
    def compile(
        cls, spec: Spec, vocabulary: Vocabulary, *, documents: Mapping[str, Any] | None = None, **options: Any
    ) -> Grammar:
        """Compile `spec`; `options` are the fields of `Options`, `documents` the schemas that a JSON schema refers to.

        Raises GrammarError when the constraint cannot be parsed, kept, satisfied or spelled by the vocabulary, or
        costs more than its limits; ConfigError for an unknown option.
        """
        if documents is not None and isinstance(spec, JsonSchema):
            spec = spec.with_documents(documents)
        return compile_spec(spec, vocabulary, read_options(options))

    @property
    def num_bytes(self) -> int:
        return self.compiled.num_bytes

    def matcher(self) -> Matcher:
        """A matcher at the beginning of the text."""
        return self.compiled.matcher()

    def explain(self) -> Explanation:
        """Which engine keeps which part, and how much of the text is forced."""
        from graftlm.core.grammar.explain import explain

        if self.source is None:
            raise ConfigError("this grammar was made by hand; only one that Grammar.compile made can be explained")
        return explain(*self.source)


class GrammarFactory(Protocol):
    """A grammar engine, as a plugin registers it with the hook `graftlm_register_grammars`.

    Raises GrammarError for a constraint that it cannot keep. `options.engine` is None, so that a factory may
    delegate to `compile_spec`.
    """

    def __call__(self, spec: Spec, vocabulary: Vocabulary, options: Options) -> Grammar: ...


def read_options(options: dict[str, Any]) -> Options:
    """`Options` from keywords; an unknown one raises ConfigError and names its nearest neighbour."""
    if not options:
        return _USUAL
    reject_unknown(list(options), list(Options.__dataclass_fields__), "grammar option")
    return Options(**options)


def compile_spec(spec: Spec, vocabulary: Vocabulary, options: Options) -> Grammar:
    """Compile without a cache; see `Grammar.compile`."""
    if not isinstance(spec, (Regex, Choices, JsonSchema, Lark, Composite)):
        raise ConfigError(
            f"{type(spec).__name__} is not a constraint; use Regex, Choices, JsonSchema, Lark or Composite"
        )
    _checksize_of(spec, options.limits)
    handled = sys.exception()
    try:
        with limited(options.limits), paused():
            try:
                grammar = _compiled(spec, vocabulary, options)
            except (GrammarError, RecursionError) as error:
                _forget_frames(error, handled)  # what they hold is freed before the collector goes on
                raise
    except RecursionError as error:
        raise GrammarError("the constraint nests too deep, by itself or through its definitions; flatten it") from error
    check_start(grammar, vocabulary)
    return replace(grammar, source=(spec, options))


def _compiled(spec: Spec, vocabulary: Vocabulary, options: Options) -> Grammar:
    if isinstance(spec, JsonSchema):
        from graftlm.core.grammar.schema.unique_items import may_have_unique_parts

        if may_have_unique_parts(spec):
            return _with_unique_parts(spec, vocabulary, options)
    reader: SchemaReader | None = None
    try:
        if options.engine is not None:
            return _call_engine(options.engine, spec, vocabulary, replace(options, engine=None))
        if isinstance(spec, JsonSchema):
            from graftlm.core.grammar.schema.reading.json_schema import SchemaReader

            reader = SchemaReader(spec, options, items_differ=True)
        return _choose_engine(spec, vocabulary, options, reader)
    finally:
        if reader is not None:
            reader.close()


def _with_unique_parts(spec: JsonSchema, vocabulary: Vocabulary, options: Options) -> Grammar:
    """Compile a schema whose items, or names of members, must differ: an engine's grammar and masks beside it."""
    from graftlm.core.grammar.engines.unique import UniqueGrammar
    from graftlm.core.grammar.schema.lowering import unique_places
    from graftlm.core.grammar.schema.reading.json_schema import SchemaReader

    with closing(SchemaReader(spec, options, items_differ=True)) as reader:
        root = unique_places(spec, options, reader)
        if options.engine is None:
            grammar = _choose_engine(spec, vocabulary, options, reader)
        else:
            grammar = _call_engine(options.engine, spec, vocabulary, replace(options, engine=None))
        issues = [issue for issue in reader.issues if issue not in grammar.warnings]
    grammar = replace(grammar, warnings=(*grammar.warnings, *issues))
    if root is None:
        return grammar
    if not vocabulary.has_all_bytes:
        raise GrammarError(
            "uniqueItems and counted names need a token for each byte, and the vocabulary lacks some; remove the "
            "keyword or use a tokenizer with byte fallback"
        )
    return replace(grammar, compiled=UniqueGrammar(grammar.compiled, root, vocabulary))


def _forget_frames(error: BaseException | None, handled: BaseException | None) -> None:
    """Clear the locals of the frames of `error` and of those it followed, up to the one `handled` before it."""
    while error is not None and error is not handled:
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _call_engine(name: str, spec: Spec, vocabulary: Vocabulary, options: Options) -> Grammar:
    """Compile with the grammar engine that a plugin registered as `name`; PluginError if it breaks the protocol."""
    from graftlm.plugins.manager import load

    factory: GrammarFactory = load().grammars[name]
    grammar = factory(spec, vocabulary, options)
    if not isinstance(grammar, Grammar):
        raise PluginError(
            f"grammar engine {name!r} returned {type(grammar).__name__}; "
            "return a graftlm.core.grammar.Grammar(engine, compiled, warnings)"
        )
    return grammar


@dataclass(frozen=True)
class Language:
    """The texts that a constraint allows: nodes and the rules that they name, for every engine."""

    node: nodes.Node
    rules: dict[str, nodes.Node] = field(default_factory=dict)
    issues: tuple[Issue, ...] = ()
    annotations: tuple[Issue, ...] = ()

    def grammar(self, engine: str, compiled: EngineGrammar) -> Grammar:
        return Grammar(engine, compiled, self.issues, self.annotations)


def _choose_engine(spec: Spec, vocabulary: Vocabulary, options: Options, reader: SchemaReader | None = None) -> Grammar:
    """Compile with the DFA if the language is regular, else with the PDA; with llguidance if that engine refuses."""
    if isinstance(spec, Lark):
        from graftlm.core.grammar.lark_text import compile_grammar_text

        return compile_grammar_text(spec.text, vocabulary)
    language = language_of(spec, options, reader=reader)
    if not isinstance(spec, JsonSchema | Composite):
        return automaton(language, vocabulary, options.limits)
    limits = replace(options.limits, states=min(options.limits.states, _AUTOMATON_STATES))
    try:
        return automaton(language, vocabulary, limits)
    except EmptyLanguage:
        raise
    except GrammarError as error:
        try:
            grammar = _by_llguidance(language, vocabulary)
            check_start(grammar, vocabulary)
            return grammar
        except (GrammarError, RecursionError):
            if not isinstance(error, TooManyStates) or limits.states == options.limits.states:
                raise error from None
    return automaton(language, vocabulary, options.limits)  # no other engine: as many states as are allowed


def compile_fsm(spec: Spec, vocabulary: Vocabulary, options: Options) -> Grammar:
    """Compile into a DFA. Raises GrammarError if the constraint is not regular."""
    language = language_of(spec, options)
    regular = written_out(language.node, language.rules)
    if regular is None:
        raise GrammarError(
            "the constraint contains itself, admits any JSON value or is too large to be written out, and no finite "
            "automaton can hold it; let the engine be chosen, or use 'pda'"
        )
    return language.grammar("fsm", FsmGrammar.compile(regular, vocabulary, options.limits))


def compile_pda(spec: Spec, vocabulary: Vocabulary, options: Options) -> Grammar:
    """Compile into a deterministic pushdown automaton. Raises GrammarError if the language is not deterministic."""
    language = language_of(spec, options)
    return language.grammar("pda", PdaGrammar.compile(language.node, language.rules, vocabulary, options.limits))


def compile_llguidance(spec: Spec, vocabulary: Vocabulary, options: Options) -> Grammar:
    """Compile with llguidance."""
    if isinstance(spec, Lark):
        from graftlm.core.grammar.lark_text import compile_grammar_text

        return compile_grammar_text(spec.text, vocabulary)
    return _by_llguidance(language_of(spec, options), vocabulary)


def language_of(spec: Spec, options: Options, reader: SchemaReader | None = None) -> Language:
    """Return the language of `spec`; `reader` is that of a JSON schema that was read before."""
    match spec:
        case Regex(pattern):
            from graftlm.core.grammar.regex import parser

            return Language(parser.parse(pattern, max_depth=options.limits.depth))
        case Choices(options=choices):
            return Language(nodes.alternation(*map(nodes.literal, choices)))
        case JsonSchema():
            from graftlm.core.grammar.schema.lowering import lower_read, lower_schema

            if reader is not None:
                lowered = lower_read(reader, spec, options)
            else:
                lowered = lower_schema(spec, options, items_differ=True)
            return Language(lowered.node, lowered.rules, lowered.issues, lowered.annotations)
        case Composite(node, rules):
            return Language(node, dict(rules))
        case Lark():
            raise GrammarError(
                "only llguidance matches the text of a grammar; leave the engine out, or name 'llguidance'"
            )


def automaton(language: Language, vocabulary: Vocabulary, limits: Limits) -> Grammar:
    """Compile into a DFA if the language is regular, else into a PDA."""
    node, rules = language.node, language.rules
    regular = written_out(node, rules)
    if regular is None:
        return language.grammar("pda", PdaGrammar.compile(node, rules, vocabulary, limits))
    return language.grammar("fsm", FsmGrammar.compile(regular, vocabulary, limits))


def _by_llguidance(language: Language, vocabulary: Vocabulary) -> Grammar:
    from graftlm.core.grammar.engines.lark_writer import to_lark
    from graftlm.core.grammar.engines.llguidance import LlguidanceGrammar

    text = to_lark(language.node, language.rules)
    return language.grammar("llguidance", LlguidanceGrammar.from_lark(text, vocabulary))


def size_of(spec: Spec) -> int:
    """Return the characters of a constraint; 0 for a Composite, whose parts were lowered before."""
    match spec:
        case Regex(text) | Lark(text) | JsonSchema(text=text):
            return len(text)
        case Choices(options=choices):
            return sum(map(len, choices))
        case Composite():
            return 0


def _checksize_of(spec: Spec, limits: Limits) -> None:
    if size_of(spec) > limits.size:
        raise GrammarError(
            f"the constraint has {size_of(spec):,} characters, the limit is {limits.size:,}; "
            "shorten it or raise limits.size"
        )


def check_start(grammar: Grammar, vocabulary: Vocabulary) -> None:
    """A grammar that no token can begin would stop every sequence with nothing to sample."""
    matcher = grammar.matcher()
    if isinstance(matcher, AutomatonMatcher) and vocabulary.has_all_bytes and not matcher.finished:
        return  # an automaton has a byte on from each state but the last
    row = np.zeros(vocabulary.num_words, np.int32)
    if matcher.fill_mask(row) and not row.any():
        raise GrammarError(
            f"no token of the vocabulary ({vocabulary.vocab_size:,} tokens) can begin a text that the constraint "
            "allows; use a tokenizer with byte fallback or a constraint within its alphabet"
        )
