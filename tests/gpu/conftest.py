"""Few graphs, so that a runtime over a tiny model starts in a moment."""

from __future__ import annotations

import pytest

from graftlm.core import graphs


@pytest.fixture(autouse=True)
def few_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "LADDER", (1, 2, 4, 8, 16))
