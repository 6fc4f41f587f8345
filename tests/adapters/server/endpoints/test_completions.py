"""`/v1/completions`, asked by the openai SDK over HTTP, beside the same requests in process."""

from __future__ import annotations

from typing import Any

import openai
import pytest

import graftlm as gl

PROMPT = "Mara is 20 years old and lives in"


@pytest.fixture(scope="module")
def runtime() -> gl.Runtime:
    return gl.Runtime.shared("sprout", dtype="float32")


def complete(client: openai.OpenAI, **given: Any) -> Any:
    return client.completions.create(
        **{"model": "sprout", "prompt": PROMPT, "temperature": 0, "max_tokens": 8, **given}
    )


def test_text_and_token_ids_are_the_same_prompt(client: openai.OpenAI, runtime: gl.Runtime) -> None:
    ids = runtime.tokenizer.encode(PROMPT)
    own = runtime.generate(PROMPT, temperature=0, max_tokens=8).text
    assert complete(client).choices[0].text == complete(client, prompt=ids).choices[0].text == own


def test_each_prompt_of_a_list_has_its_choices_in_order(client: openai.OpenAI) -> None:
    prompts = [PROMPT, "Who is", "The cat"]
    alone = [complete(client, prompt=prompt).choices[0].text for prompt in prompts]
    assert [choice.text for choice in complete(client, prompt=prompts).choices] == alone
    twice = complete(client, prompt=prompts, n=2)
    assert [choice.index for choice in twice.choices] == [0, 1, 2, 3, 4, 5]
    assert [choice.text for choice in twice.choices] == [text for text in alone for _ in range(2)]
    streamed = ["", "", ""]
    for chunk in complete(client, prompt=prompts, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == alone


def test_max_tokens_is_16_where_none_is_given(client: openai.OpenAI) -> None:
    assert complete(client, max_tokens=None, extra_body={"ignore_eos": True}).usage.completion_tokens == 16


def test_each_chunk_counts_tokens_where_that_is_asked(client: openai.OpenAI) -> None:
    options = {"continuous_usage_stats": True}
    counts = [chunk.usage.completion_tokens for chunk in complete(client, stream=True, stream_options=options)]
    assert counts == sorted(counts)
    assert counts[-1] == complete(client).usage.completion_tokens


@pytest.mark.parametrize("limit", [0, 1])
def test_echo_scores_the_prompt_as_the_runtime_does(client: openai.OpenAI, runtime: gl.Runtime, limit: int) -> None:
    answer = complete(client, echo=True, logprobs=2, max_tokens=limit)
    ids, found = runtime.tokenizer.encode(PROMPT), answer.choices[0].logprobs
    own = runtime.score(ids[:1], ids[1:])
    assert answer.choices[0].text.startswith(PROMPT)
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    assert found.token_logprobs[1 : len(ids)] == pytest.approx(own.logprobs, abs=1e-5)
    assert len(found.tokens) == len(ids) + limit
    values = zip(found.token_logprobs[1:], found.top_logprobs[1:], strict=True)
    assert all(value <= max(top.values()) for value, top in values)
    assert all(len(top) in (2, 3) for top in found.top_logprobs[1 : len(ids)])


def test_text_offsets_point_at_the_tokens(client: openai.OpenAI) -> None:
    choice = complete(client, echo=True, logprobs=0).choices[0]
    found = choice.logprobs
    starts = [choice.text[at : at + len(token)] for at, token in zip(found.text_offset, found.tokens, strict=True)]
    assert starts[1:] == found.tokens[1:]
    streamed = [c.logprobs for chunk in complete(client, logprobs=0, stream=True) for c in chunk.choices]
    offsets = [at for one in streamed if one for at in one.text_offset]
    assert offsets == sorted(set(offsets))


def test_echo_streams_the_prompt_first(client: openai.OpenAI) -> None:
    texts = [choice.text for chunk in complete(client, echo=True, stream=True) for choice in chunk.choices]
    assert texts[0].startswith(PROMPT)
    assert "".join(texts) == PROMPT + complete(client).choices[0].text


def test_token_ids_are_returned_where_they_are_asked_for(client: openai.OpenAI, runtime: gl.Runtime) -> None:
    choice = complete(client, extra_body={"return_token_ids": True}).choices[0]
    own = runtime.generate(PROMPT, temperature=0, max_tokens=8)
    assert choice.prompt_token_ids == runtime.tokenizer.encode(PROMPT)
    assert choice.token_ids == own.token_ids


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, None),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
    ],
)
def test_what_cannot_be_done_is_refused(client: openai.OpenAI, given: dict[str, Any], param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        list(complete(client, **given))
    assert caught.value.param == param


EMOJI = {"max_tokens": 8, "extra_body": {"guided_regex": "👍👍"}}
STARTS = [0, 0, 0, 0, 1, 1, 1, 1]


def test_offsets_used_to_drift_after_a_character_of_several_tokens(client: openai.OpenAI) -> None:
    choice = complete(client, logprobs=1, **EMOJI).choices[0]
    assert choice.text == "👍👍"
    assert choice.logprobs.text_offset[:8] == STARTS
    assert choice.logprobs.tokens[:2] == ["bytes:\\xf0", "bytes:\\x9f"]
    streamed = [c.logprobs for chunk in complete(client, logprobs=1, stream=True, **EMOJI) for c in chunk.choices]
    assert [at for one in streamed if one for at in one.text_offset][:8] == STARTS


@pytest.mark.parametrize("prompt", ["👍 Mara", "é"])
def test_offsets_of_an_echoed_prompt_used_to_count_bytes_as_characters(client: openai.OpenAI, prompt: str) -> None:
    choice = complete(client, prompt=prompt, echo=True, logprobs=0, max_tokens=1).choices[0]
    found = choice.logprobs
    assert choice.text.startswith(prompt)
    assert found.text_offset[-1] == len(prompt)
    assert found.text_offset == sorted(found.text_offset)


def test_an_echoed_prompt_is_counted_whole_and_streamed(client: openai.OpenAI, runtime: gl.Runtime) -> None:
    # the count was one token short, and a stream had no chunk
    whole = complete(client, echo=True, max_tokens=0, n=2)
    assert whole.usage.prompt_tokens == len(runtime.tokenizer.encode(PROMPT))
    options = {"include_usage": True}
    *chunks, last = list(complete(client, echo=True, max_tokens=0, n=2, stream=True, stream_options=options))
    said = [(choice.index, choice.text, choice.finish_reason) for chunk in chunks for choice in chunk.choices]
    assert said == [(0, PROMPT, "length"), (1, PROMPT, "length")]
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
