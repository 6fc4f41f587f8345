from __future__ import annotations

import pytest

from graftlm.core.chat.tools import Tool, named_apart
from graftlm.core.errors import ConfigError


@pytest.mark.parametrize("name", ["", "two words", 'quo"te', None])
def test_a_tool_needs_a_name_that_can_be_written(name: str) -> None:
    with pytest.raises(ConfigError, match="a tool is named"):
        Tool(name)


def test_something_that_is_no_tool_raises_and_shows_the_form() -> None:
    with pytest.raises(ConfigError, match="'type': 'function'"):
        Tool.from_openai({"nope": 1})
    with pytest.raises(ConfigError, match="field 'paramters' in tool 'f'; did you mean 'parameters'"):
        Tool.from_openai({"name": "f", "paramters": {"type": "object"}})
    with pytest.raises(ConfigError, match="field 'input_schema' in tool 'f'; did you mean 'parameters'"):
        Tool.from_openai({"name": "f", "input_schema": {"type": "object"}})
    with pytest.raises(ConfigError, match="takes a JSON object"):
        Tool("f", {"type": "string"})
    with pytest.raises(ConfigError, match="parameters of tool 'f' are 'x'; give a JSON schema"):
        Tool.from_openai({"name": "f", "parameters": "x"})


def test_two_tools_of_one_name_are_refused() -> None:
    assert named_apart([Tool("f"), Tool("g")]) == (Tool("f"), Tool("g"))
    with pytest.raises(ConfigError, match="tools has 2 tools named 'f'; give each a name of its own"):
        named_apart([Tool("f"), Tool("g"), Tool("f", {"type": "object"})])
