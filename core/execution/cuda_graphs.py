"""GraphRunner: decode steps and small mixed ones as CUDA graphs, captured once for a ladder of sizes and replayed."""

from __future__ import annotations

import gc
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from graftlm.core.execution.paged import PagedRunner
from graftlm.kernels.gpu.attention.step_buffers import CapturableAttention, DeviceStep, Layout, best_prefix
from graftlm.kernels.jit.precompile import compile_together
from graftlm.kernels.recurrent.state_step import StateStep
from graftlm.kernels.transfer import registration, send
from graftlm.kernels.wire_plan import SCRATCH, WirePlan

TOKENS_PER_ROW = 2
"""How many more tokens than rows the graphs with logits of all tokens go up to: rows may have several new tokens."""

LADDER = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 512)

WIDE = (96, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536)
"""Sizes with logits of some tokens only, as far as ReplayCost finds them worth it."""


LAUNCH = 4.5e11
"""Operations that the device does while the host launches one layer: 0.8 ms, with other threads beside it."""

READ = 132.0
"""Operations in the time of reading one number of K or V again, of a token's own sequence."""

SHARED_READ = 44.0
"""The same for a prefix that rows share, which is read once for many tokens."""


class Shape(NamedTuple):
    """The shape that one graph was captured for."""

    num_rows: int
    prefix: bool


@dataclass(frozen=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor  # [num_rows, vocab_size]; overwritten by every replay


class _Borrowed:
    """The memory of a tensor on a GPU, for a tensor that does not keep it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": f"<i{tensor.itemsize}",
            "data": (tensor.data_ptr(), False),
            "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
            "version": 3,
        }


def _borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory that does not own it: the graphs' pool keeps it, and other graphs use it too."""
    return torch.as_tensor(_Borrowed(tensor), device=tensor.device).view(tensor.dtype)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Shield a capture from what happens outside, and the outside from a capture that fails.

    Freeing the graphs of an earlier runtime fails the capture at hand, so no garbage is collected meanwhile, and no
    host memory is registered, which fails it too. A failed one leaves torch's generator believing that it is being
    captured: every later random number would be an error.
    """
    if device.type != "cuda":
        yield
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    state = generator.clone_state()
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with registration:
            yield
    except BaseException:
        generator.graphsafe_set_state(state)
        raise
    finally:
        if collecting:
            gc.enable()


class GraphRunner:
    """Replays decode steps, and steps of a few new tokens in some rows; hands every other step to the eager runner.

    All graphs share one memory pool and one set of input buffers. A step is padded up to the next captured size
    with rows that write to the scratch slot, the last one of the KV store. Graphs wider than `logits_rows` compute
    logits of so many rows. A model whose forward cannot be captured runs eagerly, after one warning; if it has
    experts, small steps may still be captured with their weights gathered.
    """

    def __init__(
        self, eager: PagedRunner, attention: CapturableAttention, *, max_batch: int, max_len: int, scratch: int
    ) -> None:
        self.eager = eager
        self.attention = attention
        self.sizes = graph_sizes(max_batch, eager)
        self.step = step_buffers(max_batch, max_len, scratch, attention, eager)
        self.logits_rows = torch.zeros(max_dense(max_batch), dtype=torch.int64, device=attention.device)
        self.state_slots: torch.Tensor | None = None  # of the rows' states, for a model with layers that have one
        if eager.states is not None:
            self.state_slots = torch.full((self.sizes[-1],), SCRATCH, dtype=torch.int64, device=attention.device)
        self.graphs: dict[Shape, Captured] = {}
        loaded = eager.loaded
        self.cost = ReplayCost(loaded.text_config)
        num_first = 1 + max(map(loaded.layers.index, loaded.layers))  # up to the first layer of the last kind
        self._brief = PagedRunner(loaded, _until(attention, num_first), eager.drawn, eager.states)
        self._capture_all()

    def forward(self, plan: WirePlan) -> torch.Tensor:
        """Compute the step. -> logits [num_logits, vocab_size]; valid until the next forward."""
        if not self._fits(plan):
            return self.eager.forward(plan)
        size = self.sizes[bisect_left(self.sizes, plan.num_tokens)]
        layout = self.step.write(plan, padded_rows=size, token_rows=not plan.is_decode)
        if size > len(self.logits_rows):
            self._select(plan.logits_rows)
        captured = self.graphs[Shape(size, layout.prefix)]
        if self.state_slots is not None:
            self.eager.copy_states(plan)
            slots = np.full(size, SCRATCH, np.int64)
            slots[: plan.num_rows] = plan.state_slots
            self.state_slots[:size].copy_(send(slots, self.state_slots.device))
        captured.graph.replay()
        num_logits = len(plan.logits_rows)
        if num_logits == plan.num_tokens or size > len(self.logits_rows):
            return captured.logits[:num_logits]
        return captured.logits.index_select(0, send(plan.logits_rows, captured.logits.device))

    def _fits(self, plan: WirePlan) -> bool:
        """Whether the step has a graph. A row of several tokens is read once for each of them there."""
        if not self.graphs or plan.embedded or plan.num_tokens > self.sizes[-1]:
            return False
        num_dense = len(self.logits_rows)
        if plan.num_tokens > num_dense < len(plan.logits_rows):
            return False
        if plan.is_decode:
            return True
        if self.state_slots is not None:
            return False  # tokens of one row change one state, in turn
        return not self.attention.strict and self.cost.worth(plan)

    def _select(self, rows: NDArray[np.int64]) -> None:
        """Let the next replay of a wide graph compute logits of these rows, and of row 0 as often as there is room."""
        padded = np.zeros(len(self.logits_rows), np.int64)
        padded[: len(rows)] = rows
        self.logits_rows.copy_(send(padded, self.logits_rows.device))

    def _compile(self) -> None:
        """Compile the kernels of all graphs side by side; capturing one graph after the other compiles them in turn."""

        def launch_all() -> None:
            buffers = self.logits_rows, self.state_slots
            launch_steps(self.step, self.attention, self._brief, self.sizes[1:], *buffers)
            # one row has a head of its own
            launch_steps(self.step, self.attention, self.eager, self.sizes[:1], *buffers)

        compile_together(launch_all, self.attention.device)

    def _capture_all(self) -> None:
        if not self.eager.loaded.rehearsed:
            self._compile()
        reason = self._captured(self.sizes, nullcontext)
        if reason is None:
            return
        gathered = GatheredExperts(self.eager.loaded.model)
        few = [size for size in self.sizes if size <= gathered.max_tokens]
        if few and not self.attention.strict:
            reason = self._captured(few, gathered)
            if reason is None:
                self.sizes = few
                return
        warnings.warn(f"decode steps run without CUDA graphs, more slowly: {reason}", stacklevel=2)

    def _captured(self, sizes: list[int], during: Callable[[], AbstractContextManager[None]]) -> str | None:
        """Capture all sizes in a context. -> why that cannot be; then there are no graphs."""
        pool = None
        try:
            with during(), undisturbed(self.attention.device):
                for prefix in (False, True):
                    for size in reversed(sizes):
                        captured = self._capture(Shape(size, prefix), pool)
                        pool = captured.graph.pool()
                        self.graphs[Shape(size, prefix)] = captured
        except RuntimeError as error:
            self.graphs.clear()
            torch.cuda.synchronize()
            return str(error).splitlines()[0][:200]
        return None

    def _capture(self, shape: Shape, pool: Any) -> Captured:
        layout = Layout(shape.num_rows, shape.num_rows, 1, shape.prefix)
        self.attention.bind(self.step, layout)
        self.step.fill_scratch(shape.num_rows)
        stream: Any = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), suppress(_Seen):
            # Kernels compile and libraries set themselves up outside the capture. With a prefix only attention is
            # another than in the graph of this size without; after a rehearsal all kernels are there.
            brief = shape.prefix or self.eager.loaded.rehearsed
            self._run(shape.num_rows, self._brief if brief else self.eager)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        mode = "global" if self.eager.ranks is None else "thread_local"  # NCCL's thread looks at its events
        with torch.cuda.graph(graph, pool=pool, capture_error_mode=mode):
            logits = self._run(shape.num_rows, self.eager)
        graph.replay()  # the first replay sends the graph to the device, which takes milliseconds
        return Captured(graph, _borrowed(logits))

    def _run(self, num_rows: int, runner: PagedRunner) -> torch.Tensor:
        return run_rows(self.step, runner, num_rows, self.logits_rows, self.state_slots)


def max_dense(max_batch: int) -> int:
    """The largest size of a graph with logits of all its tokens."""
    return min(max(TOKENS_PER_ROW * max_batch, 64), LADDER[-1])


def graph_sizes(max_batch: int, runner: PagedRunner) -> list[int]:
    """For how many rows graphs are captured, the fewest first. Wide ones only where a model can leave logits out."""
    largest = max_dense(max_batch)
    dense = [size for size in LADDER if size < largest] + [largest]
    if not runner.selects_logits or cast(CapturableAttention, runner.attention).strict:
        return dense
    cost = ReplayCost(runner.loaded.text_config)
    return dense + [size for size in WIDE if size > largest and cost.fits(size)]


def step_buffers(
    max_batch: int, max_len: int, scratch: int, attention: CapturableAttention, runner: PagedRunner
) -> DeviceStep:
    """The input buffers that all graphs read."""
    largest = graph_sizes(max_batch, runner)[-1]
    seqs = min(max_batch, largest)
    return DeviceStep(largest, largest, max_len, scratch, attention.device, seqs, attention.num_splits)


def run_rows(
    step: DeviceStep,
    runner: PagedRunner,
    num_rows: int,
    logits_rows: torch.Tensor,
    state_slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the step at hand, which has so many rows of one token.

    logits_rows  int64 [num_logits], on the device: whose logits are computed where there are more rows than these
    state_slots  int64 [max_rows], on the device: of the rows' states, for a model with layers that have one
    -> logits [min(num_rows, num_logits), vocab_size]
    """
    ids = step.ids[:num_rows]
    if runner.drawn is not None:
        ids = runner.drawn_ids(ids, step.sources[:num_rows])
    states = None if state_slots is None else StateStep(num_rows, state_slots[:num_rows])
    rows = logits_rows if num_rows > len(logits_rows) else None
    return runner.run(ids, step.positions[:num_rows], None, rows, state_step=states)


def launch_steps(
    step: DeviceStep,
    attention: CapturableAttention,
    runner: PagedRunner,
    sizes: list[int],
    logits_rows: torch.Tensor,
    state_slots: torch.Tensor | None = None,
) -> None:
    """Run steps of all `sizes` in the form that is captured, so that their kernels are launched."""
    for size in reversed(sizes):
        for prefix in (False, True):
            attention.bind(step, Layout(size, size, 1, prefix))
            step.fill_scratch(size)
            with suppress(_Seen):
                run_rows(step, runner, size, logits_rows, state_slots)


class _Seen(Exception):
    """A forward has launched all kinds of layers."""


def _until(attention: CapturableAttention, num_layers: int) -> CapturableAttention:
    """The attention of the step, but the forward pass ends at layer `num_layers`."""
    brief = copy(attention)

    def ending(forward: Callable[..., Any]) -> Callable[..., Any]:
        def attend(layer: int, *args: Any, **options: Any) -> Any:
            if layer >= num_layers:
                raise _Seen
            return forward(layer, *args, **options)

        return attend

    for name in ("forward", "forward_latent", "forward_packed"):
        if hasattr(attention, name):
            setattr(brief, name, ending(getattr(attention, name)))
    return brief


def _of_first_layer(config: Any, name: str) -> Any:
    """Return a field of a configuration, or its value for the first layer, if layers differ in it (Gemma 4)."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # of transformers, for fields that layers override
        return getattr(config.per_layer_config[0], name, None)


class ReplayCost:
    """Decides whether a mixed step takes less time as rows of a captured graph than launched kernel by kernel.

    As rows, tokens of one sequence each read the tokens before them, which costs device time; a launch costs host time.
    Both grow with the number of layers, so costs are those of one layer, in operations: what a device computes in the
    same time. Measured on an H100 with the shape of Llama 3.1 8B.

    config  the decoder's configuration
    """

    def __init__(self, config: Any) -> None:
        heads = int(getattr(config, "num_attention_heads", 1))
        kv_heads = int(_of_first_layer(config, "num_key_value_heads") or heads)
        width = int(getattr(config, "hidden_size", 1024))
        dim = int(_of_first_layer(config, "head_dim") or max(width // heads, 1))
        inner = int(getattr(config, "intermediate_size", None) or 4 * width)
        if experts := getattr(config, "num_experts_per_tok", None):
            inner = int(experts) * int(getattr(config, "moe_intermediate_size", None) or inner)
        self._per_token = 2.0 * (2 * width * dim * (heads + kv_heads) + 3 * width * inner)
        self._kv_numbers = 2 * kv_heads * dim

    def fits(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens is worth a graph if nothing is read again."""
        return self._per_token * num_tokens <= LAUNCH

    def worth(self, plan: WirePlan) -> bool:
        """Whether the step takes less time with a row for each of its tokens."""
        num_new, past = plan.num_new, plan.past.copy()
        shared_reads = 0
        shared = best_prefix(plan, num_new)
        if shared is not None:
            members = list(shared.rows)
            past[members] -= shared.length
            shared_reads = shared.length * int(num_new[members].sum())
        more = num_new - 1
        reads = int((more * past + more * num_new // 2).sum())
        again = self._kv_numbers * (READ * reads + SHARED_READ * shared_reads)
        return self._per_token * plan.num_tokens + again <= LAUNCH


MAX_GATHERED = 1 << 30
"""Bytes of weights that one layer may gather in one step."""


class GatheredExperts:
    """Switch a model's experts to gathered weights during a call, in a form that a CUDA graph can hold.

    Without a grouped matmul for a dtype or a card, torch reads on the host how many tokens each expert got, which no
    graph can hold. Gathering the weights of each token's experts copies them: only steps of few tokens do so.

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
