"""The paged lane: a Hugging Face model run ragged over the KV store.

All tokens of all rows are one sequence of shape [1, num_tokens] with their own positions. The model calls the
attention function that is registered here, which hands queries, keys and values to the step at hand: the one that
the calling thread has switched on. (A keyword of the model call would not do: some models do not pass theirs on.)
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from graftlm.core.errors import EngineError, ModelError
from graftlm.core.tensor_parallel.ranks import HEAD_PARTS, ranks_at_hand
from graftlm.kernels.attention import PackedAttention, PackedQKV
from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.cpu.decoder.greedy_steps import GreedySteps
from graftlm.kernels.gpu.support import triton_problem
from graftlm.kernels.latent import LatentHeads
from graftlm.kernels.recurrent.state_step import StateStep
from graftlm.kernels.transfer import send

if TYPE_CHECKING:
    from graftlm.core.execution.vision import VisionInputs
    from graftlm.core.loaded_model import LoadedModel
    from graftlm.kernels.attention import Attention
    from graftlm.kernels.recurrent.state_pool import StatePool
    from graftlm.kernels.wire_plan import WirePlan

IMPLEMENTATION = "graftlm"
LATENT = "graftlm_latent"
"""The attribute of a module of latent attention that holds its LatentHeads."""
ALL_TOKENS = "graftlm_all_tokens"
"""The attribute of a module whose indexer chooses the tokens that it attends to, and is made to choose all."""
_HARMLESS = frozenset({"position_ids", "use_cache", "dropout", "cache_position", "logits_to_keep"})
"""Keywords that an attention function is handed and that change nothing here: a model in evaluation has no dropout."""


class AttentionCall(NamedTuple):
    """One call of a model's attention. q, k [1, heads, num_tokens, k_dim], v [1, num_kv_heads, num_tokens, v_dim].

    tokens  int64 [num_wanted], the only ones whose output is looked at, in order; None for all
    latent  the heads of latent attention: q are queries of expanded keys, k the latents [1, 1, num_tokens, rank +
            rope_dim], v their first part. The output is that of expanded values
    """

    module: nn.Module
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    params: AttentionParams
    tokens: torch.Tensor | None = None
    latent: LatentHeads | None = None


class PackedCall(NamedTuple):
    """One call of a model's attention by a layer that leaves rotary embedding and KV store to the kernel.

    last_token_only  of each row, where the others are not asked for
    """

    module: nn.Module
    packed: PackedQKV
    params: AttentionParams
    last_token_only: bool = False


class OutputTokens(NamedTuple):
    """The tokens whose output of the last layer is looked at, where these are few: the others need not be computed.

    attention  that of the last layer
    tokens     int64 [num_wanted], on the device
    last_token_only  whether they are the last tokens of all rows, in order
    """

    attention: nn.Module
    tokens: torch.Tensor
    last_token_only: bool


Step = Callable[[AttentionCall], torch.Tensor]
"""Answers a call with [num_tokens, num_heads, v_dim], or [num_wanted, num_heads, v_dim]."""

PackedStep = Callable[[PackedCall], torch.Tensor]

StateLayerStep = Callable[[int, torch.Tensor], torch.Tensor]
"""Runs one layer with a state by its number: hidden states [1, num_tokens, hidden_size] to hidden states."""


class _Current(threading.local):
    step: Step | None = None
    packed: PackedStep | None = None
    wanted: OutputTokens | None = None
    states: StateLayerStep | None = None


_current = _Current()


def step_at_hand() -> Step | None:
    """The step that answers the attention calls of this thread; None outside of a step."""
    return _current.step


def packed_step() -> PackedStep | None:
    """The step that answers packed calls of this thread; None outside of a step, or if its kernel takes none."""
    return _current.packed


def state_step() -> StateLayerStep | None:
    """The step that runs layers with a state of this thread; None outside of a step."""
    return _current.states


def output_tokens_after(attention: nn.Module) -> OutputTokens | None:
    """Which tokens matter after the layer that has this attention; None if all do."""
    wanted = _current.wanted
    return wanted if wanted is not None and wanted.attention is attention else None


def attention_function(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The function that AttentionInterface calls in every layer. An argument that would be ignored raises an error."""
    if _current.step is None:
        raise EngineError(
            f"{type(module).__name__} was called by another thread while a runtime runs the model; call the model "
            "through the runtime, or close that before model.generate()"
        )
    if ALL_TOKENS in vars(module):
        attention_mask, others = None, others | {"indices": None}
    for name, value_given in others.items():
        if name not in _HARMLESS and value_given is not None and value_given is not False:
            raise ModelError(f"{type(module).__name__} passes {name!r} to its attention, which is not supported here")
    if attention_mask is not None:
        raise ModelError(f"{type(module).__name__} passes an attention mask of its own, which is not supported here")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ModelError(f"{type(module).__name__} attends in both directions, which is not supported here")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    params = AttentionParams(scale, sliding_window, softcap, s_aux)
    latent = vars(module).get(LATENT)
    return _current.step(AttentionCall(module, query, key, value, params, latent=latent))[None], None


def _register() -> None:
    """Let models of transformers find our attention. Where it was not imported, there is none of its models.

    No mask function goes with it: transformers then builds no mask at all.
    """
    models: Any = sys.modules.get("transformers.modeling_utils")
    if models is not None:
        models.AttentionInterface.register(IMPLEMENTATION, attention_function)


class AttentionSwitch:
    """Puts a model on our attention for the time of a call and back on its own.

    Outside of our calls the model is as it was: `model.generate` of a model that its user handed over still works.
    """

    def __init__(self, model: nn.Module) -> None:
        _register()
        configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
        self._configs = [c for c in configs.values() if hasattr(c, "_attn_implementation_internal")]

    @contextmanager
    def __call__(
        self,
        step: Step,
        packed: PackedStep | None = None,
        wanted: OutputTokens | None = None,
        states: StateLayerStep | None = None,
    ) -> Iterator[None]:
        before = [config._attn_implementation_internal for config in self._configs]
        for config in self._configs:
            config._attn_implementation_internal = IMPLEMENTATION
        _current.step, _current.packed, _current.wanted, _current.states = step, packed, wanted, states
        try:
            yield
        finally:
            _current.step = _current.packed = _current.wanted = _current.states = None
            for config, implementation in zip(self._configs, before, strict=True):
                config._attn_implementation_internal = implementation


def accepts_logits_to_keep(model: nn.Module) -> bool:
    """Whether the model can be told which tokens' logits are wanted."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def feed(input_ids: torch.Tensor, sources: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Where a source is not -1, take that token of `drawn` instead of the id. input_ids, sources  [num_tokens]"""
    if triton_problem(drawn.device) is None:
        from graftlm.kernels.gpu.step_inputs import feed_tokens

        return feed_tokens(input_ids, sources, drawn)
    return torch.where(sources >= 0, drawn[sources.clamp(min=0)], input_ids)


def _last_attention(loaded: LoadedModel) -> nn.Module | None:
    """Return the attention of the last layer; None if a layer with a state follows, which needs all tokens."""
    last = max(loaded.layer_of, key=loaded.layer_of.__getitem__, default=None)
    if last is not None and loaded.states is not None:
        order = [m for m in loaded.model.modules() if m is last or m in loaded.states.layers]
        return last if order[-1] is last else None
    return last


class PagedRunner:
    """One forward of a loaded model over the KV store.

    drawn  int64 [max_rows], on the device: the tokens that the last step drew, for steps that are laid out before
           these are known (`WirePlan.token_sources`).
    states the states of sequences, for a model that has layers with a state
    """

    def __init__(
        self,
        loaded: LoadedModel,
        attention: Attention,
        drawn: torch.Tensor | None = None,
        states: StatePool | None = None,
    ) -> None:
        self.loaded = loaded
        self.attention = attention
        self.drawn = drawn
        self.states = states
        self._model = loaded.model
        self._layer_of = loaded.layer_of
        self._switch = AttentionSwitch(loaded.model)
        self._keeps = accepts_logits_to_keep(loaded.model)
        self._takes_packed = isinstance(attention, PackedAttention)
        self._stack = loaded.stack if attention.reads_in_place(loaded.dtype) else None
        self.interrupt = np.zeros(1, np.int64)
        self._last = _last_attention(loaded)
        self.ranks = ranks_at_hand()
        self._gathers = self.ranks is not None and hasattr(loaded.model, HEAD_PARTS)

    def forward(self, plan: WirePlan) -> torch.Tensor:
        """Compute the step: stores the KV of all its tokens.

        -> logits [num_logits, vocab_size] of `plan.logits_rows`, dtype of the model's head.
        """
        device = self.loaded.device
        # Without a wanted row the last one is computed and dropped: not every head takes an empty input.
        num_logits = len(plan.logits_rows)
        rows = plan.logits_rows if num_logits else np.array([plan.num_tokens - 1])
        with torch.inference_mode():
            self.copy_states(plan)
            self.attention.prepare(plan)
            input_ids = self._fed(plan, send(plan.input_ids, device))
            if self._stack is not None and not plan.embedded:
                logits = self._stack.run(plan, input_ids, torch.from_numpy(plan.logits_rows), self.attention)
                if logits is not None:
                    return self._gathered(logits)
            wanted = self._wanted(plan, rows)
            state_step = StateStep.of(plan, device) if self.states is not None else None
            positions, rows_sent = send(plan.positions, device), send(rows, device)
            inputs: VisionInputs | None = None
            if plan.embedded:
                assert self.loaded.vision is not None
                inputs = self.loaded.vision.inputs(plan, input_ids)  # the encoder keeps its own attention
                positions = positions if plan.grid is None else send(plan.grid, device)
            logits = self.run(input_ids, positions, plan, rows_sent, wanted, state_step, inputs)
            return logits[:num_logits]

    def copy_states(self, plan: WirePlan) -> None:
        """Copy the states that the step asks for, before anything else of it runs."""
        if self.states is not None:
            with torch.inference_mode():
                self.states.copy(plan.state_copies)

    @property
    def selects_logits(self) -> bool:
        """Whether the model computes logits of the wanted tokens alone."""
        return self._keeps

    @property
    def runs_steps(self) -> bool:
        """Whether `decode` may run steps."""
        return self._stack is not None

    def decode(self, plan: WirePlan, ends: Seq[Seq[int]], num_steps: int) -> NDArray[np.int64] | None:
        """As StepRunner.decode (core/scheduling/steps_ahead.py)."""
        if self._stack is None:
            return None
        with torch.inference_mode():
            self.attention.prepare(plan)
            steps = GreedySteps(num_steps, ends, self.interrupt)
            ids, rows = torch.from_numpy(plan.input_ids), torch.from_numpy(plan.logits_rows)
            return self._stack.decode(plan, ids, rows, self.attention, steps)

    def _wanted(self, plan: WirePlan, rows: NDArray[np.int64]) -> OutputTokens | None:
        """What the last layer is to compute for logits of these rows; None for all."""
        if self._last is None or not (self._takes_packed or self.loaded.device.type == "cpu"):
            return None
        last = plan.ends - 1
        only_last = set(last.tolist()).issuperset(rows.tolist())
        tokens = last if only_last else rows
        if 2 * len(tokens) > plan.num_tokens:
            return None
        return OutputTokens(self._last, send(tokens, self.loaded.device), only_last)

    def _fed(self, plan: WirePlan, input_ids: torch.Tensor) -> torch.Tensor:
        """The step's ids, including those that the last step sampled on the device."""
        if plan.token_sources is None:
            return input_ids
        return self.drawn_ids(input_ids, send(plan.token_sources, input_ids.device))

    def drawn_ids(self, input_ids: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        """Return the ids with those that the last step sampled on the device, of rank 0 where there are several."""
        assert self.drawn is not None
        ids = feed(input_ids, sources, self.drawn)
        return ids if self.ranks is None else self.ranks.from_first(ids)

    def run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        plan: WirePlan | None,
        rows: torch.Tensor | None,
        wanted: OutputTokens | None = None,
        state_step: StateStep | None = None,
        inputs: VisionInputs | None = None,
    ) -> torch.Tensor:
        """Run the model on tokens that the attention has been prepared for.

        input_ids, positions  [num_tokens], on the device; positions [3, num_tokens] of a multimodal rotary embedding
        plan                  handed to the attention; None for one that reads its step from the device
        rows                  [num_logits], whose logits are wanted; None wants all
        wanted                what the last layer may confine itself to
        state_step            the rows, for layers with a state; None for a model without
        inputs                what the model takes in place of `input_ids`, for a step with pictures
        -> logits [num_logits, vocab_size]
        """
        attention, layer_of = self.attention, self._layer_of

        def step(call: AttentionCall) -> torch.Tensor:
            q, k, v = (x[0].transpose(0, 1) for x in (call.q, call.k, call.v))
            layer, tokens = layer_of[call.module], call.tokens
            if call.latent is not None:
                return attention.forward_latent(layer, call.latent, q, k, plan, call.params)
            if tokens is None:
                return attention.forward(layer, q, k, v, plan, call.params)
            return attention.forward_some(layer, q, k, v, plan, call.params, tokens)

        def packed(call: PackedCall) -> torch.Tensor:
            assert isinstance(attention, PackedAttention)
            return attention.forward_packed(
                layer_of[call.module], call.packed, plan, call.params, last_token_only=call.last_token_only
            )

        keep = {"logits_to_keep": rows} if self._keeps and rows is not None else {}
        run_state: StateLayerStep | None = None
        if state_step is not None:
            assert self.states is not None and self.loaded.states is not None
            run_state = self.loaded.states.runner(self.states, state_step)
        with torch.inference_mode(), self._switch(step, packed if self._takes_packed else None, wanted, run_state):
            position_ids = positions[None] if positions.dim() == 1 else positions[:, None]
            with nullcontext({"input_ids": input_ids[None]}) if inputs is None else inputs as given:
                output: Any = self._model(position_ids=position_ids, use_cache=False, **given, **keep)
            logits: torch.Tensor = output.logits[0]
            return self._gathered(logits if self._keeps or rows is None else logits.index_select(0, rows))

    def _gathered(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of the whole vocabulary, where this rank's head computes a part of them."""
        return self.ranks.gather(logits) if self._gathers and self.ranks is not None else logits
