"""Load any Hugging Face decoder: read its weights, replace its modules by faster equivalents, and choose its lane."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from graftlm.core.config import EngineConfig
from graftlm.core.errors import ConfigError, ModelError
from graftlm.core.fusion.cpu_layers import fuse_cpu
from graftlm.core.fusion.latent_attention import fuse_indexers, fuse_latent
from graftlm.core.fusion.linears import Fusions, fuse, pack_quantised
from graftlm.core.kv.memory import check_weights_fit, give_back
from graftlm.core.loaded_model import LoadedModel
from graftlm.core.model.description import describe, describe_model, resolve, source_of
from graftlm.core.model.kernel_warmup import rehearse
from graftlm.core.model.known_models import learn, read_known
from graftlm.core.model.lane import check_strict, choose_lane, default_attention
from graftlm.core.model.qualify import AttentionFactory, Reference
from graftlm.core.model.quantised.held import widen
from graftlm.core.model.remembered.load_record import LoadRecord
from graftlm.core.model.vision_probe import PictureReference, add_vision
from graftlm.core.model.weights import choose_device, choose_dtype, leave_files, read_weights
from graftlm.core.tensor_parallel.ranks import ranks_at_hand
from graftlm.core.tensor_parallel.shards import read_shard
from graftlm.kernels.codes.tiled_weight import runs_on
from graftlm.kernels.gpu.support import triton_problem
from graftlm.kernels.jit.compile_server import CompileServer


def load_model(
    model: str | os.PathLike[str] | nn.Module,
    config: EngineConfig | None = None,
    tokenizer: Any = None,
    *,
    attention_factory: AttentionFactory | None = None,
) -> LoadedModel:
    """Load a decoder and choose its lane.

    model      a Hugging Face id, a local folder (no network call is made), a GGUF file, "ollama:NAME" for a model that
               Ollama has, "sprout" for the embedded model, or a loaded transformers model; the latter's weights are
               used in place and its own attention stays usable.
    tokenizer  a Hugging Face tokenizer or a Tokenizer; None loads the one beside the model.

    Raises ModelError if the model or its tokenizer cannot be found, read or run, ConfigError for options that the model
    contradicts. A model that fails qualification gets the serial lane and one warning.
    """
    config = config or EngineConfig()
    device = choose_device(config.device)
    _check_activations(config, device)
    with CompileServer() if triton_problem(device) is None else nullcontext() as server:
        record = _record_of(model, config, device) if attention_factory is None else None
        loaded = _read(model, config, tokenizer, device, record)
        loaded.fusions.trusted = record is not None and record.tested
        factory = attention_factory or default_attention(device)
        _choose_compact(loaded, config)
        if device.type == "cpu":
            pack_quantised(loaded.model, loaded.fusions, config.activations)
            widen(loaded.model)
        rehearsal = rehearse(loaded, config, factory, server=server)
        try:
            reference = None if loaded.fusions.trusted else Reference.of(loaded)
        except Exception as error:
            raise ModelError(f"{loaded.name} cannot be run: {type(error).__name__}: {str(error)[:500]}") from error
        if reference is not None and not isinstance(model, nn.Module):
            _check_values(loaded, reference)
        pictures = PictureReference.of(loaded)
        if rehearsal is not None:
            if loaded.tokenizer is not None:
                _ = loaded.tokenizer.token_bytes  # computed here for the engine
            rehearsal.wait()
    hf_model = loaded.model
    ours = loaded.owned = not isinstance(model, nn.Module)
    learned = (
        None
        if isinstance(model, nn.Module) or ranks_at_hand() is not None or reference is None
        else learn(resolve(model, revision=config.revision), loaded, reference, config)
    )
    if device.type == "cpu":
        give_back()  # the largest weight is in memory twice at this point
    latents = Fusions()
    fuse_indexers(hf_model, latents)
    fuse_latent(hf_model, latents)  # before weights are laid out anew
    loaded.fusions = _fuse(loaded, config, unchanged=ours)
    loaded.fusions.add(latents.undo)
    loaded.rehearsed = rehearsal is not None and rehearsal.covers(hf_model)
    if ours:
        leave_files(hf_model, loaded.fusions)
    if device.type == "cpu":
        fuse_cpu(hf_model, loaded.fusions)  # last: it stores addresses of weights
    choose_lane(loaded, reference, factory, config)
    add_vision(loaded, pictures, factory, config)
    if config.strict and loaded.lane == "paged" and device.type == "cuda":
        check_strict(loaded, factory)
    if device.type == "cpu":
        if learned is not None and loaded.lane == "paged":
            learned()
        if record is not None and loaded.lane == "paged" and not loaded.fusions.num_refused:
            record = record if record.key is not None else _record_of(model, config, device)  # files were downloaded
            if record is not None:
                record.keep(hf_model)
        give_back()
    return loaded


def _check_values(loaded: LoadedModel, reference: Reference) -> None:
    """Raise ModelError if logits are not finite because of a weight in the files."""
    if reference.logits.isfinite().all():
        return
    name = next((name for name, values in loaded.model.named_parameters() if not values.isfinite().all()), None)
    if name is not None:
        raise ModelError(
            f"{loaded.name!r} has values in {name!r} that are infinite or no numbers; its file is damaged: download it "
            "again"
        )


def _record_of(
    model: str | os.PathLike[str] | nn.Module, config: EngineConfig, device: torch.device
) -> LoadRecord | None:
    """Return the record of earlier loads on a CPU; None for loaded models and for parts of one."""
    if device.type != "cpu" or isinstance(model, nn.Module) or ranks_at_hand() is not None:
        return None
    return LoadRecord.find(resolve(model, revision=config.revision), config)


def _read(
    model: str | os.PathLike[str] | nn.Module,
    config: EngineConfig,
    tokenizer: Any,
    device: torch.device,
    record: LoadRecord | None,
) -> LoadedModel:
    """Put the model on its device and describe it; attention layers and lane are set later."""
    if isinstance(model, nn.Module):
        hf_model, source = model, source_of(model)
        dtype = choose_dtype(config, device)
        if dtype != "auto":
            hf_model = hf_model.to(dtype)
        name = source or type(model).__name__
    else:
        source = resolve(model, verify=True, revision=config.revision)
        name = os.fspath(model)
        ranks = ranks_at_hand()
        if ranks is not None:
            hf_model = read_shard(source, config, ranks)
        else:
            known = read_known(source, config, record) if record is not None else None
            hf_model = known if known is not None else read_weights(source, config, device)
    check_weights_fit(name, hf_model, device)
    hf_model = hf_model.to(device).eval()
    if (ranks := ranks_at_hand()) is not None and ranks.rank:
        return describe_model(hf_model, None, name, config, device)  # a follower has no tokenizer
    return describe(hf_model, tokenizer, source, name, config, device)


def _check_activations(config: EngineConfig, device: torch.device) -> None:
    """Raise ConfigError if no kernel for `device` rounds activations as the options ask."""
    place = {"int8": "a CPU", "fp8": "a Hopper GPU with Triton 3.6 or newer"}.get(config.activations)
    fits = device.type == "cpu" if config.activations == "int8" else runs_on(device)
    if place is not None and not fits:
        raise ConfigError(
            f"activations is {config.activations!r}, which needs {place}, and the model runs on {device}; leave "
            "activations out, or choose another device"
        )


def _choose_compact(loaded: LoadedModel, config: EngineConfig) -> None:
    if triton_problem(loaded.device) is None:
        from graftlm.core.fusion.compact_weights import choose_compact

        choose_compact(loaded, config)
    elif config.compact_weights:
        raise ConfigError(
            f"compact_weights is True, but there are none on {loaded.device}; they need a Hopper GPU and Triton: leave "
            "compact_weights out"
        )


def _fuse(loaded: LoadedModel, config: EngineConfig, *, unchanged: bool) -> Fusions:
    if loaded.device.type == "cpu":
        return fuse(loaded.model, unchanged=unchanged, fusions=loaded.fusions)
    if triton_problem(loaded.device) is None:
        from graftlm.core.fusion.gpu_modules import fuse_gpu

        return fuse_gpu(loaded.model, strict=config.strict, fp8=config.activations == "fp8")
    return Fusions()
