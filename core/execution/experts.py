"""Experts of a mixture in a form that a CUDA graph can hold.

Where torch has no grouped product for a dtype or a card, what it does instead asks the device how many tokens each
expert got, which no graph can hold. Gathering the weights of each token's experts asks nothing. It copies them, so only
steps of few tokens go through it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

MAX_GATHERED = 1 << 30
"""Bytes of weights that one layer may gather in one step."""


class GatheredExperts:
    """Puts a model's experts on gathered weights for the time of a call and back on what they were.

    max_tokens  of a step, so that the gathered weights take at most MAX_GATHERED bytes; 0 if the model has no experts
                that can be switched.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.max_tokens = 0
        per_token = [gathered_bytes(module) for module in model.modules() if hasattr(module, "is_transposed")]
        if per_token and hasattr(model, "get_experts_implementation"):
            self.max_tokens = MAX_GATHERED // max(1, *per_token)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        model = self._model
        before = model.get_experts_implementation()  # type: ignore[operator]
        model.set_experts_implementation("batched_mm")  # type: ignore[operator]
        try:
            yield
        finally:
            model.set_experts_implementation(before)  # type: ignore[operator]


def gathered_bytes(experts: nn.Module) -> int:
    """Bytes of weights that one token needs in a layer: those of one expert, as often as the router chooses one."""
    one = sum(weight.nbytes // weight.shape[0] for weight in experts.parameters(recurse=False))
    config = getattr(experts, "config", None)
    return one * int(getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k", None) or 1)
