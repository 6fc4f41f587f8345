"""Latent attention (DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash, Mistral 4, Youtu, LongCat): latents are cached.

transformers expands the latent of all tokens to keys and values of all heads in `expand_kv`. In steps of the paged lane
it returns the latent itself, and the attention call carries the expansion (kernels/latent.py). Outside of these steps
the module is as it was.

Sparse attention (DeepSeek V3.2, GLM-5, A.X K2) has an indexer that chooses `index_topk` tokens: all, up to that length.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from graftlm.core.execution.paged import ALL_TOKENS, LATENT, step_at_hand
from graftlm.core.fusion.layer_parts import allclose
from graftlm.core.fusion.linears import Fusions
from graftlm.kernels.latent import LatentHeads
from graftlm.kernels.weight import PlainWeight, weight_of

_PROBED = 3
"""Tokens of the random latents."""

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


@torch.no_grad()
def fuse_latent(model: nn.Module, fusions: Fusions) -> None:
    """Let every module of latent attention hand its latents to the attention of the paged lane."""
    for module in model.modules():
        heads = _heads_of(module)
        if heads is None:
            continue
        vars(module)[LATENT] = heads
        vars(module)["expand_kv"] = partial(_hand_on, module.expand_kv)
        for name in (LATENT, "expand_kv"):
            fusions.add(partial(vars(module).pop, name))


def fuse_indexers(model: nn.Module, fusions: Fusions) -> None:
    """Let attention with an indexer attend to all tokens; for contexts of at most `index_topk` tokens (qualify.py)."""
    for module in model.modules():
        if not hasattr(module, "expand_kv") or not hasattr(module, "indexer"):
            continue
        vars(module)[ALL_TOKENS] = True
        vars(module)["forward"] = partial(_with_mask, module.forward)
        fusions.add(partial(vars(module).pop, ALL_TOKENS))
        fusions.add(partial(vars(module).pop, "forward"))
        indexer: Any = module.indexer
        if indexer is not None:  # layers that share a choice have none
            vars(indexer)["forward"] = partial(_no_choice, indexer.forward)
            fusions.add(partial(vars(indexer).pop, "forward"))


def _with_mask(own: Any, *args: Any, **options: Any) -> Any:
    """Run attention in a step with a mask in place of None, which its own code would index."""
    if step_at_hand() is not None:
        options["attention_mask"] = torch.zeros(1, 1, 1, 1, dtype=torch.float32)
    return own(*args, **options)


def _no_choice(own: Any, hidden_states: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """Return a choice that nothing reads in a step."""
    if step_at_hand() is None:
        chosen: torch.Tensor = own(hidden_states, *args, **options)
        return chosen
    return hidden_states.new_empty(0, dtype=torch.int32)


def _hand_on(own: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return latent and shared key as one key [1, 1, num_tokens, rank + rope_dim], and the latent, its first part."""
    if step_at_hand() is None:
        expanded: tuple[torch.Tensor, torch.Tensor] = own(kv_nope, k_rot)
        return expanded
    whole = torch.cat([kv_nope, k_rot], -1)
    return whole, whole[..., : kv_nope.shape[-1]]


def _heads_of(module: nn.Module) -> LatentHeads | None:
    """Return the heads of a module of latent attention; None for other modules, and for other expansions."""
    own, up = getattr(module, "expand_kv", None), getattr(module, "kv_b_proj", None)
    sizes = [getattr(module, n, None) for n in ("num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank")]
    if own is None or not isinstance(up, nn.Module) or not all(isinstance(size, int) for size in sizes):
        return None
    weight = weight_of(up)
    if not isinstance(weight, PlainWeight) or getattr(up, "bias", None) is not None:
        return None
    num_heads, nope, rope, rank = (int(size) for size in sizes if size is not None)
    values = weight.values.detach()
    if values.device.type == "cpu":  # where the module's own weight is laid out anew
        values = values.clone()
    by_head = values.view(num_heads, -1, rank)
    found = LatentHeads(by_head[:, :nope], by_head[:, nope:], rope)
    latent = torch.randn(_PROBED, rank + rope, device=values.device, dtype=torch.float32).to(values.dtype)
    try:
        expected = own(latent[None, None, :, :rank], latent[None, None, :, rank:])
    except Exception:  # its arguments differ
        return None
    same = zip(expected, found.expand(latent), strict=True)
    limit = _TOLERANCE.get(values.dtype, 0.0)
    return found if all(allclose(a[0].transpose(0, 1), b, limit) for a, b in same) else None
