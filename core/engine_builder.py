"""Build the local engine: load the model, allocate its KV pool, and put a runner over both."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from graftlm.core.config import EngineConfig
from graftlm.core.errors import ConfigError, PluginError
from graftlm.core.kv.memory import (
    STEP_TOKENS,
    heaps_trimmed,
    num_states,
    pool_size,
    prefill_bytes,
    step_tokens,
    trim_heap,
)
from graftlm.core.kv.prefix_cache import SnapshotLane
from graftlm.core.kv.tiers.build import check_tiers, folder_tier, host_tier, refuse_tiers
from graftlm.core.kv.tiers.context import weights_identity
from graftlm.kernels.attention import StrictAttention

if TYPE_CHECKING:
    import torch
    from torch import nn

    from graftlm.core.engine import LocalEngine
    from graftlm.core.execution.vision import Vision
    from graftlm.core.kv.tiers.folder import BlockFolder
    from graftlm.core.kv.tiers.loads import HostTier
    from graftlm.core.loaded_model import LoadedModel
    from graftlm.core.model.qualify import AttentionFactory
    from graftlm.core.sampling.device_sampler import DeviceSampler
    from graftlm.core.scheduling.steps_ahead import StepRunner
    from graftlm.core.tensor_parallel.ranks import Ranks
    from graftlm.core.text.tokenizer import Tokenizer
    from graftlm.kernels.attention import Attention
    from graftlm.kernels.kv_store import KVStore
    from graftlm.kernels.wire_plan import WirePlan


class Runner(Protocol):
    """Runs steps.

    A runner knows nothing of sequences and requests: the plan is all that it gets, so it may run in another process.
    """

    def forward(self, plan: WirePlan) -> torch.Tensor:
        """Compute a step and store the KV of its tokens. -> logits [num_logits, vocab_size] of `plan.logits_rows`"""
        ...


@dataclass(frozen=True)
class RunnerSpec:
    """A runner and what the engine must know to feed it.

    num_embeddings  token ids that the model knows, at least vocab_size
    step_tokens     prompt tokens computed in one step, beside one token of each row that decodes
    weights         the dtype that the model computes in, in words
    kv              the KV cache's format, in words
    execution       how the model runs and why not faster, in words
    lane            the runner itself, where it keeps prefixes (the serial lane)
    min_forced      the shortest run of forced tokens worth a longer step on this device
    drafts          whether rows may carry draft tokens
    device_sampler  samples tokens on the device, so that a step may be launched before the last step's tokens are
                    known to the host; None where the host samples every step before the next one
    count_step      is told of each step's seconds
    steps           runs several decode steps at once; None where each is run by itself
    check_device    raises if the device can no longer be used at all
    check_step      raises if the results of the last steps are not to be used
    close           gives the model back in the state in which it was handed over
    num_states      slots for the states of sequences and cached prefixes; 0 for a model without layers with a state
    host_tier       host memory for evicted KV; None without
    vision          the model's encoder of pictures; None for a model without
    no_pictures     the reason for which prompts with pictures are refused; None where they are read
    no_modules      the reason for which prompts with modules are refused; None where they are taken
    folder          files of KV behind it; None without
    """

    runner: Runner
    num_slots: int
    max_model_len: int
    vocab_size: int
    num_embeddings: int
    step_tokens: int
    weights: str = ""
    kv: str = ""
    execution: str = ""
    lane: SnapshotLane | None = None
    min_forced: int = 1
    drafts: bool = False
    device_sampler: DeviceSampler | None = None
    count_step: Callable[[float], object] = lambda step_s: None
    steps: StepRunner | None = None
    check_device: Callable[[], object] = lambda: None
    check_step: Callable[[], object] = lambda: None
    close: Callable[[], None] = lambda: None
    num_states: int = 0
    host_tier: HostTier | None = None
    vision: Vision | None = None
    no_pictures: str | None = None
    no_modules: str | None = None
    folder: BlockFolder | None = None


def build_local(
    model: Any, config: EngineConfig, *, tokenizer: Tokenizer, wake: Callable[[], None] = lambda: None
) -> LocalEngine:
    """Load `model` and put an engine over it, with the loader and the kernels that the configuration names."""
    from graftlm.core.constraint import prepare_constraints
    from graftlm.core.engine import LocalEngine
    from graftlm.core.loaded_model import ModelLease
    from graftlm.core.tensor_parallel.ranks import loading_for
    from graftlm.kernels.cpu.contention import CoreContention
    from graftlm.kernels.cpu.cores import fit_threads
    from graftlm.plugins import manager

    check_tiers(config)
    registry = manager.load()
    fit_threads(config.tensor_parallel)  # before weights are packed, in a layout that may depend on their number
    lease, crew = ModelLease(model), None
    try:
        keeps = config.cache.folder is not None
        identity = weights_identity(model) if keeps and not isinstance(model, str) else ""  # before it is changed
        if config.tensor_parallel > 1:
            from graftlm.core.tensor_parallel.crew import Crew

            crew = Crew.of(model, config, wake)
            config = replace(config, device=str(crew.ranks.device))
        with loading_for(crew.ranks if crew is not None else None), heaps_trimmed():
            loaded = registry.models[config.loader](model, config, tokenizer)
            if keeps and isinstance(model, str):
                identity = weights_identity(model)  # its files may have been downloaded
            spec = build_runner(loaded, config, registry.attention, identity=identity)
            spec = replace(spec, no_modules=_no_modules(loaded, config))
        if crew is not None:
            spec = crew.over(spec)
    except BaseException:
        if crew is not None:
            crew.close()
        lease.release()
        raise

    contention = CoreContention() if loaded.device.type == "cpu" else None

    def close() -> None:
        try:
            spec.close()
        finally:
            lease.release()
            if contention is not None:
                contention.close()
                trim_heap()

    owned = replace(spec, close=close)
    if contention is not None:
        owned = replace(owned, count_step=contention.add)
    prepare_constraints(tokenizer)
    return LocalEngine(owned, tokenizer, config, wake=wake, finished=registry.request_finished)


def build_runner(
    loaded: LoadedModel, config: EngineConfig, kernels: Mapping[str, AttentionFactory], *, identity: str = ""
) -> RunnerSpec:
    """Allocate the KV pool and put a runner over it, with the attention that the configuration names.

    identity  of the weights, for a folder of KV
    """
    from graftlm.core.kv.kv_format import kv_format
    from graftlm.core.model.kv_scales import kv_scales
    from graftlm.core.tensor_parallel.ranks import ranks_at_hand
    from graftlm.kernels.kv_store import FP8
    from graftlm.kernels.wire_plan import RESERVED

    kv = kv_format(loaded, config)
    if loaded.kv_reason is not None:
        warnings.warn(f"KV is kept in {kv}, not in 12 bits a number: {loaded.kv_reason}", stacklevel=2)
    words = str(loaded.dtype).removeprefix("torch."), str(kv), loaded.execution
    sizes = loaded.max_model_len, loaded.vocab_size, _num_embeddings(loaded)
    states = num_states(loaded, config)
    state_bytes = (states + RESERVED) * loaded.states.num_bytes if loaded.states is not None else 0
    reserved = state_bytes + (loaded.vision.reserved_bytes if loaded.vision is not None else 0)
    reserved += prefill_bytes(loaded, config.max_step_tokens or STEP_TOKENS)
    num_slots = pool_size(loaded, config.cache, kv.bytes_per_token(loaded), reserved)
    if (ranks := ranks_at_hand()) is not None:
        num_slots, states = _agreed(ranks, loaded, str(kv), num_slots, states)
    if loaded.lane == "serial":
        refuse_tiers(loaded, config)
        from graftlm.core.execution.serial import SerialRunner
        from graftlm.core.model.qualify import stretched_context

        serial = SerialRunner(loaded, stretches_at=stretched_context(loaded.text_config))
        budget = step_tokens(config.max_step_tokens, loaded)
        return RunnerSpec(
            serial, num_slots, *sizes, budget, *words, lane=serial, close=loaded.close, no_pictures=loaded.no_pictures
        )
    from graftlm.core.execution.paged import PagedRunner
    from graftlm.core.sampling.device_sampler import DeviceSampler

    scales = kv_scales(loaded) if kv.dtype is FP8 else ()
    store = kv.store(loaded, num_slots + 1, scales)  # the last slot is scratch
    pool = loaded.states.pool(states + RESERVED, loaded.device) if loaded.states is not None else None
    budget = step_tokens(config.max_step_tokens, loaded)  # of the memory that weights and store leave
    attention = _attention(loaded, config, kernels, store)
    overlap = loaded.device.type == "cuda" if config.overlap is None else config.overlap
    device_sampler = DeviceSampler(config.max_batch, loaded.device) if overlap else None
    host = host_tier(config, store, pool, max_tokens=loaded.max_model_len)
    paged = PagedRunner(loaded, attention, device_sampler.tokens if device_sampler is not None else None, pool)
    runner: Runner = paged
    if loaded.device.type == "cuda":
        from graftlm.core.execution.cuda_graphs import GraphRunner
        from graftlm.kernels.gpu.attention.step_buffers import CapturableAttention

        if isinstance(attention, CapturableAttention):
            runner = GraphRunner(
                paged, attention, max_batch=config.max_batch, max_len=loaded.max_model_len, scratch=num_slots
            )
    if host is not None:
        host.register()
    return RunnerSpec(
        runner,
        num_slots,
        *sizes,
        budget,
        *words,
        # a state cannot be cut back to the tokens before a rejected draft
        drafts=config.speculation == "auto"
        and loaded.device.type == "cpu"
        and device_sampler is None
        and loaded.states is None,
        device_sampler=device_sampler,
        steps=paged if paged.runs_steps and device_sampler is None else None,
        check_device=partial(_synchronize, loaded.device),
        close=loaded.close,
        num_states=states,
        vision=loaded.vision,
        no_pictures=loaded.no_pictures,
        host_tier=host,
        folder=folder_tier(config, loaded, attention, host, identity),
    )


def _no_modules(loaded: LoadedModel, config: EngineConfig) -> str | None:
    """Return the reason for which this model cannot attend to modules in any order; None if it can."""
    windows = [layer.window for layer in loaded.layers if layer.window is not None]
    if loaded.lane != "paged":
        why = f"it runs alone, where positions cannot be set: {loaded.lane_reason}"
    elif loaded.states is not None:
        why = "it has layers whose state depends on the order of all tokens"
    elif windows and min(windows) < loaded.max_model_len:
        why = f"it has layers that see {min(windows):,} tokens only, so the order matters; lower max_model_len to that"
    elif config.strict:
        why = "strict=True promises the answers of the whole prompt, which modules change; leave it out"
    elif not config.cache.enabled or config.cache.page_size > 1:
        why = "their KV is kept in the prefix cache; use CacheConfig(enabled=True, page_size=1)"
    else:
        return None
    return f"{loaded.name} takes no prompts of gl.module: {why}"


def _agreed(ranks: Ranks, loaded: LoadedModel, kv: str, num_slots: int, num_states: int) -> tuple[int, int]:
    """Agree with the other ranks on the slots of the pools. Raises ConfigError if the ranks differ otherwise."""
    from graftlm.core.tensor_parallel.ranks import Meeting

    if loaded.lane != "paged":
        raise ConfigError(
            f"tensor_parallel is {ranks.size}, which {loaded.name} cannot use: {loaded.lane_reason}; use "
            "tensor_parallel=1"
        )
    facts = {"modules": loaded.execution, "KV cache": kv, "dtype": str(loaded.dtype), "lane": loaded.lane}
    common = ranks.agree(Meeting(facts, num_slots, num_states))
    return common.num_slots, common.num_states


def _synchronize(device: torch.device) -> None:
    """Wait for all that was launched; after some errors a device fails every call from then on, this one too."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _num_embeddings(loaded: LoadedModel) -> int:
    embeddings: nn.Module = loaded.model.get_input_embeddings()  # type: ignore[operator]
    num = getattr(embeddings, "num_embeddings", None)  # codes have no weight that costs nothing
    if num is None:
        weight = getattr(embeddings, "weight", None)
        num = weight.shape[0] if weight is not None else 0
    return max(loaded.vocab_size, num)


def _attention(
    loaded: LoadedModel, config: EngineConfig, kernels: Mapping[str, AttentionFactory], store: KVStore
) -> Attention:
    """The kernels that the configuration names; for "auto" the first of the device's that can run the model.

    FlashInfer is optional: where it is missing or does not compile, the next best kernels are taken, with a
    warning. "auto" does not wish for it: nothing measured here says that it is faster.
    """
    from graftlm.kernels.gpu.support import triton_problem
    from graftlm.kernels.kv_store import CompactKV, Int8KV

    if isinstance(store, Int8KV):
        from graftlm.kernels.cpu.attention.int8 import Int8Attention

        int8 = Int8Attention(store)  # no other kernel reads it
        kernels, config = {"torch": lambda _: int8}, replace(config, attention="torch")
    on_gpu = loaded.device.type == "cuda"
    problem = triton_problem(loaded.device) if on_gpu else None
    best = ["triton", "torch"] if on_gpu and problem is None else ["torch"]
    names = best if config.attention == "auto" else [config.attention]
    if config.attention == "flashinfer":
        names = ["flashinfer", *best]
    if isinstance(store, CompactKV):
        names = ["triton"]  # no other reads it
    reasons = [f"triton: {problem}"] if problem and config.attention == "auto" else []
    for name in names:
        try:
            attention = kernels[name](store)
        except PluginError as error:
            if name == names[-1]:
                raise
            reasons.append(str(error))
            continue
        reason = next((r for layer in loaded.layers if (r := attention.supports(layer))), None)
        if reason is None and config.strict and on_gpu:
            if isinstance(attention, StrictAttention):
                attention.strict = True
            else:
                reason = "its results depend on the batch"
        if reason is None:
            if reasons:
                warnings.warn(f"attention {name!r} is used, more slowly: {'; '.join(reasons)}", stacklevel=2)
            return attention
        reasons.append(f"{name}: {reason}")
    raise ConfigError(f"no attention can run {loaded.name}: {'; '.join(reasons)}; use attention='auto'")
