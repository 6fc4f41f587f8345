"""Models whose quantised weights stay codes: where a kernel multiplies them. Elsewhere each weight is widened once.

The rule: in bfloat16, a weight stays codes if the compiled loops of a CPU multiply its format, or the kernels of a
Hopper GPU; there embeddings are always widened. On a CPU, a weight that no kernel has taken when the model is fused is
widened, so that no forward computes a dense weight again.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from graftlm.core.tensor_parallel.ranks import move_sum
from graftlm.kernels.codes.expert_codes import ExpertCodes, put_experts
from graftlm.kernels.codes.tiled_weight import coded_problem, problem as codes_problem, runs_on
from graftlm.kernels.cpu.linear.quantised_panels import problem
from graftlm.kernels.quantised_modules import QuantisedEmbedding, QuantisedLinear, put_quantised
from graftlm.kernels.quantised_weight import QuantisedWeight
from graftlm.kernels.weight import Weight

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class HeldWeights:
    """The quantised weights of a model that stay codes, by the names of the tensors that they replace.

    model   the model without weights; only its linear layers and embeddings can hold codes. None keeps none
    device  where the model will run
    dtype   that it computes in
    """

    def __init__(self, model: nn.Module | None, device: torch.device, dtype: torch.dtype) -> None:
        self.weights: dict[str, Weight] = {}
        self.experts: dict[str, ExpertCodes] = {}
        self._device = device
        self._problem = problem if device.type == "cpu" else codes_problem
        runs = importlib.util.find_spec("llvmlite") is not None if device.type == "cpu" else runs_on(device)
        self._kept = model is not None and dtype is torch.bfloat16 and runs
        kinds = (nn.Linear, nn.Embedding) if device.type == "cpu" else (nn.Linear,)
        modules = model.named_modules() if model is not None and self._kept else ()
        self._kinds = {f"{name}.weight": type(module) for name, module in modules if type(module) in kinds}

    @classmethod
    def of_names(cls, device: torch.device, dtype: torch.dtype, layers: Mapping[str, bool]) -> HeldWeights:
        """Return those of a model by the names of its matrices; the value is True for an embedding."""
        held = cls(nn.Module(), device, dtype)
        if held._kept:
            held._kinds = {name: nn.Embedding if is_table else nn.Linear for name, is_table in layers.items()}
        return held

    def keep(self, name: str, weight: QuantisedWeight) -> torch.Tensor | None:
        """Keep a weight as codes if a kernel multiplies it; return a tensor of its shape for the model's state.

        The tensor takes no memory, and `put` replaces it. None for a weight that must be dense.
        """
        kind = self._kinds.get(name)
        if kind not in (nn.Linear, nn.Embedding) or self._problem(weight) is not None:
            return None
        if kind is nn.Embedding and weight.order is not None:
            return None
        self.weights[name] = weight
        return torch.zeros((), dtype=weight.dtype).expand(weight.shape)

    @property
    def keeps_experts(self) -> bool:
        """Return True if a kernel multiplies experts of some formats."""
        return self._device.type == "cuda" and self._kept

    def keep_experts(
        self, name: str, gate_up: QuantisedWeight, down: QuantisedWeight, num_experts: int, *, transposed: bool
    ) -> dict[str, torch.Tensor] | None:
        """Keep a layer's experts as codes if a kernel multiplies them; return tensors for the model's state as `keep`.

        name     of their module
        gate_up  [num_experts * 2 n, k]; down [num_experts * k, n]; transposed: the module's parameters are
        """
        if not self.keeps_experts or coded_problem(gate_up, down, num_experts) is not None:
            return None
        both = {"gate_up_proj": gate_up, "down_proj": down}
        held = {
            f"{name}.{leaf}": ExpertCodes(weight.to(self._device), num_experts, transposed)
            for leaf, weight in both.items()
        }
        self.experts |= held
        return {leaf: codes.placeholder().data for leaf, codes in held.items()}

    def put(self, model: nn.Module, *, tied: bool) -> None:
        """Give a model with the state of `keep` its weights; `tied`: the head is the embedding."""
        put_experts(model, self.experts)
        if tied and _EMBEDDING in self.weights:
            self.weights[_HEAD] = self.weights[_EMBEDDING]
        put_quantised(model, self.weights)


@torch.no_grad()
def widen(model: nn.Module) -> None:
    """Replace modules that still hold codes by plain ones, one at a time; a tied head stays tied."""
    tables: dict[int, nn.Parameter] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, QuantisedLinear | QuantisedEmbedding) and child.quantised is not None:
                setattr(parent, name, _plain(child, tables))


def _plain(module: Any, tables: dict[int, nn.Parameter]) -> nn.Module:
    held = module.quantised
    values = tables.get(id(held))
    if values is None:
        values = tables[id(held)] = nn.Parameter(held.dense(), requires_grad=False)
    n, k = held.shape
    if isinstance(module, QuantisedEmbedding):
        table = nn.Embedding(n, k, module.padding_idx, device="meta")
        table.weight = values
        return table.eval()
    plain = nn.Linear(k, n, bias=False, device="meta")
    plain.weight, plain.bias = values, module.bias
    move_sum(module, plain)
    return plain.eval()
