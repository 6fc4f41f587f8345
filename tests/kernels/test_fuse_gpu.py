"""Fusions for GPUs, whose kernels run in Triton's interpreter without one."""

import pytest
import torch

from graftlm.core.fuse_gpu import PackedProjections, fuse_gpu
from tests.models import random_prompt, tiny_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "phi3", "gpt2"])
def test_a_fused_model_computes_what_it_did_and_can_be_put_back(kind: str) -> None:
    model = tiny_model(kind).to(DEVICE)
    ids = torch.tensor([random_prompt(6)], device=DEVICE)
    names = [name for name, _ in model.named_parameters()]
    with torch.inference_mode():
        before = model(ids).logits
        fusions = fuse_gpu(model)
        fused = model(ids).logits
        fusions.undo()
        after = model(ids).logits
    assert float((fused - before).norm() / before.norm()) < 1e-5
    assert torch.equal(after, before)
    assert [name for name, _ in model.named_parameters()] == names


def test_projections_of_a_llama_are_packed() -> None:
    model = tiny_model("llama").to(DEVICE)
    fusions = fuse_gpu(model)
    assert fusions.num_packed == 4  # two layers: qkv, and gate and up
    assert isinstance(model.model.layers[0].self_attn.q_proj, PackedProjections)
    fusions.undo()


def test_a_norm_with_other_arithmetic_keeps_its_own() -> None:
    model = tiny_model("gemma3").to(DEVICE)
    fusions = fuse_gpu(model)
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
    assert norms and not any("forward" in vars(m) for m in norms)  # it scales by 1 + weight
    fusions.undo()
