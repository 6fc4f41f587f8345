"""A vocabulary that was sent encodes as the one here; processes draft for it."""

from __future__ import annotations

import pickle
import sys
import time
from concurrent.futures import Future
from typing import Any

import pytest

from graftlm.core.constraint import vocabulary_of
from graftlm.core.grammar.drafting.draft import Draft
from graftlm.core.grammar.drafting.processes import DraftingProcesses
from graftlm.core.grammar.drafting.vocabulary_image import VocabularyImage
from graftlm.core.grammar.spec import JsonSchema, Options
from graftlm.core.model.embedded import sprout_folder
from graftlm.core.text.tokenizer import Tokenizer
from tests.models import byte_tokenizer

TEXTS = [b'{"name":"', b'","kind":', b"}", "é".encode(), b"ok\xc3", b"<s> x", b"\x00"]
FIELDS = {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}}
SCHEMA = JsonSchema({"type": "object", "properties": FIELDS, "required": list(FIELDS)})


@pytest.mark.parametrize("name", ["sprout", "bytes"])
def test_a_vocabulary_that_was_sent_is_the_same(name: str) -> None:
    tokenizer = (
        Tokenizer.from_pretrained(str(sprout_folder())) if name == "sprout" else Tokenizer.from_hf(byte_tokenizer())
    )
    vocabulary = vocabulary_of(tokenizer)
    image = VocabularyImage.of(vocabulary, tokenizer)
    assert image is not None
    sent = pickle.loads(pickle.dumps(image)).vocabulary()
    assert sent.fingerprint == image.fingerprint == vocabulary.fingerprint
    assert sent.eos_token_ids == vocabulary.eos_token_ids
    for text in TEXTS:
        assert sent.encode(text) == vocabulary.encode(text)
        for token_id in (5, 40, 80, 200):
            assert sent.joins(token_id, text) == vocabulary.joins(token_id, text)


def test_a_tokenizer_whose_core_cannot_be_sent_has_no_image() -> None:
    class Core:
        def __reduce__(self) -> Any:
            raise TypeError("a part is written in Python")

    class Odd:
        continuation_backend = Core()
        backend = None

    vocabulary = vocabulary_of(Tokenizer.from_pretrained(str(sprout_folder())))
    odd: Any = Odd()
    assert VocabularyImage.of(vocabulary, odd) is None
    odd.continuation_backend = None
    assert VocabularyImage.of(vocabulary, odd) is None


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
def test_processes_work_out_forced_texts_for_the_vocabulary_that_they_have() -> None:
    tokenizer = Tokenizer.from_pretrained(str(sprout_folder()))
    vocabulary = vocabulary_of(tokenizer)
    processes = DraftingProcesses(1)
    late: tuple[int, ...] | None = None
    try:
        processes.start(lambda: VocabularyImage.of(vocabulary, tokenizer))
        processes.wait()
        found = []
        for fingerprint in (vocabulary.fingerprint, "another", None):
            answer: Future[Any] = Future()
            processes.submit(SCHEMA, Options(), answer.set_result, fingerprint)
            found.append(answer.result(60))
        after_value = found[0].automaton.walk(found[0].automaton.start, b'{"a":"x')
        until_s = time.monotonic() + 60
        while (late := found[0].forced.ids(after_value)) is None and time.monotonic() < until_s:
            time.sleep(0.01)
    finally:
        processes.close()
    assert all(isinstance(draft, Draft) for draft in found)
    assert [draft.forced is not None for draft in found] == [True, False, False]
    begins = (found[0].automaton.start[0],)
    text, _ = found[0].forced.run(begins)
    ids = found[0].forced.ids(begins)
    assert text.startswith(b'{"a":') and ids and list(ids) == vocabulary.encode(text)[: len(ids)]
    assert late and vocabulary.decode(late).startswith(b'","b":')
