"""Shapes with equal values are one object, however they are made."""

import copy
import gc
import pickle
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from graftlm.core.grammar.schema.algebra import shared_shapes
from graftlm.core.grammar.schema.algebra.shapes import ANYTHING, Anything, Array, Number, Object, Text


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
    watched = weakref.ref(shape)
    del shape
    gc.collect()
    assert watched() is None


def test_what_leaves_late_does_not_take_its_successor_along() -> None:
    shape = Text(min_length=4_320)
    gone, successor = (shared_shapes._Use(shape, lambda _: None) for _ in range(2))
    gone.values = successor.values = (4_320,)
    in_use = {successor.values: successor}
    shared_shapes._entrance.leave_out(in_use, gone)
    assert in_use == {(4_320,): successor}
    shared_shapes._entrance.leave_out(in_use, successor)
    assert not in_use


def test_a_shape_is_freed_while_a_thread_that_never_goes_on_enters_one() -> None:
    entered, leaves = threading.Event(), threading.Event()

    def enter() -> None:
        with shared_shapes._entrance.lock:
            entered.set()
            leaves.wait(30)

    thread = threading.Thread(target=enter)
    shape = Text(min_length=4_321)
    thread.start()
    assert entered.wait(30)
    del shape  # which does not wait
    assert not leaves.is_set() and thread.is_alive()
    leaves.set()
    thread.join()
    assert any(use.values[0] == 4_321 for use in Text._in_use.values())
    other = Text(min_length=4_322)
    assert [use() for use in Text._in_use.values() if use.values[0] in (4_321, 4_322)] == [other]
    assert Text(min_length=4_321) is Text(min_length=4_321)


def test_a_shape_is_freed_as_the_interpreter_ends_and_the_names_of_its_module_are_gone() -> None:
    script = """
from graftlm.core.grammar.schema.algebra import shapes, shared_shapes
kept, in_use = [shapes.Text(min_length=900)], shapes.Text._in_use
vars(shared_shapes).update((name, None) for name in list(vars(shared_shapes)) if name != "__builtins__")
kept.clear()
print([use.values[0] for use in in_use.values() if use.values[0] == 900])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_field_that_no_shape_has_and_one_too_many_are_errors() -> None:
    unknown: dict[str, Any] = {"longest": 3}
    with pytest.raises(TypeError, match="Text takes min_length, max_length"):
        Text(**unknown)
    with pytest.raises(TypeError, match="Anything takes nothing"):
        Anything(*unknown)
