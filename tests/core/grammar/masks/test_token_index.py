"""The index of a vocabulary: the same from disk, and built anew when what is on disk is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from graftlm.core.grammar.masks import trie
from graftlm.core.grammar.masks.trie import SortedTokens, TokenIndex

TOKENS = [b"ab", b"a", "é".encode(), b"", b"\xc3", b"abc", b"a", b"b\xff"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRAFTLM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(trie, "_FEWEST_TOKENS", 1)
    return tmp_path / "vocabularies"


def same(one: TokenIndex, other: TokenIndex) -> bool:
    arrays = [(vars(one.tokens)[name], vars(other.tokens)[name]) for name in vars(one.tokens)]
    arrays += [
        (one.trie.nodes, other.trie.nodes),
        (one.trie.twins, other.trie.twins),
        (one.trie.roots, other.trie.roots),
    ]
    return one.trie.max_depth == other.trie.max_depth and all((a == b).all() and a.dtype == b.dtype for a, b in arrays)


def test_an_index_comes_back_from_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = TokenIndex.of(TOKENS, "f")
    monkeypatch.setattr(SortedTokens, "of", None)
    assert same(TokenIndex.of(TOKENS, "f"), built)


def test_a_damaged_file_is_built_anew(folder: Path) -> None:
    built = TokenIndex.of(TOKENS, "f")
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert same(TokenIndex.of(TOKENS, "f"), built)
    assert path.stat().st_size == len(whole)


def test_small_vocabularies_are_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trie, "_FEWEST_TOKENS", 100)
    TokenIndex.of(TOKENS, "f")
    assert not folder.exists()


def test_what_is_known_of_tokens() -> None:
    found = SortedTokens.of(TOKENS)
    assert found.ids.tolist() == [1, 6, 0, 5, 7, 4, 2]
    assert found.num_characters.tolist() == [1, 1, 2, 3, 2, 1, 1]
    assert found.whole_characters.tolist() == [True, True, True, True, False, False, True]
