"""`GraftLM`: DSPy's LM over a runtime, through DSPy's public calls."""

from __future__ import annotations

import asyncio
import copy
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

import dspy
import pytest
from dspy import lm15
from dspy.utils.callback import BaseCallback
from dspy.utils.exceptions import (
    ContextWindowExceededError,
    LMInvalidRequestError,
    LMProviderError,
    LMUnsupportedFeatureError,
)

from graftlm.adapters.dspy import AsyncEngine, Engine, GraftAdapter, GraftLM
from graftlm.core.errors import ConfigError
from graftlm.core.runtime import Runtime
from tests.models import byte_tokenizer, greedy_reference, tiny_model

CONTEXT = 4096


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    model = tiny_model("llama", max_position_embeddings=CONTEXT)
    with Runtime(model, tokenizer=byte_tokenizer(), max_model_len=CONTEXT) as one:
        yield one


@pytest.fixture
def lm(runtime: Runtime) -> GraftLM:
    return GraftLM(runtime=runtime, temperature=0.0, max_tokens=12, cache=False)


def request(lm: GraftLM, text: str = "hello", **config: Any) -> lm15.Request:
    config = {"temperature": 0.0, "max_tokens": 8, **config}
    return lm15.Request(model=lm.model, messages=(lm15.Message.user(text),), config=lm15.Config(**config))


def test_an_answer_is_what_generate_gives_for_the_same_rendered_chat(runtime: Runtime, lm: GraftLM) -> None:
    prompt = runtime.processor.encode([{"role": "user", "content": "hello"}]).ids
    expected = greedy_reference(runtime.model, prompt.tolist(), 12)
    assert lm("hello") == [runtime.generate(prompt.tolist(), max_tokens=12, temperature=0.0).text]
    assert runtime.generate(prompt.tolist(), max_tokens=12, temperature=0.0, ignore_eos=True).token_ids == expected


def test_the_model_string_names_the_weights(runtime: Runtime, lm: GraftLM) -> None:
    with Runtime(tiny_model("llama", seed=1), tokenizer=byte_tokenizer()) as other:
        assert lm.model.startswith("graftlm/LlamaForCausalLM@")
        assert GraftLM(runtime=other).model != lm.model
    assert GraftLM(runtime=runtime).model == lm.model


def test_copies_share_the_engine(lm: GraftLM) -> None:
    program = dspy.Predict("question -> answer")
    program.lm = lm
    copies = [copy.deepcopy(lm), lm.copy(temperature=1.0), program.deepcopy().lm]
    assert [id(one.engine) for one in copies] == [id(lm.engine)] * 3


def test_usage_history_and_callbacks_are_filled_in_order(lm: GraftLM) -> None:
    seen: list[str] = []

    class Recorder(BaseCallback):
        def on_module_start(self, *_: Any, **__: Any) -> None:
            seen.append("module")

        def on_adapter_format_start(self, *_: Any, **__: Any) -> None:
            seen.append("format")

        def on_lm_start(self, *_: Any, **__: Any) -> None:
            seen.append("lm_start")

        def on_lm_end(self, *_: Any, **__: Any) -> None:
            seen.append("lm_end")

        def on_adapter_parse_start(self, *_: Any, **__: Any) -> None:
            seen.append("parse")

    lm = lm.copy(max_tokens=100)
    with dspy.context(lm=lm, adapter=GraftAdapter(), callbacks=[Recorder()], track_usage=True):
        answer = dspy.Predict("question -> answer: bool")(question="x")
    assert seen == ["module", "format", "lm_start", "lm_end", "parse"]
    usage = answer.get_lm_usage()[lm.model]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0
    assert lm.history[-1]["usage"] == usage


def test_the_second_call_reads_the_prompt_from_the_kv_cache(lm: GraftLM) -> None:
    lm("a prompt that comes twice")
    lm("a prompt that comes twice")
    usage = lm.history[-1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


def test_a_cached_answer_makes_no_request(runtime: Runtime) -> None:
    lm = GraftLM(runtime=runtime, temperature=0.0, max_tokens=4, cache=True)
    lm("cached by DSPy")
    before = runtime.stats().requests
    assert lm("cached by DSPy") == lm("cached by DSPy")
    assert runtime.stats().requests == before


def test_sampling_parameters_reach_the_runtime(runtime: Runtime, lm: GraftLM) -> None:
    free = lm(request(lm, temperature=1.0, seed=7, max_tokens=20)).text
    assert lm(request(lm, temperature=1.0, seed=7, max_tokens=20)).text == free
    assert lm(request(lm, temperature=1.0, seed=8, max_tokens=20)).text != free
    assert lm(request(lm, max_tokens=3)).usage.output_tokens == 3
    assert free is not None
    cut = lm(request(lm, temperature=1.0, seed=7, max_tokens=20, stop=(free[3],)))
    assert cut.text == free[: free.index(free[3])] and cut.finish_reason == "stop"
    narrow = lm(request(lm, temperature=2.0, top_k=1, seed=3))
    assert narrow.text == lm(request(lm)).text


def test_logprobs_are_reported_for_each_token(lm: GraftLM) -> None:
    answer = lm(request(lm, logprobs=2, max_tokens=5))
    assert answer.logprobs is not None and len(answer.logprobs) == 5
    assert all(token.logprob <= 0 and len(token.top) == 2 for token in answer.logprobs)
    assert answer.logprobs[0].top[0].token_id == answer.logprobs[0].token_id
    table = lm.runtime.tokenizer.token_bytes
    found = [one for token in answer.logprobs for one in (token, *token.top) if one.token_id < len(table)]
    assert found and all(bytes(one.bytes) == table[one.token_id] for one in found)


def test_rollouts_at_temperature_one_differ_and_seeds_repeat(lm: GraftLM) -> None:
    answers = {lm.copy(rollout_id=i, temperature=1.0)("say something")[0] for i in range(4)}
    seeded = {lm.copy(temperature=1.0, seed=5)("say something")[0] for _ in range(2)}
    assert len(answers) > 1 and len(seeded) == 1


def test_a_json_schema_is_obeyed_exactly(lm: GraftLM) -> None:
    class Answer(dspy.Signature):
        question: str = dspy.InputField()
        colour: Literal["red", "blue"] = dspy.OutputField()
        count: int = dspy.OutputField()

    with dspy.context(lm=lm.copy(max_tokens=80), adapter=dspy.JSONAdapter()):
        answer = dspy.Predict(Answer)(question="x")
    assert answer.colour in ("red", "blue") and isinstance(answer.count, int)
    assert list(answer.keys()) == ["colour", "count"]


def test_native_constraints_travel_in_the_extensions(lm: GraftLM) -> None:
    answer = lm(request(lm, extensions={"graftlm": {"regex": "[0-9]{3}-[0-9]{2}"}}, max_tokens=20))
    assert answer.text is not None and len(answer.text) == 6 and answer.text[3] == "-"


def test_many_calls_on_one_event_loop_run_as_one_batch(runtime: Runtime, lm: GraftLM) -> None:
    async def gather() -> list[Any]:
        return await asyncio.gather(*(lm.acall(f"question number {i}") for i in range(256)))

    runtime.reset_stats()
    answers = asyncio.run(gather())
    assert len(answers) == 256 and answers[:32] == [lm(f"question number {i}") for i in range(32)]
    assert runtime.stats().largest_batch >= 32


def test_cancelling_an_awaited_call_frees_its_kv(runtime: Runtime, lm: GraftLM) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(lm.acall("a long answer", max_tokens=2000))  # ends by itself after 2,862
        while runtime.stats().slots_in_use == 0:
            await asyncio.sleep(0.001)  # asking all the time would keep the interpreter from the engine
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while runtime.stats().slots_in_use and not runtime.closed:
            await asyncio.sleep(0.001)

    before = runtime.stats().cancelled
    asyncio.run(cancel())
    assert runtime.stats().slots_in_use == 0
    assert runtime.stats().cancelled == before + 1


def test_an_overlong_prompt_is_a_context_overflow_of_dspy(lm: GraftLM) -> None:
    with pytest.raises(ContextWindowExceededError, match="4,096"):
        lm("x" * 5000)


@pytest.mark.parametrize("keyword", [{"regex": "a"}, {"min_p": 0.1}, {"guided_regex": "a"}, {"metadata": {"a": "b"}}])
def test_keywords_without_a_meaning_are_refused(lm: GraftLM, keyword: dict[str, Any]) -> None:
    with pytest.raises(LMUnsupportedFeatureError, match=next(iter(keyword))):
        lm("hello", **keyword)


def test_unknown_extensions_and_settings_of_providers_are_refused(lm: GraftLM) -> None:
    with pytest.raises(LMUnsupportedFeatureError, match="graftlm.rgex"):
        lm(request(lm, extensions={"graftlm": {"rgex": "a"}}))
    with pytest.raises(LMUnsupportedFeatureError, match="service_tier"):
        lm(request(lm, service_tier="fast"))


def test_an_image_for_a_text_model_is_refused(lm: GraftLM) -> None:
    message = lm15.Message(role="user", parts=(lm15.AudioPart(data="aGVsbG8=", media_type="audio/wav"),))
    with pytest.raises(LMUnsupportedFeatureError, match="audio"):
        lm(lm15.Request(model=lm.model, messages=(message,)))
    picture = lm15.Message(role="user", parts=(lm15.ImagePart(data="aGVsbG8=", media_type="image/png"),))
    with pytest.raises(LMInvalidRequestError, match="image"):
        lm(lm15.Request(model=lm.model, messages=(picture,)))


def test_an_infeasible_grammar_is_an_invalid_request(lm: GraftLM) -> None:
    schema = {"type": "json_schema", "schema": {"type": "string", "minLength": 3, "maxLength": 2}}
    with pytest.raises(LMInvalidRequestError):
        lm(request(lm, response_format=schema))


def test_a_failing_request_does_not_hurt_its_neighbours(runtime: Runtime, lm: GraftLM) -> None:
    alone = lm("the good one")

    async def both() -> list[Any]:
        bad = lm.acall("the bad one", max_tokens=30, logit_bias={"99999": 1.0})
        return await asyncio.gather(bad, lm.acall("the good one"), return_exceptions=True)

    failed, good = asyncio.run(both())
    assert isinstance(failed, LMInvalidRequestError | LMProviderError) and good == alone


def test_a_closed_runtime_is_a_provider_error_that_is_not_retried() -> None:
    runtime = Runtime(tiny_model("llama"), tokenizer=byte_tokenizer())
    lm = GraftLM(runtime=runtime, cache=False)
    runtime.close()
    with pytest.raises(LMProviderError, match="closed"):
        lm("hello")


def test_an_engine_over_a_loaded_model_cannot_be_saved(lm: GraftLM) -> None:
    program = dspy.Predict("question -> answer")
    program.lm = lm
    with pytest.raises(TypeError, match="loaded model"):
        program.dump_state()


def test_unknown_options_name_their_nearest_neighbour(runtime: Runtime) -> None:
    with pytest.raises(ConfigError, match="max_tokens|top_p|temperature"):
        GraftLM(runtime=runtime, top_pp=0.5)
    with pytest.raises(ConfigError, match="max_batch"):
        GraftLM(runtime=runtime, max_batch=3)


def test_streaming_gives_the_events_of_the_unstreamed_answer(lm: GraftLM) -> None:
    whole = lm(request(lm, max_tokens=20))
    events = list(lm.engine.stream(request(lm, max_tokens=20)))
    assert [events[0].type, events[-1].type] == ["start", "end"]
    assert "".join(event.delta.text for event in events[1:-1]) == whole.text
    assert events[-1].usage.output_tokens == whole.usage.output_tokens


def test_a_stream_of_several_answers_is_refused_which_used_to_drop_all_but_one(lm: GraftLM) -> None:
    several = request(lm, temperature=1.0, extensions={"graftlm": {"n": 2}})
    with pytest.raises(lm15.UnsupportedFeatureError, match="n is 2 and a stream has one answer"):
        list(lm.engine.stream(several))


def test_an_abandoned_stream_frees_its_kv(runtime: Runtime, lm: GraftLM) -> None:
    before = runtime.stats().cancelled
    stream = lm.engine.stream(request(lm, "a long answer", max_tokens=2000))  # ends by itself after 2,862
    next(stream), next(stream)
    stream.close()
    while runtime.stats().slots_in_use and not runtime.closed:
        gc.collect()
        time.sleep(0.001)
    assert runtime.stats().slots_in_use == 0
    assert runtime.stats().cancelled == before + 1


def test_a_tool_call_has_arguments_of_its_schema(lm: GraftLM) -> None:
    tool = lm15.FunctionTool(
        name="paint",
        parameters={
            "type": "object",
            "properties": {"colour": {"enum": ["red", "blue"]}, "coats": {"type": "integer", "maximum": 3}},
            "required": ["colour", "coats"],
        },
    )
    config = lm15.Config(temperature=1.0, seed=1, max_tokens=200, tool_choice=lm15.ToolChoice(mode="required"))
    asked = lm15.Request(model=lm.model, messages=(lm15.Message.user("go"),), tools=(tool,), config=config)
    answer = lm(asked)
    (call, *_) = answer.tool_calls
    assert answer.finish_reason == "tool_call" and call.name == "paint"
    assert call.input["colour"] in ("red", "blue") and call.input["coats"] <= 3


def test_judgments_are_measured(lm: GraftLM) -> None:
    schema = {
        "type": "object",
        "properties": {"urgent": {"type": "boolean"}, "kind": {"type": "string", "enum": ["bug", "wish"]}},
        "required": ["urgent", "kind"],
        "additionalProperties": False,
    }
    answer = lm(request(lm, response_format={"type": "json_schema", "schema": schema}, probabilities="required"))
    (part,) = answer.message.parts
    assert part.method == "candidate_sequence_likelihood"
    assert {name: sorted(p) for name, p in part.probabilities.items()} == {
        "urgent": ["false", "true"],
        "kind": ["bug", "wish"],
    }
    assert all(abs(sum(p.values()) - 1) < 1e-6 for p in part.probabilities.values())
    assert part.value["kind"] == max(part.probabilities["kind"], key=part.probabilities["kind"].get)


def test_a_stream_of_judgments_is_refused_which_used_to_be_free_text(lm: GraftLM) -> None:
    schema = {"type": "object", "properties": {"urgent": {"type": "boolean"}}, "required": ["urgent"]}
    judged = request(lm, response_format={"type": "json_schema", "schema": schema}, probabilities="required")
    with pytest.raises(lm15.UnsupportedFeatureError, match="a stream has no probabilities"):
        list(lm.engine.stream(judged))


def test_identical_deterministic_requests_in_flight_are_computed_once(runtime: Runtime, lm: GraftLM) -> None:
    lm("warm up")
    gate = threading.Barrier(8)
    answers: list[Any] = []

    def ask() -> None:
        gate.wait()
        answers.append(lm("the same question from all threads", max_tokens=200))

    before = runtime.stats().requests
    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert runtime.stats().requests - before < 8
    assert len(answers) == 8 and all(answer == answers[0] for answer in answers)
    assert len(lm.engine._in_flight) == 0


def test_the_engines_are_what_dspy_takes() -> None:
    with Runtime(tiny_model("llama"), tokenizer=byte_tokenizer()) as runtime:
        engine = Engine(runtime)
        lm = dspy.LM(engine.model_string, engine=engine, async_engine=AsyncEngine(runtime), cache=False, max_tokens=3)
        assert len(lm("hello")) == 1
        assert lm.supports_function_calling and lm.supports_response_schema and not lm.supports_reasoning
        assert "response_format" in lm.supported_params


def test_it_is_imported_while_numpy_is_not_there_yet() -> None:
    """DSPy puts a stand-in in its place, which fails in some versions if a part of NumPy is imported first."""
    script = "import sys; sys.modules['numpy.typing'] = None\nimport dspy\nfrom graftlm.adapters.dspy import GraftLM"
    subprocess.run([sys.executable, "-c", script], check=True)
