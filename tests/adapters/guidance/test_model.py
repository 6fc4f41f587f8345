"""`GraftModel`: guidance programs through guidance's public calls."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import guidance
import pytest
from guidance import assistant, gen, json as gen_json, regex as regex_node, select, substring, system, user
from guidance._ast import AudioBlob, GenAudio, ImageBlob, ImageUrl
from guidance._grammar import subgrammar
from guidance.chat import ChatMLTemplate
from guidance.library import capture, special_token
from transformers import Cache

from graftlm.ab.engines.frameworks import mend_crop
from graftlm.adapters.guidance import GraftModel
from graftlm.adapters.guidance.engine import Grammar
from graftlm.core.errors import ConfigError, GrammarError, RequestTooLong
from graftlm.core.runtime import Runtime
from tests.adapters.guidance.guidance_plugin import tame_model, trained_tokenizer

CONTEXT = 2048


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    tokenizer = trained_tokenizer()
    with Runtime(tame_model(tokenizer), tokenizer=tokenizer, dtype="float32", max_model_len=CONTEXT) as one:
        yield one


@pytest.fixture(scope="module")
def model(runtime: Runtime) -> GraftModel:
    return GraftModel(runtime=runtime, echo=False)


def stock(model: Any, extend: Any) -> Any:
    """The same through guidance's own loop over `get_logits`, token by token."""
    engine = model._interpreter.engine
    with patch.object(engine, "get_logits", side_effect=engine.get_logits):
        return extend(model)


PROGRAMS = {
    "regex": lambda lm: lm + "The number is " + gen("x", regex=r"[0-9]{3}") + " and " + gen("y", regex="[a-z]+") + ".",
    "free": lambda lm: lm + "Once upon" + gen("x", max_tokens=6) + "\n" + gen("y", max_tokens=3, stop=";"),
    "stops": lambda lm: lm + 'A title: "' + gen("x", stop='"', max_tokens=8, save_stop_text=True) + '"',
    "select": lambda lm: lm + "It is " + select(["red", "green", "greenish", "blue"], name="x") + " " + select([1, 22]),
    "lists": lambda lm: lm + "".join(f"{i}: {gen('x', list_append=True, regex='[a-c]{2}')}\n" for i in range(3)),
    "suffix": lambda lm: lm + "Say: " + gen("x", regex="[a-z]+", suffix=";", max_tokens=5) + "done",
    "healing": lambda lm: lm + "The link is http:" + gen("x", regex=r"//[a-z]{4}\.(com|org)"),
    "substring": lambda lm: lm + "Quote: " + substring("the quick brown fox", name="x") + ".",
    "json": lambda lm: (
        lm
        + gen_json(
            "x",
            schema={
                "type": "object",
                "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["a"],
            },
        )
    ),  # fmt: skip
    "capture": lambda lm: lm + capture("ab" + regex_node("[0-9]"), "x") + capture(regex_node("[xyz]{2}"), "y"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_transcripts_and_captures_are_those_of_guidances_own_loop(model: GraftModel, name: str) -> None:
    ours, theirs = PROGRAMS[name](model), stock(model, PROGRAMS[name])
    assert str(ours) == str(theirs)
    captures = ours._interpreter.state.captures
    values = {k: [one["value"] for one in v] if isinstance(v, list) else v["value"] for k, v in captures.items()}
    assert values == {key: theirs[key] for key in values} and values


def test_the_log_probability_of_a_capture_is_that_of_its_tokens(runtime: Runtime) -> None:
    lm = GraftModel(runtime=runtime, echo=False) + "measured: "
    engine = lm._interpreter.engine
    engine._enable_token_probabilities = True
    for grammar in (Grammar(gen("x", regex="[a-z]{6}")), gen("x", max_tokens=6).ll_grammar()):
        steps = list(engine(lm._interpreter.state, grammar))
        tokens = [token for step in steps for token in step.tokens if token.is_generated]
        *_, score = (step.capture_group_log_probs["x"] for step in steps if "x" in step.capture_groups)
        assert score == pytest.approx(sum(math.log(token.prob) for token in tokens)) and score < 0


def test_what_is_generated_matches_its_grammar(model: GraftModel) -> None:
    grammar = gen("x", regex=r"[a-f]{2,5}-[0-9]+", max_tokens=30)
    text = str(model + "code " + grammar).removeprefix("code ")
    assert re.fullmatch(r"[a-f]{2,5}-[0-9]+", text)


GRAMMARS = {
    "gen": gen("x", regex="[a-z ]{4,9}"),
    "select": select(["red", "green", "greenish"], name="x"),
    "regex": regex_node("[a-f]{2,5}-[0-9]{3}"),
    "json": gen_json("x", schema={"enum": ["a", 1, None]}),
    "lark": guidance.lark(lark_grammar='start: "I " verb\nverb: "run" | "walk"', name="x"),
    "substring": substring("the quick brown fox", name="x"),
    "subgrammar": subgrammar(body="(" + regex_node("[0-9]{2}") + ")", name="x"),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_what_every_kind_of_node_writes_its_grammar_matches(model: GraftModel, name: str) -> None:
    lm = model + "Say: " + GRAMMARS[name]
    text = str(lm).removeprefix("Say: ")
    found = GRAMMARS[name].match(text)
    assert found is not None
    assert found.captures == {key: lm[key] for key in found.captures}


@pytest.fixture(scope="module")
def reference(model: GraftModel) -> Iterator[Any]:
    """Guidance's own class over the same weights, mended for current transformers."""
    tokenizer = model.runtime.tokenizer.hf
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Cache, "crop", Cache.crop)
        mend_crop()
        options = {"chat_template": ChatMLTemplate, "echo": False, "enable_monitoring": False}
        yield guidance.models.Transformers(tame_model(tokenizer), tokenizer, **options)


@pytest.mark.parametrize("name", PROGRAMS)
def test_transcripts_and_captures_are_those_of_the_stock_class(model: GraftModel, reference: Any, name: str) -> None:
    ours, theirs = PROGRAMS[name](model), PROGRAMS[name](reference)
    assert str(ours) == str(theirs)
    captures = ours._interpreter.state.captures
    assert captures.keys() == theirs._interpreter.state.captures.keys()
    assert all(ours[key] == theirs[key] for key in captures)


def test_a_list_has_one_entry_per_gen_in_a_role_too(model: GraftModel) -> None:
    """Guidance appends an empty text before each: four entries."""
    lm = model
    for _ in range(2):
        with user():
            lm += "Which?"
        with assistant():
            lm += gen("x", regex="[a-c]{2}", list_append=True)
    assert [len(text) for text in lm["x"]] == [2, 2]


def test_a_choice_of_nothing_is_the_empty_text_at_the_beginning_too(model: GraftModel) -> None:
    assert [(lm + select([], name="x"))["x"] for lm in (model, model + "A")] == ["", ""]


def test_appending_is_associative(model: GraftModel) -> None:
    a, b = "The answer is ", gen("x", regex="[0-9]{2}")
    assert str((model + a) + b) == str(model + (a + b))


def test_roles_are_written_as_the_chat_template_has_them(model: GraftModel, runtime: Runtime) -> None:
    lm = model
    with system():
        lm += "You are terse."
    with user():
        lm += "Hello"
    with assistant():
        lm += gen("x", max_tokens=4)
    messages = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "Hello"}]
    assert str(lm).startswith(runtime.tokenizer.render(messages))
    assert lm["x"] in str(lm)


def test_branches_compute_only_their_own_text(model: GraftModel, runtime: Runtime) -> None:
    base = model + "a long shared beginning " * 40 + select(["x", "y"])
    runtime.reset_stats()
    for i in range(10):
        base + f" branch {i} " + gen("a", regex="[a-z]{3}")
    assert runtime.stats().computed_tokens < 10 * 12


def test_returning_to_an_old_base_costs_next_to_nothing(model: GraftModel, runtime: Runtime) -> None:
    base = model + "another shared beginning " * 40
    base + select(["x", "y"])
    model + "something else entirely " * 40 + select(["x", "y"])
    runtime.reset_stats()
    base + select(["x", "y"])
    assert runtime.stats().computed_tokens <= 2


def program(lm: Any, i: int) -> Any:
    lm += f"thread {i} says " + gen("a", regex="[a-z ]{20}") + select(["x", "y"], name="c")
    return lm + "\n" + gen("b", max_tokens=8)


def test_sixteen_threads_give_the_transcripts_of_one(model: GraftModel, runtime: Runtime) -> None:
    alone = [str(program(model, i)) for i in range(16)]
    runtime.clear_cache()
    runtime.reset_stats()
    together: dict[int, str] = {}
    gate = threading.Barrier(16)

    def work(i: int) -> None:
        gate.wait()
        together[i] = str(program(model, i))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[i] for i in range(16)] == alone
    assert runtime.stats().largest_batch >= 12


def test_a_stream_ends_where_the_run_does_with_its_usage(model: GraftModel) -> None:
    streamed = list(model.stream() + "Count: " + gen("x", regex="[0-9 ]{12}"))
    whole = model + "Count: " + gen("x", regex="[0-9 ]{12}")
    assert streamed[-1]._get_usage().forward_passes == whole._get_usage().forward_passes > 0
    states = [str(lm) for lm in streamed]
    assert states[-1] == str(whole)
    assert len(set(states)) >= 3 and all(states[-1].startswith(state) for state in states)


def test_an_error_in_a_streamed_program_comes_out(model: GraftModel) -> None:
    @guidance.guidance
    def failing(lm: Any) -> Any:
        raise AssertionError("on purpose")

    with pytest.raises(AssertionError, match="on purpose"):
        list(model.stream() + failing())


def test_an_abandoned_generator_frees_its_kv(model: GraftModel, runtime: Runtime) -> None:
    interpreter = (model + "x")._interpreter
    steps = interpreter.engine(interpreter.state, gen("x", max_tokens=500).ll_grammar())
    next(steps), next(steps)
    steps.close()
    while runtime.stats().slots_in_use and not runtime.closed:
        pass
    assert runtime.stats().slots_in_use == 0


def test_echo_shows_the_text_and_records_probabilities(runtime: Runtime) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        lm = GraftModel(runtime=runtime, echo=True)
        lm += "Say " + gen("x", regex="[a-z]{6}")
    engine = lm._interpreter.engine
    assert engine._enable_token_probabilities and lm["x"]
    steps = list(engine((GraftModel(runtime=runtime, echo=False) + "Say ")._interpreter.state, gen(regex="[a-z]{6}").ll_grammar()))  # noqa: E501  # fmt: skip
    generated = [token for step in steps for token in step.tokens if token.is_generated]
    assert generated and all(0 < token.prob <= 1 and len(token.top_k) == 5 for token in generated)


def test_the_trace_has_a_node_for_each_step(model: GraftModel) -> None:
    lm = model + "a" + gen("x", regex="[0-9]{3}")
    nodes = [node for node in lm._trace_nodes]
    assert nodes and any(node.output for node in nodes)


def test_rules_have_temperatures_of_their_own(runtime: Runtime) -> None:
    def texts(temperature: float, seed: int) -> str:
        lm = GraftModel(runtime=runtime, echo=False, seed=seed)
        return str(lm + "x" + gen("a", regex="[a-z]{8}") + "-" + gen("b", regex="[a-z]{8}", temperature=temperature))

    cold, first, again, other = texts(0.0, 1), texts(1.5, 1), texts(1.5, 1), texts(1.5, 2)
    assert first == again != other
    assert {text.partition("-")[0] for text in (cold, first, other)} == {cold.partition("-")[0]}


def test_sampling_parameters_are_honoured(runtime: Runtime) -> None:
    hot = gen("x", regex="[a-z]{12}", temperature=2.0)
    cold = str(GraftModel(runtime=runtime, echo=False) + "x " + gen("x", regex="[a-z]{12}"))
    narrow = GraftModel(runtime=runtime, echo=False, seed=3).with_sampling_params({"top_k": 1})
    assert str(narrow + "x " + hot) == cold
    tight = GraftModel(runtime=runtime, echo=False, seed=3).with_sampling_params({"min_p": 1.0})
    assert str(tight + "x " + hot) == cold


def test_a_token_limit_inside_a_character_does_not_raise(runtime: Runtime) -> None:
    for seed in range(4):
        lm = GraftModel(runtime=runtime, echo=False, seed=seed) + gen("x", max_tokens=2, temperature=3.0)
        assert isinstance(lm["x"], str)


def test_forced_text_costs_no_forward_pass(model: GraftModel) -> None:
    schema = {"type": "object", "properties": {k: {"type": "boolean"} for k in ("first", "second", "third")}}
    schema |= {"required": list(schema["properties"]), "additionalProperties": False}
    lm = model + gen_json("x", schema=schema, whitespace_flexible=False)
    usage = lm._get_usage()
    assert set(json.loads(lm["x"])) == {"first", "second", "third"}
    assert usage.ff_tokens > 0 and usage.forward_passes < usage.output_tokens


def test_usage_agrees_with_the_counters_of_the_runtime(model: GraftModel, runtime: Runtime) -> None:
    runtime.reset_stats()
    usage = (model + "count this " + gen("x", regex="[0-9]{5}"))._get_usage()
    stats = runtime.stats()
    assert usage.cached_input_tokens == stats.cached_tokens
    assert usage.forward_passes == stats.completion_tokens - stats.forced_tokens
    assert usage.round_trips == stats.requests == 1


def test_text_alone_runs_nothing(model: GraftModel, runtime: Runtime) -> None:
    before = runtime.stats().requests
    lm = model + "only text"
    with user():
        lm += "and roles"
    assert runtime.stats().requests == before


def test_a_grammar_in_lark_is_a_chat_completion(model: GraftModel) -> None:
    grammar = '%llguidance {}\nstart: "I choose " letter\nletter[capture="value"]: LETTER\nLETTER: "A" | "B"\n'
    text, captures = model._interpreter.engine.chat_completion([{"role": "user", "content": "A letter"}], grammar)
    assert text == f"I choose {captures['value']}"


def test_step_hooks_run_guidances_own_loop(model: GraftModel) -> None:
    seen: list[str] = []

    def callback(context: Any) -> dict[str, Any]:
        seen.append(context["last_step_text"])
        return {}

    model.with_step_config({"step_every_k": 2, "callback": callback}) + gen("x", max_tokens=6)
    assert seen


def test_a_special_token_may_be_part_of_a_grammar(model: GraftModel) -> None:
    lm = model + ("x" + special_token("<|im_start|>") + "y" + gen("a", regex="[0-9]"))
    assert str(lm).startswith("x<|im_start|>y")


NODES = [
    ImageBlob(b"aGVsbG8="),
    ImageUrl("http://localhost:1/picture.png"),
    AudioBlob(b"aGVsbG8="),
    GenAudio({}),
]


@pytest.mark.parametrize("node", NODES, ids=["image", "url", "audio", "gen_audio"])
def test_what_is_no_text_is_refused_before_anything_is_read(model: GraftModel, node: Any) -> None:
    with pytest.raises(ValueError, match="text only"):
        model + node


def test_tools_are_refused(model: GraftModel) -> None:
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    with pytest.raises(NotImplementedError, match="[Tt]ool"):
        model + gen(tools=[add])


def test_a_prompt_beyond_the_context_says_so(model: GraftModel) -> None:
    with pytest.raises(RequestTooLong, match="2,048"):
        model + "word " * 3000 + gen("x", max_tokens=3)


def test_a_text_that_reaches_the_end_of_the_context_says_so(model: GraftModel) -> None:
    with pytest.raises(RequestTooLong, match="bound it with max_tokens"):
        model + "word " * 900 + gen("x", regex="[a-b]{4000}")


def test_an_infeasible_grammar_is_guidances_error(model: GraftModel) -> None:
    with pytest.raises(ValueError):
        model + gen("x", regex="[")
    with pytest.raises(GrammarError, match="allows no text here"):
        model + "a" + gen("x", regex=r"[^\s\S]")
    assert len((model + gen("x", regex="[ab]"))["x"]) == 1  # others go on


def test_copies_share_the_engine(model: GraftModel) -> None:
    assert (model + "a")._interpreter.engine is model.copy()._interpreter.engine is model._interpreter.engine


def test_options_of_the_runtime_beside_a_runtime_are_refused(runtime: Runtime) -> None:
    with pytest.raises(ConfigError, match="max_batch"):
        GraftModel(runtime=runtime, max_batch=2)


def test_a_stream_that_is_left_used_to_run_to_its_budget(runtime: Runtime) -> None:
    before = runtime.stats().completion_tokens
    model = GraftModel(runtime=runtime, echo=False)
    for _ in model.stream() + "Count: " + gen("x", regex="[0-9]{600}"):
        break
    for thread in threading.enumerate():
        if thread.name == "graftlm guidance stream":
            thread.join(60)
            assert not thread.is_alive()
    stats = runtime.stats()
    assert (stats.running, stats.waiting, stats.slots_in_use) == (0, 0, 0)
    assert stats.completion_tokens - before < 600
    assert str(model + "x" + gen("y", regex="[0-9]{2}"))[1:].isdigit()  # nothing of the stream is left behind
