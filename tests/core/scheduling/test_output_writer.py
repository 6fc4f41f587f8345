"""Constraints whose shortest text does not fit, or is not found."""

from __future__ import annotations

from typing import Any

import pytest

from graftlm.core.config import CacheConfig
from graftlm.core.errors import ConfigError, GrammarError
from graftlm.core.grammar.engines import llguidance
from graftlm.core.runtime import Runtime
from tests.models import byte_tokenizer, tiny_model


@pytest.mark.parametrize(
    ("limits", "given", "message"),
    [
        ({}, {"max_tokens": 9}, "max_tokens is 9, but the shortest text .* takes up to 40 tokens; raise max_tokens"),
        ({"max_model_len": 64}, {}, "the prompt of 40 tokens leaves room for 24, but .* 40 tokens; shorten it"),
        ({"max_model_len": 64}, {"max_tokens": 50}, "leaves room for 24, but .*; shorten it or raise max_model_len"),
        ({"cache": CacheConfig(max_tokens=48)}, {}, "leaves room for 8, but .* or raise CacheConfig.max_tokens"),
    ],
)
def test_what_limits_the_text_is_named(limits: dict[str, Any], given: dict[str, Any], message: str) -> None:
    schema = {"type": "string", "minLength": 38, "maxLength": 38}
    with (
        Runtime(tiny_model("llama"), tokenizer=byte_tokenizer(), **limits) as runtime,
        pytest.raises(ConfigError, match=message),
    ):
        runtime.generate(list(range(40)), json_schema=schema, **{"max_tokens": None, **given})


def test_a_constraint_without_any_ending_is_refused_unless_its_text_may_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llguidance, "_SEARCH_S", 0.1)
    endless = {"grammar": 'start: "a" start | "b" start', "max_tokens": 9}
    with Runtime(tiny_model("llama"), tokenizer=byte_tokenizer()) as runtime:
        with pytest.raises(GrammarError, match="no text was found that completes .* close_on_length=False"):
            runtime.generate(list(range(40)), **endless, close_on_length=True)
        assert len(runtime.generate(list(range(40)), **endless).token_ids) == 9


def test_a_text_whose_ending_would_be_lost_is_closed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llguidance, "_SEARCH_S", 0.1)
    grammar = 'start: ("x" | "y")* "~" rest | ("x" | "y")* "."\nrest: "a" rest | "b" rest'
    with Runtime(tiny_model("llama"), tokenizer=byte_tokenizer()) as runtime:
        for seed in range(4):
            sampling = {"temperature": 2.0, "seed": seed, "max_tokens": 30, "close_on_length": True}
            assert runtime.generate([1, 2, 3], grammar=grammar, **sampling).text.endswith(".")
