"""Refuse a GGUF file whose metadata cannot be a model's, before a configuration is made of it.

transformers takes most values as they are: a negative context, a frequency that is no number, or 2^60 layers. The
model would compute noise, or its description would take all memory.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable
from typing import Any

from graftlm.core.errors import ModelError
from graftlm.core.model.gguf.reader import GgufFile

_AGAIN = "download it again, or convert the model again with a current llama.cpp"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    """Return True for a whole number; 0 stands for a value that the architecture does not have."""
    return type(value) is int and 0 <= value < 1 << 31


def _are_counts(value: Any) -> bool:
    """Return True for a count, or one for each layer."""
    return _is_count(value) or (isinstance(value, list) and value != [] and all(map(_is_count, value)))


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


_Kind = tuple[Callable[[Any], bool], str]
_COUNT: _Kind = (_is_count, "a whole number below 2^31")
_COUNTS: _Kind = (_are_counts, "a whole number below 2^31, or one for each layer")
_NUMBER: _Kind = (_is_number, "a finite number")
_POSITIVE: _Kind = (_is_positive, "a number above 0")
_TEXT: _Kind = (_is_text, "a text")
_FLAG: _Kind = (lambda value: isinstance(value, bool), "true or false")
_TEXTS: _Kind = (_are_texts, "a list of texts")
_NUMBERS: _Kind = (_are_numbers, "a list of numbers")

_OWN: dict[str, _Kind] = {
    **dict.fromkeys(
        (
            "block_count", "context_length", "embedding_length", "attention.key_length", "rope.dimension_count",
            "expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length",
            "attention.sliding_window", "rope.scaling.original_context_length",
        ),
        _COUNT,
    ),
    **dict.fromkeys(("attention.head_count", "attention.head_count_kv", "feed_forward_length"), _COUNTS),
    **dict.fromkeys(
        (
            "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "rope.freq_base", "rope.freq_base_swa",
            "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_attn_factor",
            "embedding_scale", "residual_scale", "attention.scale", "logit_scale",
        ),
        _POSITIVE,
    ),
    **dict.fromkeys(
        (
            "rope.scaling.factor", "rope.scale_linear", "rope.scaling.attn_factor", "attn_logit_softcapping",
            "final_logit_softcapping",
        ),
        (lambda value: _is_number(value) and value >= 0, "a number of 0 or more"),
    ),
    "rope.scaling.type": _TEXT,
}  # fmt: skip
"""Metadata of an architecture by the ends of their keys."""

_NEEDED = ("block_count", "context_length", "embedding_length", "attention.head_count")
"""Counts that cannot be 0."""

_TOKENIZER: dict[str, _Kind] = {
    "model": _TEXT, "pre": _TEXT, "tokens": _TEXTS, "merges": _TEXTS, "scores": _NUMBERS, "token_type": _NUMBERS,
    "add_bos_token": _FLAG, "add_space_prefix": _FLAG,
}  # fmt: skip

_NO_TOKEN = (1 << 32) - 1
"""The id that converters write for a special token that a model has not."""

_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding")

_EMBEDS = frozenset(
    {
        "bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert",
        "gemma-embedding", "llama-embed", "t5encoder",
    }
)  # fmt: skip
"""Architectures that embed texts and write none."""


def check_metadata(file: GgufFile) -> None:
    """Raise ModelError for metadata of a wrong kind, and for a file whose tensors contradict it."""
    arch, meta = file.architecture, file.metadata
    pooling = file.get("pooling_type", 0)
    if arch in _EMBEDS or pooling not in (0, None):
        raise ModelError(
            f"{_path(file)} is a model for embeddings or scores ({arch!r}, pooling_type {pooling!r}), which writes no "
            "text; give the file of a model that does"
        )
    kinds = {f"{arch}.{key}": kind for key, kind in _OWN.items()}
    kinds |= {f"tokenizer.ggml.{key}": kind for key, kind in _TOKENIZER.items()}
    kinds["tokenizer.chat_template"] = _TEXT
    for key, (fits, wanted) in kinds.items():
        if key in meta and not fits(meta[key]):
            raise _wrong(file, key, wanted)
    for key in _NEEDED:
        if file.get(key) == 0:
            raise _wrong(file, f"{arch}.{key}", "a whole number from 1 on")
    _check_tokens(file)
    _check_layers(file)


def _check_tokens(file: GgufFile) -> None:
    """Raise ModelError if lists of a vocabulary differ in length, or name a token that it does not have."""
    tokens = file.metadata.get("tokenizer.ggml.tokens") or []
    for name in ("scores", "token_type"):
        given = file.metadata.get(f"tokenizer.ggml.{name}")
        if given and len(given) != len(tokens):
            raise ModelError(
                f"{_path(file)} has {len(tokens)} tokens and {len(given)} values in 'tokenizer.ggml.{name}', expected "
                f"one for each; {_AGAIN}"
            )
    for name in _IDS:
        key = f"tokenizer.ggml.{name}_token_id"
        if type(file.metadata.get(key, 0)) is not int:
            raise _wrong(file, key, "the id of a token")
    end = file.metadata.get("tokenizer.ggml.eos_token_id", _NO_TOKEN)
    if tokens and end != _NO_TOKEN and file.token_id("eos") is None:  # other ids that no token has are none
        raise _wrong(file, "tokenizer.ggml.eos_token_id", f"the id of one of {len(tokens)} tokens")
    table = file.tensors.get("token_embd.weight")
    if table is not None and len(table.shape) == 2 and len(tokens) > table.shape[0]:
        raise ModelError(
            f"{_path(file)} has {len(tokens)} tokens and 'token_embd.weight' {list(table.shape)} with a row for "
            f"{table.shape[0]}; {_AGAIN}"
        )


_LAYER = re.compile(r"blk\.(\d+)\.")


def _check_layers(file: GgufFile) -> None:
    """Raise ModelError if the number of layers is not that of the tensors."""
    if not file.tensors:
        raise ModelError(f"{_path(file)} has no tensors: it holds a vocabulary; give the file of the model")
    layers = {int(found[1]) for name in file.tensors if (found := _LAYER.match(name))}
    count = file.get("block_count")
    if count is not None and count != len(layers):
        raise ModelError(
            f"{_path(file)} has tensors of {len(layers)} layers, expected {count:,} by "
            f"'{file.architecture}.block_count'; it is incomplete or damaged: {_AGAIN}"
        )


def _wrong(file: GgufFile, key: str, wanted: str) -> ModelError:
    found = reprlib.repr(file.metadata[key])
    return ModelError(f"{_path(file)} has {found} as metadata {key!r}, expected {wanted}; {_AGAIN}")


def _path(file: GgufFile) -> str:
    return repr(str(file.paths[0]))
