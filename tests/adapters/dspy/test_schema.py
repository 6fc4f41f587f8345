from __future__ import annotations

from typing import Any, Literal

import dspy

from graftlm.adapters.dspy.wire import asked_object


class Every(dspy.Signature):
    """Every kind of type that DSPy prints."""

    question: str = dspy.InputField()
    thought: str = dspy.OutputField()
    tool: Literal["a`b", "it's, then `c`", "(d)"] = dspy.OutputField()
    count: int = dspy.OutputField()
    share: float = dspy.OutputField()
    sure: bool = dspy.OutputField()
    arguments: dict[str, Any] = dspy.OutputField()
    names: list[str] = dspy.OutputField()


def test_the_fields_of_an_object_without_a_schema_are_read_from_the_prompt_of_json_adapter() -> None:
    prompt = dspy.JSONAdapter().format(Every, [], {"question": "x"})[-1]["content"]
    schema = asked_object(prompt)
    assert schema["properties"] == {
        "thought": {"type": "string"},
        "tool": {"enum": ["a`b", "it's, then `c`", "(d)"]},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "sure": {"type": "boolean"},
        "arguments": {"type": "object"},
        "names": {},
    }
    assert schema["required"] == list(schema["properties"])
    assert asked_object("Answer as JSON.") == {"type": "object"}
