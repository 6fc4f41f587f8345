from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from graftlm.core.errors import ConfigError
from graftlm.core.request import Completion, Usage
from graftlm.core.semantic_cache import index as module
from graftlm.core.semantic_cache.index import GraphIndex, ProductIndex, check_kind, grown
from graftlm.core.semantic_cache.semantic_cache import SemanticCache

HAS_FAISS = importlib.util.find_spec("faiss") is not None


def rows(count: int) -> np.ndarray:
    found = np.random.default_rng(0).standard_normal((count, 16), np.float32)
    return np.asarray(found / np.linalg.norm(found, axis=1, keepdims=True))


def filled(count: int) -> tuple[ProductIndex, np.ndarray]:
    found, made = ProductIndex(), rows(count)
    for number, row in enumerate(made):
        found.add(number, row)
    return found, made


@pytest.mark.parametrize("graph", [False, pytest.param(True, marks=pytest.mark.skipif(not HAS_FAISS, reason="faiss"))])
def test_removed_rows_are_never_found_and_the_others_are(graph: bool) -> None:
    exact, made = filled(60)
    index: Any = GraphIndex(exact) if graph else exact
    rng = np.random.default_rng(1)
    alive = set(range(60))
    for number in rng.permutation(60)[:58].tolist():
        index.remove(number)
        alive.discard(number)
        assert {index.nearest(made[one])[0] for one in alive} == alive
        assert index.nearest(made[number])[0] in alive
    for number in range(99, 109):
        index.add(number, made[number - 99])
    assert not graph or index.complete
    assert [index.nearest(row)[0] for row in made[:10]] == [*range(99, 109)]


@pytest.mark.skipif(not HAS_FAISS, reason="faiss")
def test_large_contexts_become_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE", 10)
    assert isinstance(grown(filled(9)[0], "auto"), ProductIndex)
    assert isinstance(grown(filled(10)[0], "auto"), GraphIndex)
    assert isinstance(grown(filled(10)[0], "numpy"), ProductIndex)
    assert isinstance(grown(filled(1)[0], "faiss"), GraphIndex)


@pytest.mark.parametrize("kind", ["numpy", *(["faiss"] if HAS_FAISS else [])])
def test_a_full_cache_finds_what_it_kept_last(kind: Any) -> None:
    cache, made = SemanticCache(embedder=len, index=kind, max_entries=20, strict_words=False), rows(50)
    for number, row in enumerate(made):
        cache.keep("", f"{number}", row, Completion(f"{number}", [], "stop", Usage()))
    found = [cache.find("", "?", row) for row in made]
    assert [one.text if one else None for one in found] == [None] * 30 + [f"{number}" for number in range(30, 50)]


def test_other_kinds_and_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="index is 'hnsw'; use 'auto', 'numpy' or 'faiss'"):
        SemanticCache(index="hnsw")  # type: ignore[arg-type]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'graftlm\[semantic\]', or use 'numpy'"):
        check_kind("faiss")
