"""One `graftlm serve sprout` process for the tests of this folder, on a free port of 127.0.0.1."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.served import Served, started


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with started(tmp_path_factory.mktemp("server"), "sprout", "--option", "dtype=float32") as served:
        served.wait_ready()
        yield served


@pytest.fixture(scope="session")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
