"""Experts of a checkpoint that has a weight for each expert and projection, as one weight of all experts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch

from graftlm.core.model.quantised.held import HeldWeights
from graftlm.kernels.quantised_weight import QuantisedWeight

_EXPERT = re.compile(
    r"(?P<module>.+\.experts)\.(?P<expert>\d+)\.(?:(?P<gate>gate_proj|w1)|(?P<up>up_proj|w3)|(?P<down>down_proj|w2))"
)
_OLD = ".block_sparse_moe.", ".mlp."
"""The name of Mixtral's mixtures in files, and in models."""


class MergedExperts:
    """The experts of a model whose weights come one by one; where kernels multiply codes, they stay codes.

    shapes  of the model's tensors
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], held: HeldWeights) -> None:
        self._shapes = shapes
        self._held = held
        self._modules: dict[str, dict[tuple[int, str], tuple[str, QuantisedWeight]]] = {}

    def add(self, layer: str, weight: QuantisedWeight) -> Iterator[tuple[str, torch.Tensor]] | None:
        """Take the weight of a layer by its name in the files; None if it is no expert, or must be dense.

        -> the tensors for the model's state, once a module's last weight has come
        """
        found = _EXPERT.fullmatch(layer)
        if found is None or not self._held.keeps_experts:
            return None
        module = found["module"].replace(*_OLD)
        shape = self._shapes.get(f"{module}.gate_up_proj", ())
        if len(shape) != 3 or shape[2] != self._shapes[f"{module}.down_proj"][1]:  # absent, or transposed
            return None
        kind = next(name for name in ("gate", "up", "down") if found[name])
        weights = self._modules.setdefault(module, {})
        weights[int(found["expert"]), kind] = layer, weight
        return iter(self._merged(module, shape[0]) if len(weights) == 3 * shape[0] else ())

    def _merged(self, module: str, num_experts: int) -> list[tuple[str, torch.Tensor]]:
        weights = self._modules.pop(module)
        gate_up, down = (
            [weights[expert, kind][1] for expert in range(num_experts) for kind in kinds]
            for kinds in (("gate", "up"), ("down",))
        )
        whole, whole_down = gate_up[0].concat(gate_up[1:]), down[0].concat(down[1:])
        places = None
        if isinstance(whole, QuantisedWeight) and isinstance(whole_down, QuantisedWeight):
            places = self._held.keep_experts(module, whole, whole_down, num_experts, transposed=False)
        if places is not None:
            return list(places.items())
        return [(f"{layer}.weight", weight.dense()) for layer, weight in weights.values()]

    def rest(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the values of modules of which weights are missing."""
        for weights in self._modules.values():
            yield from ((f"{layer}.weight", weight.dense()) for layer, weight in weights.values())
