"""Which engine takes which constraint, and what is refused before a sequence meets it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from graftlm import Choices, JsonSchema, Lark, Regex, Vocabulary
from graftlm.core.errors import ConfigError, GrammarError, PluginError
from graftlm.core.grammar import Grammar, Limits, budget
from graftlm.core.grammar.compile import compile_spec
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.schema.algebra.shapes import Shape
from graftlm.core.grammar.schema.reading.json_schema import SchemaReader
from graftlm.core.grammar.spec import Composite, Options, Spec
from graftlm.plugins.hookspecs import Register, hookimpl
from graftlm.plugins.manager import load
from tests.grammars import BYTES, allows, compiled


@pytest.mark.parametrize(
    ("spec", "engine"),
    [
        (Regex(r"\d{3}"), "fsm"),
        (Choices(["yes", "no"]), "fsm"),
        (JsonSchema({"type": "object", "properties": {"a": {"type": "integer"}}}), "fsm"),
        (JsonSchema({"type": "array"}), "pda"),
        (JsonSchema(True), "pda"),
        (Lark('start: "a"'), "llguidance"),
        (Composite(nodes.literal("a")), "fsm"),
    ],
)
def test_the_engine_is_chosen_by_what_the_constraint_needs(spec: Regex, engine: str) -> None:
    assert compiled(spec).engine == engine


def test_a_schema_whose_every_text_leads_nowhere_is_refused() -> None:
    with pytest.raises(GrammarError, match="nothing can satisfy"):
        compiled({"type": "integer", "multipleOf": 10, "minimum": 1, "maximum": 9})


def test_choices_may_begin_alike_and_be_empty() -> None:
    grammar = compiled(Choices(["no", "north", "", "é"]))
    assert [text for text in ("no", "north", "", "é", "n", "nor") if allows(grammar, text)] == ["no", "north", "", "é"]


def test_asking_an_automaton_for_what_is_not_regular_is_an_error() -> None:
    with pytest.raises(GrammarError, match="no finite automaton can hold"):
        compiled({"type": "object"}, engine="fsm")
    with pytest.raises(GrammarError, match="only llguidance matches the text of a grammar"):
        compiled(Lark('start: "a"'), engine="fsm")


def test_an_engine_that_nobody_offers_is_named_with_those_that_are() -> None:
    with pytest.raises(PluginError, match="'nope'.*llguidance"):
        compiled(Regex("a"), engine="nope")


def test_built_in_engines_are_offered_by_name_as_plugins_are() -> None:
    grammars = load().grammars
    assert grammars["fsm"](Regex("a+"), BYTES, Options()).engine == "fsm"
    assert grammars["llguidance"](Regex("a+"), BYTES, Options(whitespace="single")).engine == "llguidance"


@pytest.fixture
def offer() -> Iterator[Callable[[Any], None]]:
    """Register one grammar engine, "acme", for the length of a test."""
    registry = load()

    class Acme:
        def __init__(self, factory: Any) -> None:
            self.factory = factory

        @hookimpl
        def graftlm_register_grammars(self, register: Register) -> None:
            register("acme", self.factory)

    yield lambda factory: registry.add("acme", Acme(factory)) and None
    registry.remove("acme")


def test_an_engine_of_a_plugin_gets_the_options_as_one_object(offer: Callable[[Any], None]) -> None:
    seen: list[Options] = []

    def acme(spec: Spec, vocabulary: Vocabulary, options: Options) -> Grammar:
        seen.append(options)
        return compile_spec(spec, vocabulary, options)

    offer(acme)
    assert allows(compiled(Regex("a+"), engine="acme", whitespace="single"), "aa")
    assert seen == [Options(whitespace="single")]


def test_an_engine_that_breaks_the_protocol_is_named_with_the_argument_or_the_result(
    offer: Callable[[Any], None],
) -> None:
    def acme(spec: Spec, vocabulary: Vocabulary, options: Options, depth: int) -> Grammar: ...

    offer(acme)
    with pytest.raises(PluginError, match=r"'acme'.*spec, vocabulary, options.*'depth'"):
        compiled(Regex("a"), engine="acme")
    load().remove("acme")
    offer(lambda spec, vocabulary, options: None)
    with pytest.raises(PluginError, match="'acme' returned NoneType"):
        compiled(Regex("a"), engine="acme")


def test_a_constraint_is_an_object_of_a_known_kind() -> None:
    with pytest.raises(ConfigError, match="dict is not a constraint"):
        Grammar.compile({"type": "object"}, BYTES)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="did you mean 'whitespace'"):
        compiled(Regex("a"), whitespac="single")


class Clock:
    """A clock whose times pass by its calls: `wall` and `processor` seconds each."""

    def __init__(self, wall: float, processor: float) -> None:
        self._wall, self._processor, self._calls = wall, processor, 0

    def monotonic(self) -> float:
        self._calls += 1
        return self._calls * self._wall

    def thread_time(self) -> float:
        return self._calls * self._processor


@pytest.mark.parametrize(
    ("limits", "clock", "message"),
    [
        (Limits(states=1_000), Clock(0, 0), "more than 1,000 states"),
        (Limits(seconds=5), Clock(100, 100), "longer than 5 s to compile"),
        (Limits(seconds=5), Clock(100, 0), "longer than 125 s by the clock to compile"),
    ],
    ids=["states", "processor", "clock"],
)
def test_a_pattern_that_explodes_is_refused_within_its_limits(
    limits: Limits, clock: Clock, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "time", clock)
    with pytest.raises(GrammarError, match=message):
        compiled(Regex("(a|b)*a(a|b){20}"), limits=limits)


def test_a_schema_over_the_states_of_an_automaton_goes_to_llguidance() -> None:
    schema = {"type": "string", "pattern": "^(a|b)*a(a|b){14}$"}
    grammar = compiled(schema, limits=Limits(states=1_000))
    assert grammar.engine == "llguidance"
    assert allows(grammar, '"a' + "b" * 14 + '"') and not allows(grammar, '"' + "b" * 15 + '"')


def test_a_schema_that_llguidance_refuses_gets_as_many_states_as_its_limits_allow() -> None:
    schema = {"type": "array", "items": {"type": "integer", "multipleOf": 1999}, "minItems": 40, "maxItems": 50}
    grammar = compiled(schema)
    assert grammar.engine == "fsm"
    assert allows(grammar, json.dumps([1999] * 40, separators=(",", ":")))
    assert not allows(grammar, json.dumps([2000] * 40, separators=(",", ":")))
    with pytest.raises(GrammarError, match=r"more than 70,000 states;.* raise limits\.states"):
        compiled(schema, limits=Limits(states=70_000))


def test_a_pattern_and_a_length_too_large_for_a_product_go_to_llguidance() -> None:
    grammar = compiled({"type": "string", "pattern": "^([a-z]+ ?)*$", "maxLength": 4000})
    assert grammar.engine == "llguidance"
    assert allows(grammar, f'"{"ab " * 1300}"') and not allows(grammar, f'"{"ab " * 1340}"')


def test_definitions_that_double_each_other_cost_no_more_than_their_number() -> None:
    definitions: dict[str, Any] = {"d0": {"type": "integer"}}
    for i in range(1, 40):
        pair = {"a": {"$ref": f"#/$defs/d{i - 1}"}, "b": {"$ref": f"#/$defs/d{i - 1}"}}
        definitions[f"d{i}"] = {"type": "object", "properties": pair, "required": ["a", "b"]}
    assert compiled({"$defs": definitions, "$ref": "#/$defs/d4"}).engine == "fsm"
    with pytest.raises(GrammarError, match="no text of less than 2 GiB"):  # the shortest has 2**39 integers
        compiled({"$defs": definitions, "$ref": "#/$defs/d39"})


def test_definitions_that_nest_too_deep_are_an_error() -> None:
    definitions: dict[str, Any] = {"d0": {"type": "integer"}}
    for i in range(1, 2000):
        definitions[f"d{i}"] = {"type": "array", "items": {"$ref": f"#/$defs/d{i - 1}"}}
    with pytest.raises(GrammarError, match="nests too deep"):
        compiled({"$defs": definitions, "$ref": "#/$defs/d1999"})


def test_more_optional_members_than_rules_can_nest_are_kept_by_an_automaton_alone() -> None:
    schema = {"type": "object", "properties": {f"p{i}": {} for i in range(900)}, "minProperties": 1}
    grammar = compiled(schema)
    assert allows(grammar, '{"p3":[],"p899":{"p1":1}}') and not allows(grammar, '{"p899":1,"p3":1}')
    assert not allows(grammar, "{}")
    with pytest.raises(GrammarError, match="1,799 states, the limit of a context-free grammar is 1,000"):
        compiled(schema, engine="llguidance")


def test_a_constraint_over_the_size_is_refused() -> None:
    with pytest.raises(GrammarError, match="5 characters, the limit is 4"):
        compiled(Regex("aaaaa"), limits=Limits(size=4))


def test_a_text_that_the_vocabulary_cannot_begin_is_an_error() -> None:
    letters = Vocabulary([b"a", b"b", b""], eos_token_id=2)
    with pytest.raises(GrammarError, match=r"3 tokens\) spell"):
        Grammar.compile(Regex("c+"), letters)


def test_a_composite_with_a_rule_that_is_not_given_is_an_error() -> None:
    with pytest.raises(GrammarError, match="'missing'"):
        compiled(Composite(nodes.Rule("missing")))


@pytest.mark.parametrize("states", [20_000, 10], ids=["an automaton", "too many states for one"])
def test_a_schema_is_read_once_though_unique_items_and_the_other_engine_need_it_again(
    states: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pointers: list[str] = []
    read = SchemaReader.read

    def counted(reader: SchemaReader, schema: Any, pointer: str) -> Shape:
        pointers.append(pointer)
        return read(reader, schema, pointer)

    monkeypatch.setattr(SchemaReader, "read", counted)
    schema = {"type": "array", "items": {"type": "string", "maxLength": 9}, "uniqueItems": True}
    allows(Grammar.compile(JsonSchema(schema), BYTES, limits=Limits(states=states)), '["a"]')
    assert sorted(pointers) == ["", "/items"]


def test_public_names_come_from_the_package() -> None:
    import graftlm.core.grammar as package

    assert package.Grammar is Grammar and package.Limits is Limits
    assert {"Grammar", "Limits", "Vocabulary"} <= set(dir(package))
    with pytest.raises(AttributeError, match="no attribute 'Nope'"):
        package.Nope  # noqa: B018


def test_the_mask_of_a_real_text_follows_it_token_by_token() -> None:
    vocabulary = Vocabulary([*BYTES.tokens, b'{"', b'":', b"12"], eos_token_id=256)
    matcher = Grammar.compile(
        JsonSchema({"properties": {"n": {"type": "integer"}}, "required": ["n"]}), vocabulary
    ).matcher()
    row = np.zeros(vocabulary.num_words, np.int32)
    for token_id in [257, ord("n"), 258, 259, ord("}"), 256]:
        matcher.fill_mask(row)
        assert row[token_id >> 5] >> (token_id & 31) & 1, token_id
        assert matcher.advance([token_id]) == 1
    assert matcher.finished
