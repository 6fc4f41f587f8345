"""What the first constraint needs is got ready beside the loading of a model."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

from graftlm.core.chat.chat import chat_format
from graftlm.core.constraint import prepare_constraints, vocabulary_of
from graftlm.core.grammar.automata import jit
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
    from graftlm.core.grammar.vocabulary import Vocabulary
    from graftlm.core.grammar.automata import jit
    assert "graftlm.core.grammar.schema.lowering" in sys.modules
    assert runtime.tokenizer.derived[Vocabulary]._index is not None
    assert all(loop.machine_code is not None for loop in jit._loops)
    assert runtime.generate("Mara is", regex="yes", max_tokens=4).text == "yes"
    assert jit._thread is None and no_numba()
"""


def prepared(tokenizer: Tokenizer) -> None:
    before = set(threading.enumerate())
    prepare_constraints(tokenizer)
    for thread in set(threading.enumerate()) - before:
        thread.join()


def test_a_loaded_runtime_has_the_trie_of_its_vocabulary_and_the_loops_that_are_ready() -> None:
    jit.wait()  # they are, from here on
    subprocess.run([sys.executable, "-c", LOADED_RUNTIME], check=True, cwd=ROOT)


def test_a_tokenizer_that_fails_ends_no_load() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.__dict__["token_bytes"] = None
    prepared(tokenizer)


def test_a_vocabulary_used_to_keep_the_tokenizer_of_a_closed_runtime() -> None:
    tokenizer = Tokenizer.from_hf(byte_tokenizer())
    vocabulary_of(tokenizer).prepare()
    chat_format(tokenizer).around(("user",))
    alive = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert alive() is None
