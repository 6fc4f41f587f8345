"""Answers, streams and refusals in the shapes of well-known servers and gateways."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any

import pytest

import graftlm as gl
from graftlm.adapters.langchain import ChatGraftLM
from graftlm.core.errors import RemoteError
from tests.core.remote.server import Fault, Server
from tests.core.remote.test_odd_servers import CHAT, FORM, SAID, VALUES, chat

Edit = Callable[[dict[str, Any]], dict[str, Any]]


def azure(body: dict[str, Any]) -> dict[str, Any]:
    """Azure: verdicts of filters at every choice and beside them."""
    safe = {"hate": {"filtered": False, "severity": "safe"}}
    for choice in body.get("choices") or ():
        choice["content_filter_results"] = safe
    return body | {"prompt_filter_results": [{"prompt_index": 0, "content_filter_results": safe}]}


def llama_cpp(body: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp: the first piece's content is null, timings stand beside the usage."""
    for choice in body.get("choices") or ():
        if choice.get("delta") == {}:
            choice["delta"] = {"role": "assistant", "content": None}
    return body | {"timings": {"cache_n": 0, "prompt_ms": 1.5}, "__verbose": {"stop": True}}


def vllm(body: dict[str, Any]) -> dict[str, Any]:
    """vLLM: what stopped the text, ids, and fields that are null."""
    for choice in body.get("choices") or ():
        choice |= {"stop_reason": None, "token_ids": None}
        choice.setdefault("logprobs", None)
    return body | {
        "prompt_logprobs": None,
        "kv_transfer_params": None,
        "service_tier": None,
        "system_fingerprint": None,
    }


def ollama(body: dict[str, Any]) -> dict[str, Any]:
    """Ollama: thoughts in a field of their own, an empty content beside them."""
    for choice in body.get("choices") or ():
        for name in ("message", "delta"):
            if name in choice:
                choice[name]["reasoning"] = ""
        choice["finish_reason"] = choice.get("finish_reason") or None
    return body | {"system_fingerprint": "fp_ollama"}


def anthropic(body: dict[str, Any]) -> dict[str, Any]:
    """Anthropic's layer: the usage lacks details, messages have fields that are null."""
    for choice in body.get("choices") or ():
        for name in ("message", "delta"):
            if name in choice:
                choice[name] |= {"refusal": None, "audio": None, "function_call": None, "annotations": None}
    return body | {"service_tier": None}


def together(body: dict[str, Any]) -> dict[str, Any]:
    """Together: a token's id at each choice, its text beside the delta."""
    for choice in body.get("choices") or ():
        choice |= {"token_id": 11, "seed": 1783, "text": (choice.get("delta") or choice).get("content", "")}
    return body | {"prompt": []}


def perplexity() -> Edit:
    """Perplexity: every piece has the message so far beside its delta."""
    so_far = ""

    def edit(body: dict[str, Any]) -> dict[str, Any]:
        nonlocal so_far
        for choice in body.get("choices") or ():
            if "delta" in choice:
                so_far += choice["delta"].get("content") or ""
                choice["message"] = {"role": "assistant", "content": so_far}
            if choice.get("finish_reason"):
                so_far = ""
        return body

    return edit


NO_PREFILL = {"continue_turn": "none", "trailing": "refused", "logprobs": False}
FAMILIES: dict[str, Callable[[], dict[str, Any]]] = {
    "azure": lambda: {"edit": azure, "continue_turn": "none", "max_tokens_field": "max_completion_tokens"},
    "llama.cpp": lambda: {"edit": llama_cpp, "continue_turn": "bare"},
    "vllm": lambda: {"edit": vllm},
    "ollama": lambda: {"edit": ollama, "continue_turn": "bare", "logprobs": False, "n": False},
    "anthropic": lambda: {"edit": anthropic, **NO_PREFILL, "n": False, "drops": ("stop",)},
    "together": lambda: {"edit": together, "continue_turn": "none"},
    "perplexity": lambda: {"edit": perplexity(), "continue_turn": "none", "logprobs": False},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_spec_tokens", [None, 64])
def test_programs_and_streams_are_right(family: str, num_spec_tokens: int | None) -> None:
    example = [{"role": "user", "content": "Bob?"}, {"role": "assistant", "content": FORM.replace("Ann", "Bob")}]

    def shown(s: Any) -> None:
        s += gl.user("Bob?") + gl.assistant(example[1]["content"])
        chat(s)

    program = gl.program(num_api_spec_tokens=num_spec_tokens, temperature=0)(shown)
    with Server(SAID, **FAMILIES[family]()) as server, gl.Runtime("m", base_url=server.url) as rt:
        assert rt.generate(CHAT, temperature=0).text == FORM
        assert "".join(chunk.text for chunk in rt.stream(CHAT, temperature=0)) == FORM
        usage = rt.usage
        assert (usage.api_calls + usage.retries, usage.estimated) == (len(server.calls), 0)
        if family in ("llama.cpp", "vllm", "ollama") or num_spec_tokens is not None:
            assert program.run(runtime=rt).variables == VALUES


MESSAGE = {"error": {"message": "said so", "type": "x", "param": None, "code": None}}
REFUSALS: dict[str, tuple[int, Any, str]] = {
    "azure's filter": (
        400,
        {"error": {"code": "content_filter", "message": "management policy", "status": 400, "innererror": {}}},
        "400 content_filter: management policy; change what it refuses",
    ),
    "llama.cpp's context": (
        400,
        {"error": {"code": 400, "message": "exceeds the context", "type": "exceed_context_size_error", "n_ctx": 512}},
        "400.*: exceeds the context; shorten the prompt",
    ),
    "ollama's model": (
        404,
        {"error": {"message": "model 'm' not found", "type": "api_error", "param": None, "code": None}},
        "404.*model 'm' not found; check base_url .*and the model's name",
    ),
    "vllm, as it was": (
        400,
        {"object": "error", "message": "at most 512 tokens", "type": "BadRequestError", "param": None, "code": 400},
        "400.*: at most 512 tokens; change",
    ),
    "gemini's list": (
        400,
        [{"error": {"code": 400, "message": "API key not valid", "status": "INVALID_ARGUMENT"}}],
        "answered 400[^\\[{]*: API key not valid; change",
    ),
    "fastapi's detail": (
        422,
        {"detail": [{"type": "missing", "loc": ["body", "model"], "msg": "Field required"}]},
        "422.*'model'.*Field required.*; change",
    ),
    "tgi": (
        422,
        {"error": "inputs must be shorter", "error_type": "validation"},
        "422: inputs must be shorter; change",
    ),
    "anthropic's own": (
        400,
        {"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long"}},
        "400 invalid_request_error: prompt is too long; shorten the prompt",
    ),
    "openrouter's credit": (402, {"error": {"code": 402, "message": "Insufficient credits"}}, "credits; add credit"),
    "groq's size": (413, {"error": {"message": "too large", "code": "rate_limit_exceeded"}}, "too large; shorten"),
    "a gateway's text": (403, "Access denied", "403: Access denied; check what the key is allowed to do"),
}


@pytest.mark.parametrize("case", REFUSALS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_quoted_once_with_a_remedy(case: str, stream: bool) -> None:
    status, body, reason = REFUSALS[case]
    with (
        Server(SAID, faults=[Fault(status, body=body)] * 3) as server,
        gl.Runtime("m", base_url=server.url) as rt,
        pytest.raises(RemoteError, match=reason),
    ):
        _ = list(rt.stream(CHAT)) if stream else rt.generate(CHAT)
    assert len(server.calls) == 1


def test_a_model_that_still_loads_is_waited_for() -> None:
    """As llama.cpp says it, and Anthropic that it is overloaded."""
    loading = Fault(503, {"retry-after": "0"}, {"error": {"code": 503, "message": "Loading model"}})
    busy = Fault(529, {"retry-after": "0"}, {"type": "error", "error": {"type": "overloaded_error", "message": "Busy"}})
    with Server(SAID, faults=[loading, busy]) as server, gl.Runtime("m", base_url=server.url) as rt:
        assert rt.generate(CHAT).text == FORM
        assert (rt.usage.api_calls, rt.usage.retries) == (1, 2)


def test_an_error_at_a_choice_is_told() -> None:
    """OpenRouter answers 200 where the provider behind it failed."""
    choice = {"index": 0, "message": {"content": "Na"}, "finish_reason": "error", "error": {"message": "overheated"}}
    raw = json.dumps({"choices": [choice]}).encode()
    with (
        Server(SAID, faults=[Fault(raw=raw)]) as server,
        gl.Runtime("m", base_url=server.url) as rt,
        pytest.raises(RemoteError, match=r"finish_reason 'error' \(overheated\); ask again"),
    ):
        rt.generate(CHAT)


@pytest.mark.parametrize("arguments", ['{"city": "Bonn"}', {"city": "Bonn"}])
def test_streamed_calls_that_are_numbered_alike_stay_apart(arguments: Any) -> None:
    """Ollama and Gemini send each call whole, all with index 0 or none."""
    calls = [
        {"index": 0, "id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for name in ("weather", "time")
    ]
    pieces = [{"choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}]} for call in calls]
    pieces.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    raw = "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces).encode() + b"data: [DONE]\n\n"
    tools = [{"name": name, "description": "", "parameters": {"type": "object"}} for name in ("weather", "time")]
    with Server(SAID, faults=[Fault(raw=raw, raw_type="text/event-stream")]) as server:
        said = list(ChatGraftLM(model="m", base_url=server.url).bind_tools(tools).stream("Bonn?"))
    called = reduce(add, said).tool_calls  # type: ignore[arg-type]
    assert [(call["name"], call["args"]) for call in called] == [
        ("weather", {"city": "Bonn"}),
        ("time", {"city": "Bonn"}),
    ]
