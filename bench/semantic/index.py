"""The index of the semantic cache: the time of a search by product and through a graph, by the entries of a context."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator

import numpy as np

from bench.harness import Options, Row, timed
from graftlm.core.semantic_cache.index import GraphIndex, ProductIndex

SIZE, QUESTIONS, WORDINGS = 384, 200, 4


def run(options: Options) -> Iterator[Row]:
    if importlib.util.find_spec("faiss") is None:
        print("index: skipped, faiss is not installed; pip install 'graftlm[semantic]'", file=sys.stderr)
        return
    for count in options.choose((1_000, 4_000), (500, 1_000, 2_000, 4_000, 10_000, 40_000)):
        rows, asked = _texts(count)
        exact = ProductIndex()
        for number, row in enumerate(rows):
            exact.add(number, row)
        graph = GraphIndex(exact)
        graph._move(count)
        pairs = [
            [timed(lambda row=row, index=index: index.nearest(row)) for index in (graph, exact)]  # type: ignore[misc]
            for row in asked
        ]
        found, product = (float(np.median(column)) * 1e6 for column in zip(*pairs, strict=True))
        equal = sum(graph.nearest(row)[0] == exact.nearest(row)[0] for row in asked)
        yield Row("index", f"{count:,} entries: a search through the graph, baseline by product", found, "us", product,
                  ratio=product / found)  # fmt: skip
        yield Row("index", f"{count:,} entries: the nearest is found", 100 * equal / len(asked), "%")


def _texts(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return embeddings in clusters of wordings, and other wordings of some; float32 [num, SIZE], of length 1."""
    rng = np.random.default_rng(0)
    meanings = rng.standard_normal((count // WORDINGS, SIZE), np.float32)
    rows = np.repeat(meanings, WORDINGS, 0) + 0.3 * rng.standard_normal((count, SIZE), np.float32)
    asked = rows[rng.integers(0, count, QUESTIONS)] + 0.1 * rng.standard_normal((QUESTIONS, SIZE), np.float32)
    return tuple(x / np.linalg.norm(x, axis=1, keepdims=True) for x in (rows, asked))  # type: ignore[return-value]
