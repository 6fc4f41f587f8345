"""Decode steps and prefill of a model with quantised weights, beside bfloat16, on one GPU.

    python -m bench.gpu.quantised [--formats bf16,fp8,int8,int4,awq] [--steps 1,16,64,256,p1] [--layers 32] [--tiny]
    python -m bench.gpu.quantised --shape gpt-oss-20b --formats plain,mxfp4 --steps 48x2200,192x700

The model has random weights in the shape of Llama 3.1 8B, or one of bench.gpu.shapes. Weights of linear layers are
rounded to each format on the card; the head stays plain. "int4" has groups of 32 inputs, "int4-128" of 128. "fp8-rows"
is "fp8" with activations="fp8". In "mxfp4" experts have random codes instead. A step is `ROWSxCONTEXT`, or rows alone
for `--context` tokens; `p16` is a prefill of 16 rows. `bf16` holds 12-bit forms beside its weights, as it does by
default, `plain` does not. One process measures all formats, so that ratios are of one run. `--profile` adds the kernels
of each step in their order, those of equal layers as one.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.gpu.model import CONFIG
from bench.gpu.one_tree import MAX_BATCH, MAX_CONTEXT, STEP_TOKENS, TINY, Step, _fill, measure, plan_of, replayed
from bench.gpu.shapes import SHAPES
from graftlm.core.model.quantised.rounding import rounded
from graftlm.kernels.codes.expert_codes import ExpertCodes, put_experts
from graftlm.kernels.quantised_modules import put_quantised
from graftlm.kernels.quantised_weight import QuantisedWeight

FORMATS = "plain,bf16,fp8,int8,int4,awq"


def quantised(weight: torch.Tensor, name: str) -> QuantisedWeight:
    """Return a weight in a format: one of `rounded`, "fp8-block" (128 x 128), or "awq" (128 inputs, zero points)."""
    n, k = weight.shape
    if name == "fp8-rows":
        name = "fp8"
    if name.startswith("int4-"):
        group = int(name.removeprefix("int4-"))
        groups = weight.float().view(n, -1, group)
        scale = (groups.abs().amax(2) / 7).bfloat16()
        codes = ((groups / scale.float()[:, :, None]).round().clamp(-8, 7) + 8).to(torch.uint8).view(n, k)
        return QuantisedWeight(codes[:, ::2] | codes[:, 1::2] << 4, 4, None, group, 1, scale, 8)
    if name == "fp8-block":
        blocks = weight.float().view(n // 128, 128, k // 128, 128)
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(torch.uint8).view(n, k)
        return QuantisedWeight(codes, 8, "e4m3", 128, 128, scale)
    if name == "awq":
        groups = weight.float().view(n, -1, 128)
        low, high = groups.amin(2), groups.amax(2)
        scale = ((high - low) / 15).half()
        zero = (-low / scale.float()).round().clamp(0, 15)
        codes = (groups / scale.float()[:, :, None] + zero[:, :, None]).round().clamp(0, 15).to(torch.uint8).view(n, k)
        return QuantisedWeight(codes[:, ::2] | codes[:, 1::2] << 4, 4, None, 128, 1, scale, zero.to(torch.uint8))
    return rounded(weight, name)  # type: ignore[arg-type]


def random_experts(model: Any) -> dict[str, ExpertCodes]:
    """Return random codes in MXFP4 for all experts of a model, whose parameters are freed."""
    found = {}
    for path, parameter in model.named_parameters():
        if parameter.dim() == 3 and path.endswith(("gate_up_proj", "down_proj")):
            transposed = bool(getattr(model.get_submodule(path.rpartition(".")[0]), "is_transposed", False))
            num_experts, n, k = parameter.transpose(1, 2).shape if transposed else parameter.shape
            codes = torch.randint(256, (num_experts * n, k // 2), dtype=torch.uint8, device=parameter.device)
            scale = torch.exp2(torch.randint(-8, -5, (num_experts * n, k // 32), device=parameter.device).float())
            weight = QuantisedWeight(codes, 4, "e2m1", 32, 1, scale)
            found[path] = ExpertCodes(weight, num_experts, transposed)
            parameter.data = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
    return found


def quantise(model: Any, name: str) -> None:
    """Round the linear layers of a model to a format, but for the head; or put random codes in its experts."""
    held = {}
    for path, parameter in model.named_parameters() if name not in ("bf16", "plain", "mxfp4") else ():
        if path.endswith("_proj.weight"):
            held[path] = quantised(parameter.data, name)
            parameter.data = parameter.data.new_empty(0)
    put_quantised(model, held)
    if name == "mxfp4":
        put_experts(model, random_experts(model))


def step_of(name: str, context: int, tokens: int) -> Step:
    rows, cross, length = name.partition("x")
    return Step(name, int(rows), int(length) - 1, 1) if cross else Step.of(name, context, tokens)


def shape_of(name: str, layers: int | None, tiny: bool) -> dict[str, Any]:
    """Return the arguments of AutoConfig.for_model."""
    shape = {**(SHAPES[name] if name else CONFIG)}
    shape["num_hidden_layers"] = layers or shape["num_hidden_layers"]
    if "layer_types" in shape:
        shape["layer_types"] = shape["layer_types"][: shape["num_hidden_layers"]]
    if tiny:
        shape |= {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
        shape |= {"head_dim": 64, "vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2}
    return shape


def kernels_of(run: Callable[[], object], steps: int = 20) -> list[str]:
    """Return a line for each kernel of a step's repeated sequence, that of a layer, and one for the whole step."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    ran = [x for x in found.events() or () if x.device_type == torch.autograd.DeviceType.CUDA]
    events: Any = sorted(ran, key=lambda event: event.time_range.start)
    size, rest = divmod(len(events), steps)
    if rest or not size:
        return [f"{len(events)} kernels in {steps} steps"]
    each = [events[at : at + size] for at in range(steps // 4 * size, len(events), size)]
    names = [event.name for event in each[0]]
    # a copy on another stream may have another place in some steps
    alike = [step for step in each if [event.name for event in step] == names]
    times = torch.tensor([[float(event.device_time) for event in step] for step in alike])
    starts = torch.tensor([[event.time_range.start for event in step] for step in alike], dtype=torch.float64)
    begins = (starts - starts[:, :1]).mean(0)
    lines = [f"{size} kernels of {times.sum(1).mean():.1f} us; the last starts after {begins[-1]:.1f} us"]
    first = size // 3
    parts = (p for p in range(4, size // 4) if names[first : first + p] == names[first + p : first + 2 * p])
    period = next(parts, 0)
    turns = sum(
        names[first : first + period] == names[at : at + period] for at in range(first, size - period, period or size)
    )
    for i in range(first, first + period):
        at = torch.arange(turns) * period + i
        apart = (begins[at + 1] - begins[at]).mean()
        lines.append(f"  {times[:, at].mean():7.2f} us, next starts after {apart:6.2f} us: {names[i][:80]}")
    alone: dict[str, float] = {}
    for event in itertools.chain(*each):
        alone[event.name[:80]] = alone.get(event.name[:80], 0.0) + float(event.device_time) / len(each)
    longest = sorted(alone.items(), key=lambda item: -item[1])[:12]
    return lines + [f"  {us:9.1f} us in a step: {name}" for name, us in longest]


def build(name: str, shape: dict[str, Any], num_slots: int, tiny: bool, strict: bool = False) -> tuple[Any, Any]:
    """Return the runner of a model in a format, and the loaded model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from graftlm.core.config import CacheConfig, EngineConfig
    from graftlm.core.engine_builder import build_runner
    from graftlm.core.model.load import load_model
    from graftlm.plugins import manager
    from graftlm.testing.byte_tokenizer import byte_tokenizer

    torch.manual_seed(0)
    with torch.device("cuda"):
        config = AutoConfig.for_model(**shape)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(0.0, 0.02)
    quantise(model, name)
    options = EngineConfig.from_options(
        max_model_len=MAX_CONTEXT // TINY if tiny else MAX_CONTEXT, max_step_tokens=STEP_TOKENS, max_batch=MAX_BATCH,
        cache=CacheConfig(max_tokens=num_slots), compact_weights=False if name == "plain" else None,
        activations="fp8" if name == "fp8-rows" else "exact", strict=strict,
    )  # fmt: skip
    loaded = load_model(model, options, byte_tokenizer())
    if loaded.lane != "paged":
        raise RuntimeError(f"the model runs in the {loaded.lane} lane: {loaded.lane_reason}")
    runner: Any = build_runner(loaded, options, manager.load().attention).runner
    _fill(getattr(runner, "eager", runner).attention.store)
    return runner, loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--steps", default="1,16,64,256,p1")
    parser.add_argument("--context", type=int, default=576)
    parser.add_argument("--tokens", type=int, default=4096, help="of a prefill")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--shape", default="")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--profile", action="store_true", help="the kernels of steps")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    from bench.gpu.card import Card

    context, tokens = (args.context // TINY, args.tokens // TINY) if args.tiny else (args.context, args.tokens)
    steps = [step_of(name, context, tokens) for name in args.steps.split(",")]
    num_slots = max(step.num_slots for step in steps) + 64
    found: dict[str, Any] = {}
    shape = shape_of(args.shape, args.layers, args.tiny)
    with Card() as card:
        for name in args.formats.split(","):
            torch.cuda.empty_cache()
            try:
                before = torch.cuda.memory_allocated()
                runner, loaded = build(name, shape, num_slots, args.tiny, args.strict)
                gc.collect()
                store = getattr(runner, "eager", runner).attention.store
                kept = torch.cuda.memory_allocated() - before - sum(x.nbytes for x in (*store.k, *store.v))
                kinds = {getattr(x.forward, "kernels", None) for x in loaded.model.modules()} - {None}
                figures: dict[str, Any] = {"fused": loaded.fusions.num_fused, "GB": round(kept / 1e9, 2)}
                print(name, figures, kinds, loaded.fusions.unfused[:1], flush=True)
                for step in steps:
                    plan = plan_of(step, 0, loaded.vocab_size)
                    steady = measure(runner, plan, lambda run: card.steady(run, TINY))
                    figures[step.name] = round(steady["ms"], 3)
                    print(name, step.what, figures[step.name], flush=True)
                    if args.profile:
                        with torch.inference_mode():
                            print("\n".join(kernels_of(replayed(runner, plan)[0])), flush=True)
                found[name] = figures
                print(name, figures, flush=True)
            except Exception as error:
                traceback.print_exc()
                found[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            runner = loaded = store = None
            gc.collect()
    base: dict[str, Any] = next((found[name] for name in ("bf16", "plain") if name in found), {})
    for name, figures in found.items():
        ratios = {
            s.name: round(figures[s.name] / base[s.name], 3) for s in steps if s.name in figures and s.name in base
        }
        print(f"{name:10} {figures}  of bf16: {ratios}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
