from __future__ import annotations

import pytest
import torch

from graftlm.core.config import EngineConfig
from graftlm.core.fusion.cpu_layers import FusedCpuLayer
from graftlm.core.model.load import load_model
from graftlm.kernels.cpu.decoder.decoder_layer import DOTS, MAX_DECODE_ROWS, PrefillLayer
from graftlm.kernels.cpu.decoder.dot_layer import DotLayer
from tests.models import byte_tokenizer, tiny_model

HALF = torch.bfloat16


@pytest.mark.skipif(not DOTS, reason="this processor does not multiply bfloat16, or has tiles for it")
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "phi3"])
@pytest.mark.parametrize("num_rows", [1, 66, 150])
def test_both_halves_give_what_the_layer_of_few_tokens_gives(kind: str, num_rows: int) -> None:
    """Also where rows are several tasks, the last of which is short; with biases, and weights that hold two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        wide = {"hidden_size": 256, "intermediate_size": 320, "num_attention_heads": 8, "num_key_value_heads": 4}
        loaded = load_model(tiny_model(kind, **wide).to(HALF), EngineConfig(), byte_tokenizer())
        fused = next(m.forward for m in loaded.model.modules() if isinstance(m.forward, FusedCpuLayer))
        assert isinstance(fused.prefill, DotLayer) and not isinstance(fused.prefill, PrefillLayer)
        w = fused.decode.weights
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(num_rows, 256, generator=generator).to(HALF)
        attended = torch.randn(num_rows, w.num_heads, w.head_dim, generator=generator)
        angles = torch.randn(num_rows, w.head_dim // 2, generator=generator).repeat(1, 2)
        cos, sin = angles.cos().to(HALF), angles.sin().to(HALF)
        found, after = fused.prefill.before(x, cos, sin), x.clone()
        fused.prefill.after(after, attended)
        for first in range(0, num_rows, MAX_DECODE_ROWS[HALF]):
            here = slice(first, first + MAX_DECODE_ROWS[HALF])
            for part, expected in zip(
                found, fused.decode.before(x[here].contiguous(), cos[here], sin[here]), strict=True
            ):
                torch.testing.assert_close(part[here], expected)
            some = x[here].clone()
            fused.decode.after(some, attended[here])
            torch.testing.assert_close(after[here], some)
    finally:
        torch.set_num_threads(threads)
