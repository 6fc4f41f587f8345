"""A model folder is data: its code runs only if asked for, and pickled weights run nothing that they hold."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from graftlm.core.config import EngineConfig
from graftlm.core.errors import ModelError
from graftlm.core.model.load import load_model
from tests.models import byte_tokenizer, tiny_model


def saved(folder: Path) -> Path:
    tiny_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


class _Touches:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_pickled_weights_that_would_run_code_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"lm_head.weight": _Touches(tmp_path / "ran")}))
    with pytest.raises(ModelError, match="could not be (loaded|read)|cannot be (loaded|read)|no model"):
        load_model(folder)
    assert not (tmp_path / "ran").exists()


def test_pickled_weights_that_hold_tensors_alone_are_read(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save(tiny_model().state_dict(), folder / "pytorch_model.bin")
    loaded = load_model(folder, EngineConfig(dtype="float32"))
    assert loaded.lane == "paged"


@pytest.mark.parametrize("trusted", [False, True])
def test_code_of_a_model_folder_runs_only_if_asked_for(tmp_path: Path, trusted: bool) -> None:
    folder = saved(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        "import os\n"
        f"os.mkdir({str(tmp_path / 'ran')!r})\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class Own(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    options = EngineConfig(dtype="float32", trust_remote_code=trusted)
    if trusted:
        assert load_model(folder, options).hf_config.model_type == "own"
    else:
        with pytest.raises(ModelError, match="trust_remote_code=True"):
            load_model(folder, options)
    assert (tmp_path / "ran").exists() == trusted
