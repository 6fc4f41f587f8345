"""The routing of mixtures of experts: recorded in a model's own forward, replayed in another execution of the model.

Two executions of a model differ by rounding. Where two experts of a token have nearly equal scores, rounding decides
between them, and the token's output differs by far more. A comparison of two executions therefore replays the recorded
choice of experts, and tests each router by itself, on the recorded inputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

_AGREEING = 0.75
"""Share of tokens that must agree: rounding may exchange two experts of nearly equal scores."""

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}

_COPIES, _NOISE = 8, 2.0**-7
"""Copies of a router's input, and the relative size of the noise on them: one rounding to bfloat16."""

MAX_UNEXPLAINED = 0.03
"""Share of tokens for which a router may choose otherwise than recorded where noise does not explain it."""

OTHER_WEIGHTS = 0.1
"""Difference of a token's weights, relative to the largest, from which on they count as another choice. Weights may
jump where rounding moves a score over a threshold (PhiMoE). Smaller differences show in the output."""

Chosen = tuple[torch.Tensor, torch.Tensor]
"""Experts [num_tokens, top_k] and their weights [num_tokens, top_k]."""

Route = Callable[[torch.Tensor], Chosen]


def has_experts(module: nn.Module) -> bool:
    """Return True if `module` holds the weights of a mixture's experts in tensors of three dimensions."""
    down = getattr(module, "down_proj", None)
    return isinstance(down, nn.Parameter) and down.dim() == 3


def mixtures_of(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each mixture of `model` with its child that holds the experts' weights."""
    for block in model.modules():
        experts = next((child for child in block.children() if has_experts(child)), None)
        if experts is not None:
            yield block, experts


def _router_of(block: nn.Module) -> nn.Module | None:
    """Return the router of experts in a decoder layer, not in a block of their own (Gemma 4); None for a block."""
    router = getattr(block, "router", None)
    return router if isinstance(router, nn.Module) and hasattr(block, "self_attn") else None


def in_order(*tensors: Any) -> Chosen:
    """Return (experts, weights) from tensors in either order."""
    first, second = tensors[:2]
    return (second, first) if first.is_floating_point() else (first, second)


@dataclass(frozen=True)
class Routing:
    """The experts and weights that a mixture chose for some tokens.

    x        [num_tokens, hidden_size]
    experts  [num_tokens, top_k]; weights [num_tokens, top_k]
    """

    x: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor

    def agrees(self, experts: torch.Tensor, weights: torch.Tensor) -> bool:
        """Return True if experts and weights are equal for nearly all tokens, in any order of a token's experts."""
        if experts.shape != self.experts.shape:
            return False
        mine, other = self.experts.long().sort(-1), experts.long().sort(-1)
        a, b = self.weights.float().gather(1, mine.indices), weights.float().gather(1, other.indices)
        close = (a - b).abs().amax(-1) <= _TOLERANCE.get(self.x.dtype, 0.0) * a.abs().amax(-1)
        return float(((mine.values == other.values).all(-1) & close).float().mean()) >= _AGREEING


class RoutingRecorder:
    """Records the routing of every mixture of a model for the time of a call.

    calls  in order, of one forward; those of a further forward follow
    """

    def __init__(self, model: nn.Module) -> None:
        self._mixtures = list(mixtures_of(model))
        self.calls: list[Routing] = []
        self._complete = bool(self._mixtures)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        inputs: dict[nn.Module, torch.Tensor] = {}

        def note(block: nn.Module, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            inputs[block] = args[0] if args else options["hidden_states"]

        def record(block: nn.Module, own: Callable[..., Any], hidden: torch.Tensor, *args: Any, **options: Any) -> Any:
            given = (*args, *options.values())
            x = inputs[block].reshape(-1, inputs[block].shape[-1])
            if len(given) < 2 or given[0].shape != given[1].shape or len(given[0]) != len(x):
                self._complete = False  # the block hands its experts something else: Llama 4's scaled tokens
            else:
                self.calls.append(Routing(x.clone(), *(part.clone() for part in in_order(*given))))
            return own(hidden, *args, **options)

        with ExitStack() as stack:
            for block, experts in self._mixtures:
                router = _router_of(block)
                noted = partial(note, block)
                handle = (router or block).register_forward_pre_hook(noted, with_kwargs=True)
                stack.callback(handle.remove)
                stack.enter_context(_forward_of(experts, partial(record, block, experts.forward)))
            yield

    def per_mixture(self, num_forwards: int) -> tuple[Routing, ...]:
        """Return the routing of each mixture call, for the tokens of all forwards; empty if any was not recorded."""
        each, rest = divmod(len(self.calls), num_forwards)
        if not self._complete or not each or rest:
            return ()
        forwards = [self.calls[first * each : (first + 1) * each] for first in range(num_forwards)]
        return tuple(
            Routing(*(torch.cat(parts) for parts in zip(*((c.x, c.experts, c.weights) for c in calls), strict=True)))
            for calls in zip(*forwards, strict=True)
        )


class RoutingReplay:
    """Runs steps of a model with the recorded experts, and tests the routers on the recorded inputs.

    A token keeps the experts and weights of its own router if they are about the recorded ones, so that slightly wrong
    weights show in the output; the test of the router shows the others.
    """

    def __init__(self, model: nn.Module, record: Sequence[Routing]) -> None:
        self._mixtures = list(mixtures_of(model))
        self._record = record
        self._unexplained: dict[int, float] = {}
        self._tokens = torch.empty(0, dtype=torch.int64)
        self._calls = 0

    @contextmanager
    def __call__(self, tokens: Sequence[int]) -> Iterator[None]:
        """Replay a step. Raises RuntimeError at its end if mixtures ran that do not take part in this.

        tokens  [num_tokens] the number of each token of the step among the recorded ones; -1 for a token without record
        """
        self._tokens = torch.tensor(tokens, device=self._record[0].experts.device)
        self._calls = 0
        with ExitStack() as stack:
            for block, experts in self._mixtures:
                run = partial(self._run_experts, block, experts, experts.forward)
                stack.enter_context(_forward_of(experts, run))
            _current.replay = self
            stack.callback(setattr, _current, "replay", None)
            yield
        if self._calls != len(self._record):
            raise RuntimeError(f"{self._calls} of {len(self._record)} mixtures replay their routing")

    def problem(self) -> str | None:
        """Return the router that chooses other experts for the recorded inputs; None if none does."""
        worst = max(self._unexplained, key=self._unexplained.__getitem__, default=None)
        if worst is None or self._unexplained[worst] <= MAX_UNEXPLAINED:
            return None
        share = f"{self._unexplained[worst]:.0%} of the tokens"
        return f"mixture {worst} chooses other experts than the model's own code for {share}"

    def choose(self, chosen: Chosen, route: Route) -> Chosen:
        """Return the experts and weights of the step's tokens in place of those that the mixture's router chose.

        route  that router: x [num_tokens, hidden_size] -> experts, weights
        """
        number, self._calls = self._calls, self._calls + 1
        recorded = self._record[number]
        if number not in self._unexplained:
            self._unexplained[number] = _unexplained(recorded, route)
        experts, weights = chosen
        at = self._tokens.clamp(min=0)
        theirs, their_weights = recorded.experts[at], recorded.weights[at]
        moved = (_other(chosen, (theirs, their_weights)) & (self._tokens >= 0))[:, None]
        return (
            torch.where(moved, theirs.to(experts.dtype), experts).contiguous(),
            torch.where(moved, their_weights.to(weights.dtype), weights).contiguous(),
        )

    def _run_experts(
        self,
        block: nn.Module,
        experts: nn.Module,
        own: Callable[..., Any],
        hidden: torch.Tensor,
        *args: Any,
        **options: Any,
    ) -> Any:
        given = (*args, *options.values())
        chosen = self.choose(in_order(*given), partial(_route_of, block, experts))
        first = 1 if given[0].is_floating_point() else 0
        placed = (chosen[first], chosen[1 - first], *given[2:])
        return own(hidden, *placed[: len(args)], **dict(zip(options, placed[len(args) :], strict=True)))


class _Current(threading.local):
    replay: RoutingReplay | None = None


_current = _Current()


def is_replayed() -> bool:
    """Return True while this thread replays the choice of experts."""
    return _current.replay is not None


def replayed(chosen: Chosen, route: Route) -> Chosen:
    """Return `chosen`, or the experts and weights that this thread replays instead. route: as in `choose`"""
    replay = _current.replay
    return chosen if replay is None else replay.choose(chosen, route)


def _other(chosen: Chosen, recorded: Chosen) -> torch.Tensor:
    """Return True for each token whose experts differ, in any order, or whose weights do. -> bool [num_tokens]"""
    (experts, weights), (theirs, their_weights) = chosen, recorded
    mine, other = experts.long().sort(-1), theirs.long().sort(-1)
    a, b = weights.float().gather(1, mine.indices), their_weights.float().gather(1, other.indices)
    apart = (a - b).abs().amax(-1) > OTHER_WEIGHTS * b.abs().amax(-1)
    return (mine.values != other.values).any(-1) | apart


def _unexplained(recorded: Routing, route: Route) -> float:
    """Return the share of tokens whose choice differs on the recorded input, and on that input with any noise."""
    theirs = recorded.experts, recorded.weights
    wrong = _other(route(recorded.x), theirs)
    if bool(wrong.any()):
        generator = torch.Generator(recorded.x.device).manual_seed(0)
        noise = torch.randn(
            _COPIES, *recorded.x.shape, generator=generator, device=recorded.x.device, dtype=torch.float32
        )
        copies = (recorded.x * (1 + _NOISE * noise)).to(recorded.x.dtype)
        experts, weights = (x.view(_COPIES, *recorded.experts.shape) for x in route(copies.flatten(0, 1)))
        wrong &= torch.stack([_other(found, theirs) for found in zip(experts, weights, strict=True)]).all(0)
    return float(wrong.float().mean())


def _route_of(block: nn.Module, experts: nn.Module, x: torch.Tensor) -> Chosen:
    """Return the arguments with which `block` calls its experts for x [num_tokens, hidden_size]."""
    router = _router_of(block)
    if router is not None:
        return in_order(*router(x)[-2:])
    found: list[Chosen] = []

    def note(hidden: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        found.append(in_order(*args, *options.values()))
        return torch.zeros_like(hidden)

    with _forward_of(experts, note):
        block(x[None])
    return found[0]


@contextmanager
def _forward_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Put `forward` in place of that of `module` for the time of a call."""
    before = vars(module).get("forward")
    setattr(module, "forward", forward)  # noqa: B010
    try:
        yield
    finally:
        if before is None:
            delattr(module, "forward")
        else:
            setattr(module, "forward", before)  # noqa: B010
