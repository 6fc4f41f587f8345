"""Every test finds LlamaIndex's settings as a new process does."""

from __future__ import annotations

import llama_index.core
import pytest

from graftlm.adapters.llama_index import llm


@pytest.fixture(autouse=True)
def no_tokenizer_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_index.core, "global_tokenizer", None)
    monkeypatch.setattr(llm, "_compared", set())
