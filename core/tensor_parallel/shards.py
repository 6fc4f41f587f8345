"""The shard of a rank: reads only its parts of the files, and adds the sums over the ranks to the modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graftlm.core.config import EngineConfig
from graftlm.core.errors import ConfigError, ModelError
from graftlm.core.hub import why_not
from graftlm.core.model.description import model_config
from graftlm.core.model.gguf.folder import listed_gguf
from graftlm.core.model.quantised.format_check import METHODS, check_format
from graftlm.core.model.quantised.rounded_model import round_model, scheme_of
from graftlm.core.model.transformers_lock import building_model, importing_transformers
from graftlm.core.model.weights import (
    choose_dtype,
    progress_bars,
    quantised_already,
    read_gguf_model,
    read_quantised,
    snapshot,
)
from graftlm.core.tensor_parallel.ranks import HEAD_PARTS, Ranks, add_sum
from graftlm.core.tensor_parallel.shard_plan import ShardPart, ShardPlan


def read_shard(source: str, config: EngineConfig, ranks: Ranks) -> nn.Module:
    """Read the shard of a rank. Raises ModelError if the files cannot be read or lack weights."""
    hf_config = model_config(source, config)
    plan = ShardPlan.of(source, hf_config, ranks.size)
    part = ShardPart(plan, ranks.rank)
    gguf = listed_gguf(source)
    method = check_format(source, hf_config) if gguf is None else None
    if method is not None and config.quantization is not None:
        raise quantised_already(source, config)
    if gguf is not None:
        loaded: nn.Module | None = read_gguf_model(gguf, source, config, ranks.device, part)
    elif method in METHODS:
        loaded = read_quantised(source, config, ranks.device, part)
    else:
        loaded = None
    if loaded is not None:
        add_sums(loaded, plan, ranks)
        return loaded
    if method is not None:
        raise ConfigError(f"tensor_parallel is {ranks.size}, which {method!r} does not support; use tensor_parallel=1")
    dtype = _dtype(hf_config, config, ranks.device)
    with importing_transformers():
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig

        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    try:
        largest: dict[str, torch.Tensor] = {}
        state = dict(_pieces(snapshot(source), part, dtype, largest if config.quantization == "fp8" else None))
        with progress_bars(shown=not config.quiet and sys.stderr.isatty()), building_model():
            read: Any = model_class.from_pretrained(
                None, config=plan.hf_config, state_dict=state, dtype=dtype, output_loading_info=True
            )
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise ModelError(f"no model could be loaded from {source!r}: {why_not(source, error)}") from error
    model, report = read
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"{source!r} lacks {len(missing)} weights, {missing[0]!r} first; its files are incomplete or of another "
            "architecture than its config.json says"
        )
    model.config.name_or_path = source
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(source)
    if config.quantization is not None:
        round_model(model, scheme_of(config.quantization), ranks.device, source, largest)
    add_sums(model, plan, ranks)
    cut_head(model, ranks)
    found: nn.Module = model
    return found


def cut_head(model: nn.Module, ranks: Ranks) -> None:
    """Keep the rows of the head for this rank's part of the vocabulary, if all parts are equal."""
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    if type(head) is not nn.Linear or head.out_features % ranks.size or "lm_head" not in dict(model.named_children()):
        return
    num_rows = head.out_features // ranks.size
    mine = slice(num_rows * ranks.rank, num_rows * (ranks.rank + 1))
    head.weight = nn.Parameter(head.weight.detach()[mine].clone(), requires_grad=False)
    if head.bias is not None:
        head.bias = nn.Parameter(head.bias.detach()[mine].clone(), requires_grad=False)
    head.out_features = num_rows
    setattr(model, HEAD_PARTS, ranks.size)


def add_sums(model: nn.Module, plan: ShardPlan, ranks: Ranks) -> None:
    """Sum the outputs of the modules that compute parts of sums."""
    for name in plan.sums:
        add_sum(model.get_submodule(name), ranks)


def _dtype(hf_config: Any, config: EngineConfig, device: torch.device) -> torch.dtype:
    chosen = choose_dtype(config, device)
    if config.quantization is not None and chosen == "auto":
        return torch.bfloat16
    own = getattr(hf_config, "dtype", None)
    dtype = chosen if isinstance(chosen, torch.dtype) else own if isinstance(own, torch.dtype) else torch.float32
    half_on_cpu = (device.type, chosen, dtype) == ("cpu", "auto", torch.float16)
    return torch.float32 if half_on_cpu else dtype  # half precision has no fast matmul on CPUs


def _pieces(
    folder: Path, part: ShardPart, dtype: torch.dtype, largest: dict[str, torch.Tensor] | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's part of every tensor.

    largest  gets the largest size of a weight of each output [n, 1], for weights of whose inputs it is a part
    """
    from safetensors import safe_open

    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{str(folder)!r} has no safetensors files, the only ones of which a part can be read")
    for path in paths:
        file: Any
        with safe_open(str(path), "pt") as file:
            for name in file.keys():  # noqa: SIM118, a method of safetensors
                piece = file.get_slice(name)
                if largest is not None and part.plan.piece(name).cut == "rows" and len(piece.get_shape()) == 2:
                    largest[name] = piece[:].to(dtype).abs().amax(1, keepdim=True)
                tensor = part.tensor(name, piece)
                yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor
