"""llguidance's tokenizer built outside of Python's lock is the one that its binding builds."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from graftlm import Grammar, JsonSchema, Vocabulary
from graftlm.core.grammar.engines import llguidance_tokenizer as ours
from graftlm.core.grammar.engines.library import PerVocabulary
from tests.core.grammar.vocabularies import bpe_vocabulary
from tests.grammars import BYTES

ROOT = Path(__file__).parents[4]

LARGE = Vocabulary([*BYTES.tokens, *(b"%d" % i for i in range(100, 60_000))], eos_token_id=256)

LARK = """start: "{" (pair ("," pair)*)? "}"
pair: /"[a-zé\\\\ ]{1,12}"/ ":" (NUMBER | start | "true" | "false" | "a text that is quite long")
NUMBER: /-?(0|[1-9][0-9]{0,5})(\\.[0-9]+)?/
"""


def bound(vocabulary: Vocabulary) -> LLTokenizer:
    """The binding's own."""
    return LLTokenizer(TokenizerWrapper(ours._ByteTokenizer(vocabulary)))


def mask(matcher: LLMatcher, vocabulary: Vocabulary) -> np.ndarray[Any, np.dtype[np.int32]]:
    row = np.zeros(vocabulary.num_words, np.int32)
    matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
    return row


def test_this_installation_is_a_known_one() -> None:
    if sys.platform == "linux":
        assert ours._library() is not None


@pytest.mark.parametrize("vocabulary", [BYTES, bpe_vocabulary()], ids=["bytes", "bpe"])
def test_it_tokenizes_masks_and_forces_as_the_one_of_the_binding(vocabulary: Vocabulary) -> None:
    built, other = ours.build_outside_lock(vocabulary), bound(vocabulary)
    assert built is not None
    assert (built.vocab_size, built.eos_token, built.is_canonical) == (other.vocab_size, other.eos_token, True)
    for data in (b"hello \xe6\x97\xa5", b"a\xff\xfe\x80b", b"", b"1234567890" * 9):
        assert built.tokenize_bytes(data) == other.tokenize_bytes(data)
    rng = random.Random(0)
    for _ in range(4):
        pair = [LLMatcher(tokenizer, LARK, log_level=0) for tokenizer in (built, other)]
        for _ in range(60):
            rows = [mask(matcher, vocabulary) for matcher in pair]
            assert (rows[0] == rows[1]).all()
            forced = [matcher.compute_ff_tokens() for matcher in pair]
            assert forced[0] == forced[1]
            allowed = np.flatnonzero(np.unpackbits(rows[0].view(np.uint8), bitorder="little"))
            chosen = forced[0] or [int(rng.choice(allowed.tolist()))]
            assert [matcher.try_consume_tokens(chosen) for matcher in pair] == [len(chosen)] * 2
            if pair[0].is_stopped():
                break


def test_other_threads_run_while_it_is_built() -> None:
    vocabulary = LARGE
    assert ours.builds_outside_lock(vocabulary)
    ours._library()
    longest = 0.0
    done = threading.Event()

    def watch() -> None:
        nonlocal longest
        last = time.perf_counter()
        while not done.is_set():
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    ours.build_outside_lock(vocabulary)
    built_s = time.perf_counter() - start
    done.set()
    watcher.join()
    assert longest < 0.8 * built_s  # with the lock kept it is all of it


def test_matchers_outlive_the_tokenizer_and_its_vocabulary() -> None:
    vocabulary = Vocabulary(list(BYTES.tokens), eos_token_id=256)
    built = ours.build_outside_lock(vocabulary)
    assert built is not None
    matcher = LLMatcher(built, 'start: "héllo " /[ab]+/', log_level=0)
    del built, vocabulary
    assert matcher.compute_ff_tokens() == list("héllo ".encode())
    assert matcher.deep_copy().try_consume_tokens([*"héllo a".encode()]) == 8


def test_tokenizers_and_matchers_come_and_go_in_many_threads() -> None:
    failed: list[BaseException] = []

    def use() -> None:
        try:
            for _ in range(20):
                built = ours.build_outside_lock(BYTES)
                assert built is not None
                good, bad = LLMatcher(built, LARK, log_level=0), LLMatcher(built, "start: nothing", log_level=0)
                assert bad.is_error() and "unknown name" in bad.get_error()
                assert good.try_consume_tokens(list(b'{"a":1')) == 6 and good.rollback(2)
                assert mask(good.deep_copy(), BYTES).any()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.parametrize("tokens", [[b"a" * 600], [b"ab" * (1 << 21)]], ids=["long", "huge"])
def test_a_vocabulary_that_the_trie_cannot_hold_is_left_to_the_binding(tokens: list[bytes]) -> None:
    assert ours.build_outside_lock(Vocabulary([*BYTES.tokens, *tokens], eos_token_id=256)) is None


def test_a_vocabulary_that_cannot_spell_every_byte_is_left_to_the_binding() -> None:
    assert ours.build_outside_lock(Vocabulary([b"a", b"b", b""], eos_token_id=2)) is None


def test_an_unknown_version_is_left_to_the_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    ours._library.cache_clear()
    monkeypatch.setattr(ours, "KNOWN_VERSIONS", frozenset({"0.0.1"}))
    try:
        assert ours._library() is None and not ours.builds_outside_lock(LARGE)
        assert ours._build(LARGE).vocab_size == LARGE.vocab_size
    finally:
        ours._library.cache_clear()


def test_what_somebody_else_holds_too_is_not_exchanged() -> None:
    first, second = LLTokenizer("byte", slices=[]), LLTokenizer("byte", slices=[])
    address = id(second) + ours._HEADER_BYTES
    count = ctypes.c_size_t.from_address(ctypes.c_void_p.from_address(address).value or 0)
    count.value += 1
    assert not ours._exchange(first, address)
    count.value -= 1
    assert ours._exchange(first, address)


def test_an_encoder_that_fails_spells_by_bytes() -> None:
    def encode(text: str) -> list[int]:
        raise RuntimeError("no")

    vocabulary = Vocabulary(list(BYTES.tokens), eos_token_id=256, encode=encode)
    built = ours.build_outside_lock(vocabulary)
    assert built is not None and built.tokenize_str("abc") == [97, 98, 99]


INTERRUPTED = """
import signal
import numpy as np
from graftlm import Grammar, Lark
from graftlm.core.grammar.engines import llguidance_tokenizer as ours
from tests.core.grammar.vocabularies import bpe_vocabulary

armed = False

def interrupt(*_):
    if armed:
        raise KeyboardInterrupt

vocabulary = bpe_vocabulary()
ours.MIN_TOKENS = 0
text = 'start: "a text that is forced, " /[a-z]{3}/ ", and another one" start | "x"'
grammar = Grammar.compile(Lark(text), vocabulary)
assert ours._callbacks
row = np.zeros(vocabulary.num_words, np.int32)
signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0007)
interrupts = 0
while interrupts < 300:
    try:
        armed = True
        matcher = grammar.matcher()
        for _ in range(20):
            matcher.fill_mask(row)
            forced = matcher.forced([])
            matcher.advance(forced or [int(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))[0])])
        armed = False
    except KeyboardInterrupt:
        armed = False
        interrupts += 1
signal.setitimer(signal.ITIMER_REAL, 0)
print("whole")
"""


def test_an_interrupt_in_the_main_thread_never_reaches_the_callback() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith("whole\n") and not done.stderr, done.stderr


def test_a_fork_does_not_wait_for_what_a_thread_of_its_parent_builds() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def build(vocabulary: Vocabulary) -> int:
        begun.set()
        go_on.wait()
        return 1

    built = PerVocabulary(build)
    thread = threading.Thread(target=built, args=(BYTES,))
    thread.start()
    begun.wait()
    child = os.fork()
    if not child:
        go_on.set()
        os._exit(0 if built(BYTES) == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    go_on.set()
    thread.join()


def test_open_schemas_are_matched_with_it() -> None:
    schema = JsonSchema({"type": "object", "properties": {"a": {}}, "required": ["a"]})
    vocabulary = LARGE
    grammar = Grammar.compile(schema, vocabulary)
    matcher = grammar.matcher()
    forced = matcher.forced([])
    assert grammar.engine == "llguidance" and vocabulary.decode(forced).startswith(b'{"a"')
