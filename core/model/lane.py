"""The lane of a loaded model: paged, with attention over the KV store, or serial, with the model's own cache."""

from __future__ import annotations

import warnings

import torch

from graftlm.core.config import EngineConfig
from graftlm.core.fusion.decoder_stack import stack_layers
from graftlm.core.kv.kv_format import may_be_compact
from graftlm.core.loaded_model import LoadedModel
from graftlm.core.model.qualify import AttentionFactory, Reference, batch_dependence, difference, discover, qualify
from graftlm.core.state_layers.state_layer import UnknownVariant
from graftlm.core.state_layers.state_layers import StateLayers
from graftlm.kernels.cpu.attention.backend import TorchAttention
from graftlm.kernels.gpu.support import triton_problem


def default_attention(device: torch.device) -> AttentionFactory:
    """Return the attention with which a model is qualified: that of "auto" on this device."""
    if triton_problem(device) is None:
        from graftlm.kernels.gpu.attention.backend import TritonAttention

        return TritonAttention
    return TorchAttention


def choose_lane(
    loaded: LoadedModel, reference: Reference | None, attention_factory: AttentionFactory, config: EngineConfig
) -> None:
    """Choose the paged lane if the model passes its self-test; else the serial lane, with one warning.

    reference  None for a model whose earlier load passed
    """
    try:
        found = discover(loaded.model, loaded.device)
    except Exception as failure:
        loaded.lane_reason = f"its attention cannot be taken over: {type(failure).__name__}: {str(failure)[:200]}"
    else:
        loaded.layers, loaded.layer_of = found.layers, found.layer_of
        loaded.lane_reason = _take_over_states(loaded) or _why_not_paged(loaded, reference, attention_factory, config)
    if loaded.lane_reason is None:
        loaded.lane = "paged"
        if loaded.device.type == "cpu" and loaded.states is None:
            stack_layers(loaded, lambda: difference(loaded, reference, attention_factory))
        return
    loaded.layers, loaded.layer_of = (), {}
    if loaded.states is not None:
        loaded.states.undo()
        loaded.states = None
    warnings.warn(f"{loaded.name} runs in the serial lane, one sequence at a time: {loaded.lane_reason}", stacklevel=3)


def _take_over_states(loaded: LoadedModel) -> str | None:
    """Let our own forward run the layers with a state. -> the reason if it cannot"""
    try:
        loaded.states = StateLayers.of(loaded.model)
    except UnknownVariant as reason:
        return f"a layer with a state cannot be taken over: {reason}"
    return None


def _why_not_paged(
    loaded: LoadedModel, reference: Reference | None, attention_factory: AttentionFactory, config: EngineConfig
) -> str | None:
    """Return the reason against the paged lane; None if the model can run in it, if only with KV in its own dtype."""
    compact = may_be_compact(loaded, config)
    reason = qualify(loaded, reference, attention_factory, compact=compact)
    if reason is None or not compact:
        return reason
    plain_reason = qualify(loaded, reference, attention_factory)
    if plain_reason is None:
        loaded.kv_reason = reason
    return plain_reason


def check_strict(loaded: LoadedModel, attention_factory: AttentionFactory) -> None:
    """Warn if part of the model computes in an order that depends on the batch, which breaks strict mode."""
    reason = batch_dependence(loaded, attention_factory)
    if reason is not None:
        but = "answers differ where two tokens are all but as likely"
        remedy = but if loaded.dtype is torch.float32 else "dtype='float32' makes it hold but for ties"
        named = f"{loaded.name} in {str(loaded.dtype)[6:]}"
        warnings.warn(f"strict=True does not hold for {named}: {reason}; {remedy}", stacklevel=3)
