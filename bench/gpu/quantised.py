"""Decode steps and prefill of a model with quantised weights, beside bfloat16, on one GPU.

    python -m bench.gpu.quantised [--formats bf16,fp8,int8,int4,awq] [--steps 1,16,64,256,p1] [--layers 32] [--tiny]
    python -m bench.gpu.quantised --shape gpt-oss-20b --formats plain,mxfp4 --steps 48x2200,192x700

The model has random weights in the shape of Llama 3.1 8B, or one of bench.gpu.shapes. Weights of linear layers are
rounded to each format on the card; the head stays plain. "fp8-rows" is "fp8" with activations="fp8". In "mxfp4"
experts have random codes instead. A step is `ROWSxCONTEXT`, or rows alone for `--context` tokens; `p16` is a prefill of
16 rows. `bf16` holds 12-bit forms beside its weights, as it does by default, `plain` does not. One process measures all
formats, so that ratios are of one run.
"""

from __future__ import annotations

import argparse
import gc
import json
import traceback
from pathlib import Path
from typing import Any

import torch

from bench.gpu.model import CONFIG
from bench.gpu.one_tree import MAX_BATCH, MAX_CONTEXT, STEP_TOKENS, TINY, Step, _fill, measure, plan_of
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


def build(name: str, shape: dict[str, Any], num_slots: int, tiny: bool) -> tuple[Any, Any]:
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
    held = {}
    for path, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(0.0, 0.02)
        if path.endswith("_proj.weight") and name not in ("bf16", "plain", "mxfp4"):
            held[path] = quantised(parameter.data, name)
            parameter.data = parameter.data.new_empty(0)
    put_quantised(model, held)
    if name == "mxfp4":
        put_experts(model, random_experts(model))
    options = EngineConfig.from_options(
        max_model_len=MAX_CONTEXT // TINY if tiny else MAX_CONTEXT, max_step_tokens=STEP_TOKENS, max_batch=MAX_BATCH,
        cache=CacheConfig(max_tokens=num_slots), compact_weights=False if name == "plain" else None,
        activations="fp8" if name == "fp8-rows" else "exact",
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
                runner, loaded = build(name, shape, num_slots, args.tiny)
                gc.collect()
                store = getattr(runner, "eager", runner).attention.store
                kept = torch.cuda.memory_allocated() - before - sum(x.nbytes for x in (*store.k, *store.v))
                kinds = {getattr(x.forward, "kernels", None) for x in loaded.model.modules()} - {None}
                figures: dict[str, Any] = {"fused": loaded.fusions.num_fused, "GB": round(kept / 1e9, 2)}
                print(name, figures, kinds, loaded.fusions.unfused[:1], flush=True)
                for step in steps:
                    steady = measure(runner, plan_of(step, 0, loaded.vocab_size), lambda run: card.steady(run, TINY))
                    figures[step.name] = round(steady["ms"], 3)
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
