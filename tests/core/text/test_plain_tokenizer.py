from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from transformers import AutoTokenizer

from graftlm.core.model.embedded import sprout_folder
from graftlm.core.text import plain_tokenizer
from graftlm.core.text.plain_tokenizer import KnownTokenizer, PlainTokenizer
from graftlm.core.text.tokenizer import Tokenizer
from tests.models import byte_tokenizer
from tests.toy_tokenizers import metaspace_tokenizer, sentencepiece_tokenizer

SPROUT = str(sprout_folder())
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "It is"},
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRAFTLM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("make", [byte_tokenizer, sentencepiece_tokenizer, metaspace_tokenizer])
def test_a_second_load_needs_no_transformers_and_knows_the_same(make: object, tmp_path: Path) -> None:
    assert callable(make)
    make().save_pretrained(tmp_path)
    first, second = (Tokenizer.from_pretrained(str(tmp_path)) for _ in range(2))
    assert not isinstance(first.hf, PlainTokenizer) and isinstance(second.hf, PlainTokenizer)
    for text in ("a", "the other <|im_end|> é你 🙂", " two  spaces"):
        ids = first.encode(text)
        assert second.encode(text) == ids and second.decode(ids) == first.decode(ids)
        assert second.encode_continuation(text) == first.encode_continuation(text)
    kept = {"token_bytes", "exact_bytes"}
    assert kept <= set(second.__dict__) and not kept & set(Tokenizer.from_pretrained(SPROUT).__dict__)
    for name in (*kept, "vocab_size", "fingerprint", "eos_token_ids", "bos_token_id", "has_chat_template"):
        assert getattr(second, name) == getattr(first, name)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=40))
def test_any_text_gets_the_ids_that_transformers_gives_it(text: str) -> None:
    plain, hf = Tokenizer.from_pretrained(SPROUT), AutoTokenizer.from_pretrained(SPROUT)
    assert isinstance(plain.hf, PlainTokenizer)
    assert plain.encode_one(text) == hf.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("options", [{}, {"continue_final_message": True}, {"add_generation_prompt": False}])
def test_messages_are_rendered_as_transformers_renders_them(options: dict[str, bool]) -> None:
    plain, complete = Tokenizer.from_pretrained(SPROUT), Tokenizer.from_hf(AutoTokenizer.from_pretrained(SPROUT))
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    for given_tools in (None, tools):
        assert plain.render(MESSAGES, given_tools, **options) == complete.render(MESSAGES, given_tools, **options)


def test_what_only_transformers_knows_is_asked_of_it_and_a_new_template_counts_for_both() -> None:
    hf = Tokenizer.from_pretrained(SPROUT).hf
    hf.chat_template = "{{ messages[0]['content'] }}!"
    assert hf.apply_chat_template(MESSAGES, tokenize=False) == "Be brief.!"
    assert hf.apply_chat_template(MESSAGES, tokenize=True)["input_ids"] == hf.encode("Be brief.!")
    assert hf.model_max_length == 4096
    with pytest.raises(AttributeError, match="no_such_thing"):
        getattr(hf, "no_such_thing")  # noqa: B009


def test_a_tokenizer_whose_core_is_changed_while_it_is_loaded_is_not_recorded(tmp_path: Path, cache: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    described = json.loads(path.read_text())
    described["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(described))
    Tokenizer.from_pretrained(str(tmp_path))
    assert KnownTokenizer.find(str(tmp_path)) is None


def test_a_changed_file_is_read_by_transformers_again(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    Tokenizer.from_pretrained(str(tmp_path))
    assert KnownTokenizer.find(str(tmp_path)) is not None
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert KnownTokenizer.find(str(tmp_path)) is None


def test_the_packages_record_of_the_embedded_tokenizer_is_what_a_first_load_finds() -> None:
    eos = Tokenizer.from_pretrained(SPROUT).eos_token_ids
    found = KnownTokenizer.of(SPROUT, AutoTokenizer.from_pretrained(SPROUT), eos)
    assert found is not None
    record = json.loads(plain_tokenizer.EMBEDDED.read_text(encoding="utf-8"))
    assert {**record, "token_bytes": None} == asdict(found)
