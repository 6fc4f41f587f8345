"""A model described without its weights: its folder, configuration, tokenizer, context and vocabulary."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graftlm.core.config import EngineConfig
from graftlm.core.errors import ConfigError, ModelError
from graftlm.core.hub import complete_folder, near_names, only_local, unreachable, why_not
from graftlm.core.loaded_model import LoadedModel, text_config
from graftlm.core.model.gguf.folder import description_folder, find_gguf
from graftlm.core.model.known_models import find
from graftlm.core.model.transformers_lock import importing_transformers
from graftlm.core.tensor_parallel.ranks import HEAD_PARTS
from graftlm.core.text.tokenizer import Tokenizer, ends_of

if TYPE_CHECKING:
    from graftlm.core.media.processor import MediaProcessor

_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
_UNLIMITED = 32_768
"""Context in tokens of a model without a declared limit, such as a recurrent one."""


def resolve(model: str | os.PathLike[str], *, verify: bool = False, revision: str | None = None) -> str:
    """Resolve a model name to a folder, or to a Hugging Face id whose files are not all in the cache.

    A GGUF file has a folder that describes it (gguf/folder.py).

    verify    compare the embedded model's files with their checksums, not only their sizes; for a load that follows
    revision  branch, tag or commit of a Hugging Face id: returns the folder of its files, downloaded unless cached
    Raises ModelError for a missing folder, for a file of the embedded model that is missing or corrupted, for a GGUF
    file that cannot be read and for an unknown revision.
    """
    name = os.fspath(model)
    if name == "sprout":
        from graftlm.core.model.embedded import sprout_path, verify_sprout

        return str(verify_sprout() if verify else sprout_path())
    gguf = find_gguf(name)
    if gguf is not None:
        return os.fspath(description_folder(gguf))
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(
                f"{name!r} is a folder without config.json and without a GGUF file; give a folder that save_pretrained "
                "wrote, or a .gguf file"
            )
        return os.fspath(path)
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(".gguf") or path.exists():
        raise ModelError(
            f"there is no model folder or GGUF file {name!r}; give a folder, a .gguf file, a Hugging Face id or "
            "'sprout'"
        )
    if "/" not in name and "sprout" in (near := near_names(name)):
        raise ModelError(f"there is no model {name!r}; did you mean {' or '.join(map(repr, near))}?")
    return (complete_folder(name) or name) if revision is None else _snapshot(name, revision)


_MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"]
"""Files of a repository that a model is read from."""


@lru_cache(maxsize=64)
def _snapshot(name: str, revision: str) -> str:
    from huggingface_hub import snapshot_download

    try:
        return str(
            snapshot_download(
                name, revision=revision, allow_patterns=_MODEL_FILES, local_files_only=unreachable(name) is not None
            )
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"{name!r} could not be read at revision {revision!r}: {why_not(name, error)}") from error


def model_config(model: Any, config: EngineConfig) -> Any:
    """Return the Hugging Face configuration of a model name, folder or loaded model, without reading weights."""
    if isinstance(model, nn.Module):
        return model.config
    source = resolve(model, revision=config.revision)
    local = only_local(source)
    try:
        with importing_transformers():
            from transformers import AutoConfig

            return AutoConfig.from_pretrained(
                source, trust_remote_code=config.trust_remote_code, local_files_only=local
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # the last of a value of a wrong kind
        raise ModelError(f"no configuration could be read from {source!r}: {why_not(source, error)}") from error


def describes_vision(model: Any, config: EngineConfig) -> bool:
    """Return True if a model's configuration has a part for pictures. Reads one file at most."""
    if isinstance(model, nn.Module):
        return getattr(model.config, "vision_config", None) is not None
    return _has_vision(resolve(model, revision=config.revision))


def load_tokenizer(model: Any, given: Any, config: EngineConfig) -> Tokenizer:
    """Return the tokenizer that goes with a model name, folder or loaded model, without reading weights."""
    if isinstance(model, nn.Module):
        return _tokenizer(given, source_of(model), config, model)
    return _tokenizer(given, resolve(model, verify=True, revision=config.revision), config)


def source_of(model: nn.Module) -> str:
    """Return the folder or id of a loaded model's files; empty if its configuration has none."""
    return getattr(getattr(model, "config", None), "_name_or_path", "") or ""


def context_length(model: Any, config: EngineConfig) -> int:
    """Return the largest number of tokens of prompt and answer together."""
    known = None if isinstance(model, nn.Module) else find(resolve(model, revision=config.revision), config)
    return _context(known.described if known else model_config(model, config), config)


def describe(
    hf_model: Any, tokenizer: Any, source: str, name: str, config: EngineConfig, device: torch.device
) -> LoadedModel:
    """Describe a model on its device; its attention layers and lane are set later.

    tokenizer  a Hugging Face tokenizer or a Tokenizer; None loads the one of `source`
    """
    return describe_model(hf_model, _tokenizer(tokenizer, source, config, hf_model), name, config, device)


def describe_model(
    hf_model: Any, tokenizer: Tokenizer | None, name: str, config: EngineConfig, device: torch.device
) -> LoadedModel:
    """As `describe`, with a tokenizer at hand, or none for a runner whose tokens are chosen elsewhere."""
    return LoadedModel(
        model=hf_model,
        hf_config=hf_model.config,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype_of(hf_model),
        max_model_len=_context(hf_model.config, config),
        vocab_size=_vocab_size(hf_model),
        eos_token_ids=tokenizer.eos_token_ids if tokenizer is not None else (),
        name=name,
    )


def _tokenizer(given: Any, source: str, config: EngineConfig, model: nn.Module | None = None) -> Tokenizer:
    """Return the tokenizer, extended by the end-of-sequence tokens of the model's generation configuration."""
    if isinstance(given, Tokenizer):
        wrapped = given
    elif given is not None:
        wrapped = Tokenizer.from_hf(_tokenizer_of(given))
    elif not source:
        raise ModelError("a loaded model was given without its tokenizer; pass tokenizer=")
    else:
        wrapped = Tokenizer.from_pretrained(source, trust_remote_code=config.trust_remote_code)
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    wrapped.eos_token_ids = tuple(dict.fromkeys([*wrapped.eos_token_ids, *ends_of(eos)]))
    if wrapped.media is None:
        wrapped.media = _media(given, source, config, model)
        if config.mm_processor_kwargs:
            if wrapped.media is None:
                raise ConfigError(
                    "mm_processor_kwargs are for pictures, and this model reads text only; leave them out"
                )
            wrapped.media.hf  # noqa: B018  (raises ConfigError for unknown options)
        if wrapped.media is not None and not wrapped.has_chat_template:
            with suppress(ConfigError):  # processors may have a file of their own for it
                wrapped.hf.chat_template = wrapped.media.hf.hf.chat_template
    return wrapped


def _tokenizer_of(given: Any) -> Any:
    """Return a Hugging Face tokenizer, or that of a processor."""
    if not hasattr(given, "image_processor"):
        return given
    from graftlm.core.media.hf_processor import own_tokenizer

    return own_tokenizer(given.tokenizer)


def _media(given: Any, source: str, config: EngineConfig, model: nn.Module | None) -> MediaProcessor | None:
    """Return the processor of pictures and videos; None for a model that reads text only, or of a plugin."""
    described = getattr(model, "config", None)
    if described is None and source and not (_takes_media(config) and _has_vision(source)):
        return None
    from graftlm.core.media.processor import MediaProcessor, reads_pictures

    described = described if described is not None else model_config(source, config)
    if not reads_pictures(described):
        return None
    return MediaProcessor(described, source, config, given if hasattr(given, "image_processor") else None)


def _takes_media(config: EngineConfig) -> bool:
    """Return True if the configured engine takes prompts with pictures and videos."""
    if config.engine in ("local", "ray") or config.loader != "hf":
        return config.loader == "hf"
    from graftlm.plugins import manager

    return getattr(manager.load().engines.get(config.engine), "takes_media", False)


def _has_vision(source: str) -> bool:
    """Return False if the configuration of a local folder mentions no vision, without importing transformers."""
    path = Path(source) / "config.json"
    return not path.is_file() or b"vision_config" in path.read_bytes()


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype that the model computes in."""
    own = getattr(model, "dtype", None)
    if isinstance(own, torch.dtype) and own.is_floating_point:
        return own
    return next((p.dtype for p in model.parameters() if p.dtype.is_floating_point), torch.float32)


def _vocab_size(model: nn.Module) -> int:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    rows = getattr(head, "out_features", None) or getattr(getattr(head, "weight", None), "shape", (None,))[0]
    return int(rows or text_config(model.config).vocab_size) * int(getattr(model, HEAD_PARTS, 1))


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
