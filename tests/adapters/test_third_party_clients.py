"""Clients of others against a real `graftlm serve`: the examples of docs/serve.md as they are printed."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from tests.served import Served, started
from tests.test_docs import ROOT, blocks

EXAMPLES = {
    client: next(
        block.code
        for block in blocks(ROOT / "docs/serve.md")
        if f"import {client}" in block.code or f"from {client} " in block.code
    )
    for client in ("litellm", "instructor", "pydantic_ai")
}


@pytest.fixture(autouse=True)
def own_event_loop() -> Iterator[None]:
    """A client that finds no event loop makes one; it leaves that open, and its connections."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()
    gc.collect()  # while the test's warnings are ignored


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with started(tmp_path_factory.mktemp("server"), "sprout", "--option", "dtype=float32") as served:
        served.wait_ready()
        yield served


def run(client: str, server: Served) -> dict[str, Any]:
    """What the example of a client leaves behind."""
    if importlib.util.find_spec(client) is None:
        pytest.skip(f"{client} is not installed; install graftlm[test-third-party]")
    names: dict[str, Any] = {"__name__": "example"}
    exec(EXAMPLES[client].replace("http://localhost:8000", server.url), names)
    return names


@pytest.mark.filterwarnings("ignore")
def test_litellm(server: Served) -> None:
    answer = run("litellm", server)["answer"]
    assert answer.choices[0].message.content and answer.model.endswith("sprout")
    assert 0 < answer.usage.completion_tokens <= 20 < answer.usage.total_tokens


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("client", ["instructor", "pydantic_ai"])
def test_an_object_is_read_at_the_first_try(server: Served, client: str) -> None:
    person = run(client, server)["person"]
    assert (person.name, person.job) == ("Mara", "baker")
