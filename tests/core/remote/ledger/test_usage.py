"""What calls cost: as the server counted, in tokens and money, within a budget."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import graftlm as gl
from graftlm.core.errors import ConfigError, RemoteError
from tests.core.remote.models import writes
from tests.core.remote.server import Fault, Server


def runtime(server: Server, **options: Any) -> gl.Runtime:
    return gl.Runtime("m", base_url=server.url, **options).load()


def test_what_was_spent_is_what_the_server_counted() -> None:
    with Server(writes("some words"), faults=[None, Fault(500)]) as server, runtime(server) as rt:
        with ThreadPoolExecutor(16) as pool:
            done = list(pool.map(lambda i: rt.generate(f"{i}: "), range(64)))
        total = sum((d.usage for d in done), start=gl.Usage())
        spent = rt.usage
        assert spent.api_calls + spent.retries == len(server.calls) == 65
        assert server.totals()[1:] == (spent.prompt_tokens, spent.completion_tokens)
        assert (total.prompt_tokens, total.completion_tokens) == (spent.prompt_tokens, spent.completion_tokens)


def test_a_price_list_makes_tokens_money_and_an_unknown_price_is_none() -> None:
    with Server(writes("a b")) as server:
        prices = {"input": 2.0, "cached": 0.5, "output": 10.0}
        with runtime(server, prices=prices) as rt:
            first, second = rt.generate("go "), rt.generate("go ")
            assert first.usage.cost == pytest.approx((2 * 2.0 + 3 * 10.0) / 1e6)
            assert second.usage.cost == pytest.approx((2 * 0.5 + 3 * 10.0) / 1e6)  # the whole prompt was cached
        with runtime(server) as rt:
            assert rt.generate("go ").usage.cost is None


@pytest.mark.parametrize("usage", ["absent", "null"])
def test_tokens_that_are_not_reported_are_estimated_and_marked(usage: str) -> None:
    with Server(writes("12345678"), usage=usage) as server, runtime(server) as rt:
        found = rt.generate("go go go").usage
        assert (found.prompt_tokens, found.completion_tokens, found.estimated, found.cached_unknown) == (2, 2, 1, 1)


def test_a_budget_is_never_exceeded_in_calls() -> None:
    with Server(writes("x"), faults=[Fault(500)]) as server, runtime(server, budget={"calls": 3}) as rt:
        rt.generate("go ")
        rt.generate("go ")
        with pytest.raises(RemoteError, match="the budget of .* is spent: 3 of 3 calls; raise budget="):
            rt.generate("go ")
        assert len(server.requests) == 3  # the repeated one counts too
    with Server(writes("x")) as server, runtime(server, budget={"cost": 1.0}) as rt:
        rt.generate("go ")
        with pytest.raises(ConfigError, match="the price of model 'm' is unknown; give prices="):
            rt.generate("go ")
