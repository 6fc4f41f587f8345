from __future__ import annotations

from graftlm.core.text.tokenizer import Tokenizer
from tests.models import IM_END, byte_tokenizer
from tests.toy_tokenizers import sentencepiece_tokenizer

BYTES = Tokenizer.from_hf(byte_tokenizer(merges=[("t", "h"), ("th", "e"), ("Ġ", "the")]))
SENTENCEPIECE = Tokenizer.from_hf(sentencepiece_tokenizer())


def test_the_byte_table_of_byte_level_bpe() -> None:
    assert BYTES.token_bytes[:256] == [bytes([byte]) for byte in range(256)]
    assert BYTES.token_bytes[IM_END] == b"" and BYTES.is_special(IM_END)
    assert BYTES.token_bytes[BYTES.encode(" the")[0]] == b" the"
    assert len(BYTES.token_bytes) == BYTES.vocab_size


def test_the_byte_table_of_sentencepiece_with_byte_fallback() -> None:
    ids = SENTENCEPIECE.encode_continuation(" hello\né")
    assert [SENTENCEPIECE.token_bytes[i] for i in ids] == [b" hello", b"\n", b"\xc3", b"\xa9"]


def test_an_added_token_that_is_not_special_is_its_own_text() -> None:
    hf = byte_tokenizer()
    hf.add_tokens(["<think>é"])
    tokenizer = Tokenizer.from_hf(hf)
    (token,) = tokenizer.encode("<think>é")
    assert tokenizer.token_bytes[token] == "<think>é".encode()
    assert tokenizer.detokenizer().push([token]) == "<think>é"


def test_a_piece_that_stands_for_no_bytes_is_its_own_text() -> None:
    hf = byte_tokenizer()
    vocab = {**hf.get_vocab(), "\u4e2d": 400, "a\ufffeb": 401}
    tokenizer = Tokenizer.from_hf(hf)
    hf.get_vocab = lambda: vocab
    assert tokenizer.token_bytes[400:] == ["\u4e2d".encode(), "a\ufffeb".encode()]
    assert tokenizer.token_bytes[:256] == [bytes([byte]) for byte in range(256)]
