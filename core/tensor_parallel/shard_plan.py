"""ShardPlan: how the parameters of a model are cut over ranks, by the plan that transformers has for its architecture.

It is made of the configuration alone, before any weight is read.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from graftlm.core.errors import ConfigError
from graftlm.core.loaded_model import text_config

Cut = Literal["whole", "columns", "rows", "first"]
"""whole    every rank has the whole tensor
columns  a part of the outputs; each of the `parts` of a packed tensor is cut by itself
rows     a part of the inputs: outputs are parts of a sum
first    rank 0 has it, the others zeros: it is added to a sum"""

_COLUMNS = {"colwise": 1, "packed_colwise": 2, "colwise_transposed": 1}
_ROWS = {"rowwise": 1, "packed_rowwise": 2, "rowwise_transposed": 1}
"""Styles of parameters that are cut, and the parts of a packed one; a transposed weight is [inputs, outputs]."""
_WHOLE = frozenset(
    {
        "colwise_gather_output", "rowwise_split_input", "replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj",
        "colwise_rep", "rowwise_rep", "local_params", "embedding_rowwise",
    }
)  # fmt: skip
"""Styles of modules that every rank holds whole here: they are computed alike everywhere."""
_SUMS = frozenset({"moe_tp_experts"})
"""Styles of modules whose output is a part of a sum."""

_PLANS = {
    "gpt_oss": {
        **{f"layers.*.self_attn.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj", "sinks")},
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.experts.gate_up_proj": "colwise_transposed",  # gates and ups alternate
        "layers.*.mlp.experts.down_proj": "rowwise_transposed",
        "layers.*.mlp.experts": "moe_tp_experts",
    }
}
"""Plans of architectures for which transformers has none."""

_HEADS = ("q_proj", "k_proj", "v_proj", "query_key_value", "q_b_proj", "kv_b_proj")
_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp")
"""Attributes of a configuration with the number of an MLP's intermediate outputs."""

_EXPERT = re.compile(r".+\.experts\.\d+\.(?P<name>\w+)\.(?P<kind>weight|bias)")
"""A tensor of one expert in a checkpoint whose experts are not merged."""
_EXPERT_ROWS = frozenset({"down_proj", "w2", "linear_out", "down_linear"})


@dataclass(frozen=True)
class Piece:
    """The part of one tensor that a rank has. axis: that is cut; parts: that a packed tensor has along it"""

    cut: Cut
    axis: int = 0
    parts: int = 1

    def of(self, tensor: Any, rank: int, size: int) -> torch.Tensor:
        """Read the part of a rank. tensor: one of torch, or a slice of safetensors, which reads only that part"""
        shape = tuple(tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape)
        if self.cut in ("whole", "first"):
            whole: torch.Tensor = tensor[...] if shape else tensor[:]
            return whole if self.cut == "whole" or rank == 0 else torch.zeros_like(whole)
        length = shape[self.axis] // self.parts // size
        before = (slice(None),) * self.axis
        starts = [shape[self.axis] // self.parts * part + length * rank for part in range(self.parts)]
        pieces = [tensor[(*before, slice(start, start + length))] for start in starts]
        return torch.cat(pieces, self.axis) if len(pieces) > 1 else pieces[0]


WHOLE = Piece("whole")


@dataclass(frozen=True)
class ShardPlan:
    """How a model is cut over `size` ranks.

    hf_config  of a shard: a model with fewer heads and narrower MLPs
    pieces     of the parameters that are cut, by name
    sums       names of the modules whose outputs are parts of sums
    """

    size: int
    hf_config: Any
    pieces: Mapping[str, Piece]
    sums: tuple[str, ...]

    @classmethod
    def of(cls, name: str, hf_config: Any, size: int) -> ShardPlan:
        """Cut a model by the plan of its configuration. Raises ConfigError, which names what cannot be cut."""
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ConfigError(
                f"tensor_parallel is {size}, but {name} ({hf_config.model_type}) is no decoder of text alone; use "
                "tensor_parallel=1"
            )
        styles = _styles(name, hf_config)
        shard_config = _narrowed(name, hf_config, styles, size)
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
        with torch.device("meta"):
            whole, shard = model_class(hf_config), model_class(shard_config)
        parameters = dict(shard.named_parameters())
        pieces: dict[str, Piece] = {}
        for each, parameter in whole.named_parameters():
            piece = _piece(each, parameter, styles)
            expected = list(parameter.shape)
            if piece.cut in ("columns", "rows"):
                _check_divides(name, each, expected[piece.axis], size * piece.parts, size)
                expected[piece.axis] //= size
            if each not in parameters or list(parameters[each].shape) != expected:
                raise ConfigError(
                    f"tensor_parallel is {size}, but {name} cannot be cut: {each} has shape {tuple(parameter.shape)}, "
                    f"its part {tuple(parameters[each].shape) if each in parameters else 'no place'} instead of "
                    f"{tuple(expected)}; use tensor_parallel=1"
                )
            if piece is not WHOLE:
                pieces[each] = piece
        modules = (module for module, _ in whole.named_modules())
        sums = tuple(module for module in modules if _is_sum(module, styles))
        return cls(size, shard_config, pieces, sums)

    def piece(self, name: str) -> Piece:
        """The part of a tensor of a checkpoint, by its name there."""
        found = self.pieces.get(name) or self._by_end.get(_end(name))
        if found is not None:
            return found
        expert = _EXPERT.fullmatch(name)
        if expert is None or _layer(name) not in {_layer(s) for s in self.sums if s.endswith(".experts")}:
            return WHOLE  # a checkpoint may call the block of the experts by another name
        if expert["name"] in _EXPERT_ROWS:
            return Piece("rows", 1) if expert["kind"] == "weight" else Piece("first")
        return Piece("columns", 0, 2 if expert["name"] == "gate_up_proj" else 1)

    @property
    def _by_end(self) -> dict[str, Piece]:
        return {_end(name): piece for name, piece in self.pieces.items()}


@dataclass(frozen=True)
class ShardPart:
    """The part of a rank in the weights of a checkpoint."""

    plan: ShardPlan
    rank: int

    @property
    def hf_config(self) -> Any:
        return self.plan.hf_config

    def weight(self, name: str, weight: Any) -> Any:
        """Return the part of a Weight. Raises ValueError if its format cannot be cut there."""
        piece, size = self.plan.piece(name), self.plan.size
        if piece.cut not in ("columns", "rows"):
            return weight
        if piece.parts == 1:
            return weight.shard(0 if piece.cut == "columns" else 1, self.rank, size)
        each = weight.shape[0] // piece.parts
        first, *others = (one.shard(0, self.rank, size) for one in weight.split([each] * piece.parts))
        return first.concat(others)

    def tensor(self, name: str, tensor: Any) -> torch.Tensor:
        """Return the part of a tensor, or of a slice of safetensors."""
        return self.plan.piece(name).of(tensor, self.rank, self.plan.size)


def _end(name: str) -> str:
    """Return a name from its layer on: a checkpoint may have another prefix than the model."""
    return name[name.find("layers.") :] if "layers." in name else name


def _layer(name: str) -> str:
    """Return the part of a name that says in which layer it is."""
    found = re.search(r"layers\.\d+\.", name)
    return found[0] if found is not None else ""


def _styles(name: str, hf_config: Any) -> dict[str, str]:
    """Return the plan of an architecture: patterns of module names, and the style of each."""
    plan = getattr(text_config(hf_config), "base_model_tp_plan", None) or getattr(hf_config, "base_model_tp_plan", None)
    plan = plan or _PLANS.get(hf_config.model_type)
    if not plan:
        raise ConfigError(
            f"transformers has no plan to cut {name} ({hf_config.model_type}) over several processes; use "
            "tensor_parallel=1, or replicas with engine='ray'"
        )
    known = _COLUMNS.keys() | _ROWS.keys() | _WHOLE | _SUMS
    unknown = {pattern: style for pattern, style in plan.items() if style not in known}
    if unknown:
        pattern, style = next(iter(unknown.items()))
        raise ConfigError(
            f"{name} ({hf_config.model_type}) is cut in the style {style!r} ({pattern}), which is not supported here; "
            "use tensor_parallel=1"
        )
    return dict(plan)


def _narrowed(name: str, hf_config: Any, styles: Mapping[str, str], size: int) -> Any:
    """Return the configuration of a shard. Raises ConfigError if `size` does not divide heads or widths."""
    narrowed = copy.deepcopy(hf_config)
    config = text_config(narrowed)
    cut = [pattern.rpartition(".")[2] for pattern, style in styles.items() if style in _COLUMNS]
    if any(last in _HEADS for last in cut):
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        if kv_heads % size:
            raise ConfigError(
                f"tensor_parallel is {size}, but {name} has {kv_heads} KV heads, which {size} does not divide; use "
                f"{_divisors(kv_heads)}"
            )
        _check_divides(name, "num_attention_heads", heads, size, size)
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        config.num_attention_heads = heads // size
        if getattr(config, "num_key_value_heads", None) is not None:
            config.num_key_value_heads = kv_heads // size
        if not hasattr(config, "kv_lora_rank"):
            config.head_dim = dim
    if any(last not in _HEADS for last in cut):
        for attribute in _WIDTHS:
            width = getattr(config, attribute, None)
            if isinstance(width, int) and width:
                _check_divides(name, attribute, width, size, size)
                setattr(config, attribute, width // size)
    return narrowed


def _check_divides(name: str, what: str, number: int, divisor: int, size: int) -> None:
    if number % divisor:
        raise ConfigError(
            f"tensor_parallel is {size}, but {what} of {name} is {number}, which {divisor} does not divide; use a "
            "smaller power of two"
        )


def _divisors(number: int) -> str:
    return " or ".join(str(n) for n in range(1, min(number, 64) + 1) if number % n == 0)


def _style(name: str, styles: Mapping[str, str]) -> str | None:
    """Return the style of a module or parameter; patterns begin below the model's prefix."""
    generic = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    return next(
        (style for pattern, style in styles.items() if generic == pattern or generic.endswith("." + pattern)), None
    )


def _piece(name: str, parameter: torch.Tensor, styles: Mapping[str, str]) -> Piece:
    style, owner = _style(name, styles), None
    if style is None:
        owner, _, last = name.rpartition(".")
        if last.endswith("_bias"):  # of merged experts
            style, owner = _style(name.removesuffix("_bias"), styles), name
        else:
            style = _style(owner, styles)
    transposed = style is not None and style.endswith("_transposed")
    is_bias = owner is not None and name.endswith("bias")
    if style in _COLUMNS:
        axis = parameter.dim() - (1 if is_bias or transposed or parameter.dim() == 1 else 2)
        return Piece("columns", axis, _COLUMNS[style])
    if style in _ROWS:
        return Piece("first") if is_bias else Piece("rows", parameter.dim() - (2 if transposed else 1), _ROWS[style])
    return WHOLE


def _is_sum(module: str, styles: Mapping[str, str]) -> bool:
    style = _style(module, styles)
    return style in _SUMS or style in _ROWS
