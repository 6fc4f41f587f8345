"""One runtime at a time runs a loaded model."""

from __future__ import annotations

import pytest

from graftlm.core.config import CacheConfig
from graftlm.core.errors import ConfigError
from graftlm.core.loaded_model import ModelLease
from graftlm.core.runtime import Runtime
from tests.models import byte_tokenizer, tiny_model

OPTIONS = {"tokenizer": byte_tokenizer(), "cache": CacheConfig(max_tokens=500)}


def test_a_second_runtime_of_a_loaded_model_is_refused_while_the_first_is_open() -> None:
    model = tiny_model()
    with Runtime(model, **OPTIONS) as first:
        first.generate("hello", max_tokens=2)
        with Runtime(model, **OPTIONS) as second, pytest.raises(ConfigError, match="run by another Runtime already"):
            second.generate("hello", max_tokens=2)
        first.generate("hello", max_tokens=2)


def test_a_closed_runtime_and_one_that_nobody_holds_leave_the_model_free() -> None:
    model = tiny_model()
    with Runtime(model, **OPTIONS) as runtime:
        before = runtime.generate("hello", max_tokens=4, temperature=0).text
    dropped = Runtime(model, **OPTIONS)
    dropped.generate("hello", max_tokens=2)
    del dropped
    with Runtime(model, **OPTIONS) as runtime:
        assert runtime.generate("hello", max_tokens=4, temperature=0).text == before


def test_a_model_that_could_not_be_loaded_is_free_again() -> None:
    model = tiny_model()
    with Runtime(model, attention="nope", **OPTIONS) as broken, pytest.raises(Exception, match="nope"):
        broken.load()
    with Runtime(model, **OPTIONS) as runtime:
        assert runtime.generate("hello", max_tokens=2).token_ids


def test_a_name_needs_no_lease() -> None:
    leases = [ModelLease("sprout"), ModelLease("sprout")]
    for lease in leases:
        lease.release()
