"""Index: the embeddings of the entries of one context, searched by product or through a graph of neighbours."""

from __future__ import annotations

import importlib.util
from itertools import islice
from typing import Any, Literal

import numpy as np

from graftlm.core.errors import ConfigError

Kind = Literal["auto", "numpy", "faiss"]

LARGE = 8_000
"""Entries of one context from which on "auto" builds a graph; `python -m bench semantic index` measures both."""

_LINKS, _BUILD, _SEARCH, _NEAR, _MOVED = 16, 64, 64, 8, 16


def check_kind(kind: Any) -> Kind:
    """Return a valid kind of index. Raises: ConfigError for another kind, or without the package that it needs."""
    if kind not in ("auto", "numpy", "faiss"):
        raise ConfigError(f"index is {kind!r}; use 'auto', 'numpy' or 'faiss'")
    if kind == "faiss" and importlib.util.find_spec("faiss") is None:
        raise ConfigError("index is 'faiss', which is not installed; pip install 'graftlm[semantic]', or use 'numpy'")
    return kind  # type: ignore[no-any-return]


class ProductIndex:
    """Embeddings of length 1 by number, in one array, float32 [capacity, size]: a search is one product, and exact."""

    def __init__(self) -> None:
        self._rows = np.zeros((0, 0), np.float32)
        self.numbers: list[int] = []
        self._places: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def rows(self) -> np.ndarray:
        """The rows in the order of `numbers`, float32 [num_rows, size]."""
        return self._rows[: len(self.numbers)]

    def of(self, numbers: list[int]) -> np.ndarray:
        """Return the rows of `numbers`, float32 [num_numbers, size]."""
        return self._rows[[self._places[number] for number in numbers]]

    def add(self, number: int, row: np.ndarray) -> None:
        count = len(self.numbers)
        if count == len(self._rows):
            grown = np.zeros((max(8, 2 * count), len(row)), np.float32)
            grown[:count] = self._rows if count else 0
            self._rows = grown
        self._rows[count] = row
        self._places[number] = count
        self.numbers.append(number)

    def remove(self, number: int) -> None:
        """Move the last row to the place of the removed one."""
        place, last = self._places.pop(number), self.numbers.pop()
        if last != number:
            self._rows[place] = self._rows[len(self.numbers)]
            self.numbers[place], self._places[last] = last, place

    def nearest(self, row: np.ndarray) -> tuple[int, float]:
        """Return the number with the largest cosine to `row`, and the cosine. The index is not empty."""
        cosines = self.rows @ row
        best = int(cosines.argmax())
        return self.numbers[best], float(cosines[best])


class GraphIndex:
    """A graph of near neighbours (HNSW, faiss): a search visits few rows, and may miss the nearest.

    Each addition moves up to 16 rows into the graph, so that no call blocks for seconds; until all are there, the
    product searches. Removed rows stay in the graph and are skipped; when they are half of it, a new one begins.
    """

    def __init__(self, rows: ProductIndex) -> None:
        self._rows = rows
        self._restart()
        self._move(1)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def complete(self) -> bool:
        """True if all rows are in the graph."""
        return not self._due

    def add(self, number: int, row: np.ndarray) -> None:
        self._rows.add(number, row)
        self._due[number] = None
        self._move(_MOVED)

    def remove(self, number: int) -> None:
        self._rows.remove(number)
        if number in self._due:
            del self._due[number]
        else:
            self._removed.add(number)
        if 2 * len(self._removed) > len(self._numbers) and len(self):
            self._restart()

    def nearest(self, row: np.ndarray) -> tuple[int, float]:
        """Return the number with the largest cosine to `row`, or a near one, and the cosine."""
        if self.complete:
            cosines, places = self._graph.search(row[None], _NEAR)
            for cosine, place in zip(cosines[0], places[0], strict=True):
                if place >= 0 and self._numbers[place] not in self._removed:
                    return self._numbers[place], float(cosine)
        return self._rows.nearest(row)

    def _restart(self) -> None:
        import faiss  # type: ignore[import-not-found, import-untyped, unused-ignore]

        self._due = dict.fromkeys(self._rows.numbers)
        self._numbers, self._removed = list[int](), set[int]()
        self._graph = faiss.IndexHNSWFlat(self._rows.rows.shape[1], _LINKS, faiss.METRIC_INNER_PRODUCT)
        self._graph.hnsw.efConstruction, self._graph.hnsw.efSearch = _BUILD, _SEARCH

    def _move(self, count: int) -> None:
        moved = [*islice(self._due, count)]
        if moved:
            self._graph.add(self._rows.of(moved))
            self._numbers += moved
            for number in moved:
                del self._due[number]


def grown(index: ProductIndex | GraphIndex, kind: Kind) -> ProductIndex | GraphIndex:
    """Return the index as a graph if it is large enough for one, or if one was asked for."""
    if isinstance(index, GraphIndex) or kind == "numpy" or not len(index):
        return index
    if kind == "faiss" or (len(index) >= LARGE and importlib.util.find_spec("faiss") is not None):
        return GraphIndex(index)
    return index
