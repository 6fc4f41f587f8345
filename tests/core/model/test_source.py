"""What a runtime knows of its model before the weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graftlm.core.config import EngineConfig
from graftlm.core.errors import ConfigError, ModelError
from graftlm.core.model.source import ModelSource
from graftlm.core.runtime import Runtime


def test_a_tokenizer_that_cannot_be_loaded_is_looked_for_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{broken")
    source = ModelSource(tmp_path, None, EngineConfig())
    failures = []
    for _ in range(2):
        with pytest.raises(ModelError, match="no tokenizer could be loaded") as caught:
            source.tokenizer  # noqa: B018
        failures.append(caught.value)
    assert failures[0] is failures[1]


def test_a_runtime_of_broken_files_says_so_to_each_caller(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{broken")
    with Runtime(tmp_path) as runtime:
        for _ in range(2):
            with pytest.raises(ModelError, match="no tokenizer could be loaded"):
                runtime.generate("x")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, "model is empty; give a Hugging Face id"),
        ("", "model is empty"),
        (5, "model is 5; give a Hugging Face id, a local folder, a GGUF file, a loaded transformers model or 'sprout'"),
        ({"a": 1}, r"model is \{'a': 1\}"),
        (Runtime("sprout"), r"model is Runtime\('sprout', not loaded\), a runtime already; .* as runtime="),
    ],
)
def test_what_is_no_model_is_named_before_anything_is_read(model: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Runtime(model)
