"""The price of a call."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from graftlm.core.errors import ConfigError
from graftlm.core.remote.ledger.usage import RemoteUsage

if TYPE_CHECKING:
    from graftlm.core.remote.config import EndpointConfig

_PER = 1e6  # tokens that a price is stated for


class Prices:
    """Prices of the user's table, else of the endpoint's report, else of genai-prices. Unknown is None, never 0."""

    def __init__(self, config: EndpointConfig) -> None:
        self._config = config
        self._table = config.prices
        if self._table is not None and not {"input", "output"} <= set(self._table):
            raise ConfigError(f"prices is {dict(self._table)!r}; give both 'input' and 'output', per million tokens")
        self._known = self._table is None and not config.on_this_machine and find_spec("genai_prices") is not None

    async def cost(self, usage: RemoteUsage, found: Mapping[str, Any]) -> float | None:
        """Return the cost of a call with this usage, whose response body is `found`."""
        if self._table is not None:
            return cost_of(self._table, usage)
        reported = found.get("usage")
        value = reported.get("cost") if isinstance(reported, Mapping) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)  # OpenRouter
        if not self._known:
            return None
        return await asyncio.to_thread(self._look_up, usage)  # the first use reads a table of some megabytes

    def _look_up(self, usage: RemoteUsage) -> float | None:
        import genai_prices  # type: ignore[import-not-found,unused-ignore]

        tokens = genai_prices.Usage(
            input_tokens=usage.prompt_tokens,
            cache_read_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
        )
        try:
            price = genai_prices.calc_price(tokens, self._config.model, provider_api_url=self._config.base_url)
        except LookupError:
            return None
        return float(price.total_price)


def cost_of(table: Mapping[str, float], usage: RemoteUsage) -> float:
    """Return the cost by a table. Cached tokens are part of the prompt and cost as much, unless they have a price."""
    cached = table.get("cached", table["input"])
    fresh = usage.prompt_tokens - usage.cached_tokens
    return (fresh * table["input"] + usage.cached_tokens * cached + usage.completion_tokens * table["output"]) / _PER
