"""Limits of the hardware: the least time for reading bytes and computing operations, part after part.

Every weight is read once a step and every cached token once a step, a prefix that several rows share once for all of
them; each matrix product takes the longer of its two times. Nothing else is counted: no norms, no launches, no host.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu.workloads import Sizes

BYTES = 2  # of a bfloat16 number


@dataclass(frozen=True)
class Rates:
    """Measured rates of the card: bytes a second read or written, and operations a second in bfloat16."""

    bytes_per_s: float
    operations_per_s: float


@dataclass(frozen=True)
class Decoder:
    """A decoder's numbers of weights: `layers` all layers' together, `head` the output's; `kv_bytes` of one token.

    attention  operations for one query and one key in all layers
    """

    layers: int
    head: int
    kv_bytes: int
    attention: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Decoder:
        width, inner, depth = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        dim = config.get("head_dim") or width // heads
        projections = width * dim * (2 * heads + 2 * kv_heads)
        return cls(
            layers=depth * (projections + 3 * width * inner),
            head=width * config["vocab_size"],
            kv_bytes=depth * 2 * kv_heads * dim * BYTES,
            attention=depth * 4 * heads * dim,
        )

    @classmethod
    def read(cls, folder: str) -> Decoder:
        return cls.of(json.loads((Path(folder) / "config.json").read_text()))


@dataclass(frozen=True)
class Limits:
    """Times in seconds that a decoder needs at least on a card."""

    decoder: Decoder
    rates: Rates

    def products(self, num_tokens: int, num_logits: int) -> float:
        """Return the time of all matmuls with weights, for `num_tokens` tokens, some of which need logits."""
        both = ((self.decoder.layers, num_tokens), (self.decoder.head, num_logits))
        read = sum(weights for weights, count in both if count) * BYTES
        operations = sum(2 * weights * count for weights, count in both)
        return max(read / self.rates.bytes_per_s, operations / self.rates.operations_per_s)

    def step(self, batch: int, num_cached: float) -> float:
        """Return the time of a decode step of `batch` rows that reads `num_cached` different tokens of KV."""
        return self.products(batch, batch) + num_cached * self.decoder.kv_bytes / self.rates.bytes_per_s

    def prefill(self, num_tokens: int, num_pairs: float, num_logits: int) -> float:
        """Return the time of a prefill whose tokens attend to `num_pairs` tokens in all, themselves included."""
        attention = num_pairs * self.decoder.attention / self.rates.operations_per_s
        return self.products(num_tokens, num_logits) + attention


def pairs(past: int, new: int) -> float:
    """Return the number of token pairs in the attention of `new` tokens after `past` cached ones."""
    return new * past + new * (new + 1) / 2


def limits(decoder: Decoder, rates: Rates, sizes: Sizes) -> dict[str, dict[str, float]]:
    """Return the best possible figures of each section, by the names under which engines report them."""
    card = Limits(decoder, rates)
    found: dict[str, dict[str, float]] = {}
    for batch in sizes.batches:
        context = sizes.prompt + sizes.new / 2
        found[f"a{batch}"] = {"ms_per_step": 1e3 * card.step(batch, batch * context)}
    found["b"] = {"requests_per_s": sizes.sharers / _shared_prefix(card, sizes)}
    found["c"] = {"requests_per_s": sizes.levels * sizes.questions * sizes.branches / _tree(card, sizes)}
    found["d"] = {"requests_per_s": sizes.turns * sizes.chats / _chat(card, sizes)}
    found["e"] = {"free_tokens_per_s": sizes.documents * sizes.text / _free_text(card, sizes)}
    for letter, count, length in (
        ("f", sizes.long_prompts, sizes.long),
        ("g", sizes.longest_prompts, sizes.longest),
    ):
        found[letter] = {"tokens_per_s": count * length / card.prefill(count * length, count * pairs(0, length), count)}
    return found


def _shared_prefix(card: Limits, sizes: Sizes) -> float:
    many = sizes.sharers
    looked_at = pairs(0, sizes.shared) + many * pairs(sizes.shared, sizes.own)
    cached = sizes.shared + many * (sizes.own + sizes.shared_new / 2)
    prefill = card.prefill(sizes.shared + many * sizes.own, looked_at, many)
    return prefill + (sizes.shared_new - 1) * card.step(many, cached)


def _tree(card: Limits, sizes: Sizes) -> float:
    rows, total = sizes.questions * sizes.branches, 0.0
    for level in range(sizes.levels):
        path = sizes.question + level * (sizes.branch + sizes.answer)  # of one question, after the common tokens
        new = rows * sizes.branch + (sizes.common + sizes.questions * sizes.question if level == 0 else sizes.questions)
        total += card.prefill(new, rows * pairs(sizes.common + path, sizes.branch), rows)
        cached = sizes.common + sizes.questions * path + rows * (sizes.branch + sizes.answer / 2)
        total += (sizes.answer - 1) * card.step(rows, cached)
    return total


def _chat(card: Limits, sizes: Sizes) -> float:
    rows, total = sizes.chats, 0.0
    for turn in range(sizes.turns):
        past = turn * (sizes.said + sizes.answer)
        total += card.prefill(rows * sizes.said, rows * pairs(past, sizes.said), rows)
        total += (sizes.answer - 1) * card.step(rows, rows * (past + sizes.said + sizes.answer / 2))
    return total


def _free_text(card: Limits, sizes: Sizes) -> float:
    rows = sizes.documents
    prefill = card.prefill(rows * sizes.document, rows * pairs(0, sizes.document), rows)
    return prefill + (sizes.text - 1) * card.step(rows, rows * (sizes.document + sizes.text / 2))


def measure_rates() -> Rates:
    """Time a large copy and a large matrix product on the GPU. Medians of ten; random numbers, never zeros."""
    import torch

    def median_s(function: Any) -> float:
        for _ in range(3):
            function()
        times: list[float] = []
        for _ in range(10):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            function()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return sorted(times)[len(times) // 2]

    source = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_s = median_s(lambda: a @ b)
    return Rates(2 * source.nbytes / copy_s, 2 * 8192**3 / product_s)


if __name__ == "__main__":
    measured = measure_rates()
    print(json.dumps({"bytes_per_s": measured.bytes_per_s, "operations_per_s": measured.operations_per_s}))
