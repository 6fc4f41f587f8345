"""The decoder layers of a model, recorded in its own forward and compared, one by one, in another execution of it.

Two executions of a deep model in half precision may end far apart although each layer is right: every layer makes the
rounding of those before it larger. So each layer gets the recorded input, and its output is compared with the recorded
one. A mixture of experts keeps the recorded experts (routing.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import torch
from torch import nn

from graftlm.core.execution.routing import Routing, RoutingRecorder, RoutingReplay


@dataclass(frozen=True)
class LayerRecord:
    """Inputs and outputs of decoder layers, [num_tokens, hidden_size] each, and the routing of their mixtures.

    routing  empty if there are no mixtures, or some whose routing cannot be recorded
    """

    before: tuple[torch.Tensor, ...] = ()
    after: tuple[torch.Tensor, ...] = ()
    routing: tuple[Routing, ...] = ()


class LayerRecorder:
    """Records decoder layers for the time of a call, in which the model may run several forwards."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._routing = RoutingRecorder(model)
        self._before: list[list[torch.Tensor]] = [[] for _ in layers]
        self._after: list[list[torch.Tensor]] = [[] for _ in layers]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        def before(number: int, layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            self._before[number].append((args[0] if args else options["hidden_states"])[0])

        def after(number: int, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._after[number].append((output[0] if isinstance(output, tuple) else output)[0])

        with ExitStack() as stack:
            for number, layer in enumerate(self._layers):
                stack.callback(layer.register_forward_pre_hook(partial(before, number), with_kwargs=True).remove)
                stack.callback(layer.register_forward_hook(partial(after, number)).remove)
            stack.enter_context(self._routing())
            yield

    def record(self, num_forwards: int) -> LayerRecord:
        """Return the tokens of all forwards, in order; an empty record if a layer did not run once in each."""
        kept = self._before, self._after
        if not self._layers or any(len(found) != num_forwards for parts in kept for found in parts):
            return LayerRecord()
        before, after = (tuple(torch.cat(found) for found in parts) for parts in kept)
        return LayerRecord(before, after, self._routing.per_mixture(num_forwards))


@dataclass
class _Compared:
    """Squared norms over the tokens of a layer that were compared: of the error, the layer's addend and its output."""

    error: float = 0.0
    added: float = 0.0
    output: float = 0.0


@dataclass
class LayerReplay:
    """Runs steps of a model whose layers each get the recorded input, and compares their outputs."""

    model: nn.Module
    layers: Sequence[nn.Module]
    recorded: LayerRecord
    outputs: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._compared = [_Compared() for _ in self.layers]
        self._routing = RoutingReplay(self.model, self.recorded.routing) if self.recorded.routing else None

    @contextmanager
    def __call__(self, tokens: Sequence[int]) -> Iterator[None]:
        """Run a step. Raises RuntimeError at its end if the model ran its layers or mixtures as another module's code.

        tokens  [num_tokens] the number of each token of the step among the recorded ones; -1 for a token without record
        Sets `outputs`, each layer's output [num_tokens, hidden_size].
        """
        at = torch.tensor(tokens, device=self.recorded.before[0].device)
        self.outputs = []
        with ExitStack() as stack:
            for number, layer in enumerate(self.layers):
                before, after = partial(self._before, number, at), partial(self._after, number, at)
                stack.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(layer.register_forward_hook(after).remove)
            if self._routing is not None:
                stack.enter_context(self._routing(tokens))
            yield
        if len(self.outputs) != len(self.layers):
            raise RuntimeError(f"{len(self.outputs)} of {len(self.layers)} layers run by themselves")

    def worst(self) -> tuple[int, float]:
        """Return the layer with the largest error relative to its addend, less rounding of the sum, and that error."""
        eps = torch.finfo(self.recorded.before[0].dtype).eps
        # an error that is no number counts as infinite
        norms = ((c.error**0.5 if c.error >= 0.0 else inf, eps * c.output**0.5, c.added**0.5) for c in self._compared)
        errors = [max(error - rounding, 0.0) / max(added, 1e-30) for error, rounding, added in norms]
        worst = max(range(len(errors)), key=errors.__getitem__)
        return worst, errors[worst]

    def router_problem(self) -> str | None:
        """Return the router that chooses other experts for the recorded inputs; None if none does."""
        return self._routing.problem() if self._routing is not None else None

    def _before(
        self, number: int, at: torch.Tensor, layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = args[0] if args else options["hidden_states"]
        hidden = torch.where((at >= 0)[:, None], self.recorded.before[number][at.clamp(min=0)], given[0])[None]
        return ((hidden, *args[1:]), options) if args else (args, options | {"hidden_states": hidden})

    def _after(self, number: int, at: torch.Tensor, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        given = output[0] if isinstance(output, tuple) else output
        found, known = given[0], at >= 0
        self.outputs.append(found.clone())
        before, after = (part[number][at[known]].float() for part in (self.recorded.before, self.recorded.after))
        compared = self._compared[number]
        compared.error += float((found[known].float() - after).square().sum())
        compared.added += float((after - before).square().sum())
        compared.output += float(after.square().sum())
        hidden = torch.where(known[:, None], self.recorded.after[number][at.clamp(min=0)], found)[None]
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden
