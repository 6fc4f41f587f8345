"""Compiles what the wrappers of Triton kernels launch, for GPUs that are not there: a program of its own.

argv    for each GPU its compute capability, such as 89, and the bytes of shared memory of a program there
stdout  a line for each launch that was compiled: capability, kernel, what was asked for, bytes of shared memory

A launch that an earlier GPU has too is compiled for a later one only if it is the kernel's first: its code hardly
depends on the GPU, and half of the launches are alike.

Launches are caught before Triton looks for a GPU. Each gives the signature and the constants that Triton would compile.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from graftlm.kernels.attention import PackedQKV
from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.expert_dispatch import plan_experts
from graftlm.kernels.gpu import linear
from graftlm.kernels.gpu.attention import decode, extend
from graftlm.kernels.gpu.attention.block_table import write_table
from graftlm.kernels.gpu.attention.decode import AT_ONCE, DecodeRows, Workspace, decode_attention
from graftlm.kernels.gpu.attention.extend import ExtendRows, extend_attention
from graftlm.kernels.gpu.attention.one_order import num_splits, one_order_attention
from graftlm.kernels.gpu.attention.qkv_rope_store import rotate_store
from graftlm.kernels.gpu.attention.shared_prefix import PrefixRows, decode_prefix
from graftlm.kernels.gpu.attention.softmax_pieces import Room
from graftlm.kernels.gpu.elementwise import gate_mul, rotate, store_kv
from graftlm.kernels.gpu.linear.batch_invariant_matmul import FixedProduct
from graftlm.kernels.gpu.linear.gemv import gemv
from graftlm.kernels.gpu.linear.skinny_matmul import skinny_gate_up, skinny_matmul, skinny_parts
from graftlm.kernels.gpu.mixture import expert_plan
from graftlm.kernels.gpu.mixture.expert_plan import ExpertWeights
from graftlm.kernels.gpu.mixture.expert_router import route
from graftlm.kernels.gpu.mixture.grouped_matmul import Gate, sum_parts
from graftlm.kernels.gpu.mixture.router import Router
from graftlm.kernels.gpu.norm import add_norm, norm_rows
from graftlm.kernels.gpu.sampling.argmax import greedy
from graftlm.kernels.gpu.sampling.nucleus import draw_nucleus
from graftlm.kernels.gpu.sampling.token_mask import apply_mask
from graftlm.kernels.gpu.step_inputs import copy_words, feed_tokens, rotary_table
from graftlm.kernels.gpu.support import Card
from graftlm.kernels.norm import Addition, Norm

TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32", torch.int64: "i64",
    torch.uint8: "u8", torch.uint32: "u32", torch.int16: "i16", torch.bool: "i1",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")

Launch = tuple[str, str, str, dict[str, str], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any], dict[str, Any]]
found: dict[str, Launch] = {}
what = ""


def catch(self: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
    """In place of a launch: note what would be compiled."""
    options = {name: given.pop(name) for name in OPTIONS if name in given}
    values = dict(zip(self.arg_names, args, strict=False)) | given
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, parameter in enumerate(self.params):
        value = values[parameter.name]
        kind = "constexpr"
        if isinstance(value, torch.Tensor):
            kind = "*" + TYPES[value.dtype]
            attributes[i,] = [["tt.divisibility", 16]]
        elif not parameter.is_constexpr and isinstance(value, float):
            kind = "fp32"
        elif not parameter.is_constexpr and not (value == 1 and not parameter.do_not_specialize):
            kind = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[i,] = [["tt.divisibility", 16]]
        if kind == "constexpr":
            constants[i,] = value
        signature[parameter.name] = kind
    launch = (what, self.fn.__module__, self.fn.__name__, signature, constants, attributes, options)
    found.setdefault(repr(launch[1:]), launch)


def compile_launch(job: tuple[int, Launch]) -> str:
    capability, launch = job
    what, module, name, signature, constants, attributes, options = launch
    function = getattr(sys.modules[module], name)
    source = ASTSource(function, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return f"{capability} {name} {what.replace(' ', '_')} {compiled.metadata.shared}"


def launches() -> None:
    """What steps of common shapes launch."""
    i32 = {"dtype": torch.int32}
    half = torch.bfloat16

    def noted(name: str, run: Callable[[], object]) -> None:
        global what
        what = name
        run()

    for dim, group, dtype in [(128, 4, half), (256, 2, half), (128, 4, torch.float32)]:
        kv_heads, rows = 2, 4
        q = torch.empty(rows * 600, kv_heads * group, dim, dtype=dtype)
        k = torch.empty(64, kv_heads, dim, dtype=dtype)
        table = torch.zeros(rows, 640, **i32)
        index, lens = torch.zeros(rows, **i32), torch.zeros(rows, **i32)
        is_first = dim == 128 and dtype is half  # the cheapest to compile has the variants that take no more memory
        for params in (AttentionParams(0.1), AttentionParams(0.1, window=64, softcap=50.0))[: 1 + is_first]:
            name = f"{dim} x {group} {TYPES[dtype]} window {params.window}"
            work = Workspace.allocate(rows, kv_heads * group, dim, 4, q.device)
            step = DecodeRows(table, index, lens, index)
            for splits in (4,) if params.window else (1, 4):
                noted(
                    name,
                    lambda q=q, k=k, s=step, w=work, p=params, n=splits: decode_attention(
                        q[:4], k, k, s, w, p, splits=n
                    ),
                )
            for new in (8, 600):
                extend = ExtendRows(table, index, lens, torch.zeros(rows + 1, **i32), new)
                noted(f"{name} new {new}", lambda q=q, k=k, e=extend, p=params: extend_attention(q, k, k, e, p))
                noted(f"{name} new {new}", lambda q=q, k=k, e=extend, p=params: one_order_attention(q, k, k, e, p))
            one_each, room = ExtendRows(table, index, lens, index, 1), Room.allocate(rows, 8, dim, 10, q.device)
            for splits in {1, num_splits(rows, kv_heads, 108, dim)}:
                noted(
                    f"{name} splits {splits}",
                    lambda q=q, k=k, e=one_each, p=params, r=room, n=splits: one_order_attention(
                        q[:4], k, k, e, p, room=r, splits=n
                    ),
                )
            if params.window is None:
                prefix = PrefixRows(index[:1], index, index[:1])
                noted(
                    name,
                    lambda q=q, k=k, s=step, x=prefix, w=work, p=params: decode_prefix(
                        q[:4], k, k, s, x, w, p, splits=2, num_parts=4
                    ),
                )
        if is_first:
            for tile in AT_ONCE.values():
                noted(
                    f"whole rows {tile}",
                    lambda q=q, k=k, s=step, w=work, t=tile: decode_attention(
                        q[:4], k, k, s, w, AttentionParams(0.1), splits=1, tile=t
                    ),
                )
        for num_tokens in (8, 64) if is_first else (64,):
            qkv = torch.empty(num_tokens, (group + 2) * kv_heads * dim, dtype=dtype)
            cos = torch.empty(num_tokens, dim, dtype=dtype)
            norm = Norm(torch.empty(dim, dtype=dtype), 1e-5)
            packed = PackedQKV(qkv, group * kv_heads, kv_heads, dim, cos, cos, norm, norm)
            noted(
                f"{num_tokens} tokens", lambda p=packed, k=k, n=num_tokens: rotate_store(p, k, k, torch.zeros(n, **i32))
            )
            parts = torch.empty(2, *qkv.shape)
            summed = replace(packed, parts=parts, bias=norm.weight)
            noted(
                f"{num_tokens} tokens parts",
                lambda p=summed, k=k, n=num_tokens: rotate_store(p, k, k, torch.zeros(n, **i32)),
            )
        noted("", lambda q=q, k=k: rotate(q[:8], k[:8], torch.empty(8, q.shape[2]), torch.empty(8, q.shape[2])))
        noted("", lambda k=k: store_kv(k[:8], k[:8], k, k, torch.zeros(8, **i32)))
    weight = torch.empty(4096, 4096, dtype=half)
    norm = Norm(torch.empty(4096, dtype=half), 1e-5)
    for num_rows in (1, 17, 64, 300):
        x = torch.empty(num_rows, 4096, dtype=half)
        noted("", lambda x=x: norm_rows(x, norm))
        noted("", lambda x=x: add_norm(torch.empty(4, *x.shape), x, norm, addition=Addition(norm)))
        noted("", lambda x=x: gate_mul(x, "gelu_tanh"))
        noted(f"{num_rows} rows", lambda x=x: FixedProduct(x.device, x.dtype)(x, weight, None))
        if num_rows <= 64:
            noted(f"{num_rows} rows", lambda x=x: skinny_matmul(x, weight))
            noted(f"{num_rows} rows", lambda x=x: skinny_gate_up(x, weight, "gelu_tanh"))
            noted(f"{num_rows} rows", lambda x=x: skinny_parts(x, weight))
    x = torch.empty(1, 4096, dtype=half)
    noted("", lambda: gemv(x, weight))
    noted("", lambda: gemv(x, weight, activation="silu"))
    logits = torch.empty(4, 128_256)
    noted("", lambda: greedy(logits, torch.zeros(4, dtype=torch.int64)))
    for dtype in (half, torch.float16, torch.float32):
        for top_p in (False, True):
            noted("", lambda d=dtype, p=top_p: draw_nucleus(logits.to(d), logits[:, :3], logits[:, :1], top_p=p))
    masks = torch.zeros(4, 4008, **i32)
    noted("", lambda: apply_mask(logits, masks, masks[:, 0]))
    noted("", lambda: write_table(masks, torch.zeros(4, 4, **i32), 4))
    noted("", lambda: copy_words(masks[0], masks[1]))
    noted("", lambda: feed_tokens(masks[0], masks[0], torch.zeros(4, dtype=torch.int64)))
    for num_tokens in (1, 40):
        noted(f"{num_tokens} tokens", lambda n=num_tokens: rotary_table(masks[0, :n], logits[0, :64], 1.0, half))


def mixtures() -> None:
    """What the steps of a mixture launch, with as many tokens for each expert as each tile is for."""
    global what
    counts_of = {
        (torch.bfloat16, 4): (1, 20, 40, 100, 1000),
        (torch.float32, 4): (1, 1000),
        (torch.bfloat16, 64): (40, 1000),
    }
    for (dtype, num_experts), counts in counts_of.items():
        sizes = ((num_experts, 1024, 256), (num_experts, 256, 512))
        up, down = (torch.empty(size, dtype=dtype) for size in sizes)
        plan = plan_experts(ExpertWeights(up, None, down, None, Gate()))
        for num_tokens in counts:
            what = f"{num_experts} experts {num_tokens} tokens {TYPES[dtype]}"
            x = torch.empty(num_tokens, 256, dtype=dtype)
            sum_parts(plan.parts(x, *route(x, Router(up[0, :num_experts], 2))), dtype)


def jobs_of(cards: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Launch]]:
    """The launches of each card that no earlier one has, and the first of each kernel."""
    seen: set[str] = set()
    for capability, limit in cards:
        for module in (decode, extend, linear.skinny_matmul, expert_plan):
            module.card_of = lambda _, limit=limit: Card(108, limit - 1024)  # type: ignore[misc]
        found.clear()
        launches()
        mixtures()
        kernels: set[str] = set()
        for key, launch in found.items():
            if key not in seen or launch[2] not in kernels:
                yield capability, launch
            kernels.add(launch[2])
        seen |= set(found)


def main(cards: Sequence[tuple[int, int]]) -> None:
    JITFunction.run = catch  # type: ignore[method-assign]
    expert_plan.takes_tma = lambda _: False  # it came with Hopper
    jobs = list(jobs_of(cards))
    with ProcessPoolExecutor(os.cpu_count()) as pool:  # forked: the kernels' modules are there
        for line in pool.map(compile_launch, jobs):
            print(line, flush=True)


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    main(list(zip(numbers[::2], numbers[1::2], strict=True)))
