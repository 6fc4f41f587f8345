from __future__ import annotations

import pytest

from graftlm.ab.cost import cost_of, read_prices
from graftlm.ab.measure.profile import Work
from graftlm.core.errors import ConfigError

WORK = Work(calls=2, prompt_tokens=2_000_000, completion_tokens=500_000)


def test_an_endpoint_costs_its_tokens_and_an_engine_here_nothing_that_is_known() -> None:
    assert cost_of("openai:http://here/v1", "any", WORK, read_prices("0.5,2")) == 2.0
    assert cost_of("graftlm", "any", WORK, (0.5, 2.0)) is None
    assert cost_of("openai:http://here/v1", "any", Work(calls=2), (0.5, 2.0)) is None


@pytest.mark.parametrize("text", ["cheap", "1", "1,2,3", "-1,2"])
def test_prices_that_are_none_are_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="--prices is"):
        read_prices(text)
