"""Exact match of the embedded model on held-out entities, by greedy generation: `python -m bench sprout`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.sprout.document import Document
from bench.sprout.folder import write_json
from bench.sprout.mixture import FAMILIES, cases
from bench.sprout.tokenizer import segment_ids
from bench.sprout.wires import PATH, Wires
from graftlm.core.execution.cache_name import cache_name

FLOOR, PASSAGE_FLOOR = 0.95, 0.98


@dataclass
class Row:
    """One case during generation: given, expected and written tokens."""

    document: Document
    prompt: list[int]
    rest: list[tuple[int, bool]]
    written: list[int] = field(default_factory=list)
    right: bool = True

    @classmethod
    def of(cls, tokenizer: Any, document: Document) -> Row:
        segments = segment_ids(tokenizer, document)
        prompt = [i for ids, _ in segments[: document.scored] for i in ids]
        rest = [(i, learned) for ids, learned in segments[document.scored :] for i in ids]
        while rest and not rest[-1][1]:
            rest.pop()  # what is given after the model's last word does not matter
        return cls(document, prompt, rest)

    @property
    def done(self) -> bool:
        """The answer is complete, or a wrong one has gone on for as long as a right one."""
        return len(self.written) >= len(self.rest)

    def take(self, chosen: int) -> int:
        """Append the next token: the given one inside forced text, else the model's. Returns it."""
        expected, learned = self.rest[len(self.written)]
        token = chosen if learned or not self.right else expected
        self.right = self.right and token == expected
        self.written.append(token)
        return token


@torch.inference_mode()
def generate(model: Any, rows: Sequence[Row], pad: int) -> None:
    """Greedy generation in batches of similar length, left-padded; fills `written` and `right`."""
    batch_tokens = 600_000 if model.device.type == "cuda" else 8_000
    order = sorted(rows, key=lambda row: len(row.prompt))
    while order:
        longest = len(order[-1].prompt)
        count = max(1, batch_tokens // longest)
        batch, order = order[-count:], order[:-count]
        width = max(len(row.prompt) for row in batch)
        ids = torch.full((len(batch), width), pad)
        mask = torch.zeros((len(batch), width), dtype=torch.long)
        for i, row in enumerate(batch):
            ids[i, width - len(row.prompt) :] = torch.tensor(row.prompt)
            mask[i, width - len(row.prompt) :] = 1
        _decode(model, batch, ids.to(model.device), mask.to(model.device))


def _decode(model: Any, batch: list[Row], ids: torch.Tensor, mask: torch.Tensor) -> None:
    from transformers import DynamicCache

    name = cache_name(model.forward)
    assert name is not None
    held = {name: DynamicCache(config=model.config)}
    while True:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        logits = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **held,
            logits_to_keep=1,
        ).logits
        chosen = logits[:, -1].argmax(-1).tolist()
        if all(row.done for row in batch):
            return
        tokens = [row.take(token) if not row.done else token for row, token in zip(batch, chosen, strict=True)]
        if all(row.done for row in batch):
            return
        ids = torch.tensor(tokens, device=mask.device)[:, None]
        mask = torch.cat((mask, mask.new_ones(len(batch), 1)), -1)


@dataclass
class Score:
    """Right answers of a family, and of each detail in it."""

    right: int = 0
    total: int = 0
    details: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    wrong: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.right / max(1, self.total)


def score(
    model: Any, tokenizer: Any, wires: Wires, families: Sequence[str], count: int, *, seed: int = 0, split: Any = "test"
) -> tuple[dict[str, Score], list[Row]]:
    """Generate `count` cases of each family: (scores by family, all rows)."""
    backend = tokenizer.backend_tokenizer
    rows = [Row.of(backend, d) for f in families for d in cases(f, count, wires, split=split, seed=seed)]
    generate(model, rows, tokenizer.pad_token_id)
    scores: dict[str, Score] = {family: Score() for family in families}
    for row in rows:
        found = scores[row.document.family]
        found.total += 1
        found.right += row.right
        found.details[row.document.detail][0] += row.right
        found.details[row.document.detail][1] += 1
        if not row.right:
            expected = tokenizer.decode([i for i, _ in row.rest])
            found.wrong.append((row.document.prompt, expected, tokenizer.decode(row.written)))
    return scores, rows


def load(folder: Path, dtype: torch.dtype, device: str) -> tuple[Any, Any]:
    """Return (model, tokenizer), loaded by plain transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    return model.to(device).eval(), AutoTokenizer.from_pretrained(folder)


def agreement(first: Sequence[Row], second: Sequence[Row]) -> float:
    """Share of cases in which two runs wrote the same tokens."""
    return sum(a.written == b.written for a, b in zip(first, second, strict=True)) / max(1, len(first))


def tokens_per_second(model: Any, tokenizer: Any, new_tokens: int = 200) -> float:
    """Decode speed of `model.generate`, one sequence, the prompt's prefill left out of neither count nor time."""
    messages = [{"role": "user", "content": "Tarel lives in Mosk.\n\nWhere does Tarel live?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False).to(model.device)
    rates = []
    for _ in range(4):
        start = time.perf_counter()
        model.generate(**inputs, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
        rates.append(new_tokens / (time.perf_counter() - start))
    return sorted(rates[1:])[1]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench sprout", description=__doc__)
    parser.add_argument("--folder", type=Path, help="a model folder (default: the embedded model)")
    parser.add_argument("--cases", type=int, default=500, help="held-out cases of each family")
    parser.add_argument("--family", action="append", choices=FAMILIES, help="only this family; may be repeated")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--agreement", action="store_true", help="also run in the other dtype and compare the answers")
    parser.add_argument("--speed", action="store_true", help="also measure transformers' generate, tokens a second")
    parser.add_argument("--details", action="store_true", help="rates by attribute and format")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print N wrong answers of each family")
    parser.add_argument("--wires", type=Path, default=PATH, help="the file that bench.sprout.wires wrote")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; exit status 1 if a family is under its floor."""
    args = parse(sys.argv[1:] if argv is None else argv)
    if args.folder is None:
        from graftlm.core.model.embedded import verify_sprout

        args.folder = verify_sprout()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wires = Wires.load(args.wires)
    families = args.family or list(FAMILIES)
    model, tokenizer = load(args.folder, getattr(torch, args.dtype), device)
    print(f"{args.folder.name}: {args.cases} held-out cases a family, greedy, {args.dtype} on {device}")
    figures: dict[str, Any] = {"families": {}, "details": {}}
    low = []
    rows: list[Row] = []
    for family in families:
        start = time.perf_counter()
        scores, new = score(model, tokenizer, wires, [family], args.cases, seed=args.seed)
        rows += new
        found = scores[family]
        floor = PASSAGE_FLOOR if family == "passage questions" else FLOOR
        mark = "" if found.rate >= floor else f"  under the floor of {floor}"
        low += [family] if mark else []
        print(f"{family:28s} {found.rate:.4f}  {time.perf_counter() - start:5.1f} s{mark}", flush=True)
        figures["families"][family] = round(found.rate, 4)
        figures["details"][family] = {k: v for k, v in sorted(found.details.items())}
        if args.details:
            weak = sorted(found.details.items(), key=lambda item: item[1][0] / item[1][1])
            print("    " + ", ".join(f"{k} {r}/{t}" for k, (r, t) in weak if r < t))
        for prompt, expected, written in found.wrong[: args.show]:
            print(f"    ...{prompt[-300:]!r}\n    expected {expected!r}\n    written  {written!r}")
    if args.json:
        write_json(args.json, figures)
    if args.agreement:
        other = "bfloat16" if args.dtype == "float32" else "float32"
        model, tokenizer = load(args.folder, getattr(torch, other), device)
        _, again = score(model, tokenizer, wires, families, args.cases, seed=args.seed)
        figures["agreement"] = round(agreement(rows, again), 4)
        print(f"float32 and bfloat16 write the same in {figures['agreement']:.2%} of {len(rows)} cases")
    if args.speed:
        figures["tokens_per_second"] = round(tokens_per_second(model, tokenizer), 1)
        print(f"transformers generate: {figures['tokens_per_second']} tokens a second on {device}")
    if args.json:
        write_json(args.json, figures)
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())
