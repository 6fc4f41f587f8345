from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.exceptions import ModelInvalidRequestError
from langchain_core.messages import HumanMessage

from graftlm.core.runtime import Runtime
from tests.models import byte_tokenizer, tiny_model
from tests.test_docs import ROOT, blocks

decisions = pytest.importorskip("langchain_core.decisions", reason="decision models came with langchain-core 1.8")
from graftlm.adapters.langchain import GraftDecisionModel  # noqa: E402

STATE = "Production is down, please help at once. " * 30
QUESTIONS: dict[str, Any] = {
    "urgent": decisions.Noul(instructions="Is it urgent?"),
    "team": decisions.Choice(instructions="Who?", criteria={"billing": "money", "technical": None, "sales": "deals"}),
    "anger": decisions.Score(instructions="How angry?", criteria=["calm", "annoyed", "furious"]),
}


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with Runtime(tiny_model(max_position_embeddings=4096), tokenizer=byte_tokenizer()) as runtime:
        yield runtime


@pytest.fixture
def model(runtime: Runtime) -> Any:
    runtime.clear_cache()
    runtime.reset_stats()
    return GraftDecisionModel(runtime=runtime)


def test_every_question_gets_an_answer_of_its_kind(model: Any) -> None:
    response = model.invoke({"state": STATE, "questions": QUESTIONS})
    team, anger = response.choices["team"], response.scores["anger"]
    assert 0 <= response.nouls["urgent"].noul <= 1
    assert sum(team.probabilities.values()) == pytest.approx(1)
    assert team.choice == max(team.probabilities, key=team.probabilities.get)
    assert team.confidence == max(team.probabilities.values())
    assert anger.score == pytest.approx(sum(level * p for level, p in anger.probabilities.items()))
    assert anger.legend == {0: "calm", 1: "annoyed", 2: "furious"}


def test_the_state_is_computed_once(model: Any, runtime: Runtime) -> None:
    model.invoke({"state": STATE, "questions": QUESTIONS})
    assert runtime.stats().computed_tokens < 1.6 * len(STATE)


def test_a_labels_probability_is_that_of_the_model_writing_it(model: Any, runtime: Runtime) -> None:
    response = model.invoke({"state": "hello", "questions": {"team": QUESTIONS["team"]}})
    from graftlm.adapters.langchain.decisions import _ask, _state_messages

    prompt = [_ask(_state_messages("hello")[0], QUESTIONS["team"])]
    chosen = runtime.select(prompt, ["billing", "technical", "sales"], method="exact")
    assert list(response.choices["team"].probabilities.values()) == pytest.approx(list(chosen.probabilities))


def test_async_and_sync_agree_and_messages_may_be_the_state(model: Any) -> None:
    request = {"state": [HumanMessage("It is down.")], "questions": QUESTIONS}
    answer = asyncio.run(model.ainvoke(request))
    # the second call finds the prompt cached, and a prefill in other pieces rounds otherwise
    expected = pytest.approx(model.invoke(request).choices["team"].probabilities, rel=1e-4)
    assert answer.choices["team"].probabilities == expected


def test_json_with_messages_inside_may_be_the_state(model: Any) -> None:
    state = {"plan": "free", "chat": [HumanMessage("hi")], "count": 3}
    assert model.invoke({"state": state, "questions": {"urgent": QUESTIONS["urgent"]}}).nouls


def test_the_example_of_the_page_runs() -> None:
    (example,) = [b for b in blocks(ROOT / "docs/langchain.md") if b.skip == "needs langchain-core 1.8"]
    names: dict[str, Any] = {}
    exec(example.code, names)
    assert set(names["response"].choices["team"].probabilities) == {"billing", "technical"}


def test_questions_about_images_and_none_at_all_raise(model: Any) -> None:
    with pytest.raises(ModelInvalidRequestError, match="Box"):
        model.invoke({"state": "x", "questions": {"where": decisions.Box(instructions="the cat")}})
    with pytest.raises(ModelInvalidRequestError, match="questions is empty"):
        model.invoke({"state": "x", "questions": {}})
