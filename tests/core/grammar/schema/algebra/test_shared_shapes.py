"""Shapes with equal values are one object, however they are made."""

import copy
import dataclasses
import gc
import pickle
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from graftlm.core.grammar.schema.algebra import shared_shapes
from graftlm.core.grammar.schema.algebra.shapes import ANYTHING, Anything, Array, Number, Object, Text
from graftlm.core.grammar.schema.reading.json_schema import SchemaReader
from graftlm.core.grammar.spec import JsonSchema, Options


def test_values_by_position_by_name_and_by_default_give_the_same_shape() -> None:
    assert Text(1) is Text(min_length=1)
    assert Array(items=Number(True)) is Array((), Number(integer=True), 0)
    assert Anything() is ANYTHING
    assert Text(1) is not Text(2)


def test_a_copy_and_what_is_read_from_a_pickle_are_the_shape_itself() -> None:
    shape = Object(properties=(("a", Text(max_length=3)),), required=("a",))
    assert copy.deepcopy(shape) is shape
    assert pickle.loads(pickle.dumps(shape)) is shape


def test_threads_that_make_equal_shapes_at_once_get_one_object() -> None:
    with ThreadPoolExecutor(8) as threads:
        rounds = [list(threads.map(Text, [n] * 32)) for n in range(1_000, 1_200)]
    assert all(len(set(map(id, shapes))) == 1 for shapes in rounds)


def test_a_shape_that_nothing_uses_is_freed() -> None:
    shape = Object(properties=(("gone", Text(77)),))
    watched, inner = weakref.ref(shape), weakref.ref(Text(77))
    del shape
    gc.collect()
    assert watched() is None
    shared_shapes.leave_out_gone()
    assert inner() is None
    assert not any(use.values[0] == 77 for use in Text._in_use.values())


def test_shapes_that_are_gone_do_not_gather() -> None:
    for n in range(3 * shared_shapes._MOST_GONE):
        Text(min_length=10_000 + n)
    assert sum(use() is None for use in Text._in_use.values()) <= shared_shapes._MOST_GONE + 1


def test_what_leaves_late_does_not_take_its_successor_along() -> None:
    shape = Text(min_length=4_320)
    gone = Text._in_use[dataclasses.astuple(shape)]
    del shape
    assert gone in Text._gone
    successor = Text(min_length=4_320)
    assert Text._in_use[gone.values] is not gone
    shared_shapes.leave_out_gone()
    assert gone not in Text._gone
    assert Text(min_length=4_320) is successor


def test_a_shape_is_freed_while_a_thread_that_never_goes_on_leaves_others_out() -> None:
    entered, leaves = threading.Event(), threading.Event()

    def leave_out() -> None:
        with shared_shapes._lock:
            entered.set()
            leaves.wait(120)

    thread = threading.Thread(target=leave_out)
    shape = Text(min_length=4_321)
    thread.start()
    assert entered.wait(120)
    del shape  # which does not wait
    shared_shapes.leave_out_gone()  # nor does this
    assert any(use.values[0] == 4_321 for use in Text._in_use.values())
    other = Text(min_length=4_322)
    assert not leaves.is_set() and thread.is_alive()
    leaves.set()
    thread.join()
    shared_shapes.leave_out_gone()
    assert [use() for use in Text._in_use.values() if use.values[0] in (4_321, 4_322)] == [other]
    assert Text(min_length=4_321) is Text(min_length=4_321)


def test_a_shape_is_freed_as_the_interpreter_ends_and_the_names_of_its_module_are_gone() -> None:
    script = """
from graftlm.core.grammar.schema.algebra import shapes, shared_shapes
kept, in_use = [shapes.Text(min_length=900)], shapes.Text._in_use
vars(shared_shapes).update((name, None) for name in list(vars(shared_shapes)) if name != "__builtins__")
kept.clear()
print([use() for use in in_use.values() if use.values[0] == 900])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert (done.stdout, done.stderr) == ("[None]\n", "")


def test_what_is_read_of_a_schema_is_freed_with_its_reader() -> None:
    spec = JsonSchema({"properties": {"a": {"minLength": 4_323, "type": "string"}, "b": {"not": {"minLength": 4_324}}}})
    with closing(SchemaReader(spec, Options())) as reader:
        reader.shape("")
        assert any(use.values[0] == 4_323 for use in Text._in_use.values())
    assert not any(use.values[0] in (4_323, 4_324) for use in Text._in_use.values())


def test_a_field_that_no_shape_has_and_one_too_many_are_errors() -> None:
    unknown: dict[str, Any] = {"longest": 3}
    with pytest.raises(TypeError, match="Text takes min_length, max_length"):
        Text(**unknown)
    with pytest.raises(TypeError, match="Anything takes nothing"):
        Anything(*unknown)
