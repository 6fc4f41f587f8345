from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from graftlm.core.chat.messages import Message
from graftlm.core.errors import ConfigError, GraftError, ModelError, RequestTooLong
from graftlm.core.text import render_limit
from graftlm.core.text.tokenizer import Tokenizer
from tests.models import BOS, IM_END, byte_tokenizer
from tests.tokenizer_kinds import tokenizer_kind
from tests.toy_tokenizers import metaspace_tokenizer, sentencepiece_tokenizer

BYTES = Tokenizer.from_hf(byte_tokenizer(merges=[("t", "h"), ("th", "e"), ("Ġ", "the")]))
SENTENCEPIECE = Tokenizer.from_hf(sentencepiece_tokenizer())


def test_text_gets_exactly_one_bos_where_the_tokenizer_puts_one() -> None:
    tokenizer = Tokenizer.from_hf(byte_tokenizer(add_bos=True))
    assert tokenizer.encode("a") == tokenizer.encode("<|bos|>a") == [BOS, 97]
    assert tokenizer.encode_continuation("a") == [97]
    assert BYTES.encode("a") == [97]


@pytest.mark.parametrize("tokenizer", [BYTES, SENTENCEPIECE], ids=["bytes", "sentencepiece"])
@pytest.mark.parametrize("text", ["the other the<|im_end|>x", "the other\nthe<|im_end|>x " * 90], ids=["short", "long"])
def test_counted_ids_are_those_of_the_text_on_its_own_whatever_was_cut_before(tokenizer: Tokenizer, text: str) -> None:
    expected = tokenizer.hf.encode(text, add_special_tokens=False)
    assert tokenizer.ids_alone(text) == expected
    tokenizer.hf("the other", truncation=True, max_length=1)  # Hugging Face leaves its tokenizer's core cutting
    assert tokenizer.ids_alone(text) == expected


def test_a_final_message_can_be_continued() -> None:
    text = BYTES.render([Message("user", "2+2?"), Message("assistant", "It is")], continue_final_message=True)
    assert text.endswith("assistant\nIt is")


def test_tools_reach_the_template() -> None:
    assert '"name": "add"' in BYTES.render([Message("user", "x")], tools=[{"name": "add"}])


def test_eos_ids_are_those_of_the_tokenizer_and_of_the_generation_config(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, IM_END]}))
    assert Tokenizer.from_pretrained(str(tmp_path)).eos_token_ids == (IM_END, 257)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("null", "cannot be read"),
        ("[]", "cannot be read"),
        ("{", "cannot be read"),
        ('{"pad_token_id": "x"}', "cannot be read"),
        ('{"watermarking_config": 3}', "cannot be read"),
        ('{"eos_token_id": ' + "[" * 9_999 + "]" * 9_999 + "}", "cannot be read"),
        ('{"eos_token_id": "two"}', "has eos_token_id 'two'"),
        ('{"eos_token_id": [1, "2"]}', r"has eos_token_id \[1, '2'\]"),
        ('{"eos_token_id": [null]}', "has eos_token_id"),
        ('{"eos_token_id": 1000000000000}', "has eos_token_id 1000000000000"),
        ('{"eos_token_id": true}', "has eos_token_id True"),
    ],
    ids=lambda text: text[:30],
)
def test_an_odd_generation_config_used_to_raise_type_errors_or_to_lose_its_end(
    tmp_path: Path, text: str, message: str
) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_pretrained(str(tmp_path))


@pytest.mark.parametrize(("cached", "refused"), [(False, True), (True, False)], ids=["folder", "hub cache"])
def test_a_chat_template_that_links_out_of_its_folder_used_to_be_followed(
    tmp_path: Path, cached: bool, refused: bool
) -> None:
    folder = tmp_path / "snapshots" / "main" if cached else tmp_path / "model"
    byte_tokenizer().save_pretrained(folder)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "secret").write_text("{{ 'secret' }}")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.jinja").symlink_to(tmp_path / "blobs" / "secret")
    if refused:
        with pytest.raises(ModelError, match="is a link out of its folder"):
            Tokenizer.from_pretrained(str(folder))
    else:
        assert Tokenizer.from_pretrained(str(folder)).render([Message("user", "x")]) == "secret"


def test_a_chat_template_that_loops_used_to_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    hf = byte_tokenizer()
    loop = "{% for i in range(99999) %}"
    hf.chat_template = loop * 3 + "{% endfor %}" * 3
    monkeypatch.setattr(render_limit, "MOST_S", 0.0)
    with pytest.raises(ConfigError, match="runs for more than 0 s; it may loop for ever"):
        Tokenizer.from_hf(hf).render([Message("user", "x")])
    monkeypatch.undo()
    hf.chat_template = "{{ messages[0].content }}"
    assert Tokenizer.from_hf(hf).render([Message("user", "x")]) == "x"


def test_a_folder_without_a_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer could be loaded"):
        Tokenizer.from_pretrained(str(tmp_path))


@pytest.mark.parametrize("make", [sentencepiece_tokenizer, metaspace_tokenizer], ids=["prepend", "metaspace"])
def test_a_continuation_gets_no_space_of_its_own(make: Callable[[], object]) -> None:
    tokenizer = Tokenizer.from_hf(make())
    assert tokenizer.token_bytes[tokenizer.encode("a")[-1]] == b" a"
    joined = tokenizer.encode("b") + tokenizer.encode_continuation("a") + tokenizer.encode_continuation(" a")
    assert tokenizer.decode(joined) == "ba a"


def test_fingerprints_differ_by_vocabulary_and_by_template() -> None:
    other = byte_tokenizer()
    other.chat_template = "x"
    prints = {Tokenizer.from_hf(hf).fingerprint for hf in (byte_tokenizer(), byte_tokenizer(), other)}
    assert len(prints) == 2 and BYTES.fingerprint not in prints


def test_a_token_of_part_of_a_character_has_no_text_of_its_own() -> None:
    assert BYTES.whole_text(97) == "a"
    assert BYTES.whole_text(0xC3) is None
    assert BYTES.whole_text(IM_END) is None


def test_a_long_text_has_the_ids_of_the_whole_and_ends_beyond_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlm.core.text.tokenizer.LONG_CHARS", 100)
    monkeypatch.setattr("graftlm.core.text.batch_encoder.LONG_CHARS", 100)
    tokenizer = Tokenizer.from_hf(tokenizer_kind("cl100k"))
    text = "The sea, which is blue, has 1,234 fish. " * 200
    whole = tokenizer.encode_one(text)
    encoded = tokenizer.encode_within(text, len(whole))
    assert not isinstance(encoded, GraftError)
    assert encoded.tolist() == whole
    refused = tokenizer.encode_within(text, len(whole) - 1)
    assert isinstance(refused, RequestTooLong)
    assert refused.limit == len(whole) - 1


def test_a_text_that_no_context_can_hold_is_refused_by_its_characters() -> None:
    tokenizer = Tokenizer.from_hf(tokenizer_kind("cl100k"))
    refused = tokenizer.encode_within("a" * (10 * tokenizer.longest_token + 1), 10)
    assert isinstance(refused, RequestTooLong)
    assert "more than 10 tokens can hold" in str(refused)


def test_a_text_without_a_place_to_cut_is_refused_beyond_the_longest_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlm.core.text.tokenizer.LONG_CHARS", 100)
    monkeypatch.setattr("graftlm.core.text.batch_encoder.LONGEST_BLOCK", 1000)
    tokenizer = Tokenizer.from_hf(tokenizer_kind("cl100k"))
    assert isinstance(tokenizer.encode_within("a" * 1001, 10_000), ConfigError)
