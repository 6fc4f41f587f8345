from __future__ import annotations

import json
from pathlib import Path

import pytest

from graftlm.core.config import EngineConfig
from graftlm.core.model import loop_shapes
from graftlm.core.model.loop_shapes import shapes_of, start_compiling
from graftlm.kernels.cpu.compiled.loop_cache import LoopShapes
from graftlm.kernels.cpu.element_format import ElementFormat

CAPPED = {"num_attention_heads": 4, "hidden_size": 64, "attn_logit_softcapping": 50.0}
LLAMA = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("hf_config", "options", "expected"),
    [
        (LLAMA, {}, LoopShapes(4, 64, ElementFormat.BFLOAT16, False)),
        (LLAMA, {"strict": True}, LoopShapes(4, 64, ElementFormat.FLOAT32, False)),
        (LLAMA, {"dtype": "float32"}, LoopShapes(4, 64, ElementFormat.FLOAT32, False)),
        (LLAMA | {"head_dim": 128, "dtype": "float16"}, {}, LoopShapes(4, 128, ElementFormat.FLOAT32, False)),
        ({"text_config": LLAMA, "torch_dtype": "bfloat16"}, {}, LoopShapes(4, 64, ElementFormat.BFLOAT16, False)),
        (CAPPED, {}, LoopShapes(1, 16, ElementFormat.FLOAT32, True)),
    ],
)  # fmt: skip
def test_shapes_come_from_the_configuration(
    hf_config: dict[str, object], options: dict[str, object], expected: LoopShapes
) -> None:
    assert shapes_of(hf_config, EngineConfig(**options)) == expected


def test_only_models_on_disk_that_run_on_a_cpu_are_compiled_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[LoopShapes] = []
    monkeypatch.setattr(loop_shapes.loop_cache, "start", lambda shapes, *, quiet: started.append(shapes))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    start_compiling(object(), EngineConfig(device="cpu"))
    start_compiling(tmp_path / "missing", EngineConfig(device="cpu"))
    start_compiling(tmp_path, EngineConfig(device="cuda"))
    assert started == []
    start_compiling(tmp_path, EngineConfig(device="cpu"))
    assert started == [LoopShapes(4, 64, ElementFormat.BFLOAT16, False)]
