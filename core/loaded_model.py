"""LoadedModel: a model on its device, with the facts that the runtime needs; ModelLease: its use by one runtime."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from graftlm.core.errors import ConfigError
from graftlm.core.fusion.linears import Fusions
from graftlm.core.interpreter_exit import exit_began
from graftlm.core.text.tokenizer import Tokenizer
from graftlm.kernels.attention import LayerSpec
from graftlm.kernels.kv_store import LayerKV, token_bytes

if TYPE_CHECKING:
    from graftlm.core.execution.vision import Vision
    from graftlm.core.state_layers.state_layers import StateLayers
    from graftlm.kernels.cpu.decoder.decoder_stack import DecoderStack

Lane = Literal["paged", "serial"]


@dataclass(eq=False)
class LoadedModel:
    """A model on its device, with the facts that the runtime needs.

    tokenizer        None where tokens are chosen in another process
    kv_layout        K and V of one token in each attention layer; empty in the serial lane
    bytes_per_token  of KV; an estimate in the serial lane
    vocab_size       width of the logits, which may exceed the tokenizer's vocabulary
    eos_token_ids    every id that ends an answer
    lane             "paged": ragged batches over the KV store; "serial": one sequence at a time over the model's
                     own cache, for the reason in `lane_reason`
    error            of logits of ragged batches, relative to the model's own forward; None if they were not compared
    kv_reason        the result of the comparison that ruled out 12-bit KV on a model and card that support it
    stack            runs steps of few tokens on a CPU in one compiled call; None: the model's own modules run them
    states           its layers with a state, in the paged lane; None for a model without
    vision           its encoder of pictures; None for a model that reads text only, or whose pictures are refused
    no_pictures      the reason for which pictures are refused
    owned            whether no other code holds the model
    rehearsed        whether the kernels of its steps were compiled before the first launch (kernel_warmup.py)
    """

    model: nn.Module
    hf_config: Any
    tokenizer: Tokenizer | None
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    name: str
    layers: tuple[LayerSpec, ...] = ()
    layer_of: dict[nn.Module, int] = field(default_factory=dict, repr=False)
    lane: Lane = "serial"
    lane_reason: str | None = None
    error: float | None = None
    kv_reason: str | None = None
    fusions: Fusions = field(default_factory=Fusions, repr=False)
    owned: bool = False
    rehearsed: bool = False
    stack: DecoderStack | None = field(default=None, repr=False)
    states: StateLayers | None = field(default=None, repr=False)
    vision: Vision | None = field(default=None, repr=False)
    no_pictures: str | None = None

    def release(self, *, weights: bool = True) -> None:
        """Restore the model's original modules and, unless `weights` is False, the plain layout of its weights."""
        self.stack = None
        if self.states is not None:
            self.states.undo()
            self.states = None
        self.fusions.undo(weights=weights)

    def close(self) -> None:
        """Release the model at the end of its runtime; its weights stay packed if no code will read them."""
        self.release(weights=not (self.owned or exit_began()))

    @property
    def execution(self) -> str:
        """One line that describes how the model runs, with the reason if a faster mode is not available."""
        if self.lane == "serial":
            return f"serial: {self.lane_reason}"
        reasons = Counter(self.fusions.unfused)
        num_layers = len(self.layers)
        if self.states is not None:
            num_layers = int(self.text_config.num_hidden_layers)
        fused = f"paged, {self.fusions.num_fused} of {num_layers} layers fused"
        if self.fusions.num_around:
            fused += f", {self.fusions.num_around} of them around their own attention"
        fused += ", decode steps in one call" if self.stack is not None else ""
        fused += f", {len(self.states)} layers with a state" if self.states is not None else ""
        if self.fusions.num_fused < num_layers and not reasons:
            reasons["the model's decoder layers have other names"] += 1
        named = [*reasons, *(f"{name}: {why}" for name, why in self.fusions.reasons.items())]
        return ": ".join([fused, *[", ".join(named)][: len(named)]])

    @property
    def text_config(self) -> Any:
        return text_config(self.hf_config)

    @property
    def kv_layout(self) -> tuple[LayerKV, ...]:
        return tuple(LayerKV(s.num_kv_heads, s.k_dim, s.v_dim, s.latent) for s in self.layers)

    @property
    def bytes_per_token(self) -> int:
        if self.layers:
            return sum(token_bytes(layer, self.dtype) for layer in self.kv_layout)
        config = self.text_config
        width = getattr(config, "hidden_size", 1024)
        return int(getattr(config, "num_hidden_layers", 1)) * 2 * int(width) * self.dtype.itemsize


def text_config(config: Any) -> Any:
    """Return the part of a configuration that describes the decoder."""
    get = getattr(config, "get_text_config", None)
    return get(decoder=True) if get is not None else config


_LEASE_TIMEOUT_S = 2.0
"""Seconds to wait for a runtime that is ending."""

_released = threading.Condition()
_leased: weakref.WeakSet[Any] = weakref.WeakSet()


class ModelLease:
    """Exclusive use of a loaded model until `release`; a runtime of a name or folder reads its own weights.

    Raises ConfigError if another runtime holds the model and does not release it in time.
    """

    def __init__(self, model: Any) -> None:
        self._model = None if isinstance(model, str) or not hasattr(model, "forward") else model
        if self._model is None:
            return
        if self._model in _leased:
            gc.collect()  # the runtime that holds it may be garbage
        with _released:
            if not _released.wait_for(lambda: self._model not in _leased, _LEASE_TIMEOUT_S):
                raise ConfigError(
                    f"this {type(model).__name__} object is run by another Runtime already; use that one for both "
                    "(Runtime.shared(model) finds it), close it first, or load the model twice"
                )
            _leased.add(self._model)

    def release(self) -> None:
        """Release the model for other runtimes. A second call does nothing."""
        with _released:
            if self._model is not None:
                _leased.discard(self._model)
                self._model = None
                _released.notify_all()
