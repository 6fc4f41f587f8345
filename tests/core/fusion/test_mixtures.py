"""Mixtures of experts are recognised by what they do, in every family that transformers has them in."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graftlm.core.fusion import mixtures
from graftlm.core.fusion.expert_modules import expert_weights
from graftlm.core.fusion.linears import Fusions
from graftlm.core.fusion.mixtures import FusedBlock, FusedExperts, Mixture, fuse_mixtures
from tests.models import random_prompt, tiny_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")

WHOLE = ["qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3", "llama4", "granitemoe"]
"""Families whose experts, routers and shared experts are all known."""


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and float((a - b).norm() / b.norm()) < 1e-4


def fused(model: nn.Module) -> tuple[dict[nn.Module, Mixture], Fusions]:
    found: dict[nn.Module, Mixture] = {}
    fusions = Fusions()
    with torch.no_grad():
        fuse_mixtures(model, found, fusions, close, strict=False, dry=False)
    return found, fusions


def forwards(model: nn.Module, kind: type) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(vars(module).get("forward"), kind)]


@pytest.mark.parametrize("kind", WHOLE)
def test_a_fused_mixture_computes_what_it_did_and_can_be_put_back(kind: str) -> None:
    model = tiny_model(kind)
    ids = torch.tensor([random_prompt(6)])
    with torch.inference_mode():
        before = model(ids, use_cache=False).logits
        found, fusions = fused(model)
        after = model(ids, use_cache=False).logits
    assert len(found) == (1 if kind == "deepseek_v3" else 2)
    # the experts of Llama 4 take all tokens at once: only its whole blocks are replaced
    assert len(forwards(model, FusedExperts)) == (0 if kind == "llama4" else len(found))
    assert len(forwards(model, Mixture)) + len(forwards(model, FusedBlock)) == len(found)
    assert fusions.reasons == {}
    assert close(after, before)
    fusions.undo()
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_router_that_is_not_known_keeps_its_own_code_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixtures, "router_of", lambda *_: None)
    model = tiny_model("qwen3_moe", num_hidden_layers=1)
    found, fusions = fused(model)
    assert found == {} and len(forwards(model, FusedExperts)) == 1
    assert fusions.reasons == {
        "Qwen3MoeSparseMoeBlock": "its own code routes: the router, or what it adds, is not known"
    }
    fusions.undo()


def test_experts_that_no_kernel_takes_keep_their_products_and_are_named() -> None:
    model = tiny_model("qwen3_moe", num_hidden_layers=1)
    experts = model.model.layers[0].mlp.experts
    experts.act_fn = nn.Softplus()
    found, fusions = fused(model)
    assert found == {} and not forwards(model, FusedExperts)
    assert fusions.reasons == {"Qwen3MoeExperts": "experts keep torch's products: its gate is not known"}


def test_kernels_that_give_something_else_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixtures, "sum_parts", lambda parts, dtype: parts.sum(0).to(dtype) * 1.01)
    model = tiny_model("mixtral", num_hidden_layers=1)
    found, fusions = fused(model)
    assert found == {} and not forwards(model, FusedExperts)
    assert fusions.reasons == {"MixtralExperts": "experts keep torch's products: the kernels' result differs"}


def test_long_steps_run_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixtures, "MAX_PARTS_BYTES", 1)
    assert [(p.start, p.stop) for p in mixtures.pieces_of(torch.empty(300, 8), 2)] == [(0, 256), (256, 512)]


def test_experts_that_pass_their_input_on_keep_their_own_code() -> None:
    model = tiny_model("longcat_flash", n_routed_experts=4, zero_expert_num=2)
    experts = next(m for m in model.modules() if type(m).__name__ == "LongcatFlashExperts")
    assert expert_weights(experts) == "6 experts, of which 4 have all weights"
