from __future__ import annotations

from typing import Any

import pytest
import torch

import graftlm as gl
from graftlm.core.execution.grid_tables import GridTables
from graftlm.testing.random_vision import random_picture, random_vision_model
from tests.vision import question, reference, written

NEW = pytest.importorskip("transformers.vision_utils")


def test_grids_are_read_once_and_their_tables_bounded() -> None:
    model, _ = random_vision_model("qwen2_5_vl")
    tables = GridTables(model)
    first = tables.of(torch.tensor([[1, 4, 6], [1, 4, 4]]), torch.device("cpu"))
    assert tables.of(torch.tensor([[1, 4, 6], [1, 4, 4]]), torch.device("cpu")) is first
    assert first.arguments["position_ids"].shape == (40, 2)
    offsets = first.arguments["cu_seqlens"]
    assert offsets.tolist() == [0, 24, 40] and first.segments[id(offsets)][1].longest == 24
    assert tables.of(torch.tensor([[1, 4, 4], [1, 4, 6]]), torch.device("cpu")) is not first
    for height in range(2, 60, 2):
        tables.of(torch.tensor([[1, height, 2]]), torch.device("cpu"))
    assert tables.of(torch.tensor([[1, 4, 6], [1, 4, 4]]), torch.device("cpu")) is not first


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_an_encoder_takes_tables_and_answers_as_before(family: str) -> None:
    model, processor = random_vision_model(family)
    prompts = [question("What?", random_picture(seed, width, 60)) for seed, width in enumerate((80, 80, 120))]
    expected = [reference(model, processor, prompt)[0] for prompt in prompts]
    with gl.Runtime(model, tokenizer=processor, device="cpu") as runtime:
        engine: Any = runtime.load()._thread.engine
        vision = engine.spec.vision
        assert vision is not None and vision.tables is not None
        assert {"position_ids", "cu_seqlens"} <= vision.tables.of(torch.tensor([[1, 4, 4]]), vision.model.device)[
            0
        ].keys()
        done = runtime.generate(prompts, max_tokens=8, temperature=0)
        assert [written(one.token_ids) for one in done] == expected


def test_an_encoder_that_refuses_tables_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(grids: torch.Tensor, merge: int) -> torch.Tensor:
        table: torch.Tensor = 3 * own(grids, merge)
        return table  # a shift would turn queries and keys alike

    own = NEW.get_vision_position_ids
    monkeypatch.setattr(NEW, "get_vision_position_ids", broken)
    model, processor = random_vision_model("qwen2_5_vl")
    with gl.Runtime(model, tokenizer=processor) as runtime:
        engine: Any = runtime.load()._thread.engine
        assert engine.spec.vision.tables is None
