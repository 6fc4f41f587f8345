"""What the first constraint needs is got ready beside the loading of a model."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from graftlm.core.constraint import prepare_constraints
from graftlm.core.text.tokenizer import Tokenizer
from tests.models import byte_tokenizer

ROOT = Path(__file__).parents[2]

LOADED_RUNTIME = """
import sys, threading
import graftlm as gl

def no_numba():
    return not any(name.split(".")[0] == "numba" for name in sys.modules)

with gl.Runtime("sprout", device="cpu") as runtime:
    runtime.load()
    for thread in threading.enumerate():
        if thread.name.startswith("graftlm grammar"):
            thread.join()
    from graftlm.core.constraint import _vocabularies
    from graftlm.core.grammar.automata import jit
    assert "graftlm.core.grammar.schema.lowering" in sys.modules
    assert _vocabularies[runtime.tokenizer]._index is not None
    runtime.generate("Mara is", max_tokens=2)
    assert jit._thread is None and no_numba()
    assert runtime.generate("Mara is", regex="yes", max_tokens=4).text == "yes"
    assert jit._thread is not None and no_numba()
    jit._thread.join()
    assert all(loop.machine_code is not None for loop in jit._loops)
"""


def prepared(tokenizer: Tokenizer) -> None:
    before = set(threading.enumerate())
    prepare_constraints(tokenizer)
    for thread in set(threading.enumerate()) - before:
        thread.join()


def test_a_loaded_runtime_has_the_trie_of_its_vocabulary_and_loads_compiled_loops_after_the_first_constraint() -> None:
    subprocess.run([sys.executable, "-c", LOADED_RUNTIME], check=True, cwd=ROOT)


AFTER_LOAD = """
import os, threading, time
import graftlm.core.constraint as constraint
from graftlm.core.grammar.engines import llguidance_tokenizer as engine
from tests.models import byte_tokenizer

tokenizer = byte_tokenizer()
built = engine.tokenizer_of
engine.MIN_TOKENS = 0
constraint._num_cores = lambda: CORES
for prepare in (constraint.prepare_constraints, constraint.prepare_constraints_after_load):
    before = set(threading.enumerate())
    prepare(tokenizer)
    for thread in set(threading.enumerate()) - before:
        thread.join()
    print(constraint.vocabulary_of(tokenizer).fingerprint in built, end=" ")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is built when it is needed")
@pytest.mark.parametrize(("cores", "built"), [(1, "False False "), (2, "False True "), (4, "True True ")])
def test_what_llguidance_needs_is_built_beside_a_load_on_four_cores_and_after_it_on_two(cores: int, built: str) -> None:
    script = AFTER_LOAD.replace("CORES", str(cores))
    done = subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == built


def test_a_tokenizer_that_fails_ends_no_load() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.__dict__["token_bytes"] = None
    prepared(tokenizer)
