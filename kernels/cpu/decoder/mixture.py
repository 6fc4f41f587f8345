"""A mixture of experts on a CPU: the weights of all experts in panels, and its call of the compiled loop."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from graftlm.kernels.activation import Activation
from graftlm.kernels.cpu.calls import EXPERT_PHASES, IDENTITY, SIGMOID, SOFTMAX, ExpertsCall
from graftlm.kernels.cpu.compiled.loop_runtime import Loop, loop_address
from graftlm.kernels.cpu.element_format import ElementFormat
from graftlm.kernels.cpu.huge_pages import huge_buffer
from graftlm.kernels.cpu.linear.panels import pack
from graftlm.kernels.gpu.mixture.router import Router

_FUNCTIONS = {"softmax": SOFTMAX, "sigmoid": SIGMOID, "logits": IDENTITY, "none": IDENTITY}

_MOST_PICKS = 1 << 13
"""Tokens times chosen experts that run together: their intermediate results take some hundred MiB at most."""


def router_problem(router: Router) -> str | None:
    """Return the reason why the compiled code cannot route in this way; None if it can."""
    if router.num_groups != router.top_groups:
        return "its router chooses groups of experts"
    return None


@dataclass(frozen=True)
class SharedExperts:
    """Experts that every token has, beside those that a router chooses.

    gate_up  [num_shared, 2 * gate_size, hidden_size], down [num_shared, hidden_size, gate_size]
    gate     [hidden_size]: the sigmoid of its product with a token is the weight of their outputs; None: weights are 1
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate: torch.Tensor | None = None


@dataclass(frozen=True)
class ExpertPanels:
    """The weights of a mixture's experts: panels as those of `Panels`, [num_experts, num_panels, depth / i, 64, i].

    gate, up    [.., depth] inputs of the hidden size, down [.., down_depth]; all padded with zeros
    num_shared  the last of the experts, which every token has
    """

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    hidden_size: int
    gate_size: int
    activation: Activation
    num_shared: int = 0

    @classmethod
    def of(
        cls, gate_up: torch.Tensor, down: torch.Tensor, activation: Activation, shared: SharedExperts | None = None
    ) -> ExpertPanels:
        """Copy gate_up [num_experts, 2 * gate_size, hidden_size] and down [num_experts, hidden_size, gate_size]."""
        _, both, hidden_size = gate_up.shape
        gate_size = both // 2
        all_gate_up, all_down = [*gate_up], [*down]
        if shared is not None:
            all_gate_up, all_down = [*all_gate_up, *shared.gate_up], [*all_down, *shared.down]
        gates, ups = ([one[at] for one in all_gate_up] for at in (slice(0, gate_size), slice(gate_size, both)))
        num_shared = len(shared.down) if shared is not None else 0
        gate, up, packed_down = (_packed(each) for each in (gates, ups, all_down))
        return cls(gate, up, packed_down, hidden_size, gate_size, activation, num_shared)

    @property
    def dtype(self) -> torch.dtype:
        return self.down.dtype

    @property
    def num_bytes(self) -> int:
        return self.gate.nbytes + self.up.nbytes + self.down.nbytes

    @property
    def num_experts(self) -> int:
        return len(self.down)

    @property
    def depth(self) -> int:
        return self.gate.shape[2] * self.gate.shape[4]

    @property
    def down_depth(self) -> int:
        return self.down.shape[2] * self.down.shape[4]

    def unpack(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return gate_up and down as given, without shared experts."""
        routed = self.num_experts - self.num_shared
        gate, up, down = (
            x[:routed].transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :num_out, :num_in]
            for x, num_out, num_in in (
                (self.gate, self.gate_size, self.hidden_size),
                (self.up, self.gate_size, self.hidden_size),
                (self.down, self.hidden_size, self.gate_size),
            )
        )
        return torch.cat([gate, up], 1), down.contiguous()


def _packed(weights: list[torch.Tensor]) -> torch.Tensor:
    first = pack(weights[0].contiguous(), None).packed
    out = huge_buffer(len(weights) * first.nbytes).view(first.dtype).view(len(weights), *first.shape)
    for to, weight in zip(out, weights, strict=True):
        to.copy_(pack(weight.contiguous(), None).packed)
    return out


class ExpertsSpace:
    """Intermediate results of mixtures that run one after the other, for up to `num_rows` rows each."""

    def __init__(self, mixtures: Sequence[tuple[ExpertPanels, int]], num_rows: int) -> None:
        """mixtures: experts, and the number of them that a token has"""
        picks, dtype = num_rows * max(top_k for _, top_k in mixtures), mixtures[0][0].dtype
        panels = [panels for panels, _ in mixtures]
        self.experts, self.weights = torch.empty(picks, dtype=torch.int64), torch.empty(picks, dtype=torch.float32)
        self.logits = torch.empty(num_rows * (1 + max(p.num_experts for p in panels)), dtype=torch.float32)
        self.sorted = torch.empty(picks * max(p.depth for p in panels), dtype=dtype)
        self.hidden = torch.empty(picks * max(p.down_depth for p in panels), dtype=dtype)
        self.parts = torch.empty(picks * max(p.hidden_size for p in panels), dtype=torch.float32)


class ExpertsRecord:
    """The arguments of one mixture.

    With a router, the choice of experts has memory of its own, not that of `space`: a thread that was not running while
    the others ran this mixture and the next one still finds the number of tasks in it.

    router  None where the choice lies in `space.experts` and `space.weights` [num_rows, top_k]
    top_k   experts of a token, shared ones included
    shared_gate  as SharedExperts.gate
    """

    def __init__(
        self,
        panels: ExpertPanels,
        router: Router | None,
        top_k: int,
        space: ExpertsSpace,
        shared_gate: torch.Tensor | None = None,
    ) -> None:
        dtype = panels.dtype
        self._held = panels, space
        self._counters = np.zeros((EXPERT_PHASES, 2), np.int64)
        self._vectors: list[torch.Tensor] = []
        record: Any = ExpertsCall()
        self.record = record
        record.counters = self._counters.ctypes.data
        record.hidden_size, record.gate_size = panels.hidden_size, panels.gate_size
        record.num_experts, record.top_k = panels.num_experts, top_k
        record.depth, record.down_depth = panels.depth, panels.down_depth
        record.up_bytes, record.down_bytes = panels.up[0].nbytes, panels.down[0].nbytes
        record.gelu = panels.activation == "gelu_tanh"
        for name in ("logits", "weights", "sorted", "hidden", "parts"):
            setattr(record, name, getattr(space, name).data_ptr())
        self.experts = space.experts if router is None else torch.empty_like(space.experts)
        record.experts = self.experts.data_ptr()
        for name in ("gate", "up", "down"):
            setattr(record, name, getattr(panels, name).data_ptr())
        if router is not None:
            record.num_shared, record.gated = panels.num_shared, shared_gate is not None
            self._set_router(record, router, dtype, shared_gate)

    def _set_router(self, record: Any, router: Router, dtype: torch.dtype, shared_gate: torch.Tensor | None) -> None:
        rows = [router.weight] if shared_gate is None else [router.weight, shared_gate[None]]
        record.router = self._kept(torch.cat([row.to(dtype) for row in rows]))
        record.bias = self._kept(router.bias.float()) if router.bias is not None else 0
        record.correction = self._kept(router.correction.float()) if router.correction is not None else 0
        record.rounds = router.logits_dtype is not torch.float32
        record.score, record.after = _FUNCTIONS[router.score], _FUNCTIONS[router.after]
        record.renormalize, record.eps, record.scale = router.renormalize, router.eps, router.scale

    def _kept(self, tensor: torch.Tensor) -> int:
        self._vectors.append(tensor)
        return tensor.data_ptr()

    @property
    def address(self) -> int:
        return ctypes.addressof(self.record)


class CompiledExperts:
    """A mixture's experts for any number of rows: the replacement of the forward of their module.

    panels  see ExpertPanels; router  of the whole mixture, None for the experts alone
    shared_gate  as SharedExperts.gate
    """

    def __init__(
        self, panels: ExpertPanels, router: Router | None = None, shared_gate: torch.Tensor | None = None
    ) -> None:
        self.panels, self.router, self.shared_gate = panels, router, shared_gate
        self._function = loop_address("experts", ElementFormat.of(panels.dtype))

    @property
    def top_k(self) -> int:
        """Return the experts of a token in the whole mixture, shared ones included."""
        return self.panels.num_shared + (self.router.top_k if self.router is not None else 0)

    def chosen(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the given experts' outputs: x [num_rows, n], the choice [num_rows, top_k]."""
        return self._run(x, None, (experts, weights))

    def routed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mixture's output for x [num_rows, n], by its router."""
        assert self.router is not None
        return self._run(x, self.router, None)

    def _run(
        self, x: torch.Tensor, router: Router | None, choice: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        top_k = self.top_k if choice is None else choice[0].shape[1]
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        piece = max(_MOST_PICKS // top_k, 1)
        for first in range(0, len(x), piece):
            here = slice(first, first + piece)
            rows = torch.nn.functional.pad(x[here].float(), (0, self.panels.depth - x.shape[1])).contiguous()
            space = ExpertsSpace([(self.panels, top_k)], len(rows))
            held = ExpertsRecord(self.panels, router, top_k, space, self.shared_gate)
            if choice is not None:
                space.experts.copy_(choice[0][here].flatten())
                space.weights.copy_(choice[1][here].flatten())
            call = held.record
            call.num_rows, call.x, call.x_row = len(rows), rows.data_ptr(), rows.shape[1]
            call.out, call.add = out[here].data_ptr(), 0
            Loop(call, self._function).run(single_thread=False)
        return out
