"""Guidance programs on models at an endpoint, where guidance's own client refuses most of them."""

from __future__ import annotations

from typing import Any

import guidance
import pytest
from guidance import assistant, gen, json as gen_json, one_or_more, select, special_token, system, user

from graftlm.adapters.guidance import GraftModel
from graftlm.core.errors import ConfigError, RemoteError
from tests.core.remote.models import answers, babbles, continues, follows_layout, writes
from tests.core.remote.server import Server

FORM = 'Name: Ann\nAge: 31\nGood: yes, A7 {"a": 3} end. More'
KNOWN = {"continue_turn": "continue_final_message", "logprobs": False, "echo": False}
NOT_ENFORCED = dict.fromkeys(("regex", "choices", "json_schema", "grammar"), "none")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def model(server: Server, *, num_api_spec_tokens: int | None = None, echo: bool = False, **known: Any) -> GraftModel:
    capabilities = {**KNOWN, **NOT_ENFORCED, **known}
    return GraftModel(
        "m", base_url=server.url, capabilities=capabilities, echo=echo, num_api_spec_tokens=num_api_spec_tokens
    )


def test_texts_gens_stops_regexes_and_selects_are_one_call() -> None:
    with Server(continues(FORM)) as server:
        lm = model(server) + "Name: " + gen("name", stop="\n") + "\nAge: "
        lm += gen("age", regex=r"\d+") + "\nGood: " + select(["no", "yes"], name="good") + ", "
        assert (lm["name"], lm["age"], lm["good"]) == ("Ann", "31", "yes")
        before = len(server.calls)
        lm = model(server) + (
            "Name: " + gen("name", stop="\n") + "\nAge: " + gen("age", regex=r"\d+") + "\nGood: "
            + select(["no", "yes"], name="good") + ", " + gen("code", regex="[A-Z][0-9]") + " "
            + gen_json("json", schema=SCHEMA) + gen("rest", stop=".")
        )  # fmt: skip
        assert len(server.calls) == before + 1
        captured = {name: lm[name] for name in ("name", "age", "good", "code", "json", "rest")}
        assert captured == {
            "name": "Ann", "age": "31", "good": "yes", "code": "A7", "json": '{"a": 3}', "rest": " end",
        }  # fmt: skip
        assert str(lm) == FORM.removesuffix(". More")
        usage = lm.usage
        assert (usage.api_calls, usage.calls_saved) == (1, 5)
        assert usage.completion_tokens == server.calls[-1].completion_tokens
        assert lm._get_usage().round_trips == 1


@pytest.mark.parametrize("spec", [None, 64])
def test_what_is_appended_later_is_fetched_ahead_only_if_told_to(spec: int | None) -> None:
    with Server(continues(FORM)) as server:
        lm = model(server, num_api_spec_tokens=spec) + "Name: "
        lm += gen("name", stop="\n", max_tokens=8)
        lm += "\nAge: "
        lm += gen("age", regex=r"\d+", max_tokens=8)
        assert (lm["name"], lm["age"], len(server.calls)) == ("Ann", "31", 2 if spec is None else 1)


@pytest.mark.parametrize(("manner", "preamble"), [("continue_final_message", ""), ("none", ""), ("none", "Sure! ")])
def test_a_turn_of_texts_and_gens_on_a_chat_endpoint(manner: str, preamble: str) -> None:
    fields = {"name": "Ann", "age": "31"}
    written = answers({"Bonn": "Name: Ann\nAge: 31\n"}) if manner != "none" else follows_layout(fields, preamble)
    with Server(written, completions=False) as server:
        lm = model(server, continue_turn=manner)
        with system():
            lm += "You fill in forms."
        with user():
            lm += "Ann, 31, of Bonn."
        with assistant():
            lm += "Name: " + gen("name", stop="\n") + "\nAge: " + gen("age", regex=r"\d+") + "\n"
        assert (lm["name"], lm["age"]) == ("Ann", "31")
        assert len(server.calls) == (2 if preamble else 1)
        assert [turn["role"] for turn in server.calls[0].body["messages"]][:2] == ["system", "user"]


def test_constraints_are_native_where_the_endpoint_proves_to_keep_them() -> None:
    with Server(writes("hello"), constraints=["structured_outputs"]) as server:
        lm = model(server, regex=None, choices=None) + "Code: "
        lm += gen("code", regex="[xy]{3}") + " " + select(["yes", "no"], name="word")
        assert (lm["code"], lm["word"]) == ("xxx", "yes")


def test_captures_inside_of_a_grammar_are_read_off_its_text() -> None:
    @guidance(stateless=True, dedent=False)
    def items(lm: Any) -> Any:
        return lm + one_or_more(select([gen("words", regex="[a-z]+", list_append=True) + ";", "- "]))

    with Server(continues("List: ab;cd;- ef; Done")) as server:
        lm = model(server) + ("List: " + items() + " " + gen("rest", max_tokens=8))
        assert (lm["words"], lm["rest"]) == (["ab", "cd", "ef"], "Done")
        assert len(server.calls) == 1


def test_branches_of_one_object_share_what_is_greedy_and_nothing_sampled() -> None:
    with Server(babbles(["a", "b", "c", ";"], 3, end=90)) as server:
        base = model(server, num_api_spec_tokens=32) + "A: " + gen("a", max_tokens=4)
        one, two = (base + gen("b", max_tokens=4) for _ in range(2))
        assert one["b"] == two["b"] and str(one) == str(two)
    with Server(babbles(["a", "b", "c", ";"], 3, end=90)) as server:
        base = model(server, num_api_spec_tokens=32) + "A: " + gen("a", max_tokens=4, temperature=1.0)
        drawn = {(base + gen("b", max_tokens=4, temperature=1.0))["b"] for _ in range(8)}
        assert len(drawn) > 1


def test_lazy_objects_and_streams_work_at_an_endpoint() -> None:
    with Server(continues(FORM), seconds_per_token=0.002) as server:
        capabilities = {**KNOWN, **NOT_ENFORCED}
        lm = GraftModel("m", base_url=server.url, capabilities=capabilities, echo=False, lazy=True)
        assert [one["name"] for one in [lm + "Name: " + gen("name", stop="\n") for _ in range(3)]] == ["Ann"] * 3
        states = [str(state) for state in model(server).stream() + "Name: " + gen("name", stop="\n")]
        assert states[-1] == "Name: Ann"


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (gen("a", stop_regex="[.!]"), r"gen 'a' stops at the pattern '\[.!\]', and an endpoint stops at texts only"),
        (gen("a", stop=".", save_stop_text=True), "gen 'a' has save_stop_text=, and an endpoint does not tell"),
        (select([gen("a", max_tokens=3), "no"]), "a gen with max_tokens= stands inside a select or a repetition"),
        (special_token("<s>"), "special token"),
    ],
)
def test_what_needs_the_models_tokens_is_an_error_that_says_what_to_do(grammar: Any, reason: str) -> None:
    with Server(continues(FORM)) as server:
        lm = model(server) + "Name: "
        with pytest.raises(ConfigError, match=reason):
            lm + grammar
        assert server.requests == []


def test_a_list_of_stops_is_sent_as_texts() -> None:
    with Server(continues("A (b) | c. d")) as server:
        assert (model(server) + "A " + gen("a", stop=[" |", "."]))["a"] == "(b)"
        assert server.calls[0].body["stop"] == [" |", "."]


def test_a_gen_without_an_end_is_an_error_that_names_it() -> None:
    reason = "gen 'a' sets no max_tokens and wrote 1,024 tokens without an end"
    with Server(babbles(["a", "b"], 1, end=10**9)) as server, pytest.raises(RemoteError, match=reason):
        model(server) + "A: " + gen("a")


def test_options_of_the_other_kind_of_model_are_refused() -> None:
    reason = "chat_template and seed are for models in this process"
    with Server(writes("x")) as server, pytest.raises(ConfigError, match=reason):
        GraftModel("m", base_url=server.url, seed=1)
    with pytest.raises(ConfigError, match="num_api_spec_tokens is for models at an endpoint"):
        GraftModel("sprout", num_api_spec_tokens=8)
