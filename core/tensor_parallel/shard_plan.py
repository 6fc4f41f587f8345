"""ShardPlan: how the parameters of a model are cut over ranks, by the plan that transformers has for its architecture.

It is made of the configuration alone, before any weight is read.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from graftlm.core.errors import ConfigError
from graftlm.core.loaded_model import text_config
from graftlm.core.model.transformers_lock import building_model, importing_transformers

Cut = Literal["whole", "columns", "rows", "first"]
"""whole    every rank has the whole tensor
columns  a part of the outputs; each of the tensors of a packed one is cut by itself
rows     a part of the inputs: outputs are parts of a sum
first    rank 0 has it, the others zeros: it is added to a sum"""

_COLUMNS = {"colwise": (1,), "packed_colwise": (1, 1), "colwise_transposed": (1,), "packed_heads": (1, 1, 1)}
_ROWS = {"rowwise": (1,), "packed_rowwise": (1, 1), "rowwise_transposed": (1,)}
"""Styles of parameters that are cut, and the shares of a packed one, those of heads by the configuration; a transposed
weight is [inputs, outputs]."""
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

_CUT_HERE = (
    ("self_attn.qkv_proj", "packed_heads", "self_attn.o_proj"),
    ("mlp.gate_up_proj", "packed_colwise", "mlp.down_proj"),
)
"""Packed products that transformers has every rank compute whole: name, style here, and the product behind it."""

_SHARED = ("shared_expert", "shared_experts")
"""Modules beside the experts that some plans forget."""

_HEADS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "q_b_proj", "kv_b_proj")
_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp")
"""Attributes of a configuration with the number of an MLP's intermediate outputs."""
_KV_HEADS = ("num_key_value_heads", "num_global_key_value_heads")

_EXPERT = re.compile(r".+\.experts\.\d+\.(?P<name>\w+)\.(?P<kind>weight|bias)")
"""A tensor of one expert in a checkpoint whose experts are not merged."""
_EXPERT_ROWS = frozenset({"down_proj", "w2", "linear_out", "down_linear"})


@dataclass(frozen=True)
class Piece:
    """The part of one tensor that a rank has. axis: that is cut; shares: of the tensors packed along it, in relation"""

    cut: Cut
    axis: int = 0
    shares: tuple[int, ...] = (1,)

    def sizes(self, length: int) -> list[int]:
        """Return the lengths of the packed tensors, of `length` together."""
        return [length * share // sum(self.shares) for share in self.shares]

    def of(self, tensor: Any, rank: int, size: int) -> torch.Tensor:
        """Read the part of a rank. tensor: one of torch, or a slice of safetensors, which reads only that part"""
        shape = tuple(tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape)
        if self.cut in ("whole", "first"):
            whole: torch.Tensor = tensor[...] if shape else tensor[:]
            return whole if self.cut == "whole" or rank == 0 else torch.zeros_like(whole)
        before, start, pieces = (slice(None),) * self.axis, 0, []
        for length in self.sizes(shape[self.axis]):
            first = start + length // size * rank
            pieces.append(tensor[(*before, slice(first, first + length // size))])
            start += length
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
        with importing_transformers():
            from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

            known: Any = MODEL_FOR_CAUSAL_LM_MAPPING
            model_class: Any = known.get(type(hf_config), None)
        if model_class is None:
            raise ConfigError(
                f"tensor_parallel is {size}, but {name} ({hf_config.model_type}) is no decoder of text alone; use "
                "tensor_parallel=1"
            )
        styles = _styles(name, hf_config)
        shard_config = _narrowed(name, hf_config, styles, size)
        with building_model(), torch.device("meta"):
            whole, shard = model_class(hf_config), model_class(shard_config)
        parameters = dict(shard.named_parameters())
        pieces: dict[str, Piece] = {}
        for each, parameter in whole.named_parameters():
            piece = _piece(each, parameter, styles, hf_config)
            expected = list(parameter.shape)
            if piece.cut in ("columns", "rows"):
                _check_divides(name, each, min(piece.sizes(expected[piece.axis])), size, size)
                expected[piece.axis] //= size
            if each not in parameters or list(parameters[each].shape) != expected:
                raise ConfigError(
                    f"tensor_parallel is {size}, but {name} cannot be cut: {each} has shape {tuple(parameter.shape)}, "
                    f"its part {tuple(parameters[each].shape) if each in parameters else 'no place'} instead of "
                    f"{tuple(expected)}; use tensor_parallel=1"
                )
            if piece is not WHOLE:
                pieces[each] = piece
        if not any(piece.cut == "rows" for piece in pieces.values()):
            raise ConfigError(
                f"tensor_parallel is {size}, but the plan that transformers has for {name} ({hf_config.model_type}) "
                "leaves every layer whole; use tensor_parallel=1, or replicas with engine='ray'"
            )
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
        return Piece("columns", 0, (1, 1) if expert["name"] == "gate_up_proj" else (1,))

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
        """Return the part of a Weight. Raises ConfigError if its format cannot be cut there."""
        piece, size = self.plan.piece(name), self.plan.size
        if piece.cut not in ("columns", "rows"):
            return weight
        try:
            if len(piece.shares) == 1:
                return weight.shard(0 if piece.cut == "columns" else 1, self.rank, size)
            first, *others = (one.shard(0, self.rank, size) for one in weight.split(piece.sizes(weight.shape[0])))
            return first.concat(others)
        except ValueError as error:
            raise self._uncut(name, error) from error

    def experts(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor [num_experts, outputs, inputs or groups of them, ...] of all experts of a layer.

        name  of their parameter, whatever the order of its axes. Raises ConfigError if groups cannot be cut there
        """
        piece, size = self.plan.piece(name), self.plan.size
        if piece.cut not in ("columns", "rows"):
            return tensor
        axis = 1 if piece.cut == "columns" else 2
        if tensor.shape[axis] % size:
            reason = f"{tensor.shape[axis]} groups of inputs are no multiple of {size} ranks"
            raise self._uncut(name, reason)
        return Piece(piece.cut, axis, piece.shares).of(tensor, self.rank, size)

    def _uncut(self, name: str, reason: object) -> ConfigError:
        return ConfigError(
            f"tensor_parallel is {self.plan.size}, but the quantised weight {name!r} cannot be cut: {reason}; use "
            "tensor_parallel=1, or another file of the model"
        )

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
    plan = _completed(plan)
    known = _COLUMNS.keys() | _ROWS.keys() | _WHOLE | _SUMS
    unknown = {pattern: style for pattern, style in plan.items() if style not in known}
    if unknown:
        pattern, style = next(iter(unknown.items()))
        raise ConfigError(
            f"{name} ({hf_config.model_type}) is cut in the style {style!r} ({pattern}), which is not supported here; "
            "use tensor_parallel=1"
        )
    return plan


def _completed(plan: Mapping[str, str]) -> dict[str, str]:
    """Cut more than a plan does: packed products, and experts that all tokens share."""
    found = dict(plan)
    for packed, style, behind in _CUT_HERE:
        for pattern in [pattern for pattern in plan if pattern.endswith(packed)]:
            if plan[pattern] == "colwise_gather_output":
                found[pattern] = style
                found[pattern.replace(packed, behind)] = "rowwise"
    experts = next((pattern for pattern, style in plan.items() if style in _SUMS), None)
    if experts is not None and not any(f".{name}." in pattern for pattern in plan for name in _SHARED):
        block = experts.rpartition(".")[0]
        for name in _SHARED:
            found |= {f"{block}.{name}.{last}": "colwise" for last in ("gate_proj", "up_proj")}
            found[f"{block}.{name}.down_proj"] = "rowwise"
    return found


def _narrowed(name: str, hf_config: Any, styles: Mapping[str, str], size: int) -> Any:
    """Return the configuration of a shard. Raises ConfigError if `size` does not divide heads or widths."""
    narrowed = copy.deepcopy(hf_config)
    config = text_config(narrowed)
    layers = _layer_overrides(config)
    cut = [pattern.rpartition(".")[2] for pattern, style in styles.items() if style in _COLUMNS]
    if any(last in _HEADS for last in cut):
        heads = int(_value(config, "num_attention_heads"))
        if _value(config, "head_dim") is None and not hasattr(config, "kv_lora_rank"):
            config.head_dim = config.hidden_size // heads
        if _value(config, "num_key_value_heads") is None:
            _check_kv_heads(name, heads, size)
        for fields, attribute in _numbers(config, layers, _KV_HEADS):
            _check_kv_heads(name, fields[attribute], size)
            fields[attribute] //= size
        _check_divides(name, "num_attention_heads", heads, size, size)
        config.num_attention_heads = heads // size
    if any(last not in _HEADS for last in cut):
        for fields, attribute in _numbers(config, layers, _WIDTHS):
            _check_divides(name, attribute, fields[attribute], size, size)
            fields[attribute] //= size
    if layers:
        config.per_layer_config = layers
    return narrowed


def _numbers(
    config: Any, layers: dict[int, dict[str, Any]], attributes: tuple[str, ...]
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield where those of these attributes are that are numbers: of the model, and of layers that have their own."""
    for fields in (vars(config), *layers.values()):
        for attribute in attributes:
            attribute = _own_name(config, attribute)
            if isinstance(fields.get(attribute), int) and fields[attribute]:
                yield fields, attribute


def _own_name(config: Any, attribute: str) -> str:
    """Return the name that an architecture has for an attribute."""
    return str(config.attribute_map.get(attribute, attribute))


def _value(config: Any, attribute: str) -> Any:
    """Return an attribute of a configuration, whether or not some layers have another value."""
    attribute = _own_name(config, attribute)
    return vars(config).get(attribute, getattr(type(config), attribute, None))


def _layer_overrides(config: Any) -> dict[int, dict[str, Any]]:
    """Return the attributes of single layers that differ from those of the model (Gemma 4), by layer."""
    spec = vars(config).get("_heterogeneity_spec")
    return copy.deepcopy(spec.per_layer_overrides) if spec is not None else {}


def _check_kv_heads(name: str, number: int, size: int) -> None:
    if number % size:
        raise ConfigError(
            f"tensor_parallel is {size}, but {name} has {number} KV heads, which {size} does not divide; use "
            f"{_divisors(number)}"
        )


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


def _piece(name: str, parameter: torch.Tensor, styles: Mapping[str, str], hf_config: Any) -> Piece:
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
        shares = _COLUMNS[style]
        if style == "packed_heads":
            config = text_config(hf_config)
            heads = int(_value(config, "num_attention_heads"))
            kv_heads = int(_value(config, "num_key_value_heads") or heads)
            shares = heads, kv_heads, kv_heads
        return Piece("columns", axis, shares)
    if style in _ROWS:
        return Piece("first") if is_bias else Piece("rows", parameter.dim() - (2 if transposed else 1), _ROWS[style])
    return WHOLE


def _is_sum(module: str, styles: Mapping[str, str]) -> bool:
    style = _style(module, styles)
    return style in _SUMS or style in _ROWS
