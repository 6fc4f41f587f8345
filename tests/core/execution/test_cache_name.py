from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from graftlm.core.execution.cache_name import CACHE_NAMES, cache_in, cache_name
from tests.models import tiny_model


@pytest.mark.parametrize("kind", ["llama", "mamba", "falcon", "rwkv"])
def test_a_model_goes_on_from_the_cache_that_it_gave(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(kind)
    ids = torch.tensor([[5, 6, 7, 8]])
    name = cache_name(model.forward)
    assert name is not None
    with torch.inference_mode(), caplog.at_level(logging.WARNING, logger="transformers"):
        whole = model(input_ids=ids).logits[0, -1]
        held = cache_in(vars(model(input_ids=ids[:, :3], use_cache=True)))
        after = model(input_ids=ids[:, 3:], use_cache=True, **{name: held}).logits[0, -1]
    assert torch.allclose(after, whole, atol=1e-5)
    assert [record for record in caplog.records if "deprecated" in record.getMessage()] == []


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_cache_is_found_under_every_name(name: str) -> None:
    held = object()
    assert cache_in({"attention_mask": None, "use_cache": True, name: held}) is held
    assert cache_in({name: None}) is None


def test_a_forward_says_its_own_name() -> None:
    def of_a_user(input_ids: Any, past_key_values: Any = None) -> None: ...
    def without(input_ids: Any, **options: Any) -> None: ...

    assert cache_name(of_a_user) == "past_key_values"
    assert cache_name(without) is None
