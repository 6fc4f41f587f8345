"""Kernel warm-up on a GPU: a dry run of a small copy of the model finds its kernels, which compile in parallel.

A start compares each replaced module with its original, a ragged batch with the model's own forward, and captures a
graph for each batch size. These steps launch a few dozen kernels; compiling each at its first launch would take most of
the start. A dry run on one layer of each kind comes first, and the kernels that it launches compile in parallel.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import nn

from graftlm.core.config import EngineConfig
from graftlm.core.execution.paged import PagedRunner
from graftlm.core.kv.kv_format import KVFormat, kv_format
from graftlm.core.model.qualify import AttentionFactory, discover, launch_ragged
from graftlm.core.state_layers.state_layers import has_states
from graftlm.kernels.attention import StrictAttention
from graftlm.kernels.gpu.attention.step_buffers import CapturableAttention
from graftlm.kernels.gpu.support import triton_problem
from graftlm.kernels.jit.compile_server import CompileServer
from graftlm.kernels.jit.precompile import Compiling, compile_meanwhile
from graftlm.kernels.kv_store import FP8

if TYPE_CHECKING:
    from graftlm.core.loaded_model import LoadedModel

MAX_KINDS = 4
"""The largest number of layers in the copy: their packed weights are held beside the model's."""

Form = frozenset[tuple[object, ...]]
"""The modules of a model, their forwards, and the kernels of its fused layers."""


@dataclass(frozen=True)
class Rehearsal:
    """The kernels that a dry run launched, compiling in the background, and the copy's form; empty if it failed."""

    compiling: tuple[Compiling, ...]
    form: Form

    def wait(self) -> None:
        """Wait until everything is compiled."""
        for compiling in self.compiling:
            compiling.wait()

    def covers(self, model: nn.Module) -> bool:
        """Return True if `model` has the form of its copy, hence launches the same kernels."""
        return self.form == form_of(model)


def rehearse(
    loaded: LoadedModel,
    config: EngineConfig,
    attention_factory: AttentionFactory,
    *,
    server: CompileServer | None = None,
) -> Rehearsal | None:
    """Start to compile the kernels of the rest of the start. None where Triton does not run, and for hybrid models.

    The model stays unchanged. Before `wait`, no kernel of the model may be launched except by its own forward.

    server   compiles the kernels, until `wait` returns; None compiles in threads
    """
    if triton_problem(loaded.device) is not None or has_states(loaded.model):
        return None
    form: Form = frozenset()

    def run() -> None:
        nonlocal form
        from graftlm.core.fusion.gpu_modules import fuse_gpu

        model = small_copy(loaded.model)
        try:
            fuse_gpu(model, strict=config.strict, fp8=config.activations == "fp8", dry=True)
            found = discover(model, loaded.device)
            small = replace(loaded, model=model, lane="paged", layers=found.layers, layer_of=found.layer_of)
            kv = kv_format(small, config)
            _launch_steps(small, config, attention_factory, kv)
            launch_ragged(small, attention_factory, compact=kv.compact)  # last: its kernels take longest to compile
            form = form_of(model)
        finally:
            _strip(model)
            first.wait()  # so that the server can test whether kernels are in Triton's cache

    # Triton digests its own files once for the version in its cache keys: the first kernels wait for that alone
    first = compile_meanwhile(partial(_launch_draws, loaded), loaded.device)
    others = compile_meanwhile(run, loaded.device, server)
    return Rehearsal((first, others), form)


def _launch_steps(loaded: LoadedModel, config: EngineConfig, attention_factory: AttentionFactory, kv: KVFormat) -> None:
    """Run a decode step of every captured graph size."""
    from graftlm.core.execution.cuda_graphs import graph_sizes, launch_steps, max_dense, step_buffers

    scales: list[torch.Tensor] = []
    if kv.dtype is FP8:
        scales = [
            torch.ones(2, layer.num_kv_heads, device=loaded.device, dtype=torch.float32) for layer in loaded.layers
        ]
    attention = attention_factory(kv.store(loaded, 1, scales))
    if isinstance(attention, StrictAttention):
        attention.strict = config.strict
    if isinstance(attention, CapturableAttention):
        runner = PagedRunner(loaded, attention)
        step = step_buffers(config.max_batch, loaded.max_model_len, 0, attention, runner)
        rows = torch.zeros(max_dense(config.max_batch), dtype=torch.int64, device=loaded.device)
        launch_steps(step, attention, runner, graph_sizes(config.max_batch, runner), rows)


def _launch_draws(loaded: LoadedModel) -> None:
    """Sample tokens as decode steps do: greedily under a mask, and at random with and without top-p."""
    from graftlm.kernels.gpu.sampling.argmax import greedy
    from graftlm.kernels.gpu.sampling.nucleus import MAX_COLUMNS, draw_nucleus
    from graftlm.kernels.gpu.sampling.token_mask import apply_mask

    logits = torch.zeros(1, loaded.vocab_size, dtype=loaded.dtype, device=loaded.device)
    numbers = torch.zeros(1, (loaded.vocab_size + 31) // 32, dtype=torch.int32, device=loaded.device)
    apply_mask(logits, numbers, numbers[0, :1])
    greedy(logits, torch.zeros(1, dtype=torch.int64, device=loaded.device))
    if loaded.vocab_size <= MAX_COLUMNS:
        params = torch.ones(1, 3, device=loaded.device, dtype=torch.float32)
        for top_p in (False, True):
            draw_nucleus(logits, params, params[:, :1], top_p=top_p)


def small_copy(model: nn.Module) -> nn.Module:
    """Return a copy of `model` that shares its weights and has one decoder layer of each kind.

    Raises ValueError if there are too many kinds.
    """
    memo: dict[int, object] = {id(x): x for x in chain(model.parameters(), model.buffers())}
    for module in model.modules():
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList):
            kinds = {_kind(layer): layer for layer in reversed(layers)}
            if len(kinds) > MAX_KINDS:
                raise ValueError(f"{type(module).__name__} has {len(kinds)} kinds of layers")
            memo[id(layers)] = nn.ModuleList(copy.deepcopy(layer, memo) for layer in reversed(kinds.values()))
    return copy.deepcopy(model, memo)


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """Return a key that is equal for layers that launch the same kernels."""
    kind: list[object] = []
    for module in layer.modules():
        kind.append(type(module))
        kind += [(k, v) for k, v in vars(module).items() if isinstance(v, bool | int | float | str) and "idx" not in k]
        for name, tensor in chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
            kind.append((name, tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % 16))
    return tuple(kind)


def form_of(model: nn.Module) -> Form:
    forwards = ((type(module), vars(module).get("forward")) for module in model.modules())
    return frozenset((k, type(f), *getattr(f, "kernels", ())) for k, f in forwards)


def _strip(model: nn.Module) -> None:
    """Free all weights at once: modules refer to each other in cycles, which the collector would free much later."""
    for module in list(model.modules()):
        vars(module).clear()
