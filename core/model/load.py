"""Load any Hugging Face decoder, describe its attention layers, and decide its lane."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from graftlm.core.config import EngineConfig
from graftlm.core.errors import ConfigError, ModelError
from graftlm.core.fusion.cpu_layers import fuse_cpu
from graftlm.core.fusion.decoder_stack import stack_layers
from graftlm.core.fusion.linears import Fusions, fuse
from graftlm.core.hub import near_names, only_local, why_not
from graftlm.core.kv.kv_format import may_be_compact
from graftlm.core.kv.memory import check_weights_fit, give_back, may_be_too_large
from graftlm.core.loaded_model import LoadedModel, text_config
from graftlm.core.model.kernel_warmup import rehearse
from graftlm.core.model.known_models import find, learn, read_known
from graftlm.core.model.qualify import AttentionFactory, Reference, batch_dependence, difference, discover, qualify
from graftlm.core.model.weight_files import converted_files, leave_files
from graftlm.core.text.tokenizer import Tokenizer
from graftlm.kernels.cpu.attention.backend import TorchAttention
from graftlm.kernels.cpu.mapped_files import read_once
from graftlm.kernels.gpu.support import triton_problem
from graftlm.kernels.jit.compile_server import CompileServer

_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
_UNLIMITED = 32_768
"""Context in tokens of a model that names none, such as a recurrent one."""


def load_model(
    model: str | os.PathLike[str] | nn.Module,
    config: EngineConfig | None = None,
    tokenizer: Any = None,
    *,
    attention_factory: AttentionFactory | None = None,
) -> LoadedModel:
    """Load a decoder and decide its lane.

    model      a Hugging Face id, a local folder (no network call is made), "sprout" for the embedded model, or a
               loaded transformers model; the latter's weights are used in place and its own attention stays usable.
    tokenizer  a Hugging Face tokenizer or a Tokenizer; None loads the one beside the model.

    Raises ModelError if the model or its tokenizer cannot be found, read or run, ConfigError for options that
    contradict it. A model that fails qualification gets the serial lane and one warning.
    """
    config = config or EngineConfig()
    device = choose_device(config.device)
    with CompileServer() if triton_problem(device) is None else nullcontext() as server:
        loaded = _read(model, config, tokenizer, device)
        factory = attention_factory or default_attention(device)
        _choose_compact(loaded, config)
        rehearsal = rehearse(loaded, config, factory, server=server)
        try:
            reference = Reference.of(loaded)
        except Exception as error:
            raise ModelError(f"{loaded.name} cannot be run: {type(error).__name__}: {str(error)[:500]}") from error
        if rehearsal is not None:
            _ = loaded.tokenizer.token_bytes  # which the engine will ask for
            rehearsal.wait()
    hf_model = loaded.model
    ours = not isinstance(model, nn.Module)
    learned = None if isinstance(model, nn.Module) else learn(resolve(model), loaded, reference, config)
    if device.type == "cpu":
        give_back()  # the largest weight is in memory twice now
    loaded.fusions = _fuse(hf_model, device, strict=config.strict, unchanged=ours)
    loaded.rehearsed = rehearsal is not None and rehearsal.covers(hf_model)
    if ours:
        leave_files(hf_model, loaded.fusions)
    if device.type == "cpu":
        fuse_cpu(hf_model, loaded.fusions)  # last: it takes addresses
    _choose_lane(loaded, reference, factory, config)
    if config.strict and loaded.lane == "paged" and device.type == "cuda":
        _check_strict(loaded, factory)
    if device.type == "cpu":
        if learned is not None and loaded.lane == "paged":
            learned()
        give_back()
    return loaded


def _read(
    model: str | os.PathLike[str] | nn.Module, config: EngineConfig, tokenizer: Any, device: torch.device
) -> LoadedModel:
    """The model on its device, described but for its attention and lane."""
    if isinstance(model, nn.Module):
        hf_model, source = model, getattr(getattr(model, "config", None), "_name_or_path", "") or ""
        dtype = choose_dtype(config, device)
        if dtype != "auto":
            hf_model = hf_model.to(dtype)
        name = source or type(model).__name__
    else:
        source = resolve(model, verify=True)
        name = os.fspath(model)
        known = read_known(source, config) if device.type == "cpu" else None
        hf_model = known if known is not None else _read_weights(source, config, device)
    check_weights_fit(name, hf_model, device)
    hf_model = hf_model.to(device).eval()
    wrapped = _tokenizer(tokenizer, source, config)
    generation = getattr(hf_model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    eos_ids = [eos] if isinstance(eos, int) else list(eos or ())
    wrapped.eos_token_ids = tuple(dict.fromkeys([*wrapped.eos_token_ids, *map(int, eos_ids)]))
    return LoadedModel(
        model=hf_model,
        hf_config=hf_model.config,
        tokenizer=wrapped,
        device=device,
        dtype=_dtype_of(hf_model),
        max_model_len=_context(hf_model.config, config),
        vocab_size=_vocab_size(hf_model),
        eos_token_ids=wrapped.eos_token_ids,
        name=name,
    )


def _check_strict(loaded: LoadedModel, attention_factory: AttentionFactory) -> None:
    """Warn if strict mode cannot be kept: part of the model computes in an order that depends on the batch."""
    reason = batch_dependence(loaded, attention_factory)
    if reason is not None:
        but = "answers differ where two tokens are all but as likely"
        remedy = but if loaded.dtype is torch.float32 else "dtype='float32' makes it hold but for ties"
        named = f"{loaded.name} in {str(loaded.dtype)[6:]}"
        warnings.warn(f"strict=True does not hold for {named}: {reason}; {remedy}", stacklevel=3)


def _choose_compact(loaded: LoadedModel, config: EngineConfig) -> None:
    if triton_problem(loaded.device) is None:
        from graftlm.core.fusion.compact_weights import choose_compact

        choose_compact(loaded, config)
    elif config.compact_weights:
        raise ConfigError(
            f"compact_weights is True, but there are none on {loaded.device}; they need a Hopper GPU and Triton: leave "
            "compact_weights out"
        )


def _fuse(model: nn.Module, device: torch.device, *, strict: bool, unchanged: bool) -> Fusions:
    if device.type == "cpu":
        return fuse(model, unchanged=unchanged)
    if triton_problem(device) is None:
        from graftlm.core.fusion.gpu_modules import fuse_gpu

        return fuse_gpu(model, strict=strict)
    return Fusions()


def default_attention(device: torch.device) -> AttentionFactory:
    """The attention a model is qualified with: the one that "auto" takes on this device."""
    if triton_problem(device) is None:
        from graftlm.kernels.gpu.attention.backend import TritonAttention

        return TritonAttention
    return TorchAttention


def _choose_lane(
    loaded: LoadedModel, reference: Reference, attention_factory: AttentionFactory, config: EngineConfig
) -> None:
    try:
        found = discover(loaded.model, loaded.device)
    except Exception as failure:
        loaded.lane_reason = f"its attention cannot be taken over: {type(failure).__name__}: {str(failure)[:200]}"
    else:
        loaded.layers, loaded.layer_of = found.layers, found.layer_of
        loaded.lane_reason = _why_not_paged(loaded, reference, attention_factory, config)
    if loaded.lane_reason is None:
        loaded.lane = "paged"
        if loaded.device.type == "cpu":
            stack_layers(loaded, lambda: difference(loaded, reference, attention_factory))
        return
    loaded.layers, loaded.layer_of = (), {}
    warnings.warn(f"{loaded.name} runs in the serial lane, one sequence at a time: {loaded.lane_reason}", stacklevel=3)


def _why_not_paged(
    loaded: LoadedModel, reference: Reference, attention_factory: AttentionFactory, config: EngineConfig
) -> str | None:
    """Why the model cannot run in the paged lane; None if it can, be it with KV in its own dtype only."""
    compact = may_be_compact(loaded, config)
    reason = qualify(loaded, reference, attention_factory, compact=compact)
    if reason is None or not compact:
        return reason
    plain_reason = qualify(loaded, reference, attention_factory)
    if plain_reason is None:
        loaded.kv_reason = reason
    return plain_reason


def choose_device(name: str) -> torch.device:
    """The device an option names; "auto" takes a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}; use 'auto', 'cpu', 'cuda' or 'cuda:N'") from error
    if device.type == "cuda":
        _check_gpu(name, device)
    return device


def _check_gpu(name: str, device: torch.device) -> None:
    if not torch.cuda.is_available():
        why = "" if torch.version.cuda else ", and this torch was built without CUDA"
        raise ConfigError(f"device is {name!r}, but torch sees no GPU here{why}; use device='cpu'")
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise ConfigError(f"device is {name!r}, torch sees {count} GPU(s) here; use 'cuda:0' to 'cuda:{count - 1}'")


def choose_dtype(config: EngineConfig, device: torch.device) -> torch.dtype | Literal["auto"]:
    """The dtype weights are loaded in; "auto" is the checkpoint's own.

    Strict mode on a CPU computes in float32 whatever the checkpoint's dtype: results of a matrix product in
    bfloat16 depend on the batch it is part of. The price is twice the memory and the bandwidth.
    """
    if config.strict and device.type == "cpu":
        return torch.float32
    if config.dtype == "auto":
        return "auto"
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def resolve(model: str | os.PathLike[str], *, verify: bool = False) -> str:
    """The folder or Hugging Face id that a model name stands for.

    verify  compare the embedded model's files with their checksums, not only their sizes: for who reads them next.
    Raises ModelError for a folder that is none, and for a file of the embedded model that is missing or corrupted.
    """
    name = os.fspath(model)
    if name == "sprout":
        from graftlm.core.model.embedded import sprout_path, verify_sprout

        return str(verify_sprout() if verify else sprout_path())
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{name!r} is a folder without config.json; give a folder that save_pretrained wrote")
        return os.fspath(path)
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or path.exists():
        raise ModelError(f"there is no model folder {name!r}; give a folder, a Hugging Face id or 'sprout'")
    if "/" not in name and "sprout" in (near := near_names(name)):
        raise ModelError(f"there is no model {name!r}; did you mean {' or '.join(map(repr, near))}?")
    return name


@contextmanager
def _progress_bars(*, shown: bool) -> Iterator[None]:
    """Switch off transformers' progress bars unless `shown`, and restore its setting afterwards."""
    from transformers.utils import logging

    hidden = not shown and logging.is_progress_bar_enabled()
    if hidden:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if hidden:
            logging.enable_progress_bar()


def _read_weights(source: str, config: EngineConfig, device: torch.device) -> nn.Module:
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": choose_dtype(config, device), "local_files_only": only_local(source)}
    if config.quantization is not None:
        from graftlm.core.model.quantization import quantization_config

        options["quantization_config"] = quantization_config(config.quantization)
    may_not_fit = device.type == "cuda" or may_be_too_large(source, device)
    if config.quantization is None and may_not_fit and (described := _described(source, config, device)) is not None:
        check_weights_fit(source, described, device)
    kept_plain = device.type == "cpu" and config.quantization is None and not config.trust_remote_code
    try:
        with (
            _progress_bars(shown=not config.quiet and sys.stderr.isatty()),
            read_once(converted_files(source, options["dtype"]) if kept_plain else ()),
        ):
            read: Any = AutoModelForCausalLM.from_pretrained(
                source, trust_remote_code=config.trust_remote_code, output_loading_info=True, **options
            )
    except Exception as error:
        where = "folder" if os.path.isdir(source) else "Hugging Face id"
        raise ModelError(f"no model could be loaded from the {where} {source!r}: {why_not(source, error)}") from error
    loaded: nn.Module
    loaded, report = read
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{source!r} lacks {len(missing)} weights, {missing[0]!r} first; its files are incomplete or of another "
            "architecture than its config.json says"
        )
    if device.type == "cpu" and config.dtype == "auto" and _dtype_of(loaded) is torch.float16:
        loaded = loaded.float()  # half precision has no fast matrix product on CPUs
    return loaded


def _described(source: str, config: EngineConfig, device: torch.device) -> nn.Module | None:
    """The model that a configuration describes, without weights; None if that cannot be told before they are read."""
    from transformers import AutoModelForCausalLM

    try:
        hf_config = model_config(source, config)
        chosen = choose_dtype(config, device)
        dtype = getattr(hf_config, "dtype", None) if chosen == "auto" else chosen
        dtype = torch.float32 if (device.type, chosen, dtype) == ("cpu", "auto", torch.float16) else dtype
        if dtype is None:
            return None
        with torch.device("meta"):
            described: nn.Module = AutoModelForCausalLM.from_config(
                hf_config, dtype=dtype, trust_remote_code=config.trust_remote_code
            )
    except Exception:  # reading the weights says what is wrong
        return None
    return described


def _tokenizer(given: Any, source: str, config: EngineConfig) -> Tokenizer:
    if isinstance(given, Tokenizer):
        return given
    if given is not None:
        return Tokenizer.from_hf(given)
    if not source:
        raise ModelError("a loaded model was given without its tokenizer; pass tokenizer=")
    return Tokenizer.from_pretrained(source, trust_remote_code=config.trust_remote_code)


def _dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype the model computes in."""
    own = getattr(model, "dtype", None)
    if isinstance(own, torch.dtype) and own.is_floating_point:
        return own
    return next((p.dtype for p in model.parameters() if p.dtype.is_floating_point), torch.float32)


def _vocab_size(model: nn.Module) -> int:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    rows = getattr(head, "out_features", None) or getattr(getattr(head, "weight", None), "shape", (None,))[0]
    return int(rows or text_config(model.config).vocab_size)


def _context(hf_config: Any, config: EngineConfig) -> int:
    described = text_config(hf_config)
    limits = [v for n in _CONTEXT_NAMES if isinstance(v := getattr(described, n, None), int) and v > 0]
    limit = limits[0] if limits else None
    wanted = config.max_model_len
    if wanted is None:
        return limit or _UNLIMITED
    if limit is not None and wanted > limit:
        raise ConfigError(f"max_model_len is {wanted:,}, the model's context is {limit:,}; lower it or leave it out")
    return wanted


def load_tokenizer(model: Any, given: Any, config: EngineConfig) -> Tokenizer:
    """The tokenizer that goes with a model name, folder or loaded model, without reading weights."""
    if isinstance(model, nn.Module):
        source = getattr(getattr(model, "config", None), "_name_or_path", "") or ""
        generation = getattr(model, "generation_config", None)
        eos = getattr(generation, "eos_token_id", None)
        wrapped = _tokenizer(given, source, config)
        extra = [eos] if isinstance(eos, int) else list(eos or ())
        wrapped.eos_token_ids = tuple(dict.fromkeys([*wrapped.eos_token_ids, *map(int, extra)]))
        return wrapped
    return _tokenizer(given, resolve(model, verify=True), config)


def model_config(model: Any, config: EngineConfig) -> Any:
    """The Hugging Face configuration of a model name, folder or loaded model, without reading weights."""
    if isinstance(model, nn.Module):
        return model.config
    from transformers import AutoConfig

    source = resolve(model)
    try:
        return AutoConfig.from_pretrained(
            source, trust_remote_code=config.trust_remote_code, local_files_only=only_local(source)
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"no configuration could be read from {source!r}: {why_not(source, error)}") from error


def context_length(model: Any, config: EngineConfig) -> int:
    """Tokens that prompt and answer may have together."""
    known = None if isinstance(model, nn.Module) else find(resolve(model), config)
    return _context(known.described if known else model_config(model, config), config)
