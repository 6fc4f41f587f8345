"""A quantised GGUF file answers with the tokens of transformers over its values, in the six ways of the bench."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.runtime.equality import NUM_NEW
from bench.runtime.gguf_equality import ASKED
from graftlm import Runtime
from graftlm.core.config import EngineConfig
from graftlm.core.model.description import resolve
from graftlm.core.model.weights import read_weights
from tests.gguf_files import coded
from tests.models import greedy_reference, random_prompt


def test_six_ways_to_ask_a_quantised_file_give_the_tokens_of_its_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAFTLM_CACHE_DIR", str(tmp_path / "cache"))
    path = coded(tmp_path / "model.gguf")
    config = EngineConfig(device="cpu", dtype="float32")
    reference = read_weights(resolve(path), config, torch.device("cpu"))
    asked = [random_prompt(n, seed=n) for n in (5, 20, 33)]
    asked.append(asked[1] + asked[0])
    expected = [greedy_reference(reference, prompt, NUM_NEW) for prompt in asked]  # type: ignore[arg-type]
    assert len(set(map(tuple, expected))) > 1
    for name, (way, options) in ASKED.items():
        with Runtime(str(path), device="cpu", dtype="float32", quiet=True, **options) as runtime:  # type: ignore[arg-type]
            assert [list(found) for found in way(runtime, asked)] == expected, name
