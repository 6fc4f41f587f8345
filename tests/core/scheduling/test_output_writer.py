"""Constraints whose shortest text does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from graftlm.core.config import CacheConfig
from graftlm.core.errors import ConfigError
from graftlm.core.runtime import Runtime
from tests.models import byte_tokenizer, tiny_model


@pytest.mark.parametrize(
    ("limits", "given", "message"),
    [
        ({}, {"max_tokens": 9}, "max_tokens is 9, but the shortest text .* takes up to 40 tokens; raise max_tokens"),
        ({"max_model_len": 64}, {}, "the prompt of 40 tokens leaves room for 24, but .* 40 tokens; shorten it"),
        ({"max_model_len": 64}, {"max_tokens": 50}, "leaves room for 24, but .* or raise max_model_len"),
        ({"cache": CacheConfig(max_tokens=48)}, {}, "leaves room for 8, but .* or CacheConfig.max_tokens"),
    ],
)
def test_what_limits_the_text_is_named(limits: dict[str, Any], given: dict[str, Any], message: str) -> None:
    schema = {"type": "string", "minLength": 38, "maxLength": 38}
    with (
        Runtime(tiny_model("llama"), tokenizer=byte_tokenizer(), **limits) as runtime,
        pytest.raises(ConfigError, match=message),
    ):
        runtime.generate(list(range(40)), json_schema=schema, **{"max_tokens": None, **given})
