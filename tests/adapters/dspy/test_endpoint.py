"""DSPy at an endpoint: replies that lack a field, several answers as one request."""

from __future__ import annotations

from typing import Any

import dspy
import pytest

from graftlm.adapters.dspy import BestOfN, GraftLM
from tests.core.remote.models import Model, answers, tokenise
from tests.core.remote.server import Server

REPLY = "[[ ## name ## ]]\nAnn\n\n[[ ## city ## ]]\nthe old town of Bonn\n\n[[ ## completed ## ]]"
COUNTS = {"1 to 20": "1 2 3 4 5 6 7 8 9"}


class Person(dspy.Signature):
    """Who is it?"""

    text: str = dspy.InputField()
    name: str = dspy.OutputField()
    city: str = dspy.OutputField()


def ask(server: Server, **options: Any) -> tuple[dspy.Prediction, dspy.LM]:
    lm = GraftLM("m", base_url=server.url, cache=False, **options)
    with dspy.context(lm=lm, adapter=dspy.ChatAdapter()):
        return dspy.Predict(Person)(text="Ann of Bonn"), lm


def lacking(reply: str) -> Model:
    """Ends its reply early, and says the rest where it is gone on with, in either manner."""

    def model(prompt: str, draw: float | None) -> str | None:
        begun = prompt.rpartition("<assistant>")[2]
        told = prompt.rpartition("<assistant>")[0].rpartition("begin with: ")[2] if "begin with: " in prompt else ""
        if told:
            return answers({"": REPLY[REPLY.index(told) :]})(prompt, draw)
        texts = {"Ann": REPLY if begun.startswith(reply + "\n\n[[ ## city") else reply}
        return answers(COUNTS | texts)(prompt, draw)

    return model


@pytest.mark.parametrize("manner", ["continue_final_message", "none"])
def test_a_missing_field_alone_is_asked_for(manner: str) -> None:
    with Server(lacking("[[ ## name ## ]]\nAnn"), continue_turn=manner) as server:
        done, lm = ask(server)
        assert (done.name, done.city) == ("Ann", "the old town of Bonn")
        first, *probes, last = server.calls
        assert len(probes) == {"continue_final_message": 1, "none": 3}[manner]
        turns = last.body["messages"]
        at = -1 if manner == "continue_final_message" else -2
        assert turns[at]["role"] == "assistant" and turns[at]["content"].startswith(
            "[[ ## name ## ]]\nAnn\n\n[[ ## city"
        )
        assert last.completion_tokens < len(tokenise(REPLY))  # the name is not written again
        assert lm.history[-1]["usage"]["prompt_tokens"] == first.prompt_tokens + last.prompt_tokens


@pytest.mark.parametrize("manner", ["continue_final_message", "none"])
@pytest.mark.parametrize("max_tokens", [20, 23, 28, 31, 36])
def test_a_cut_field_is_gone_on_with(manner: str, max_tokens: int) -> None:
    with Server(lacking(REPLY), continue_turn=manner) as server:
        done, _ = ask(server, max_tokens=max_tokens)
        assert (done.name, done.city) == ("Ann", "the old town of Bonn")


def test_a_whole_reply_is_one_call() -> None:
    with Server(answers({"Ann": REPLY})) as server:
        assert ask(server)[0].city == "the old town of Bonn"
        assert len(server.calls) == 1


def test_cut_json_is_gone_on_with() -> None:
    whole = '{"name": "Ann", "city": "the old town of Bonn"}'
    with Server(answers(COUNTS | {"Ann": whole, "Say hello": "hello"})) as server:
        lm = GraftLM("m", base_url=server.url, cache=False, max_tokens=17)
        with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
            assert dspy.Predict(Person)(text="Ann of Bonn").city == "the old town of Bonn"


def test_n_answers_are_one_request_whose_bill_is_counted_once() -> None:
    with Server(answers({"Ann": REPLY})) as server:
        lm = GraftLM("m", base_url=server.url, cache=False, temperature=0.7)
        with dspy.context(lm=lm, adapter=dspy.ChatAdapter()):
            done = dspy.Predict(Person, n=3)(text="Ann of Bonn")
        assert done.completions.name == ["Ann"] * 3
        assert [call.body.get("n") for call in server.calls] == [3]
        usage = lm.history[-1]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == server.totals()[1:]


async def test_n_answers_are_one_request_on_an_event_loop() -> None:
    with Server(answers({"Ann": REPLY})) as server:
        lm = GraftLM("m", base_url=server.url, cache=False, temperature=0.7)
        with dspy.context(lm=lm, adapter=dspy.ChatAdapter()):
            done = await dspy.Predict(Person, n=2).acall(text="Ann of Bonn")
        assert (done.completions.name, len(server.calls)) == (["Ann"] * 2, 1)


@pytest.mark.parametrize(("good_from", "requests"), [(1, [3]), (3, [3]), (4, [3, 2]), (99, [3, 2])])
def test_best_of_n_takes_its_attempts_from_two_requests(good_from: int, requests: list[int]) -> None:
    seen: list[str] = []

    def reward(_: Any, made: dspy.Prediction) -> float:
        seen.append(made.name)
        return float(len(seen) >= good_from)

    with Server(answers({"Ann": REPLY})) as server:
        lm = GraftLM("m", base_url=server.url, cache=False)
        with dspy.context(lm=lm, adapter=dspy.ChatAdapter()):
            best = BestOfN(module=dspy.Predict(Person), N=5, reward_fn=reward, threshold=1.0)
            assert best(text="Ann of Bonn").name == "Ann"
        assert len(seen) == min(good_from, 5)
        assert [call.body.get("n") for call in server.calls] == requests


def test_a_reply_of_no_form_is_not_paid_for_again() -> None:
    """An answer that does not meet its schema used to count as a server's error, which DSPy asks for four times."""
    with Server(answers({"Ann": "no json", "Say hello": "hello"})) as server:
        lm = GraftLM("m", base_url=server.url, cache=False, temperature=0)
        with pytest.raises(Exception, match="no json"):
            lm("Ann", response_format={"type": "json_schema", "json_schema": {"schema": {"const": [1]}, "name": "x"}})
        asked = [call for call in server.calls if call.body["messages"][0]["content"].startswith("Ann")]
        assert len(asked) == 5  # once, and each of two attempts to mend it in two manners
