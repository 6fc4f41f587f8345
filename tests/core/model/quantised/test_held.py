"""Weights that stay codes on CPUs, and the ones that are widened once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graftlm.core.config import EngineConfig
from graftlm.core.model.load import load_model
from graftlm.core.model.quantised.held import HeldWeights, widen
from graftlm.kernels.cpu.linear.packed_codes import PackedRows
from graftlm.kernels.quantised_modules import QuantisedEmbedding, QuantisedLinear
from graftlm.kernels.quantised_weight import QuantisedWeight
from tests.gguf_files import metadata_of, tensors_of, write_gguf
from tests.models import tiny_model

CPU = torch.device("cpu")


def weight(n: int = 64, k: int = 64, group: int = 32) -> QuantisedWeight:
    codes = torch.randint(0, 256, (n, k // 2)).byte()
    return QuantisedWeight(codes, 4, None, group, 1, torch.rand(n, k // group).half(), 8)


def model() -> Any:
    built: Any = nn.Module()
    built.model = nn.Module()
    built.model.embed_tokens = nn.Embedding(64, 64)
    built.lm_head = nn.Linear(64, 64, bias=False)
    return built


def test_codes_are_kept_where_the_loops_multiply_them() -> None:
    linear = "lm_head.weight"
    held = HeldWeights(model(), CPU, torch.bfloat16)
    place = held.keep(linear, weight())
    assert place is not None and place.shape == (64, 64) and place.untyped_storage().nbytes() == 2
    assert held.keep("model.norm.weight", weight()) is None
    assert held.keep(linear, weight(group=8)) is None  # no loop has groups of 8
    order = replace(weight(), order=torch.randperm(64).int())
    assert held.keep("model.embed_tokens.weight", order) is None
    assert HeldWeights(model(), CPU, torch.float32).keep(linear, weight()) is None
    assert HeldWeights(model(), torch.device("cuda"), torch.bfloat16).keep(linear, weight()) is None


def test_a_tied_head_shares_the_embedding_before_and_after_it_is_widened() -> None:
    built, codes = model(), weight()
    held = HeldWeights(built, CPU, torch.bfloat16)
    held.keep("model.embed_tokens.weight", codes)
    held.put(built, tied=True)
    assert type(built.model.embed_tokens) is QuantisedEmbedding and type(built.lm_head) is QuantisedLinear
    assert built.model.embed_tokens.quantised is built.lm_head.quantised is codes
    widen(built)
    assert type(built.model.embed_tokens) is nn.Embedding and type(built.lm_head) is nn.Linear
    assert built.lm_head.weight is built.model.embed_tokens.weight
    assert torch.equal(built.lm_head.weight, codes.dense())


def test_both_loads_of_a_tied_file_run_from_its_codes(tmp_path: Path) -> None:
    tiny = tiny_model("llama", tie_word_embeddings=True, intermediate_size=128)
    tensors = tensors_of(tiny, "llama")
    for name, (values, _) in tensors.items():
        if values.ndim == 2:
            raw = torch.randint(0, 256, (len(values), values.shape[1] // 32, 18)).byte()
            raw[..., :2] = (torch.rand(*raw.shape[:2], 1) * 0.02).half().view(torch.uint8)
            tensors[name] = raw.view(len(values), -1).numpy(), "Q4_0"
    path = write_gguf(tmp_path / "tied.gguf", metadata_of(tiny, "llama"), tensors)
    first, second = (load_model(path, EngineConfig(device="cpu")) for _ in range(2))
    assert [type(x.model).__name__ for x in (first, second)] == ["LlamaForCausalLM", "PlainDecoder"]
    logits = []
    for loaded in (first, second):
        assert loaded.lane == "paged" and loaded.dtype is torch.bfloat16
        assert type(loaded.model.get_input_embeddings()) is PackedRows
        loaded.fusions.undo()
        with torch.inference_mode():
            logits.append(loaded.model(torch.arange(20)[None]).logits.float())
    assert (logits[0] - logits[1]).norm() < 0.02 * logits[0].norm()  # the second load keeps the packed codes
