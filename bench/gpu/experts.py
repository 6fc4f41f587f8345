"""The products of a mixture's experts: every tile beside the memory's and the library's rate, on one GPU.

    python -m bench.gpu.experts [--rows 32,128] [--experts 128 --top-k 8 --hidden 2048 --inner 768] [--out FOLDER]

Tiles are compiled in processes of their own first. Weights are rotated so that no second-level cache holds them; each
time is the median of replays of a CUDA graph that holds one product for each copy of the weights.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from graftlm.kernels.gpu.mixture.expert_blocks import ExpertBlocks
from graftlm.kernels.gpu.mixture.expert_router import route
from graftlm.kernels.gpu.mixture.grouped_matmul import Gate, Tile, grouped_down, grouped_gate_up, sum_parts
from graftlm.kernels.gpu.mixture.router import Router
from graftlm.kernels.gpu.norm import add_norm
from graftlm.kernels.jit import python_process
from graftlm.kernels.norm import Norm

SHARED_MEMORY = 227 * 1024
FEW, MANY = (1, 8, 32, 128, 256), (512, 2048, 8192)
Role = Literal["gate_up", "down"]


@dataclass(frozen=True)
class Shape:
    experts: int
    top_k: int
    hidden: int
    inner: int


class Layers:
    """Copies of a layer's weights, and one routing for each."""

    def __init__(self, shape: Shape, copies: int) -> None:
        self.shape, self.copies = shape, copies
        self.gate_up = self._random(copies, shape.experts, 2 * shape.inner, shape.hidden)
        self.down = self._random(copies, shape.experts, shape.hidden, shape.inner)
        self.router = self._random(copies, shape.experts, shape.hidden)

    def _random(self, *size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_(0.0, 0.02)

    def tokens(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, self.shape.hidden, device="cuda", dtype=torch.bfloat16)

    def routing(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """experts int32 [copies, rows, top_k], each token's different; weights float32, alike."""
        scores = torch.rand(self.copies, rows, self.shape.experts, device="cuda")
        experts = scores.topk(self.shape.top_k, -1).indices.int().contiguous()
        return experts, torch.rand(experts.shape, device="cuda")


def tiles(rows: int, role: Role) -> Iterator[Tile]:
    """Yield the candidate tiles for `num_tokens` tokens."""
    wide = 2 if role == "gate_up" else 1
    few = rows in FEW
    pairs = ((16,) if rows <= 32 else (16, 32)) if few else ((64,) if rows == 512 else (64, 128))
    outputs, inputs = ((32, 64, 128), (64, 128, 256)) if few else ((64, 128, 256), (64,))
    for m, n, k, stages in itertools.product(pairs, outputs, inputs, (2, 3, 4, 6)):
        held = stages * (n * wide + m) * k * 2
        accumulated = m * n * wide // 32
        if held > SHARED_MEMORY or (few and not 40 * 1024 <= held <= 112 * 1024) or (not few and stages not in (3, 4)):
            continue
        for warps, swap, tma in itertools.product((4, 8), (True, False), (False, True)):
            if (few and (warps == 8) != (n * wide >= 256)) or (swap and (not few or n < 64)):
                continue
            if few or 64 <= accumulated // warps <= 256:
                yield Tile(m, n, k, warps, stages, swap, 1 if few else 8, tma)


def product(layers: Layers, role: Role, rows: int, tile: Tile) -> Callable[[], torch.Tensor]:
    """Return a function that runs one product for each copy of the weights and returns the last output."""
    shape = layers.shape
    experts, weights = layers.routing(rows)
    x = layers.tokens(rows)
    blocks = [ExpertBlocks.of(e, shape.experts, tile.pairs) for e in experts]
    hidden = torch.randn(rows * shape.top_k, shape.inner, device="cuda", dtype=torch.bfloat16)
    dtype = torch.float32 if rows <= 256 else torch.bfloat16

    def run() -> torch.Tensor:
        for i, block in enumerate(blocks):
            if role == "gate_up":
                out = grouped_gate_up(x, layers.gate_up[i], None, block, shape.top_k, Gate(), tile)
            else:
                out = grouped_down(hidden, layers.down[i], None, weights[i], block, shape.top_k, tile, dtype)
        return out

    return run


def seconds(run: Callable[[], object], copies: int, budget: float = 0.012) -> float:
    """Median time of one of `copies`, from replays of a graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times: list[float] = []
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    while sum(times) < budget or len(times) < 3:
        events[0].record()
        graph.replay()
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]) / 1e3)
    return sorted(times)[len(times) // 2] / copies


def num_bytes(layers: Layers, role: Role, rows: int) -> float:
    """Return the mean bytes of weights that a step reads."""
    shape = layers.shape
    hit = shape.experts * (1 - (1 - shape.top_k / shape.experts) ** rows)
    return hit * shape.inner * shape.hidden * 2 * (2 if role == "gate_up" else 1)


def check(layers: Layers) -> None:
    """Whole mixtures against a float32 definition."""
    shape = layers.shape
    for rows, tile in itertools.product(
        (1, 5, 33, 300), (Tile(16, 64, 64, 4, 3, True), Tile(64, 64, 64, 4, 3, group=8))
    ):
        for tma in (False, True):
            cut = Tile(**(asdict(tile) | {"tma": tma}))
            x = layers.tokens(rows)
            router = Router(layers.router[0], shape.top_k, renormalize=True, logits_dtype=torch.bfloat16)
            experts, weights = route(x, router)
            blocks = ExpertBlocks.of(experts, shape.experts, cut.pairs)
            hidden = grouped_gate_up(x, layers.gate_up[0], None, blocks, shape.top_k, Gate(), cut)
            parts = grouped_down(hidden, layers.down[0], None, weights, blocks, shape.top_k, cut, torch.float32)
            found = sum_parts(parts, torch.float32)
            logits = (x.float() @ layers.router[0].float().T).bfloat16().float()
            best = logits.softmax(-1).topk(shape.top_k)
            chosen = logits.gather(1, experts.long()).sort(-1).values
            same = float((chosen - logits.gather(1, best.indices).sort(-1).values).abs().max())
            expected = torch.zeros(rows, shape.hidden, device="cuda")
            for rank in range(shape.top_k):
                e = experts[:, rank].long()
                for expert in e.unique().tolist():
                    at = (e == expert).nonzero()[:, 0]
                    gate, up = (x[at].float() @ layers.gate_up[0, expert].float().T).chunk(2, -1)
                    inner = torch.nn.functional.silu(gate) * up
                    expected[at] += (inner @ layers.down[0, expert].float().T) * weights[at, rank, None]
            error = float((found - expected).norm() / expected.norm())
            print(f"check rows {rows:4} tile {cut.pairs} tma {tma}: error {error:.1e}, of chosen logits {same:.1e}")


def sweep(layers: Layers, rows: int, role: Role) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for tile in tiles(rows, role):
        try:
            s = seconds(product(layers, role, rows, tile), layers.copies)
        except Exception as error:
            found.append({"tile": asdict(tile), "us": 1e9, "error": str(error)[:100]})
            continue
        found.append({"tile": asdict(tile), "us": 1e6 * s})
    return sorted(found, key=lambda one: one["us"])


def library(layers: Layers, role: Role, rows: int) -> tuple[float, float]:
    """Return the seconds of torch's grouped matmul over sorted tokens, and of an equally large dense matmul."""
    shape = layers.shape
    weight = layers.gate_up if role == "gate_up" else layers.down
    experts, _ = layers.routing(rows)
    pairs = torch.randn(rows * shape.top_k, weight.shape[-1], device="cuda", dtype=torch.bfloat16)
    ends = [torch.bincount(e.flatten(), minlength=shape.experts).cumsum(0).int() for e in experts]
    grouped: Any = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    by_expert = seconds(
        lambda: [grouped(pairs, weight[i].transpose(1, 2), offs=end) for i, end in enumerate(ends)], layers.copies
    )
    one = [weight[i, 0] for i in range(layers.copies)]
    return by_expert, seconds(lambda: [torch.nn.functional.linear(pairs, w) for w in one], layers.copies)


def chain(layers: Layers, rows: int, gate_up: Tile, down: Tile) -> dict[str, float]:
    """Return the seconds of a whole mixture with its router, and of its small kernels."""
    shape = layers.shape
    x, residual = layers.tokens(rows), layers.tokens(rows)
    norm = torch.ones(shape.hidden, device="cuda", dtype=torch.bfloat16)
    routers = [Router(w, shape.top_k, renormalize=True, logits_dtype=torch.bfloat16) for w in layers.router]
    experts, weights = layers.routing(rows)
    dtype = torch.float32 if rows <= 256 else torch.bfloat16
    down = Tile(**(asdict(down) | {"pairs": gate_up.pairs}))

    def whole() -> None:
        for i, router in enumerate(routers):
            e, w = route(x, router)
            blocks = ExpertBlocks.of(e, shape.experts, gate_up.pairs)
            hidden = grouped_gate_up(x, layers.gate_up[i], None, blocks, shape.top_k, Gate(), gate_up)
            parts = grouped_down(hidden, layers.down[i], None, w, blocks, shape.top_k, down, dtype)
            add_norm(parts, residual, Norm(norm, 1e-6))

    parts = torch.zeros(shape.top_k, rows, shape.hidden, dtype=dtype, device="cuda")
    return {
        "whole": seconds(whole, layers.copies),
        "route": seconds(lambda: [route(x, router) for router in routers], layers.copies),
        "sort": seconds(lambda: [ExpertBlocks.of(e, shape.experts, gate_up.pairs) for e in experts], layers.copies),
        "add_norm": seconds(lambda: [add_norm(parts, residual, Norm(norm, 1e-6)) for _ in routers], layers.copies),
    }


def compile_part(layers: Layers, rows: list[int], part: int, parts: int) -> None:
    """Launch every `parts`-th tile once: its code is then in Triton's cache on disk."""
    jobs = [(r, role, tile) for r in rows for role in ("gate_up", "down") for tile in tiles(r, role)]
    kinds = list({(role, tile): (r, role, tile) for r, role, tile in jobs}.values())
    for r, role, tile in kinds[part::parts]:
        try:
            product(layers, role, r, tile)()
        except Exception:  # reported when it is measured
            continue
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=",".join(map(str, FEW + MANY)))
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--copies", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=130.0, help="no new sweep begins after so long")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    args = parser.parse_args()
    begin = time.monotonic()
    rows = [int(r) for r in args.rows.split(",")]
    shape = Shape(args.experts, args.top_k, args.hidden, args.inner)
    torch.manual_seed(0)
    if args.compile:
        part, parts = map(int, args.compile.split("/"))
        return compile_part(Layers(shape, 1), rows, part, parts)
    workers = max(1, min(16, (os.cpu_count() or 2)))
    command = ["-m", "bench.gpu.experts", *sys.argv[1:]]
    compiling = [python_process.start([*command, "--compile", f"{i}/{workers}"]) for i in range(workers)]
    layers = Layers(shape, args.copies)
    check(layers)
    for process in compiling:
        process.wait()
    print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    results: dict[str, Any] = {}
    for r in rows:
        best: dict[Role, Tile] = {}
        for role in ("gate_up", "down"):
            if time.monotonic() - begin > args.seconds:
                print(f"rows {r} {role}: no time left")
                continue
            found = sweep(layers, r, role)
            by_expert, dense = library(layers, role, r)
            best[role] = Tile(**found[0]["tile"])
            results[f"{role} {r}"] = {"found": found, "grouped_mm_us": 1e6 * by_expert, "dense_us": 1e6 * dense}
            work = 2 * r * shape.top_k * shape.inner * shape.hidden * (2 if role == "gate_up" else 1)
            moved, us = num_bytes(layers, role, r), found[0]["us"]
            print(
                f"rows {r:5} {role:8} {us:8.1f} us  {moved / us / 1e6:5.2f} TB/s  {work / us / 1e6:6.1f} TFLOP/s  "
                f"grouped_mm {1e6 * by_expert:8.1f}  dense {1e6 * dense:8.1f}"
            )
            for one in found[:6]:
                print(f"    {one['us']:8.1f}  {' '.join(f'{k}={v}' for k, v in one['tile'].items())}")
            worst = [one for one in found if "error" in one]
            if worst:
                print(f"    {len(worst)} of {len(found)} failed: {worst[0]['error']}", flush=True)
        if len(best) == 2:
            times = chain(layers, r, best["gate_up"], best["down"])
            results[f"chain {r}"] = times
            print(f"rows {r:5} " + "  ".join(f"{k} {1e6 * v:.1f}" for k, v in times.items()), flush=True)
    if args.out:
        (args.out / "experts.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
