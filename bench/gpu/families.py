"""python -m bench gpu families: the execution of each family of transformers, on small models with random weights.

Lane, decoder layers that run as few kernels, error of ragged batches beside the model's own forward, and whether greedy
tokens in float32 are those of transformers, asked for in six ways (alone, cached, in a batch, forked, in chunks, after
others were evicted). On a GPU the kernels of linear layers are named too. Without one the layers
are those of the CPU; with TRITON_INTERPRET=1 those of a GPU, whose kernels then run in Triton's interpreter.

--real builds published configurations (published.py) with random weights in bfloat16 instead, with as many layers as
the card holds, or as --layers says. Several processes share the card: each waits until the weights of its model fit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

FAMILIES = [
    "llama", "mistral", "ministral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "qwen3_next", "gemma", "gemma2",
    "gemma3", "gemma4", "phi", "phi3", "phimoe", "cohere", "cohere2", "olmo", "olmo2", "olmo3", "olmoe", "glm",
    "glm4", "glm4_moe", "granite", "granitemoe", "starcoder2", "stablelm", "nemotron", "helium", "smollm3",
    "exaone4", "ernie4_5", "seed_oss", "hunyuan", "arcee", "apertus", "bitnet", "persimmon", "falcon", "gpt_neox",
    "gpt2", "gptj", "gpt_neo", "gpt_bigcode", "mpt", "bloom", "opt", "codegen", "biogpt", "xglm", "mixtral", "dbrx",
    "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "longcat_flash", "llama4", "jamba", "mamba2",
    "lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text", "bamba", "granitemoehybrid", "nemotron_h", "falcon_h1",
    "minimax_m2", "kimi_linear", "lfm3", "olmo_hybrid", "bailing_hybrid",
    "deepseek_v32", "glm_moe_dsa",
]  # fmt: skip
ON_GPU = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
"""Large enough for the kernels of Hopper."""
SHARED, OWN, NEW = 48, (5, 11, 20), 12
"""Tokens of the prompts: those that all share, those of each alone; and of the answers."""
WEIGHTS_SHARE, MAX_LEN = 0.5, 4_096
"""Share of the free memory for the weights of published configurations: some are held twice; and their context, in
tokens."""
POOL, BATCH = 4_096, 8
"""Slots and rows, few: many processes share the card."""

Row = dict[str, Any]


def judge(kind: str, *, interpret: bool) -> Row:
    """Report how a small model of this family runs."""
    import torch

    from graftlm.core.config import CacheConfig, EngineConfig
    from graftlm.core.model.load import load_model
    from tests.models import FIXED, byte_tokenizer, greedy_reference, random_prompt, tiny_model

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = {name: size for name, size in ON_GPU.items() if name not in FIXED.get(kind, ())}
    sizes = sizes if device.type == "cuda" else {}
    began = time.perf_counter()
    row: Row = {"family": kind}
    try:
        model = tiny_model(kind, **sizes)
    except Exception:  # a configuration without one of these fields
        sizes = {}
        try:
            model = tiny_model(kind)
        except Exception as error:
            return row | {"why": f"no small model of it: {type(error).__name__}: {str(error).splitlines()[0][:80]}"}
    try:
        prompts = [random_prompt(SHARED) + random_prompt(own, seed=own) for own in OWN]
        if interpret and device.type == "cpu":
            row |= _interpreted(model)
        else:
            expected = [greedy_reference(model, prompt, NEW) for prompt in prompts]  # on the CPU, in float32
            row["ways"] = _ways(model.to(device), prompts, expected)
            options = {"device": device.type, "cache": CacheConfig(max_tokens=POOL), "max_batch": BATCH}
            half = tiny_model(kind, **sizes).to(device, torch.bfloat16) if device.type == "cuda" else model
            loaded = load_model(half, EngineConfig(**options), byte_tokenizer())
            row |= {"lane": loaded.lane, "execution": loaded.execution, "error": loaded.error}
            row["kernels"] = sorted(_kernels(half))
            loaded.release()
    except Exception as error:
        row["why"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
    return row | {"seconds": round(time.perf_counter() - began, 1)}


def _ways(model: Any, prompts: list[list[int]], expected: list[list[int]]) -> dict[str, bool]:
    """Ask for the greedy answers to `prompts` in six ways, in float32. -> whether each gives the expected ones"""
    from graftlm import CacheConfig, Runtime
    from tests.models import byte_tokenizer

    sampling: dict[str, Any] = {"max_tokens": NEW, "temperature": 0.0, "ignore_eos": True}
    options: dict[str, Any] = {"tokenizer": byte_tokenizer(), "dtype": "float32", "max_batch": BATCH}

    def alone(runtime: Any) -> list[list[int]]:
        return [runtime.generate(prompt, **sampling).token_ids for prompt in prompts]

    found = {}
    with Runtime(model, cache=CacheConfig(max_tokens=POOL), **options) as runtime:
        found["alone"], found["cached"] = alone(runtime), alone(runtime)
        runtime.clear_cache()
        found["batch"] = [one.token_ids for one in runtime.generate(prompts, **sampling)]
        forks = [runtime.generate(prompt, n=2, **sampling).completions for prompt in prompts]
        found["forked"] = [fork.token_ids for fork, _ in forks]
        if any(a.token_ids != b.token_ids for a, b in forks):
            found["forked"] = []
    longest = max(map(len, prompts)) + NEW
    with Runtime(model, cache=CacheConfig(max_tokens=2 * longest), max_step_tokens=16, **options) as runtime:
        found["chunked"] = [one.token_ids for one in runtime.generate(prompts, **sampling)]
        runtime.generate([9] * (2 * longest - 8), max_tokens=1)
        found["evicted"] = alone(runtime)
    return {way: answers == expected for way, answers in found.items()}


class SharedCard:
    """The memory of a card for the weights of several processes' models.

    num_bytes  for all of them together
    """

    def __init__(self, context: Any, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._left, self._changed = context.Value("q", num_bytes, lock=False), context.Condition()

    @contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        """Wait until `num_bytes` are left, and hold them."""
        with self._changed:
            self._changed.wait_for(lambda: self._left.value >= num_bytes)
            self._left.value -= num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._left.value += num_bytes
                self._changed.notify_all()


_cards: list[SharedCard] = []
"""The card of this process."""


def _share(card: SharedCard) -> None:
    _cards.append(card)


def judge_published(name: str, num_layers: int | None) -> Row:
    """Report how a published configuration runs on a GPU, with so many layers or as many as fit."""
    from bench.gpu.published import PUBLISHED, bytes_of, layers_that_fit

    shape, (card,) = PUBLISHED[name], _cards
    try:
        layers = min(layers_that_fit(shape, card.num_bytes), num_layers or int(shape["num_hidden_layers"]))
        with card.holding(bytes_of(shape, layers)):
            return _load_published(name, layers)
    except ValueError as error:
        return Row({"family": name, "why": str(error)})


def _load_published(name: str, layers: int) -> Row:
    """Load the first `layers` layers of a published configuration, and free them."""
    import torch
    from transformers import AutoModelForCausalLM

    from bench.gpu.published import PUBLISHED, fitted
    from bench.gpu.shapes import config_of
    from graftlm.core.config import EngineConfig
    from graftlm.core.model.load import load_model
    from tests.models import byte_tokenizer

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    began, shape = time.perf_counter(), PUBLISHED[name]
    row = Row({"family": f"{name}, {layers} of {shape['num_hidden_layers']} layers"})
    try:
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(config_of(fitted(shape, layers), tiny=False), dtype=torch.bfloat16)
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.data.normal_(0.0, 0.02)
        loaded = load_model(model.eval(), EngineConfig(device="cuda", max_model_len=MAX_LEN), byte_tokenizer())
        row |= {"lane": loaded.lane, "execution": loaded.execution, "error": loaded.error}
        row["kernels"] = sorted(_kernels(model))
        loaded.release()
    except Exception as error:
        row["why"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
    return row | {"seconds": round(time.perf_counter() - began, 1)}


def _interpreted(model: Any) -> Row:
    """Fuse as on a GPU, with kernels in Triton's interpreter, and compare with the model's own layers."""
    from graftlm.core.config import EngineConfig
    from graftlm.core.fusion.gpu_modules import fuse_gpu
    from graftlm.core.model import load
    from graftlm.kernels.gpu.attention.backend import TritonAttention
    from tests.models import byte_tokenizer

    load._fuse = lambda loaded, config, **_: fuse_gpu(loaded.model, max_rows=64, strict=config.strict)  # type: ignore[assignment]
    load.fuse_cpu = lambda model, fusions: 0  # type: ignore[assignment]
    config = EngineConfig(device="cpu", max_model_len=128)
    loaded = load.load_model(model, config, byte_tokenizer(), attention_factory=TritonAttention)
    kernels = sorted(_kernels(model))
    return {"lane": loaded.lane, "execution": loaded.execution, "error": loaded.error, "kernels": kernels}


def _kernels(model: Any) -> Iterator[str]:
    """Return the kernels of linear layers that the model's fused layers use, except torch's."""
    found = (getattr(vars(m).get("forward"), "kernels", ()) for m in model.modules())
    yield from {kind for kinds in found for kind_set in kinds for kind in kind_set}


def cells(row: Row) -> tuple[str, ...]:
    """Family, lane, layers fused, kernels, error, tokens, why not faster."""
    lane, _, why = str(row.get("execution", "")).partition(": ")
    layers = lane.removeprefix("paged, ").partition(" layers fused")[0] if lane.startswith("paged") else ""
    if "around their own attention" in lane:
        layers += ", around attention"
    error = row.get("error")
    ways = row.get("ways", {})
    failing = [way for way, same in ways.items() if not same]
    return (
        row["family"],
        row.get("lane", ""),
        layers,
        ", ".join(row.get("kernels", ())),
        f"{error:.0e}" if error is not None else "",
        ", ".join(["not " + way for way in failing]) or f"{len(ways)} ways" if ways else "",
        row.get("why") or why,
    )


HEADINGS = ("family", "lane", "layers fused", "kernels beside torch's", "error", "same tokens", "why not faster")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench gpu families", description=__doc__)
    parser.add_argument(
        "families", nargs="*", help="model types of transformers, or with --real published models; default: all here"
    )
    parser.add_argument("--real", action="store_true", help="published configurations, on a GPU")
    parser.add_argument("--layers", type=int, help="at most so many layers of a published configuration")
    parser.add_argument("--processes", type=int, default=max((os.cpu_count() or 2) - 1, 1))
    parser.add_argument("--seconds", type=float, default=1e6, help="families that are not done by then are left out")
    parser.add_argument("--markdown", action="store_true", help="print the table as docs/gpu-figures.md has it")
    parser.add_argument("--json", type=Path, dest="output", help="write the rows to this file")
    given = parser.parse_args(arguments)
    if given.real:
        from bench.gpu.published import PUBLISHED

        _need_published(parser, given.families, PUBLISHED)
        given.families = given.families or list(PUBLISHED)
    given.families = given.families or FAMILIES
    rows: dict[str, Row] = {}
    interpret = os.environ.get("TRITON_INTERPRET") == "1"
    run: Callable[[str], Row] = partial(judge, interpret=interpret)
    context = multiprocessing.get_context("spawn")
    options: dict[str, Any] = {}
    if given.real:
        import torch

        run = partial(judge_published, num_layers=given.layers)
        card = SharedCard(context, int(WEIGHTS_SHARE * torch.cuda.mem_get_info()[0]))
        # a published model leaves memory of its process behind, so each has a process of its own
        options = {"max_tasks_per_child": 1, "initializer": _share, "initargs": (card,)}
    pool = ProcessPoolExecutor(given.processes, context, **options)
    tasks = {pool.submit(run, kind): kind for kind in given.families}
    try:
        for done in as_completed(tasks, given.seconds):
            kind = tasks[done]
            failure = done.exception()
            rows[kind] = (
                done.result() if failure is None else {"family": kind, "why": f"{type(failure).__name__}: {failure}"}
            )
            print(" | ".join(cells(rows[kind])), file=sys.stderr, flush=True)
    except TimeoutError:
        print(f"not done: {', '.join(kind for kind in tasks.values() if kind not in rows)}", file=sys.stderr)
    table = [cells(rows[kind]) for kind in given.families if kind in rows]
    if given.output:
        given.output.write_text(json.dumps([rows[kind] for kind in given.families if kind in rows], indent=1) + "\n")
    if given.markdown:
        lines = [HEADINGS, tuple("---" for _ in HEADINGS), *table]
        print("\n".join(f"| {' | '.join(line)} |" for line in lines))
    else:
        for line in (HEADINGS, *table):
            print("  ".join(cell.ljust(12) for cell in line))
    sys.stdout.flush()
    for process in list((pool._processes or {}).values()):
        process.terminate()
    return 0


def _need_published(parser: argparse.ArgumentParser, names: Sequence[str], published: dict[str, Any]) -> None:
    """End the command if a name is none of the published models, or if there is no GPU."""
    import torch

    unknown = [name for name in names if name not in published]
    if unknown:
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(published)}")
    if not torch.cuda.is_available():
        parser.error("--real runs on a GPU, there is none here; leave it out for small models on this CPU")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
