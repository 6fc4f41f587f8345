from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import graftlm as gl
from graftlm.ab.engines.frameworks import named_engines
from graftlm.ab.measure.meter import Meter, _num_generated
from graftlm.ab.measure.prefix_caches import alive
from graftlm.ab.measure.profile import Fingerprint, Work, num_pictures
from graftlm.core.chat.messages import ImagePart, Message, TextPart, VideoPart
from graftlm.core.errors import RequestTooLong
from tests.core.remote.models import answers
from tests.core.remote.server import Server
from tests.models import byte_tokenizer, tiny_model

PROMPTS = ["The same beginning, and this", "The same beginning, and that"]


@pytest.fixture(autouse=True)
def _without_what_other_tests_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    left = alive(gl.Runtime)
    monkeypatch.setattr(
        "graftlm.ab.measure.meter.alive", lambda kind: [x for x in alive(kind) if all(x is not y for y in left)]
    )


@pytest.fixture
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gl.Runtime]:
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    with gl.Runtime(str(folder)) as runtime:
        yield runtime


def test_counts_equal_the_engines_own_and_those_of_the_prompts(runtime: gl.Runtime) -> None:
    meter = Meter()
    meter.attach()
    meter.start()
    answers = runtime.generate(PROMPTS, max_tokens=3, temperature=0)
    stats, work = runtime.stats(), meter.work()
    assert work == Work(2, stats.prompt_tokens, stats.computed_tokens, stats.completion_tokens, stats.largest_batch)
    assert work.prompt_tokens == sum(len(prompt.encode()) for prompt in PROMPTS)
    assert work.completion_tokens == sum(answer.usage.completion_tokens for answer in answers)


def test_pictures_of_every_form_count() -> None:
    """Messages, bodies of requests and objects; the fingerprint tells pictures of one size apart."""
    url = {"type": "image_url", "image_url": {"url": "data:,"}}
    body = {"messages": [{"role": "user", "content": [url, {"type": "text", "text": "image"}, url]}]}
    native = [Message("user", (ImagePart(b"1"), TextPart("a"), VideoPart([])))]
    for prompt in (body, json.dumps(body).encode(), native, body["messages"]):
        assert num_pictures(prompt) == 2
    for prompt in ("image", [1, 2], b"\xff", [], native[0].text, {"prompt": "image"}):
        assert num_pictures(prompt) == 0
    prints = []
    for value in (0, 0, 1):
        fingerprint = Fingerprint()
        fingerprint.add([Message("user", (ImagePart(np.full((4000,), value)),))])
        prints.append(fingerprint.value)
    assert prints[0] == prints[1] != prints[2]


def test_a_prefix_computed_ahead_is_no_call_but_its_tokens_are_computed(runtime: gl.Runtime) -> None:
    meter = Meter()
    meter.attach()
    meter.start()
    with runtime.warm("The same beginning"):
        runtime.generate(PROMPTS, max_tokens=3, temperature=0)
    work = meter.work()
    assert (work.calls, work.prompt_tokens) == (2, sum(map(len, PROMPTS)))
    assert work.computed_tokens == len(PROMPTS[0]) + len("is")
    assert len(meter.calls()) == 2


def test_failed_and_unfinished_calls_are_told_and_prompts_are_told_apart(runtime: gl.Runtime) -> None:
    meter = Meter()
    meter.attach()
    found = []
    for prompts in (PROMPTS, PROMPTS[::-1], [PROMPTS[0], "The same beginning, and thus"]):
        meter.start()
        runtime.generate(prompts, max_tokens=1, temperature=0)
        found.append(meter.prompts)
    assert found[0] == found[1] != found[2] and meter.failed() == []
    with pytest.raises(RequestTooLong):
        runtime.generate("a" * 9999, max_tokens=1)
    assert meter.failed()[0].startswith("a model call failed with RequestTooLong: the prompt has 9,999 characters")
    assert meter.under_way() == 0
    meter._begin("a call from a thread that outlives run()")
    assert meter.under_way(patience_s=0) == 1


def test_streams_and_calls_of_event_loops_have_a_place_in_time_and_a_first_token(runtime: gl.Runtime) -> None:
    """They were counted, and the report showed none of them."""
    meter = Meter()
    meter.attach()
    meter.start()

    async def gathered() -> list[str]:
        return [chunk.text async for chunk in runtime.astream(PROMPTS[1], max_tokens=2, temperature=0)]

    with meter.watch():
        text = "".join(chunk.text for chunk in runtime.stream(PROMPTS[0], max_tokens=2, temperature=0))
        assert text == asyncio.run(runtime.agenerate(PROMPTS[0], max_tokens=2, temperature=0)).text
        assert "".join(asyncio.run(gathered())) == runtime.generate(PROMPTS[1], max_tokens=2, temperature=0).text
        runtime.stream(PROMPTS[0], max_tokens=90, temperature=0).close()
        assert (meter.under_way(), meter.failed()) == (0, [])
    calls = meter.calls()
    assert len(meter.calls()) == len(calls) == 5
    assert all(call.first_s and bytes(call.prompt_ids).decode() in PROMPTS for call in calls[:4])


def test_a_prefix_that_an_engine_does_not_keep_takes_no_call_away(runtime: gl.Runtime) -> None:
    """Programs of a batch ask for their common prefix first: 24 calls used to be counted as 23."""
    with named_engines("native", 3)["hf"](runtime.model) as plain:
        meter = Meter()
        meter.attach()
        meter.start()
        with plain.warm("The same beginning"):
            plain.generate(PROMPTS, max_tokens=3, temperature=0)
        assert (meter.work().calls, meter.work().prompt_tokens) == (2, sum(map(len, PROMPTS)))


def test_an_endpoint_behind_a_runtime_is_named_because_its_cache_cannot_be_emptied() -> None:
    with gl.Runtime("some-model", base_url="http://127.0.0.1:9/v1", api_key="none").load() as endpoint:
        meter = Meter()
        meter.attach()
        assert meter.start() == [repr(endpoint)]


def test_what_a_program_asks_an_endpoint_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the HTTP client alone: the runtime's own figures, added to it, made two calls of one."""
    httpx = pytest.importorskip("httpx")
    for client in (httpx.Client, httpx.AsyncClient):
        monkeypatch.setattr(client, "send", client.send)  # hooked below
    with (
        Server(answers({"France": "Paris, of course."})) as server,
        gl.Runtime("m", base_url=server.url, api_key="none").load() as endpoint,
    ):
        meter = Meter()
        meter.attach()
        endpoint.generate("The capital of France is", max_tokens=3, temperature=0)
        before = len(server.calls)
        meter.start()
        endpoint.generate("The capital of France is", max_tokens=3, temperature=0)
        served = server.calls[before:]
        work = meter.work()
        assert work.calls == len(served) > 0
        assert work.prompt_tokens == sum(call.prompt_tokens for call in served)
        assert work.completion_tokens == sum(call.completion_tokens for call in served)
        assert len(meter.calls()) == len(served)


def test_generated_tokens_are_counted_up_to_each_rows_end_token() -> None:
    import torch

    model = tiny_model()
    model.generation_config.eos_token_id = [7]
    given = torch.tensor([[1, 2], [1, 2]])
    output = torch.tensor([[1, 2, 5, 7, 0, 0], [1, 2, 5, 5, 5, 5]])
    assert _num_generated(model, given, output) == 2 + 4


def test_tokens_that_a_framework_picks_from_logits_are_not_counted() -> None:
    import torch

    model, meter = tiny_model(), Meter()
    meter.attach()
    meter.start()
    model(torch.tensor([[5, 6, 7]]))
    assert meter.work() == Work(1, 3, 3, None, 1)
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, min_new_tokens=2, do_sample=False)
    assert meter.work() == Work(2, 6, 6, 2, 1)


def test_a_model_that_is_no_torch_module_counts_by_its_calls() -> None:
    torch = pytest.importorskip("torch")
    from transformers import GenerationConfig, GenerationMixin

    class Elsewhere(GenerationMixin):  # type: ignore[misc]
        config, generation_config = None, GenerationConfig(eos_token_id=9)

        def generate(self, input_ids: Any, **options: Any) -> Any:
            return torch.cat([input_ids, torch.tensor([[1, 9, 9], [1, 2, 3]])], 1)

    model, meter = Elsewhere(), Meter()
    meter.attach()
    meter.start()
    padded = torch.tensor([[0, 5, 5, 5], [5, 5, 5, 5]])
    model.generate(input_ids=padded, attention_mask=(padded > 0).long())
    assert meter.work() == Work(2, 7, 7, 5, 2)
    assert len(meter.calls()) == 1 and meter.failed() == []
