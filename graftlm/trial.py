"""The execution of a model on this machine, derived from a small model with its configuration and random weights."""

from __future__ import annotations

import copy
import warnings
from typing import Any

from graftlm.core.errors import ModelError

SMALL = {
    "vocab_size": 512, "intermediate_size": 96, "moe_intermediate_size": 32, "ffn_dim": 96, "n_inner": 96,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "shared_expert_intermediate_size": 32, "vocab_size_per_layer_input": 512,
    "first_k_dense_replace": 1,
}  # fmt: skip
"""Sizes of the small model by field of a configuration: fields that do not change how a model computes."""
HEADS = ("num_attention_heads", "n_head", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads")
WIDTHS = ("hidden_size", "n_embd", "d_model")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
MAX_LAYERS = 8


def small_config(config: Any) -> Any:
    """Return a copy of the decoder's configuration with few and small layers, at least one of each kind.

    The size of a head, windows, norms, rotations and all other fields stay.
    """
    from graftlm.core.loaded_model import text_config

    found = copy.deepcopy(text_config(config))
    kinds = vars(found).get("layer_types")
    fields: dict[str, Any] = {
        name: value for name, value in SMALL.items() if isinstance(getattr(found, name, None), int)
    }
    heads = next((name for name in HEADS if isinstance(getattr(found, name, None), int)), None)
    width = next((name for name in WIDTHS if isinstance(getattr(found, name, None), int)), None)
    if heads is not None and width is not None:
        num_heads, hidden = getattr(found, heads), getattr(found, width)
        few = min(num_heads, 4)
        fields[heads] = few
        fields[width] = few * (hidden // num_heads) if getattr(found, "head_dim", None) is None else 64
        for name in KV_HEADS:
            if isinstance(kv := getattr(found, name, None), int):
                fields[name] = few if kv == num_heads else 1 if kv == 1 else max(few // 2, 1)
    for name in LAYERS:
        if isinstance(getattr(found, name, None), int):
            fields[name] = 2 if kinds is None else max(2, min(_until_all(kinds), MAX_LAYERS))
            if kinds is not None:
                fields["layer_types"] = list(kinds)[: fields[name]]
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(found, name, None) is not None:
            fields[name] = 0
    for name, value in fields.items():
        setattr(found, name, value)
    return found


def _until_all(kinds: list[str]) -> int:
    """Return the number of first layers that contain each kind at least once."""
    return max(list(kinds).index(kind) for kind in set(kinds)) + 1


def execution_of(model: str, *, device: str = "auto", trust_remote_code: bool = False) -> str:
    """Return the execution of `model` on this machine in one line, with the reason for a slower path.

    Raises ModelError if its configuration cannot be read, or no small model can be built from it.
    """
    import torch

    from graftlm.core.config import EngineConfig
    from graftlm.core.model.description import model_config
    from graftlm.core.model.load import load_model
    from graftlm.core.model.transformers_lock import building_model, importing_transformers
    from graftlm.testing.byte_tokenizer import byte_tokenizer

    with importing_transformers():
        from transformers import AutoModelForCausalLM
    options = EngineConfig(device=device, trust_remote_code=trust_remote_code)
    config = model_config(model, options)
    dtype = getattr(config, "dtype", None) or torch.float32
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            with building_model():
                small = AutoModelForCausalLM.from_config(small_config(config), dtype=dtype).eval()
        except Exception as error:
            why = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise ModelError(
                f"no small model can be made of the configuration of {model!r}: {why}; runtime.stats().execution says "
                "how it runs once it is loaded"
            ) from error
        for parameter in small.parameters():
            if parameter.dim() >= 2:
                parameter.data.normal_(0.0, 0.15)
        if torch.cuda.is_available() and device != "cpu":
            small = small.cuda()
        loaded = load_model(small, options, byte_tokenizer())
        loaded.release()
    return loaded.execution
