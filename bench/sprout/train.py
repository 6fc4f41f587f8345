"""Train sprout on one GPU: `python -m bench.sprout.train --out FOLDER --tokenizer FOLDER`.

Warm-up, a constant phase, a decay to zero over the last part. `--stop-after MINUTES` ends early and writes the
whole state; the same command with `--resume STATE` goes on with the next step as if nothing had happened.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
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
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument("--decay", type=float, default=0.65, help="share of the run in which the rate falls to zero")
    parser.add_argument("--batch", type=int, default=131_072, help="tokens a step")
    parser.add_argument("--lr", type=float, default=0.02, help="Muon's rate")
    parser.add_argument("--adam-lr", type=float, default=0.003, help="the rate of embeddings and norms")
    parser.add_argument("--weight-decay", type=float, default=0.03)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=Path, metavar="FOLDER", help="a model folder whose weights to begin with")
    parser.add_argument("--far", type=float, default=0.0, help="weight of passages of 3,000 tokens in the mixture")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--stop-after", type=float, metavar="MINUTES", help="write the state and end, done or not")
    parser.add_argument("--state", type=Path, help="the file for it (default: beside the folder)")
    parser.add_argument("--resume", type=Path, metavar="STATE", help="go on from such a file")
    parser.add_argument("--any-order", action="store_true", help="let kernels sum in any order: bits may differ")
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
                tensors: tuple[Tensor, ...] = (
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


class Trainer:
    """A network, its optimizers and how far they have come. `step` counts finished steps."""

    def __init__(self, args: argparse.Namespace, vocab_size: int, device: torch.device) -> None:
        self.args, self.device, self.step = args, device, 0
        self._run = [args.seed, args.steps, args.batch]
        self.network = Network(
            Shape(
                vocab_size=vocab_size,
                num_layers=args.layers,
                hidden_size=args.hidden,
                intermediate_size=args.intermediate,
                num_heads=args.heads,
            )
        )
        self.network.initialize(args.seed)
        if args.start:
            load_weights(self.network, args.start)
        self.network.to(device)
        self.network.use(choose_attention(device), stream=torch.bfloat16)
        self.optimizers = optimizers(self.network, args)
        self._rates = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]
        self._schedule = Schedule(warmup_steps=min(200, args.steps // 10 + 1), decay=args.decay)
        self._forward = torch.compile(self.network, dynamic=False) if device.type == "cuda" else self.network

    def advance(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Run one step; return (loss, summed loss and count over the answers' tokens)."""
        factor = self._schedule.factor(self.step, self.step / self.args.steps)
        for optimizer, rate in zip(self.optimizers, self._rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
        with torch.autocast(self.device.type, torch.bfloat16):
            loss, answers = self._forward(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.detach(), answers

    def save(self, path: Path) -> None:
        """Write the whole state that the next step depends on."""
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "step": self.step,
            "run": self._run,
            "network": self.network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        torch.save(state, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["run"] != self._run:
            raise ValueError(f"{path} is of a run with seed, steps, batch {state['run']}, this one has {self._run}")
        self.step = state["step"]
        self.network.load_state_dict(state["network"])
        for optimizer, stored in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(stored)


def be_deterministic() -> None:
    """Let every kernel sum in a fixed order: the same seed gives the same bits on the same machine."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def train(args: argparse.Namespace) -> dict[str, Any]:
    ends = time.monotonic() + 60 * args.stop_after if args.stop_after else math.inf
    if not args.any_order:
        be_deterministic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    tokenizer = load_tokenizer(args.tokenizer)
    trainer = Trainer(args, tokenizer.get_vocab_size(), device)
    if args.resume:
        trainer.load(args.resume)
    corpus = Corpus(
        tokenizer.to_str(),
        seed=args.seed,
        num_tokens=args.batch,
        context=trainer.network.shape.context,
        num_workers=args.workers,
        first=trainer.step,
        far=args.far,
        wires_path=args.wires,
    )
    write_folder(args.out, trainer.network, tokenizer)  # a mistake in writing shows now rather than after the training
    num_params = sum(p.numel() for p in trainer.network.parameters())
    print(f"{num_params / 1e6:.2f} million parameters, {args.workers} corpus workers on {device}", flush=True)
    log = Log(args.batch, args.out.parent / f"{args.out.name}-history.jsonl", device)
    batches = on_device(iter(corpus), device)
    first = trainer.step
    while trainer.step < args.steps and time.monotonic() < ends:
        with log.waiting():
            batch = next(batches)
        log.add(trainer.step + 1, *trainer.advance(batch))
        if trainer.step == first + 3:
            log.start()  # what came before was compilation
    corpus.close()
    write_folder(args.out, trainer.network, tokenizer)
    done = trainer.step >= args.steps
    if not done:
        trainer.save(args.state or args.out.parent / f"{args.out.name}-state.pt")
    summary = {
        "parameters": num_params,
        "steps": [first, trainer.step],
        "done": done,
        "tokens": trainer.step * args.batch,
        "seconds": round(log.seconds, 1),
        "answer_loss": log.answer_loss,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    }
    print(json.dumps(summary), flush=True)
    return summary


class Log:
    """Loss and time, every hundred steps to a file and every five hundred to the screen."""

    def __init__(self, tokens_a_step: int, path: Path, device: torch.device) -> None:
        self._tokens, self._path = tokens_a_step, path
        self._total = torch.zeros((), device=device)
        self._answers = torch.zeros(2, device=device)
        self._count = 0
        self._waited = 0.0
        self.answer_loss: float | None = None
        self.start()

    def start(self) -> None:
        """Time counts from here."""
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        asked = time.monotonic()
        yield
        self._waited += time.monotonic() - asked

    def add(self, step: int, loss: Tensor, answers: Tensor) -> None:
        self._total += loss
        self._answers += answers
        self._count += 1
        if step % 100 and step != 5:
            return
        self.answer_loss = float(self._answers[0] / self._answers[1].clamp(min=1))
        if self.answer_loss != self.answer_loss:
            raise RuntimeError(f"the loss is not a number at step {step}")
        mean = float(self._total) / self._count
        entry = {"step": step, "loss": mean, "answers": self.answer_loss, "seconds": self.seconds}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        if step % 500 == 0 or step <= 300:
            print(
                f"step {step} loss {mean:.4f} answers {self.answer_loss:.4f} "
                f"{step * self._tokens / 1e6:.0f}M tokens {self.seconds:.0f} s, waited {self._waited:.0f} s",
                flush=True,
            )
        self._total.zero_()
        self._answers.zero_()
        self._count = 0


def load_weights(network: Network, folder: Path) -> None:
    """Load the weights of a model folder that an earlier run wrote."""
    from safetensors.torch import load_file

    stored = load_file(folder / "model.safetensors")
    network.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in stored.items()})


def main(argv: list[str] | None = None) -> int:
    train(parse(sys.argv[1:] if argv is None else argv))
    return 0


if __name__ == "__main__":
    sys.exit(main())
