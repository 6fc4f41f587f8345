from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from transformers import ByT5Tokenizer

from graftlm.core.text.batch_encoder import BatchEncoder, Block, BlockCache
from graftlm.core.text.safe_cuts import read_safe_cuts
from graftlm.core.text.tokenizer import Tokenizer
from tests.tokenizer_kinds import CORPUS, KINDS, SPECIALS, tokenizer_kind

_WORDS = [
    "the",
    "fox",
    "brown",
    "I",
    "it's",
    "WE'LL",
    "x",
    "e\u0301",
    "\u4f60\u597d",
    "\u041f\u0440\u0438",
    "12345",
    "7",
]
_SIGNS = [".", "!", "'", "'s", "/", "\u3002", "\u2581", "\u0301", "\u00a0", "\u0120", "\ud7ff", "<mask>", "x<|im_"]
_SPACES = [" ", " ", " ", "  ", "\n", "\n\n", " \n", "\t", "\r\n", "    "]
TEXTS = st.lists(st.sampled_from([*_WORDS, *_SIGNS, *_SPACES, *_SPACES, *SPECIALS]), max_size=30).map("".join)


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.hf.encode(text, add_special_tokens=False)
    return ids


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(texts=st.lists(TEXTS, min_size=1, max_size=5), block_chars=st.integers(1, 12))
def test_ids_by_blocks_are_those_of_the_whole_text(kind: str, texts: list[str], block_chars: int) -> None:
    tokenizer = Tokenizer.from_hf(tokenizer_kind(kind))
    encoder = BatchEncoder(tokenizer, block_chars=block_chars)
    expected = [whole(tokenizer, text) for text in texts]
    assert [ids.tolist() for ids in encoder.encode(texts)] == expected
    assert [ids.tolist() for ids in encoder.encode(texts)] == expected  # now all of it is in the cache


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(shared=TEXTS, texts=st.lists(TEXTS, min_size=2, max_size=6), block_chars=st.integers(1, 12))
def test_ids_of_texts_one_after_the_other_are_those_of_each(
    kind: str, shared: str, texts: list[str], block_chars: int
) -> None:
    tokenizer = Tokenizer.from_hf(tokenizer_kind(kind))
    encoder = BatchEncoder(tokenizer, block_chars=block_chars)
    for text in [shared, *(shared + text for text in texts), shared]:
        (ids,) = encoder.encode([text])
        assert ids.tolist() == whole(tokenizer, text)
        ids[:] = -1  # which is nobody else's


def test_a_token_that_joins_a_text_with_what_it_shared_with_the_one_before() -> None:
    tokenizer = Tokenizer.from_hf(tokenizer_kind("llama 2, a token that is no cut"))
    encoder = BatchEncoder(tokenizer, block_chars=1)
    head = "the fox brown fox it"
    for text in (head, f"{head} is <mask> x", f"{head} is <mask> x y", f"{head} is", f"{head} is<mask>"):
        (ids,) = encoder.encode([text])
        assert ids.tolist() == whole(tokenizer, text)


def test_no_texts_ask_nothing_of_the_tokenizer() -> None:
    encoder = BatchEncoder(Tokenizer.from_hf(tokenizer_kind("cl100k")))
    assert encoder.encode([]) == []
    assert encoder._cuts is None


@pytest.mark.parametrize("kind", KINDS)
def test_which_kinds_may_be_cut_behind_a_letter(kind: str) -> None:
    hf = tokenizer_kind(kind)
    puts_space = Tokenizer.from_hf(hf).continuation_backend is not None
    cuts = read_safe_cuts(hf.backend_tokenizer, puts_space=puts_space)
    assert (cuts.next("word next", 1) == (4, False)) == KINDS[kind][1]


@pytest.mark.parametrize("kind", KINDS)
def test_arbitrary_text_gets_the_ids_of_the_whole(kind: str) -> None:
    tokenizer = Tokenizer.from_hf(tokenizer_kind(kind))
    texts = ["\n".join(CORPUS), "<s>" + CORPUS[3] * 20, "word " * 1000, "\u4f60" * 2000, " " * 1500, ""]
    assert [ids.tolist() for ids in BatchEncoder(tokenizer).encode(texts)] == [whole(tokenizer, t) for t in texts]


def encoder_that_counts(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[BatchEncoder, list[Block]]:
    encoder = BatchEncoder(Tokenizer.from_hf(tokenizer_kind("cl100k")), **options)
    encoded: list[Block] = []
    encode_blocks = encoder._encode_blocks

    def counting(backend: Any, blocks: list[Block]) -> Any:
        encoded.extend(blocks)
        return encode_blocks(backend, blocks)

    monkeypatch.setattr(encoder, "_encode_blocks", counting)
    return encoder, encoded


def test_a_shared_prefix_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, encoded = encoder_that_counts(monkeypatch)
    system = "You are a helpful assistant. " * 200
    encoder.encode([f"{system}Question {i}?" for i in range(50)])
    assert sum(len(block.text) for block in encoded) < len(system) + 50 * 600
    encoded.clear()
    encoder.encode([f"{system}Another {i}?" for i in range(50)])
    assert sum(len(block.text) for block in encoded) < 50 * 600


def test_a_chat_may_be_cut_behind_its_special_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, encoded = encoder_that_counts(monkeypatch)
    turn = "<|im_start|>user\n" + "\u4f60\u597d" * 300 + "<|im_end|>"  # no letter of ASCII to cut behind
    encoder.encode([turn + "\n1"])
    encoder.encode([turn + "\n2"])
    assert [block.text for block in encoded] == [turn, "\n1", "\n2"]


def test_the_cache_keeps_to_its_bytes() -> None:
    encoder = BatchEncoder(Tokenizer.from_hf(tokenizer_kind("cl100k")), max_bytes=20_000)
    for i in range(50):
        encoder.encode([f"{i} some words of a prompt " * 100])
        assert encoder.cache.num_bytes <= 20_000
    assert len(encoder.cache) > 0


def test_a_long_text_is_kept_nowhere_but_in_the_cache() -> None:
    tokenizer = Tokenizer.from_hf(tokenizer_kind("gpt2"))
    encoder = BatchEncoder(tokenizer, max_bytes=10_000)
    for texts in (["word " * 60_000], ["word " * 60_000, "word " * 70_000]):
        encoder.encode(texts)
        assert encoder.cache.num_bytes <= 10_000
        assert encoder._last_alone is None and encoder._last == ("", [])


def test_what_was_used_last_stays_longest() -> None:
    ids = np.arange(100, dtype=np.int32)
    first, second, third = (Block(f"block {i}", False) for i in range(3))
    cache = BlockCache(max_bytes=1600)  # room for two
    cache.put_many({first: ids, second: ids})
    cache.get_many([first])
    cache.put_many({third: ids})
    assert set(cache.get_many([first, second, third])) == {first, third}


def test_tokens_that_are_added_later_are_found() -> None:
    hf = KINDS["cl100k"][0]()
    tokenizer = Tokenizer.from_hf(hf)
    encoder = BatchEncoder(tokenizer, block_chars=4)
    text = "some lazy dog and some lazy dog"
    encoder.encode([text])
    hf.add_tokens(["lazy dog"])
    assert encoder.encode([text])[0].tolist() == whole(tokenizer, text)


def test_a_tokenizer_that_its_owner_made_truncate_is_asked_text_by_text() -> None:
    hf = KINDS["gpt2"][0]()
    tokenizer = Tokenizer.from_hf(hf)
    expected = whole(tokenizer, CORPUS[0])
    hf(CORPUS[0], truncation=True, max_length=3)
    assert tokenizer.encode_texts([CORPUS[0]])[0].tolist() == expected


def test_a_tokenizer_without_a_fast_core_is_asked_text_by_text_and_says_so_once() -> None:
    tokenizer = Tokenizer.from_hf(ByT5Tokenizer())
    with pytest.warns(UserWarning, match="one by one, more slowly: ByT5Tokenizer") as said:
        results = tokenizer.encode_texts(["first", "second"])
        results += tokenizer.encode_texts(["first"])
    assert [np.asarray(ids).tolist() for ids in results] == [whole(tokenizer, t) for t in ("first", "second", "first")]
    assert len(said) == 1


def test_threads_share_one_cache() -> None:
    tokenizer = Tokenizer.from_hf(tokenizer_kind("cl100k"))
    texts = [f"{'A shared system prompt. ' * 100} {i}" for i in range(40)]
    expected = [whole(tokenizer, text) for text in texts]
    found: list[list[int]] = [[] for _ in texts]

    def work(part: int) -> None:
        for i in range(part, len(texts), 4):
            found[i] = tokenizer.encode_texts([texts[i]])[0].tolist()

    threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected
