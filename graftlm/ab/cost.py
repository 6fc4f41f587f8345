"""The price of an endpoint's tokens."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from graftlm.ab.measure.profile import Work
from graftlm.core.errors import ConfigError


def read_prices(text: str | None) -> tuple[float, float] | None:
    """Parse prices of a million prompt and completion tokens, as "0.15,0.6". Raises: ConfigError for any other text."""
    if text is None:
        return None
    try:
        prompt, completion = (float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--prices is {text!r}; give the price of a million prompt and completion tokens: 0.15,0.6"
        ) from None
    if prompt < 0 or completion < 0:
        raise ConfigError(f"--prices is {text!r}; a price must be at least 0")
    return prompt, completion


def cost_of(engine: str, model: str, work: Work, prices: tuple[float, float] | None) -> float | None:
    """Return the price of one round; None for an engine on this machine, or if tokens or prices are unknown.

    Without `prices` the package genai-prices supplies them, if it is installed.
    """
    name, _, url = engine.partition(":")
    if name != "openai" or work.prompt_tokens is None or work.completion_tokens is None:
        return None
    if prices is not None:
        return (work.prompt_tokens * prices[0] + work.completion_tokens * prices[1]) / 1e6
    if find_spec("genai_prices") is None:
        return None
    import genai_prices  # type: ignore[import-not-found,unused-ignore]

    usage: Any = genai_prices.Usage(input_tokens=work.prompt_tokens, output_tokens=work.completion_tokens)
    try:
        return float(genai_prices.calc_price(usage, model, provider_api_url=url).total_price)
    except LookupError:  # a model without a known price
        return None
