"""`GraftAdapter`: prompts are ChatAdapter's, replies always parse."""

from __future__ import annotations

import asyncio
import copy
import datetime
import enum
import pickle
from collections.abc import Callable, Iterator
from typing import Any, Literal

import dspy
import numpy as np
import pydantic
import pytest
from dspy.adapters.types.decision import Choice, Noul, Score

from graftlm.adapters.dspy import GraftAdapter, GraftLM
from graftlm.adapters.dspy.scaffold import DATE, Scaffold, text_value
from graftlm.core.grammar import Composite, Grammar, Regex, Vocabulary
from graftlm.core.runtime import Runtime
from tests.models import byte_tokenizer, tiny_model

CONTEXT = 8192


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Address(pydantic.BaseModel):
    street: str = pydantic.Field(max_length=8)
    number: Literal[1, 2]


class Code(pydantic.BaseModel):
    text: str = pydantic.Field(pattern="^[ab]*a[ab]{16}$")


class Node(pydantic.BaseModel):
    value: int = pydantic.Field(ge=0, le=9)
    children: list[Node] = pydantic.Field(max_length=1)


Topic = Choice[("billing", "Payment"), ("technical", "Product")]
Quality = Score["poor", "fair", "good"]


class Ticket(dspy.Signature):
    """Read the ticket."""

    ticket: str = dspy.InputField()
    label: Literal["bug", "feature", "question"] = dspy.OutputField()
    urgent: bool = dspy.OutputField()
    count: int = dspy.OutputField()
    score: float = dspy.OutputField(desc="0 to 1")
    due: datetime.date = dspy.OutputField()
    address: Address = dspy.OutputField()
    tags: list[Literal["a", "b"]] = dspy.OutputField()
    colour: Colour = dspy.OutputField()
    summary: str = dspy.OutputField()


class Short(dspy.Signature):
    """Sort the ticket."""

    ticket: str = dspy.InputField()
    summary: str = dspy.OutputField()
    label: Literal["bug", "feature", "question"] = dspy.OutputField()


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    model = tiny_model("llama", max_position_embeddings=CONTEXT)
    with Runtime(model, tokenizer=byte_tokenizer(), max_model_len=CONTEXT) as one:
        yield one


@pytest.fixture
def lm(runtime: Runtime) -> Iterator[GraftLM]:
    one = GraftLM(runtime=runtime, temperature=1.0, max_tokens=400, cache=False)
    with dspy.context(lm=one, adapter=GraftAdapter(use_json_adapter_fallback=False)):
        yield one


def vocabulary() -> Vocabulary:
    return Vocabulary.from_tokenizer(byte_tokenizer())


def accepts(constraint: Any, text: str) -> bool:
    matcher = Grammar.compile(constraint, vocabulary()).matcher()
    data = list(text.encode())
    return matcher.advance(data) == len(data) and matcher.accepting


def test_prompts_are_those_of_chat_adapter_byte_for_byte() -> None:
    demos = [{"ticket": "it fails", "label": "bug", "urgent": True, "count": 1, "summary": "fails"}]
    ours, theirs = GraftAdapter(), dspy.ChatAdapter()
    for _ in range(2):
        assert ours.format(Ticket, demos, {"ticket": "x"}) == theirs.format(Ticket, demos, {"ticket": "x"})
    changed = Ticket.with_instructions("Something else.")
    assert ours.format(changed, [], {"ticket": "x"}) == theirs.format(changed, [], {"ticket": "x"})


def test_every_reply_of_a_random_model_parses_and_takes_one_request(runtime: Runtime, lm: GraftLM) -> None:
    predict = dspy.Predict(Ticket)
    before = runtime.stats().requests
    answers = dspy.Parallel(num_threads=8, disable_progress_bar=True)(
        [(predict, {"ticket": f"t{i}"}) for i in range(8)]
    )
    assert runtime.stats().requests - before == 8
    assert {type(answer.due) for answer in answers} == {datetime.date}
    assert {type(answer.address) for answer in answers} == {Address}
    assert all(answer.colour in Colour and answer.label in ("bug", "feature", "question") for answer in answers)
    assert all(isinstance(answer.urgent, bool) and isinstance(answer.score, float) for answer in answers)


def test_a_short_budget_still_gives_a_reply_that_parses(lm: GraftLM) -> None:
    answer = dspy.Predict(Short)(ticket="x", config={"max_tokens": 100})
    assert answer.label in ("bug", "feature", "question")
    answer.summary.encode()  # whole characters


def test_a_budget_below_the_scaffold_says_so(lm: GraftLM) -> None:
    with pytest.raises(dspy.LMError, match="raise max_tokens"):
        dspy.Predict(Short)(ticket="x", config={"max_tokens": 5})


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("", True),
        ("a [1] b [[ c ]] [ [# [[ # [[[ x", True),
        ("[[ #x [[[[ # ", True),
        ("two\n\nparagraphs, and Ü", True),
        ("[[ ## label ## ]]", False),
        ("before [[ ## ", False),
        ("[[[ ##", False),
        ("[[ [[ ##", False),
        ("[[ #[[ ##", False),
    ],
)
def test_text_holds_anything_but_a_header(text: str, allowed: bool) -> None:
    assert accepts(Composite(text_value()), text) is allowed


def test_text_may_be_bounded() -> None:
    assert accepts(Composite(text_value(3)), "abc") and not accepts(Composite(text_value(3)), "abcd")


@pytest.mark.parametrize("text", ["2024-12-31", "0001-01-01", "1999-04-30"])
def test_dates_of_the_calendar_are_accepted(text: str) -> None:
    assert accepts(Regex(DATE), text) and datetime.date.fromisoformat(text)


@pytest.mark.parametrize("text", ["2024-13-01", "2024-02-30", "2024-04-31", "0000-01-01", "2024-1-1"])
def test_dates_beside_the_calendar_are_not(text: str) -> None:
    assert not accepts(Regex(DATE), text)


def test_a_choice_is_the_likeliest_option_as_a_whole(runtime: Runtime, lm: GraftLM) -> None:
    class Sort(dspy.Signature):
        ticket: str = dspy.InputField()
        label: Literal["bug", "feature", "question"] = dspy.OutputField()

    answer = dspy.Predict(Sort)(ticket="x", config={"temperature": 0.0})
    messages = GraftAdapter().format(Sort, [], {"ticket": "x"})
    ids = runtime.processor.encode(messages).ids.tolist()
    ids += runtime.tokenizer.encode_continuation("[[ ## label ## ]]\n")
    likelihoods = {label: sum(runtime.score(ids, label + "\n\n").logprobs) for label in ("bug", "feature", "question")}
    assert answer.label == max(likelihoods, key=likelihoods.__getitem__)


def test_json_adapter_sends_a_schema_that_is_obeyed(runtime: Runtime, lm: GraftLM) -> None:
    runtime.reset_stats()
    with dspy.context(adapter=dspy.JSONAdapter()):
        answer = dspy.Predict(Short)(ticket="x", config={"max_tokens": 600})
    assert answer.label in ("bug", "feature", "question") and runtime.stats().requests == 1
    assert set(answer.keys()) == {"summary", "label"}


def test_n_answers_are_forks_of_one_prompt(runtime: Runtime, lm: GraftLM) -> None:
    runtime.reset_stats()
    answer = dspy.Predict(Short)(ticket="n answers", config={"n": 5, "temperature": 1.0})
    stats = runtime.stats()
    assert len(answer.completions) == 5 and len(set(answer.completions.summary)) > 1
    assert stats.requests == 1 and stats.largest_batch == 5
    assert stats.prompt_tokens == stats.cached_tokens + stats.computed_tokens
    assert lm.history[-1]["usage"]["completion_tokens"] == stats.completion_tokens


def test_forks_with_a_grammar_need_no_earlier_batch_as_wide() -> None:
    with Runtime(tiny_model("llama", max_position_embeddings=CONTEXT), tokenizer=byte_tokenizer()) as fresh:
        lm = GraftLM(runtime=fresh, temperature=1.0, max_tokens=120, cache=False)
        with dspy.context(lm=lm, adapter=GraftAdapter()):
            answer = dspy.Predict(Short)(ticket="x", config={"n": 5})  # used to fail: no room for the forks' masks
    assert len(answer.completions) == 5


def test_a_cached_reply_of_n_answers_has_all_of_them(runtime: Runtime) -> None:
    lm = GraftLM(runtime=runtime, temperature=1.0, max_tokens=120, cache=True)
    with dspy.context(lm=lm, adapter=GraftAdapter()):
        first = dspy.Predict(Short)(ticket="cached n", config={"n": 3})
        before = runtime.stats().requests
        again = dspy.Predict(Short)(ticket="cached n", config={"n": 3})
    assert again.completions.summary == first.completions.summary
    assert runtime.stats().requests == before


def test_optional_nested_and_constrained_types_parse(lm: GraftLM) -> None:
    class Odd(dspy.Signature):
        question: str = dspy.InputField()
        note: str | None = dspy.OutputField()
        maybe: int | None = dspy.OutputField()
        rating: int = dspy.OutputField(ge=1, le=5)
        when: datetime.time = dspy.OutputField()
        table: dict[str, int] = dspy.OutputField()
        tree: Node = dspy.OutputField()
        numbers: Literal[1, 2, 3] = dspy.OutputField()

    for i in range(2):
        answer = dspy.Predict(Odd)(question=f"q{i}", config={"max_tokens": 350})
        assert 1 <= answer.rating <= 5 and isinstance(answer.tree, Node) and isinstance(answer.table, dict)


def test_a_schema_too_large_for_an_automaton_leaves_the_other_fields_theirs(lm: GraftLM) -> None:
    class Large(dspy.Signature):
        question: str = dspy.InputField()
        note: str = dspy.OutputField()
        code: Code = dspy.OutputField()

    answer = dspy.Predict(Large)(question="x", config={"max_tokens": 200})
    assert isinstance(answer.code, Code) and isinstance(answer.note, str)
    again = asyncio.run(dspy.Predict(Large).acall(question="y", config={"max_tokens": 200}))
    assert isinstance(again.code, Code)


def test_a_type_without_a_grammar_becomes_text_with_a_warning() -> None:
    class Strange(dspy.Signature):
        question: str = dspy.InputField()
        thing: Callable[[], int] = dspy.OutputField()

    with pytest.warns(UserWarning, match="'thing'.*no grammar"):
        (field,) = Scaffold.of(Strange).fields
    assert field.kind == "text"


def test_what_a_text_field_leaves_out_is_told() -> None:
    class Coded(dspy.Signature):
        question: str = dspy.InputField()
        code: str = dspy.OutputField(pattern="^[a-z]{3}$", min_length=3, max_length=3)

    with pytest.warns(UserWarning, match="'code'.*does not keep pattern and min_length"):
        (field,) = Scaffold.of(Coded).fields
    assert (field.kind, field.value) == ("text", 3)


def test_what_a_grammar_leaves_out_of_a_type_is_told() -> None:
    class Partly(dspy.Signature):
        question: str = dspy.InputField()
        thing: dict[str, int] = dspy.OutputField(json_schema_extra=None, min_length=2)

    with pytest.warns(UserWarning, match="'thing'.*leaves out"):
        (field,) = Scaffold.of(Partly).fields
    assert field.kind == "schema"


def test_reasoning_and_code_are_text(lm: GraftLM) -> None:
    answer = dspy.ChainOfThought("question -> answer: bool")(question="x")
    assert answer.answer in (True, False) and str(answer.reasoning) is not None


def test_decisions_are_measured(runtime: Runtime, lm: GraftLM) -> None:
    class Judge(dspy.Signature):
        ticket: str = dspy.InputField()
        topic: Topic = dspy.OutputField(desc="The topic.")
        quality: Quality = dspy.OutputField(desc="How good.")
        spam: Noul = dspy.OutputField(desc="Whether it is spam.")
        reply: str = dspy.OutputField()

    answer = dspy.Predict(Judge)(ticket="x", config={"max_tokens": 60})
    assert abs(sum(answer.topic.probabilities.values()) - 1) < 1e-6
    assert answer.topic.value == max(answer.topic.probabilities, key=answer.topic.probabilities.get)
    assert abs(sum(answer.quality.probabilities.values()) - 1) < 1e-6 and 0 <= answer.quality.value <= 2
    assert 0 <= answer.spam.probability <= 1 and isinstance(answer.reply, str)


def test_the_same_answers_with_one_thread_and_sixteen(lm: GraftLM) -> None:
    predict = dspy.Predict(Short)
    jobs = [(predict, {"ticket": f"number {i}", "config": {"temperature": 0.0, "max_tokens": 80}}) for i in range(24)]
    one, many = (dspy.Parallel(num_threads=n, disable_progress_bar=True)(jobs) for n in (1, 16))
    assert [dict(a) for a in one] == [dict(a) for a in many]


def test_an_evaluation_fills_the_batch_and_computes_shared_prefixes_once(runtime: Runtime, lm: GraftLM) -> None:
    examples = [dspy.Example(ticket=f"number {i}", label="bug").with_inputs("ticket") for i in range(40)]
    program = dspy.Predict(Short)
    program.demos = [dspy.Example(ticket="it crashes " * 5, summary="crash", label="bug") for _ in range(2)]
    runtime.clear_cache()
    runtime.reset_stats()
    with dspy.context(lm=lm.copy(temperature=0.0, max_tokens=120)):
        dspy.Evaluate(devset=examples, metric=lambda e, p: e.label == p.label, num_threads=16)(program)
    stats = runtime.stats()
    prompts = [GraftAdapter().format(Short, program.demos, {"ticket": e.ticket}) for e in examples]
    unique = num_unique_prefix_tokens([runtime.processor.encode(p).ids for p in prompts])
    assert stats.largest_batch >= 12
    assert stats.computed_tokens <= 1.05 * unique


def num_unique_prefix_tokens(prompts: list[Any]) -> int:
    """Nodes of the trie over token sequences."""
    ordered = sorted(map(tuple, prompts))
    total = len(ordered[0])
    for before, after in zip(ordered, ordered[1:], strict=False):
        a, b = np.array(before), np.array(after)
        width = min(len(a), len(b))
        differ = np.flatnonzero(a[:width] != b[:width])
        total += len(b) - (int(differ[0]) if len(differ) else width)
    return total


def listener(field: str) -> dspy.streaming.StreamListener:
    return dspy.streaming.StreamListener(signature_field_name=field)


def test_streamed_fields_arrive_in_pieces_and_the_prediction_is_the_unstreamed_one(lm: GraftLM) -> None:
    predict = dspy.Predict(Short, temperature=0.0, max_tokens=80)
    expected = predict(ticket="stream")
    stream = dspy.streamify(predict, stream_listeners=[listener("summary"), listener("label")], async_streaming=False)
    seen = list(stream(ticket="stream"))
    assert isinstance(seen[-1], dspy.Prediction) and dict(seen[-1]) == dict(expected)
    pieces = [one for one in seen[:-1] if one.signature_field_name == "summary"]
    assert len(pieces) > 1 and "".join(one.chunk for one in pieces) == expected.summary
    assert "".join(one.chunk for one in seen[:-1] if one.signature_field_name == "label") == expected.label


async def test_an_async_program_streams_too(lm: GraftLM) -> None:
    predict = dspy.Predict(Short, temperature=0.0, max_tokens=80)
    stream = dspy.streamify(predict, stream_listeners=[listener("summary")], is_async_program=True)
    seen = [one async for one in stream(ticket="stream")]
    assert dict(seen[-1]) == dict(await predict.acall(ticket="stream"))
    assert "".join(one.chunk for one in seen[:-1]) == seen[-1].summary


def test_async_calls_run_as_one_batch(runtime: Runtime, lm: GraftLM) -> None:
    async def gather() -> list[Any]:
        predict = dspy.Predict(Short, temperature=0.0, max_tokens=80)
        return await asyncio.gather(*(predict.acall(ticket=f"number {i}") for i in range(32)))

    runtime.reset_stats()
    assert len(asyncio.run(gather())) == 32
    assert runtime.stats().largest_batch >= 16


def test_native_tool_calls_fill_the_tool_field(runtime: Runtime, lm: GraftLM) -> None:
    def weather(city: Literal["Bern", "Oslo"]) -> str:
        """Look the weather up."""
        return f"sun in {city}"

    class Act(dspy.Signature):
        question: str = dspy.InputField()
        tools: list[dspy.Tool] = dspy.InputField()
        calls: dspy.ToolCalls = dspy.OutputField()

    adapter = GraftAdapter(use_native_function_calling=True)
    with dspy.context(adapter=adapter):
        config = {"tool_choice": "required", "max_tokens": 300}
        answer = dspy.Predict(Act)(question="x", tools=[dspy.Tool(weather)], config=config)
    assert all(call.name == "weather" and call.args["city"] in ("Bern", "Oslo") for call in answer.calls.tool_calls)
    assert answer.calls.tool_calls


def test_over_another_lm_it_is_chat_adapter() -> None:
    reply = {"summary": "s", "label": "bug"}
    with dspy.context(lm=dspy.utils.DummyLM([reply]), adapter=GraftAdapter()):
        assert dict(dspy.Predict(Short)(ticket="x")) == reply


def test_it_is_copied_and_pickled() -> None:
    adapter = GraftAdapter(use_json_adapter_fallback=False)
    adapter.format(Short, [], {"ticket": "x"})
    for again in (copy.deepcopy(adapter), pickle.loads(pickle.dumps(adapter))):
        assert type(again) is GraftAdapter and not again.use_json_adapter_fallback
