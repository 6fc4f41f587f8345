"""Qualification of a model for the paged lane: once per load, its ragged forward is compared with its own forward.

A support flag is not sufficient: models with recurrent state beside their attention carry it and return wrong logits.
Two random sequences of different lengths run through the model's own forward, and ragged, in pieces, through the KV
store and the attention kernel; the logits must agree. In half precision rounding adds up from layer to layer, and may
send a token of a mixture to other experts: logits that differ are no error if every layer, given the same input and
experts, computes what the model's own does (core/execution/layer_replay.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from graftlm.core.errors import ModelError
from graftlm.core.execution.layer_replay import LayerRecord, LayerRecorder, LayerReplay
from graftlm.core.execution.packed_attention import attention_by
from graftlm.core.execution.paged import AttentionCall, AttentionSwitch, PagedRunner
from graftlm.core.fusion.layer_parts import decoder_stacks
from graftlm.core.model.transformers_lock import importing_transformers
from graftlm.core.state_layers.state_layers import serial_kind
from graftlm.kernels.attention import Attention, LayerSpec, StrictAttention
from graftlm.kernels.cpu.attention.backend import attend
from graftlm.kernels.cpu.linear.packed_codes import PackedCodes
from graftlm.kernels.cpu.panel_kind import Arithmetic
from graftlm.kernels.hopper.prompt_layout import MIN_TOKENS
from graftlm.kernels.jit.precompile import compile_together
from graftlm.kernels.kv_store import KVStore, LayerKV, allocate_kv
from graftlm.kernels.wire_plan import RESERVED, ZERO, Extent, Row, WirePlan

if TYPE_CHECKING:
    from graftlm.core.loaded_model import LoadedModel

LENGTHS = (21, 13)
"""Tokens of the two sequences, at least."""

LONGEST_WINDOW = 256
"""Tokens: the first sequence is longer than an attention window of at most so many."""

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8, torch.bfloat16: 6e-2, torch.float16: 1e-2}
"""Relative error of the logits. Wrong attention exceeds 0.3; float32 agrees to 1e-6."""

INT8_TIMES = 2.5
"""Factor of the tolerance for matmuls that round their inputs to int8, whose error in bfloat16 is a few times as large:
24 layers of random weights differ by 0.1."""

MAX_ROUTED = 3
"""Factor of the tolerance in half precision if most tokens are within the tolerance: rounding routes some tokens of a
mixture to other experts. For mixtures whose routing cannot be replayed (Llama 4)."""

LAYER_SHARE = 1 / 3
"""The limit of a layer's error in the tolerance: rounding does not add up in one layer (3e-3 in bfloat16)."""

STACKED_SHARE = 0.75
"""Share of tokens whose logits must agree between layers in one call and one by one, where rounding chooses experts."""

MAX_LEAK = 2e-2
"""Relative error between two runs that differ in another sequence only: mostly exactly 0; experts round by load."""

MANY_TOKENS = 513
"""New tokens of a row, more than the limit of every kernel of few rows."""

ROWS, SOME_TOKENS = 8, 133
"""Rows, and new tokens of each, for which the extend kernel uses its large tile over a 12-bit store."""

STRICT_LENGTH = 200
"""Tokens of the sequence that checks strict mode: matmuls of one row, of few and of many."""

WITHOUT_ATTENTION = frozenset({"linear_attention", "conv", "mamba", "mlp", "moe"})
"""Kinds of layers that do not attend, by their names in `layer_types`."""

_KNOWN_ATTENTION = frozenset({"full_attention", "sliding_attention", "attention", "hybrid", "indexed_attention"})
"""Kinds of layers that attend to all tokens, or to those of a window, of a chunk or of an indexer."""

AttentionFactory = Callable[[KVStore], Attention]


@dataclass(frozen=True)
class Discovery:
    """The attention layers of a model, in the order of its calls."""

    layer_of: dict[nn.Module, int]
    layers: tuple[LayerSpec, ...]

    @property
    def layout(self) -> tuple[LayerKV, ...]:
        return tuple(LayerKV(s.num_kv_heads, s.k_dim, s.v_dim, s.latent) for s in self.layers)


def discover(model: nn.Module, device: torch.device) -> Discovery:
    """Run two tokens and record every attention layer. Raises ModelError; the model's exceptions propagate."""
    layer_of: dict[nn.Module, int] = {}
    layers: list[LayerSpec] = []

    def step(call: AttentionCall) -> torch.Tensor:
        if call.module in layer_of:
            raise ModelError(f"{type(call.module).__name__} attends twice in one forward")
        layer_of[call.module] = len(layers)
        num_heads, num_kv_heads, params = call.q.shape[1], call.k.shape[1], call.params
        layers.append(
            LayerSpec(
                num_heads,
                num_kv_heads,
                call.k.shape[-1],
                call.v.shape[-1],
                params.window,
                params.softcap,
                params.sinks is not None,
                call.latent is not None,
            )
        )
        group = num_heads // num_kv_heads
        k, v = call.k.repeat_interleave(group, 1), call.v.repeat_interleave(group, 1)
        if call.latent is not None:
            k, v = (x.transpose(0, 1)[None] for x in call.latent.expand(call.k[0, 0]))
        return attend(call.q, k, v, scale=params.scale, causal=True, softcap=params.softcap).out[0].transpose(0, 1)

    ids = torch.tensor([[1, 2]], device=device)
    with torch.inference_mode(), AttentionSwitch(model)(step):
        model(input_ids=ids, position_ids=torch.arange(2, device=device)[None], use_cache=False)
    return Discovery(layer_of, tuple(layers))


@dataclass(frozen=True)
class Reference:
    """Two random sequences, and their logits by the model's own forward before any replacement.

    layers  the decoder layers in that forward; empty in float32, which needs no other comparison than that of logits
    """

    sequences: tuple[list[int], list[int]]
    logits: torch.Tensor
    layers: LayerRecord = LayerRecord()

    @classmethod
    def of(cls, loaded: LoadedModel) -> Reference:
        generator = np.random.default_rng(0)
        high = max(min(loaded.vocab_size, 30_000), 2)
        long, short = (generator.integers(0, high, n).tolist() for n in (_longest(loaded), LENGTHS[1]))
        recorder = LayerRecorder(loaded.model, _layers(loaded))
        capped = attention_by("eager", _capped_configs(loaded.model))
        with torch.inference_mode(), capped, recorder() if loaded.dtype.itemsize < 4 else nullcontext():
            logits = torch.cat([_plain(loaded, long), _plain(loaded, short)])
        return cls((long, short), logits, recorder.record(2))


def _capped_configs(model: nn.Module) -> list[Any]:
    """Return the configurations with a cap of attention scores, which sdpa ignores in some versions of transformers."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    return [
        config
        for config in configs.values()
        if getattr(config, "attn_logit_softcapping", None) and hasattr(config, "_attn_implementation_internal")
    ]


def _layers(loaded: LoadedModel) -> list[nn.Module]:
    """Return the decoder layers of a model whose layers are recognised."""
    return [layer for layers, _ in decoder_stacks(loaded.model) for layer in layers]


def _longest(loaded: LoadedModel) -> int:
    """Return the tokens of the first sequence: more than a small attention window, twice as many in half precision."""
    window = getattr(loaded.text_config, "sliding_window", None)
    if not isinstance(window, int) or window > LONGEST_WINDOW:
        return LENGTHS[0]
    wanted = 2 * window if loaded.dtype.itemsize < 4 else window + 5
    return max(LENGTHS[0], min(wanted, loaded.max_model_len))


def qualify(
    loaded: LoadedModel, reference: Reference | None, attention_factory: AttentionFactory, *, compact: bool = False
) -> str | None:
    """Return the reason against the paged lane; None if the model can run in it.

    Two steps of two rows each cover prefill, a second chunk, a decode step and a mixed batch.
    reference  None for a model whose earlier load agreed with it
    compact    with KV in 12 bits
    """
    for layer, spec in enumerate(loaded.layers):
        reason = attention_factory(allocate_kv((), 0, loaded.dtype, loaded.device, compact=compact)).supports(spec)
        if reason is not None:
            return f"layer {layer}: {reason}"
    expected = getattr(loaded.text_config, "num_hidden_layers", len(loaded.layers))
    if not loaded.layers or (len(loaded.layers) != expected and loaded.states is None):
        kind = serial_kind(loaded.model)
        if kind is not None:
            return f"it has layers of {kind}, whose states no kernel here batches"
        return f"{len(loaded.layers)} of its {expected} layers attend through the attention interface"
    for limit, cause in context_limits(loaded.text_config, loaded.layers):
        if loaded.max_model_len > limit:
            return (
                f"{cause} beyond {limit:,} tokens; max_model_len={limit} keeps it in the paged lane" if limit else cause
            )
    if reference is None:
        return None
    if not loaded.rehearsed:  # on a GPU kernels compile in parallel
        launches = (
            partial(launch_ragged, loaded, attention_factory, compact=compact),
            partial(_difference, loaded, reference, attention_factory, compact),
        )
        compile_together(lambda: [launch() for launch in launches], loaded.device)
    return difference(loaded, reference, attention_factory, compact=compact)


def difference(
    loaded: LoadedModel, reference: Reference | None, attention_factory: AttentionFactory, *, compact: bool = False
) -> str | None:
    """Return the difference or failure of a ragged batch beside the model's own forward; None if it agrees."""
    if reference is None:
        return None
    try:
        return _difference(loaded, reference, attention_factory, compact)
    except Exception as failure:
        return f"a ragged batch fails: {type(failure).__name__}: {str(failure)[:200]}"


def context_limits(config: Any, layers: tuple[LayerSpec, ...]) -> Iterator[tuple[int, str]]:
    """Yield lengths in tokens up to which a model attends as its attention calls say, each with its reason.

    The sequences of the comparison are too short for these: a window or chunk in a model's mask that is not in its
    calls, an unsupported kind of attention, a rotary embedding that stretches.
    """
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is None:
        windowed = window is not None and getattr(config, "use_sliding_window", True) is not False
        if windowed and all(layer.window is None for layer in layers):
            yield int(window or 0), "its attention window is part of its mask"
        kinds = ()
    kinds = [kind for kind in kinds if kind not in WITHOUT_ATTENTION]
    for kind, layer in zip(kinds, layers, strict=False):
        if kind == "sliding_attention" and layer.window is None:
            yield int(window or 0), "its attention window is part of its mask"
        elif kind == "chunked_attention":
            yield int(getattr(config, "attention_chunk_size", None) or 0), "its attention is cut into chunks"
        elif kind not in _KNOWN_ATTENTION:
            yield 0, f"its attention is of kind {kind!r}"
    chosen = getattr(config, "index_topk", None)
    if isinstance(chosen, int) or "indexed_attention" in kinds:
        yield int(chosen or 0), "its attention chooses tokens by an indexer"
    stretch = stretched_context(config)
    if stretch is not None:
        yield stretch, "its rotary embedding depends on the longest sequence of a batch"


def stretched_context(config: Any) -> int | None:
    """Return the tokens from which on a "dynamic" or "longrope" embedding changes; None for all other kinds."""
    parameters = getattr(config, "rope_parameters", None) or {}
    candidates = [parameters, *(p for p in parameters.values() if isinstance(p, dict))]
    for found in candidates:
        if found.get("rope_type") in ("dynamic", "longrope"):
            original = found.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            return int(original or config.max_position_embeddings)
    return None


def starts_afresh_when_stretched(model: nn.Module) -> bool:
    """Return True if the model's `generate` drops its cache at the token that changes a "longrope" embedding.

    Phi-3 and its relatives do, in a method of their own; other models keep the keys of the earlier frequencies.
    """
    with importing_transformers():
        from transformers import GenerationMixin

    method = getattr(type(model), "prepare_inputs_for_generation", None)
    own = method is not None and method is not GenerationMixin.prepare_inputs_for_generation
    return own and hasattr(model.config, "original_max_position_embeddings")


def launch_ragged(loaded: LoadedModel, attention_factory: AttentionFactory, *, compact: bool = False) -> None:
    """Run steps of many tokens and of half as many, with rows of one token and of a few, to launch their kernels.

    The last step is long enough for the prompt kernel (prompt_attention.py), where there is one.
    compact  over KV in 12 bits; adds steps of many rows, with and without cached tokens
    """
    many = min(MANY_TOKENS, loaded.max_model_len - 1)
    few = min(SOME_TOKENS, loaded.max_model_len - 1)
    prompt = min(MIN_TOKENS + 4, loaded.max_model_len - 1)
    num_slots = max(many + 9, ROWS * few, prompt)
    store = allocate_kv(loaded.kv_layout, num_slots, loaded.dtype, loaded.device, compact=compact)
    runner = probe_runner(loaded, attention_factory(store), ROWS)
    places = ([Extent(0, many)], [Extent(many, many + 9)])
    for pieces in ([(0, many // 2), (0, 5)], [(0, many - 1), (0, 5)], [(many - 1, many), (5, 9)]):
        runner.forward(probe_plan([[0] * many, [0] * 9], places, pieces))
    if compact:
        side_by_side = tuple([Extent(row * few, (row + 1) * few)] for row in range(ROWS))
        for piece in ((0, 4), (4, few)):
            runner.forward(probe_plan([[0] * few] * ROWS, side_by_side, [piece] * ROWS))
    runner.forward(probe_plan([[0] * prompt], ([Extent(0, prompt)],), [(4, prompt)]))


def _difference(
    loaded: LoadedModel, reference: Reference, attention_factory: AttentionFactory, compact: bool
) -> str | None:
    """Return the difference of a ragged batch from the model's own forward; None if they agree."""
    ragged = _Ragged(loaded, reference, attention_factory, compact)
    reason = ragged.compare()
    if reason is None or not reference.layers.before:
        return reason
    try:
        return ragged.compare_layers(LayerReplay(loaded.model, _layers(loaded), reference.layers))
    except RuntimeError:  # its layers or mixtures are not run by themselves
        return ragged.compare_stack() if loaded.stack is not None and reference.layers.routing else reason


class _Ragged:
    """The sequences of a reference as ragged batches, and their comparison with the model's own forward."""

    def __init__(
        self, loaded: LoadedModel, reference: Reference, attention_factory: AttentionFactory, compact: bool
    ) -> None:
        self._loaded, self._reference = loaded, reference
        self._long, self._short = long, short = reference.sequences
        store = allocate_kv(loaded.kv_layout, len(long) + len(short), loaded.dtype, loaded.device, compact=compact)
        self._attention = attention_factory(store)
        self._runner = probe_runner(loaded, self._attention, 2)
        # The long sequence lies in one range of slots, the short one around it in two.
        self._places = ([Extent(5, 5 + len(long))], [Extent(0, 5), Extent(5 + len(long), len(long) + len(short))])
        self._cut = len(long) - 1
        self._limit = TOLERANCE.get(loaded.dtype, 6e-2)
        if _rounds_activations(loaded.model):
            self._limit *= INT8_TIMES

    def compare(self) -> str | None:
        """Return the difference of the logits; None if they agree."""
        first = self._first()
        if self._loaded.dtype.itemsize < 4:
            # Rounding could hide a small leak from one sequence into the next; an exchanged neighbour reveals it.
            leak = relative_error(self._first(exchanged=True)[-6:], first[-6:])
            if leak > MAX_LEAK:
                return _leak(leak)
            self._first()
        second = self._second(apart=self._loaded.stack is not None)
        error = self._loaded.error = self._error(first, second)
        return None if error < self._limit or self._mostly(first, second) else _differs("", error, self._limit)

    def _mostly(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        """Return True if most tokens agree in a model whose routing cannot be replayed, in half precision."""
        error = self._loaded.error
        if error is None or self._loaded.dtype.itemsize == 4 or self._reference.layers.routing:
            return False
        found = torch.cat([first[: self._cut], second[:1], first[self._cut :], second[1:]])
        each = sorted(map(relative_error, found, self._reference.logits))
        return error < MAX_ROUTED * self._limit and each[len(each) // 2] < self._limit

    def compare_layers(self, replay: LayerReplay) -> str | None:
        """Return the difference of a layer on the recorded inputs, or of the logits after them; None if all agree."""
        cut, num_first = self._cut, len(self._long) + 6
        with replay([-1] * cut + list(range(cut + 1, num_first))):
            self._first(exchanged=True)
        others = [output[-6:] for output in replay.outputs]
        with replay([*range(cut), *range(cut + 1, num_first)]):
            first = self._first()
        leak = max(relative_error(a, b[-6:]) for a, b in zip(others, replay.outputs, strict=True))
        if leak > MAX_LEAK:
            return _leak(leak)
        with replay([cut, *range(num_first, len(self._long) + len(self._short))]):
            second = self._second()
        error = self._error(first, second)
        worst, layer_error = replay.worst()
        self._loaded.error = max(error, layer_error)
        if not layer_error < LAYER_SHARE * self._limit:
            return _differs(f" in layer {worst}", layer_error, LAYER_SHARE * self._limit)
        return replay.router_problem() or (None if error < self._limit else _differs("", error, self._limit))

    def compare_stack(self) -> str | None:
        """Return the difference of a stack of compiled layers from the same layers one by one; None if they agree.

        These have passed the comparison with the model. Rounding may move some tokens to other experts here too.
        """
        self._first()
        stacked = self._second(apart=True).clone()
        stack, self._loaded.stack = self._loaded.stack, None
        runner, self._runner = self._runner, probe_runner(self._loaded, self._attention, 2)
        try:
            self._first()
            expected = self._second(apart=True)
        finally:
            self._loaded.stack, self._runner = stack, runner
        each = sorted(map(relative_error, stacked, expected))
        error = each[int(STACKED_SHARE * len(each))]
        limit = LAYER_SHARE * self._limit
        return None if error < limit else _differs(" in one call", error, limit)

    def _first(self, *, exchanged: bool = False) -> torch.Tensor:
        """Run all but the last token of the long sequence, and six of the short one. exchanged: other tokens of it"""
        long = [*self._long[1:], self._long[0]] if exchanged else self._long
        return self._runner.forward(probe_plan([long, self._short], self._places, [(0, self._cut), (0, 6)]))

    def _second(self, *, apart: bool = False) -> torch.Tensor:
        """Run the tokens that are left. apart: the last one alone, a step that every stack of compiled layers takes"""
        last = len(self._short) - apart
        pieces = [(self._cut, len(self._long)), (6, last)]
        logits = self._runner.forward(probe_plan([self._long, self._short], self._places, pieces))
        if not apart:
            return logits
        alone = probe_plan([self._short], self._places[1:], [(last, last + 1)], [1])
        return torch.cat([logits.clone(), self._runner.forward(alone)])

    def _error(self, first: torch.Tensor, second: torch.Tensor) -> float:
        cut = self._cut
        found = torch.cat([first[:cut], second[:1], first[cut:], second[1:]])
        return relative_error(found, self._reference.logits)


def _rounds_activations(model: nn.Module) -> bool:
    """Return True if matmuls of the model round their inputs to int8."""
    packed = (module for module in model.modules() if isinstance(module, PackedCodes))
    return any(module.whole.arithmetic is Arithmetic.INT8 for module in packed)


def _leak(leak: float) -> str:
    return f"a sequence in a ragged batch changes its neighbour's logits by {leak:.1e}"


def _differs(place: str, error: float, limit: float) -> str:
    return f"a ragged batch differs from the model's own forward{place} by {error:.1e} (limit {limit:.0e})"


def batch_dependence(loaded: LoadedModel, attention_factory: AttentionFactory) -> str | None:
    """Return the way in which the bits of a sequence's logits depend on the batch; None if they do not.

    One sequence runs alone in one step, and cut into a long chunk, a few tokens and single ones beside another.
    """
    generator = np.random.default_rng(1)
    high = max(min(loaded.vocab_size, 30_000), 2)
    longest = min(STRICT_LENGTH, loaded.max_model_len - 1)
    tokens, other = (generator.integers(0, high, n).tolist() for n in (longest, longest // 2 + 1))
    places = ([Extent(0, len(tokens))], [Extent(len(tokens), len(tokens) + len(other))])
    store = allocate_kv(loaded.kv_layout, len(tokens) + len(other), loaded.dtype, loaded.device)
    attention = attention_factory(store)
    if isinstance(attention, StrictAttention):
        attention.strict = True
    runner = probe_runner(loaded, attention, 2)
    alone = runner.forward(probe_plan([tokens], places[:1], [(0, len(tokens))])).clone()
    cut, few = len(tokens) - 5, len(tokens) - 2
    pieces = [
        runner.forward(probe_plan([other, tokens], places[::-1], [(0, len(other) - 2), (0, cut)], [1, 0]))[
            len(other) - 2 :
        ].clone(),
        runner.forward(
            probe_plan([other, tokens], places[::-1], [(len(other) - 2, len(other) - 1), (cut, few)], [1, 0])
        )[1:].clone(),
        runner.forward(probe_plan([tokens, other], places, [(few, few + 1), (len(other) - 1, len(other))]))[:1].clone(),
        runner.forward(probe_plan([tokens], places[:1], [(few + 1, len(tokens))])),
    ]
    differing = (torch.cat(pieces) != alone).any(-1)
    if not bool(differing.any()):
        return None
    return f"{int(differing.sum())} of {len(tokens)} tokens got other logits in another batch"


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference relative to that of `expected`, [num_rows, n] or [n].

    Rows are summed one by one, to save memory.
    """
    rows = list(zip(found.view(-1, found.shape[-1]), expected.view(-1, expected.shape[-1]), strict=True))
    difference = torch.stack([(a.float() - b.float()).norm() for a, b in rows]).norm()
    return float(difference / torch.stack([b.float().norm() for _, b in rows]).norm())


def _plain(loaded: LoadedModel, tokens: list[int]) -> torch.Tensor:
    """Compute logits [len(tokens), vocab_size] by the model's own forward."""
    output: Any = loaded.model(input_ids=torch.tensor([tokens], device=loaded.device), use_cache=False)
    logits: torch.Tensor = output.logits[0]
    return logits


def probe_runner(loaded: LoadedModel, attention: Attention, num_sequences: int) -> PagedRunner:
    """Return a runner with states of so many sequences, if the model has any."""
    states = loaded.states.pool(RESERVED + num_sequences, loaded.device) if loaded.states is not None else None
    return PagedRunner(loaded, attention, states=states)


def probe_plan(
    sequences: list[list[int]],
    places: tuple[list[Extent], ...],
    pieces: list[tuple[int, int]],
    numbers: list[int] | None = None,
) -> WirePlan:
    """Return a step over tokens [first, last) of each sequence that returns all their logits.

    numbers  of the sequences' states; None: in order
    """
    slots = RESERVED + np.array(range(len(sequences)) if numbers is None else numbers, np.int64)
    fresh = [[slot, ZERO] for slot, (first, _) in zip(slots, pieces, strict=True) if first == 0]
    ids: list[int] = []
    rows: list[Row] = []
    for tokens, place, (first, last) in zip(sequences, places, pieces, strict=True):
        rows.append(Row(len(ids), last - first, first, place))
        ids += tokens[first:last]
    plan = WirePlan.of(rows, ids, range(len(ids)))
    return replace(plan, state_slots=slots, state_copies=np.array(fresh, np.int64).reshape(-1, 2))
