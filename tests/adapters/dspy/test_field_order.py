from __future__ import annotations

import pickle

import dspy
import pytest

from graftlm.adapters.dspy import GraftAdapter
from graftlm.core.errors import ConfigError


class Job(dspy.Signature):
    """Answer."""

    question: str = dspy.InputField()
    guide: str = dspy.InputField()
    answer: str = dspy.OutputField()


EXAMPLES = [dspy.Example(question=f"q{i}", guide="same").with_inputs("question", "guide") for i in range(3)]


def test_fields_that_rarely_change_come_first_in_all_messages() -> None:
    adapter = GraftAdapter(order_fields_by=EXAMPLES)
    demos = [{"question": "a", "guide": "b", "answer": "c"}]
    for one in (adapter, pickle.loads(pickle.dumps(adapter))):
        messages = one.format(Job, demos, {"question": "q", "guide": "g"})
        for content in (messages[0]["content"], messages[1]["content"], messages[-1]["content"]):
            assert content.index("guide") < content.index("question")
    stock = dspy.ChatAdapter().format(Job, demos, {"question": "q", "guide": "g"})
    assert GraftAdapter().format(Job, demos, {"question": "q", "guide": "g"}) == stock


def test_too_few_examples_are_named() -> None:
    with pytest.raises(ConfigError, match="order_fields_by has 1 examples; give at least two"):
        GraftAdapter(order_fields_by=EXAMPLES[:1])
