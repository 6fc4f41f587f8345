"""Forwards of the one source tree whose graftlm this process imports, which may be older than this file.

The model, its tokenizer and this file are those of this repository, whichever tree it is: names of graftlm are looked
up where a tree has them (`_first_of`).
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

STEP_TOKENS, MAX_CONTEXT, MAX_BATCH = 8192, 16_384, 256
TINY = 16
"""`--tiny` divides token counts and repetitions by this number."""

KV_STD = 1.28
"""The deviation of K and V where weights have 0.02 and inputs are normed: 0.02 * sqrt(4096)."""

SLOTS_AT_ONCE = 16384

Run = dict[str, Any]
"""Results of one process: "figures" and "errors" by step, and facts about the process."""


@dataclass(frozen=True)
class Step:
    """A forward of `rows` rows with `past` cached and `new` new tokens each."""

    name: str
    rows: int
    past: int
    new: int

    @classmethod
    def of(cls, name: str, context: int, num_tokens: int) -> Step:
        """Read `16`, a decode of 16 rows with `context` tokens, or `p16`, a prefill of `num_tokens` in 16 rows."""
        digits = name.removeprefix("p")
        rows = int(digits) if digits.isdecimal() else 0
        if not 1 <= rows <= num_tokens:
            raise ValueError(f"{name!r} is no number of rows, 1 to {num_tokens:,}, with or without a p before it")
        return cls(name, rows, 0, num_tokens // rows) if name != digits else cls(name, rows, context - 1, 1)

    @property
    def num_slots(self) -> int:
        return self.rows * (self.past + self.new)

    @property
    def what(self) -> str:
        return f"{'decode' if self.past else 'prefill'}, {self.rows} x {self.past + self.new:,}"

    @property
    def unit(self) -> str:
        return "ms" if self.past else "tokens/s"

    def shown(self, ms: float) -> str:
        """Return the figure in `unit` of a step that takes `ms` milliseconds."""
        return f"{ms:.3f}" if self.past else f"{1e3 * self.rows * self.new / ms:,.0f}"


def build(num_slots: int, tiny: bool) -> tuple[Any, int]:
    """Return the runner of a runtime for the model, on a pool of random KV, and the vocabulary size."""
    from bench.gpu.model import CONFIG, random_weights
    from graftlm.core.config import CacheConfig, EngineConfig

    build_runner = _first_of("build_runner", "graftlm.core.engine_builder", "graftlm.core.runner")
    load_model = _first_of("load_model", "graftlm.core.model.load", "graftlm.core.model")
    from graftlm.plugins import manager

    _share_testing()
    from tests.models import byte_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        byte_tokenizer().save_pretrained(folder)
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        model, tokenizer = random_weights(None if tiny else folder)
    config = EngineConfig.from_options(
        max_model_len=MAX_CONTEXT // TINY if tiny else MAX_CONTEXT,
        max_step_tokens=STEP_TOKENS,
        max_batch=MAX_BATCH,
        cache=CacheConfig(max_tokens=num_slots),
    )
    loaded = load_model(model, config, tokenizer)
    if loaded.lane != "paged":
        raise RuntimeError(f"the model runs in the {loaded.lane} lane: {loaded.lane_reason}")
    runner: Any = build_runner(loaded, config, manager.load().attention).runner
    store = getattr(runner, "eager", runner).attention.store
    _fill(store)
    return runner, loaded.vocab_size


def _first_of(name: str, *modules: str) -> Any:
    """Return `name` from the first of `modules` that this tree has: older trees use older module names."""
    for module in modules[:-1]:
        with suppress(ModuleNotFoundError, AttributeError):
            return getattr(import_module(module), name)
    return getattr(import_module(modules[-1]), name)


def _share_testing() -> None:
    """Take graftlm.testing, which makes the tokenizer and the tiny model, from this repository: older trees lack it."""
    root = Path(__file__).resolve().parents[2]  # through the link by which a process for another tree finds bench
    if "graftlm.testing" not in sys.modules:
        package = ModuleType("graftlm.testing")
        package.__path__ = [os.fspath(root / "graftlm" / "testing")]
        sys.modules["graftlm.testing"] = package


def _fill(store: Any) -> None:
    """Random keys and values in every slot; into a compact store they go as a step writes them."""
    import torch

    torch.manual_seed(1)
    exponents = getattr(store, "exponents", None)  # older trees have none
    with torch.inference_mode():
        if exponents is None:
            for tensor in (*store.k, *store.v):
                tensor.normal_(0.0, KV_STD)
            return
        store_kv = _first_of("store_kv", "graftlm.kernels.gpu.elementwise", "graftlm.kernels.triton_elementwise")

        for layer, shape in enumerate(store.layout):
            for slots in torch.arange(store.num_slots, device=store.device).split(SLOTS_AT_ONCE):
                size = (2, len(slots), shape.num_kv_heads, shape.k_dim)
                k, v = torch.empty(size, dtype=store.dtype, device=store.device).normal_(0.0, KV_STD)
                store_kv(k, v, store.k[layer], store.v[layer], slots, exponents=exponents[layer])


def _prompt(ids: np.ndarray) -> Any:
    """Return the prompt of a sequence: a PromptInput, or the ids themselves in trees that are older than it."""
    try:
        from graftlm.core.prompt_input import PromptInput
    except ImportError:
        return ids
    return PromptInput(ids)


def plan_of(step: Step, first: int, vocab_size: int) -> Any:
    """Return a step as the engine lays it out: random ids, KV in slots from `first` on.

    Of a decode row eight ninths, its prompt, lie in one range of slots, and what was written since in another.
    """
    from graftlm.core.request import Request

    extent = _first_of("Extent", "graftlm.kernels.wire_plan", "graftlm.core.kv.pages", "graftlm.core.pages")
    sequence_of = _first_of("Sequence", "graftlm.core.sequence", "graftlm.core.request")
    scheduled_row = _first_of(
        "ScheduledRow", "graftlm.core.execution.step_plan", "graftlm.core.step_plan", "graftlm.core.plan"
    )
    build_plan = _first_of(
        "build_plan", "graftlm.core.execution.step_plan", "graftlm.core.step_plan", "graftlm.core.plan"
    )

    generator = np.random.default_rng(step.rows)
    length = step.past + step.new
    parts = (length * 8 // 9, length - length * 8 // 9) if step.past else (length,)
    scheduled = []
    for row in range(step.rows):
        sequence = sequence_of(Request([1]), _prompt(generator.integers(1, vocab_size, length).astype(np.int32)))
        # older trees have these fields on the sequence itself
        kv, progress = getattr(sequence, "kv", sequence), getattr(sequence, "progress", sequence)
        at = first
        for part in parts:
            kv.own.append(extent(at + row * part, at + (row + 1) * part))
            at += step.rows * part
        progress.num_computed, progress.status = step.past, "running"
        scheduled.append(scheduled_row(sequence, step.new, 1))
    plan = build_plan(scheduled, share_decode=True)
    return getattr(plan, "wire", plan)  # older trees run the plan itself


def replayed(runner: Any, plan: Any) -> tuple[Callable[[], object], Any, int]:
    """Run a step and note the graphs that it goes through.

    -> what runs it again: those graphs, or the whole forward where there are none; its logits, which the next step
       overwrites; the number of graphs.
    """
    import torch

    seen: list[Any] = []
    original: Any = torch.cuda.CUDAGraph.replay

    def noted(graph: Any) -> None:
        seen.append(graph)
        original(graph)

    kind: Any = torch.cuda.CUDAGraph
    kind.replay = noted
    try:
        logits = runner.forward(plan)
    finally:
        kind.replay = original
    if not seen:
        return lambda: runner.forward(plan), logits, 0
    return seen[0].replay if len(seen) == 1 else lambda: [graph.replay() for graph in seen], logits, len(seen)


def measure(runner: Any, plan: Any, steady: Callable[[Callable[[], object]], dict[str, float]]) -> dict[str, Any]:
    """Return the figures of one step, with logits to compare with another tree's ("sample", "best").

    num_graphs  that were timed; 0 where the forward was, kernel by kernel
    to_eager    relative distance of the logits from those of the step without graphs; None where there are no graphs
    """
    import torch

    with torch.inference_mode():
        run, logits, num_graphs = replayed(runner, plan)
        kept, to_eager = logits.float().clone(), None
        if not bool(torch.isfinite(kept).all()):
            raise RuntimeError("logits are not finite")
        if num_graphs:
            eager = runner.eager.forward(plan).float()
            to_eager = float((kept - eager).norm() / eager.norm())
        figures = steady(run)
    sample = kept[:8, :: max(kept.shape[1] // 128, 1)].flatten().tolist()
    about = {"num_graphs": num_graphs, "to_eager": to_eager}
    return {**figures, **about, "sample": sample, "best": kept.argmax(-1).tolist()}


def measure_here(steps: Sequence[Step], tiny: bool) -> Run:
    """Measure all steps on the tree whose graftlm this process imports; a failed step does not affect the rest."""
    from bench.gpu.card import Card

    # Prefills write behind what decode steps read: the order of steps changes no logits.
    num_decode = max([step.num_slots for step in steps if step.past], default=0)
    num_prefill = max([step.num_slots for step in steps if not step.past], default=0)
    runner, vocab_size = build(num_decode + num_prefill + 64, tiny)
    gc.collect()
    gc.freeze()  # a collection in the middle of a step would look through all that was loaded
    found: Run = {"runner": type(runner).__name__, "figures": {}, "errors": {}}
    with Card() as card:
        for step in steps:
            plan = plan_of(step, 0 if step.past else num_decode, vocab_size)
            try:
                figures = measure(runner, plan, lambda run: card.steady(run, TINY if tiny else 1))
            except Exception as error:
                traceback.print_exc()
                found["errors"][step.name] = f"{type(error).__name__}: {str(error)[:300]}"
            else:
                found["figures"][step.name] = figures
    return found | {"card": card.problem, "code": code_folder()}


def code_folder() -> str:
    """Return the folder of the tree that graftlm's modules come from, a common one if there are several."""
    files = [module.__file__ for name, module in sys.modules.items() if _is_of_tree(name)]
    return os.path.commonpath([os.path.dirname(os.path.dirname(os.path.realpath(file))) for file in files if file])


def _is_of_tree(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "graftlm" and parts[1:2] != ["testing"]
