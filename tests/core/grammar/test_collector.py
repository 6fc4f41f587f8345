"""The collector waits for compilations, and goes on as it was."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.cache import GrammarCache
from graftlm.core.grammar.collector import paused
from graftlm.core.grammar.compile import compile_spec
from graftlm.core.grammar.schema.algebra.shapes import Object
from graftlm.core.grammar.spec import JsonSchema, Options
from tests.grammars import BYTES


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def cycles_of(spec: JsonSchema) -> list[object]:
    """Objects of grammars that compiling `spec`, and dropping what came of it, leaves to the collector."""
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        compile_spec(spec, BYTES, Options())
        gc.collect()
        return [found for found in gc.garbage if "graftlm.core.grammar" in getattr(type(found), "__module__", "")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_it_goes_on_with_the_end_of_the_last_block() -> None:
    with paused():
        with paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_goes_on_after_an_error() -> None:
    with pytest.raises(ValueError, match="x"), paused():
        raise ValueError("x")
    assert gc.isenabled()


def test_who_has_switched_it_off_finds_it_off() -> None:
    gc.disable()
    with paused():
        pass
    assert not gc.isenabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_it_runs_in_a_fork_made_meanwhile() -> None:
    with paused():
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_compiling_leaves_nothing_to_the_collector() -> None:
    def schema(name: str) -> JsonSchema:
        fields = {f"{name}{i}": {"anyOf": [{"type": "integer"}, {"type": "string"}]} for i in range(450)}
        nested = {"type": "object", "properties": {name: {"pattern": f"^{name}+$"}, "inner": {"$ref": "#"}}}
        return JsonSchema({"allOf": [{"type": "object", "properties": fields}, {"oneOf": [nested, {"type": "null"}]}]})

    compile_spec(schema("a"), BYTES, Options())  # what is kept for all schemas
    assert not cycles_of(schema("b"))


def test_a_grammar_whose_items_must_differ_leaves_nothing_to_the_collector() -> None:
    def schema(name: str) -> JsonSchema:
        items = {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}
        return JsonSchema({"$ref": "#/$defs/list", "$defs": {"list": {"items": items, "uniqueItems": True}}})

    compile_spec(schema("a"), BYTES, Options())  # what is kept for all schemas
    assert not cycles_of(schema("b"))


def test_an_error_that_is_kept_holds_nothing_of_what_was_compiled() -> None:
    endless = {"type": "object", "properties": {"endless": {"$ref": "#/$defs/endless"}}, "required": ["endless"]}
    with pytest.raises(GrammarError, match="no way to end") as raised:
        compile_spec(JsonSchema({"$ref": "#/$defs/endless", "$defs": {"endless": endless}}), BYTES, Options())
    shapes = [found for found in gc.get_objects() if type(found) is Object]
    assert not [shape for shape in shapes if shape.property("endless")]
    assert raised.value.pointer == "/$defs/endless"


def test_an_error_that_is_being_handled_keeps_what_its_frames_hold() -> None:
    def fail() -> None:
        value = "kept"
        raise KeyError(value)

    try:
        fail()
    except KeyError as error:
        with pytest.raises(GrammarError, match="nowhere"):
            compile_spec(JsonSchema({"$ref": "#/$defs/nowhere"}), BYTES, Options())
        traceback = error.__traceback__
        assert traceback is not None and traceback.tb_next is not None
        assert traceback.tb_next.tb_frame.f_locals["value"] == "kept"


def test_compiling_causes_no_collection() -> None:
    fields = {f"field{i}": {"anyOf": [{"type": "integer"}, {"type": "string"}]} for i in range(80)}
    schema = JsonSchema({"type": "object", "properties": fields})
    runs: list[str] = []

    def seen(phase: str, info: dict[str, int]) -> None:
        runs.append(phase)

    gc.collect()
    gc.callbacks.append(seen)
    try:
        compile_spec(schema, BYTES, Options())
        during = len(runs)
    finally:
        gc.callbacks.remove(seen)
    assert during <= 2  # one, perhaps, of what is done after it


@pytest.mark.parametrize("more", [{}, {"self": {"type": "array", "items": {"$ref": "#"}}}])
def test_a_grammar_that_is_kept_used_to_be_over_seventy_objects_that_each_collection_looks_at(
    more: dict[str, object],
) -> None:
    def schema(i: int) -> JsonSchema:
        fields = {f"text{i}": {"type": "string", "maxLength": 8 + i}, f"word{i}": {"pattern": "^[a-z]{2,5}$"}}
        return JsonSchema({"type": "object", "properties": {**fields, **more}, "required": list(fields)})

    def use(i: int) -> None:
        text = f'{{"text{i}":"a b","word{i}":"abc'.encode()
        matcher, row = cache.get(schema(i), BYTES).matcher(), np.zeros(BYTES.num_words, np.int32)
        for byte in text:
            matcher.fill_mask(row)
            matcher.forced([])
            assert matcher.advance([byte]) == 1
        assert matcher.min_tokens_to_accept() == 2

    cache = GrammarCache()
    for i in range(4):
        use(i)
    gc.collect()
    before = len(gc.get_objects())
    for i in range(4, 24):
        use(i)
    gc.collect()
    each = 35 if sys.version_info < (3, 14) else 50  # since 3.14 the collector visits dicts of plain values too
    assert len(gc.get_objects()) - before < 20 * each
    assert len(cache) == 24
    cache.close()
