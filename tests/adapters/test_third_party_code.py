"""DSPy's modules that run code in Deno (`pip install "dspy[deno]"`, or from npm), over `GraftLM` and both adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import dspy
import pytest
from dspy.primitives.code_interpreter import CodeInterpreterError

from graftlm.adapters.dspy import GraftAdapter, GraftLM
from graftlm.testing import ScriptedModel

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # these modules are deprecated, and the sandbox leaves its pipes open
    pytest.mark.parametrize("adapter", [GraftAdapter(), dspy.ChatAdapter()], ids=["GraftAdapter", "ChatAdapter"]),
]
END = "\n\n[[ ## completed ## ]]"
ANSWER = f"[[ ## reasoning ## ]]\nIt printed 12.\n\n[[ ## answer ## ]]\n12{END}"


def interpreter() -> dspy.PythonInterpreter:
    return dspy.PythonInterpreter()


@pytest.fixture(scope="module", autouse=True)
def deno() -> None:
    """Skip where Deno is missing, or cannot get what DSPy's sandbox is made of."""
    try:
        with interpreter() as sandbox:
            assert sandbox.execute("print(1 + 1)") == "2\n"
    except CodeInterpreterError as error:
        pytest.skip(f"DSPy's sandbox does not start: {str(error)[:100]}")


@contextmanager
def scripted(adapter: dspy.Adapter, script: Callable[[str], str]) -> Iterator[ScriptedModel]:
    """`script` writes a whole reply; where the adapter has begun it, what is left of it."""

    def rest(prompt: str) -> str:
        reply, begun = script(prompt), prompt.rpartition("assistant\n")[2]
        return reply.removeprefix(begun)

    model = ScriptedModel(rest)
    with model.runtime() as runtime:
        lm = GraftLM(runtime=runtime, temperature=0, max_tokens=200, cache=False)
        with dspy.context(lm=lm, adapter=adapter):
            yield model


def code(text: str) -> str:
    return f"[[ ## generated_code ## ]]\n```python\n{text}\n```"


def test_program_of_thought_mends_code_that_failed(adapter: dspy.Adapter) -> None:
    def script(prompt: str) -> str:
        if "[[ ## code_output ## ]]" in prompt:
            return ANSWER
        text = "SUBMIT({'answer': 3 * 4})" if "ZeroDivisionError" in prompt else "print(1 / 0)"
        return f"[[ ## reasoning ## ]]\nI multiply.\n\n{code(text)}{END}"

    with scripted(adapter, script) as model:
        made = dspy.ProgramOfThought("question -> answer: int", interpreter_factory=interpreter)(question="3 times 4?")
    assert made.answer == 12 and len(model.prompts) >= 3


def times(a: int, b: int) -> int:
    return a * b


def test_code_act_calls_its_tools(adapter: dspy.Adapter) -> None:
    def script(prompt: str) -> str:
        if "starting with the field `[[ ## generated_code ## ]]`" in prompt:
            return f"{code('print(times(3, 4))')}\n\n[[ ## finished ## ]]\nTrue{END}"
        return ANSWER

    with scripted(adapter, script):
        act = dspy.CodeAct("question -> answer: int", tools=[times], interpreter_factory=interpreter)
        made = act(question="3 times 4?")
    assert made.trajectory["code_output_0"] == '"12\\n"' and made.answer == 12
