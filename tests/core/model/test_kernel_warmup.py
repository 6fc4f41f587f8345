"""The small copy that a start on a GPU is rehearsed with: it becomes what the model will, and leaves that alone."""

from __future__ import annotations

import sys

import pytest
import torch

from graftlm.core.config import EngineConfig
from graftlm.core.fusion.gpu_modules import fuse_gpu
from graftlm.core.model.kernel_warmup import MAX_KINDS, form_of, rehearse, small_copy
from graftlm.core.model.lane import default_attention
from graftlm.core.model.load import load_model
from tests.models import byte_tokenizer, random_prompt, tiny_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_a_small_copy_has_one_layer_of_each_kind_and_the_same_weights() -> None:
    model = tiny_model("llama", num_hidden_layers=6)
    copied = small_copy(model)
    assert len(copied.model.layers) == 1 and len(model.model.layers) == 6
    weights = {id(x) for x in model.parameters()}
    assert all(id(x) in weights for x in copied.parameters())


def test_layers_with_a_window_are_a_kind_of_their_own() -> None:
    kinds = ["sliding_attention", "full_attention"]
    model = tiny_model("gemma2", num_hidden_layers=6, layer_types=3 * kinds)
    windows = [layer.self_attn.sliding_window for layer in small_copy(model).model.layers]
    assert len(windows) == 2 and None in windows


def test_too_many_kinds_of_layers_are_not_copied() -> None:
    model = tiny_model("llama", num_hidden_layers=MAX_KINDS + 1)
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.scaling = 1.0 + number
    with pytest.raises(ValueError, match=f"LlamaModel has {MAX_KINDS + 1} kinds of layers"):
        small_copy(model)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "granite"])
def test_a_dry_fusion_of_the_copy_leaves_the_model_and_its_rotary_embedding_alone(kind: str) -> None:
    model = tiny_model(kind).to(DEVICE)
    ids = torch.tensor([random_prompt(6)], device=DEVICE)
    source = sys.modules[type(model).__module__]
    with torch.inference_mode():
        before, rotary, form = model(ids).logits, source.apply_rotary_pos_emb, form_of(model)
        fuse_gpu(small_copy(model), dry=True)
        assert torch.equal(model(ids).logits, before)
    assert source.apply_rotary_pos_emb is rotary
    assert form_of(model) == form


@pytest.mark.parametrize("same", [True, False])
def test_a_model_that_keeps_a_forward_is_not_what_was_rehearsed(same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama").to(DEVICE)
    if not same:  # the comparison finds that its layers compute something else; a dry run compares nothing
        layer = type(model.model.layers[0])
        forward = layer.forward
        monkeypatch.setattr(layer, "forward", lambda *args, **options: 1.5 * forward(*args, **options))
    copied = small_copy(model)
    fuse_gpu(copied, dry=True)
    fusions = fuse_gpu(model)
    assert (form_of(copied) == form_of(model)) is same
    fusions.undo()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is something to compile")
def test_nothing_is_rehearsed_where_nothing_compiles() -> None:
    loaded = load_model(tiny_model("llama"), EngineConfig(device="cpu"), byte_tokenizer())
    assert rehearse(loaded, EngineConfig(device="cpu"), default_attention(DEVICE)) is None
    loaded.release()
