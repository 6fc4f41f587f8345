"""Train sprout on one GPU: `python -m bench.sprout.train --out FOLDER --minutes 8`.

Warm-up, a long constant phase, a decay to zero over the last part. A checkpoint of the state before
the decay lets a later run go on (`--resume FILE`), with the same or a changed mixture.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from torch import Tensor

from bench.sprout.corpus import Block, Corpus
from bench.sprout.folder import load_tokenizer, write_folder
from bench.sprout.muon import Muon
from bench.sprout.network import Network, Shape, choose_attention
from bench.sprout.wires import PATH


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.sprout.train", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with tokenizer.json")
    parser.add_argument("--wires", type=Path, default=PATH, help="the file that bench.sprout.wires wrote")
    parser.add_argument("--minutes", type=float, default=8.0, help="time from the first step to the last")
    parser.add_argument("--steps", type=int, help="a fixed number of steps instead: the run is then reproducible")
    parser.add_argument("--decay", type=float, default=0.3, help="share of the run in which the rate falls to zero")
    parser.add_argument("--batch", type=int, default=131_072, help="tokens a step")
    parser.add_argument("--lr", type=float, default=0.02, help="Muon's rate")
    parser.add_argument("--adam-lr", type=float, default=0.003, help="the rate of embeddings and norms")
    parser.add_argument("--weight-decay", type=float, default=0.03)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--reuse", type=int, default=1, help="how often a block is played")
    parser.add_argument("--window", type=int, default=128, help="blocks a window")
    parser.add_argument("--first-window", type=int, default=0, help="where in the stream of blocks to begin")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--resume", type=Path, help="a model folder or checkpoint to go on from")
    parser.add_argument("--checkpoint", type=Path, help="where to write the state before the decay")
    parser.add_argument("--layers", type=int, default=Shape.num_layers)
    parser.add_argument("--hidden", type=int, default=Shape.hidden_size)
    parser.add_argument("--intermediate", type=int, default=Shape.intermediate_size)
    parser.add_argument("--heads", type=int, default=Shape.num_heads)
    return parser.parse_args(argv)


class Schedule:
    """Learning-rate factor over the run's progress in [0, 1]: warm-up, constant, linear decay."""

    def __init__(self, warmup_steps: int, decay: float) -> None:
        self.warmup_steps, self.decay = warmup_steps, decay

    def factor(self, step: int, progress: float) -> float:
        rising = min(1.0, (step + 1) / self.warmup_steps)
        falling = min(1.0, max(0.0, 1.0 - progress) / self.decay)
        return rising * falling


def on_device(blocks: Iterator[Block], device: torch.device, depth: int = 8) -> Iterator[tuple[Tensor, ...]]:
    """Copy blocks to the device in a thread ahead of use: (tokens, positions, starts, weights)."""
    queue: Queue[tuple[Tensor, ...] | Exception] = Queue(depth)

    def copy() -> None:
        try:
            for block in blocks:
                tensors = (
                    torch.from_numpy(block.tokens.astype("int64")),
                    torch.from_numpy(block.positions()),
                    torch.from_numpy(block.padded_starts()),
                    torch.from_numpy(block.weights.astype("float32") / 100),
                )
                if device.type == "cuda":
                    tensors = tuple(t.pin_memory().to(device, non_blocking=True) for t in tensors)
                queue.put(tensors)
        except Exception as error:
            queue.put(error)

    threading.Thread(target=copy, daemon=True).start()
    while True:
        item = queue.get()
        if isinstance(item, Exception):
            raise item
        yield item


def optimizers(network: Network, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, Adam for embeddings and norms."""
    matrices = [p for n, p in network.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in network.named_parameters() if p.ndim != 2 or "embed" in n]
    fused = next(network.parameters()).is_cuda
    return [
        Muon(matrices, lr=args.lr, weight_decay=args.weight_decay),
        torch.optim.AdamW(others, lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused),
    ]


def train(args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    tokenizer = load_tokenizer(args.tokenizer)
    shape = Shape(
        vocab_size=tokenizer.get_vocab_size(),
        num_layers=args.layers,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_heads=args.heads,
    )
    corpus = Corpus(
        tokenizer.to_str(),
        seed=args.seed,
        num_tokens=args.batch,
        context=shape.context,
        num_workers=args.workers,
        window=args.window,
        reuse=args.reuse,
        first_window=args.first_window,
        wires_path=args.wires,
    )
    network = Network(shape)
    network.initialize(args.seed)
    if args.resume:
        load_weights(network, args.resume)
    write_folder(args.out, network, tokenizer)  # a mistake in writing shows now rather than after the training
    network.to(device).use(choose_attention(device))
    num_params = sum(p.numel() for p in network.parameters())
    print(f"{num_params / 1e6:.2f} million parameters, {args.workers} corpus workers on {device}", flush=True)
    forward = torch.compile(network, dynamic=False) if device.type == "cuda" else network
    steppers = optimizers(network, args)
    base = [stepper.param_groups[0]["lr"] for stepper in steppers]
    schedule = Schedule(warmup_steps=min(200, (args.steps or 10_000) // 10 + 1), decay=args.decay)
    batches = on_device(iter(corpus), device)
    history: list[dict[str, float]] = []
    saved = args.checkpoint is None
    started = time.monotonic()
    step = 0
    seen = torch.zeros(2, device=device)
    total = torch.zeros((), device=device)
    waited = 0.0
    while True:
        asked = time.monotonic()
        batch = next(batches)
        waited += time.monotonic() - asked
        if step == 3:  # what came before was compilation
            started = time.monotonic()
        progress = step / args.steps if args.steps else (time.monotonic() - started) / (60 * args.minutes)
        if progress >= 1:
            break
        if not saved and progress >= 1 - args.decay:
            save_weights(network, args.checkpoint)
            saved = True
        factor = schedule.factor(step, progress)
        for stepper, rate in zip(steppers, base, strict=True):
            stepper.param_groups[0]["lr"] = rate * factor
        with torch.autocast(device.type, torch.bfloat16):
            loss, answers = forward(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad(set_to_none=True)
        seen += answers
        total += loss.detach()
        step += 1
        if step % 100 == 0 or step == 5:
            every = 100 if step % 100 == 0 else 5
            answer_loss = float(seen[0] / seen[1].clamp(min=1))
            if not answer_loss == answer_loss:
                raise RuntimeError(f"the loss is not a number at step {step}")
            elapsed = time.monotonic() - started
            history.append({"step": step, "loss": float(total) / every, "answers": answer_loss, "seconds": elapsed})
            if step % 500 == 0 or step <= 300:
                print(
                    f"step {step} loss {history[-1]['loss']:.4f} answers {answer_loss:.4f} rate {factor:.3f} "
                    f"{step * args.batch / 1e6:.0f}M tokens {elapsed:.0f} s, waited {waited:.0f} s",
                    flush=True,
                )
            seen.zero_()
            total.zero_()
    corpus.close()
    seconds = time.monotonic() - started
    write_folder(args.out, network, tokenizer)
    summary = {
        "parameters": num_params,
        "steps": step,
        "tokens": step * args.batch,
        "seconds": round(seconds, 1),
        "answer_loss": history[-1]["answers"] if history else None,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    }
    print(json.dumps(summary), flush=True)
    (args.out.parent / f"{args.out.name}-history.json").write_text(json.dumps({"summary": summary, "history": history}))
    return summary


def save_weights(network: Network, path: Path) -> None:
    """The weights in bfloat16, the state to go on from (optimizers warm up again)."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({n: p.detach().bfloat16().cpu().contiguous() for n, p in network.named_parameters()}, path)


def load_weights(network: Network, path: Path) -> None:
    from safetensors.torch import load_file

    stored = load_file(path / "model.safetensors" if path.is_dir() else path)
    network.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in stored.items()})


def main(argv: list[str] | None = None) -> int:
    train(parse(sys.argv[1:] if argv is None else argv))
    return 0


if __name__ == "__main__":
    sys.exit(main())
