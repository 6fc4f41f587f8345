"""Fuzz targets: readers of untrusted bytes. Each raises its documented errors only, and ends soon."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pydantic

import graftlm as gl
from graftlm.adapters.server.bodies import JsonCounts, LongTexts
from graftlm.adapters.server.dialects.messages import MessagesBody
from graftlm.adapters.server.dialects.ollama import GenerateBody, OllamaChatBody
from graftlm.adapters.server.dialects.responses import ResponsesBody
from graftlm.adapters.server.endpoints.chat import ChatBody
from graftlm.adapters.server.endpoints.completions import CompletionBody
from graftlm.adapters.server.settings import Limits as ServerLimits
from graftlm.core.errors import GraftError
from graftlm.core.grammar.compile import Grammar
from graftlm.core.grammar.spec import JsonSchema, Lark, Limits, Regex, Spec
from graftlm.core.grammar.vocabulary import Vocabulary
from graftlm.core.model.gguf.reader import read_gguf
from graftlm.core.model.quantised.format_check import tensor_header
from graftlm.core.remote.config import EndpointConfig
from graftlm.core.remote.transport.answer import StreamedAnswers, read_answers
from graftlm.kernels.disk_cache import load_arrays

SMALL = Limits(states=4096, memory_bytes=32 << 20, seconds=1.0)


class Target(NamedTuple):
    """A function of bytes that raises only for a fault, and inputs to begin with."""

    check: Callable[[bytes], None]
    seeds: tuple[bytes, ...]


@functools.cache
def _vocabulary() -> Vocabulary:
    return Vocabulary([*(bytes([i]) for i in range(256)), b""], eos_token_id=256)


def _compiled(spec: Callable[[], Spec]) -> Grammar | None:
    """Compile a constraint, and walk to its shortest end: the matcher accepts it."""
    try:
        grammar = Grammar.compile(spec(), _vocabulary(), limits=SMALL)
    except GraftError:
        return None
    matcher = grammar.matcher()
    for _ in range(64):
        forced = matcher.forced_bytes()
        if matcher.finished or not forced:
            break
        assert matcher.advance(list(forced[:1])) == 1, "a forced byte is refused"
    return grammar


def schema(data: bytes) -> None:
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(given, dict | bool):
        _compiled(lambda: JsonSchema(given))


def regex(data: bytes) -> None:
    _compiled(lambda: Regex(data.decode(errors="replace")))


def lark(data: bytes) -> None:
    _compiled(lambda: Lark(data.decode(errors="replace")))


@functools.cache
def _runtime() -> gl.Runtime:
    """Return a runtime that is never loaded: it reads prompts only."""
    return gl.Runtime("sprout")


CONVERSIONS: dict[type[pydantic.BaseModel], Callable[[Any], ChatBody | CompletionBody | None]] = {
    ChatBody: lambda given: given,
    CompletionBody: lambda given: given,
    MessagesBody: MessagesBody.to_chat,
    ResponsesBody: lambda given: given.to_chat([]),
    OllamaChatBody: OllamaChatBody.to_chat,
    GenerateBody: GenerateBody.to_chat,
}
"""The conversion of each body to the request that its limits are checked of; None if it only loads a model."""


def body(data: bytes) -> None:
    limits = ServerLimits(json_members=1000, json_values=1000, salt_chars=8, stop_chars=16, constraint_chars=32)
    counts = JsonCounts(ServerLimits())
    assert counts.check(data) is None
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError):
        whole = None
    if isinstance(whole, dict):
        assert counts.num_members >= len(whole) or len(data) < 2, "members are missed"
    for kind, convert in CONVERSIONS.items():
        refused = LongTexts(limits, kind).check(bytearray(data))
        try:
            read = convert(kind.model_validate_json(data))
            if read is None:
                continue
            read.check(limits)
            assert refused is None, f"a body is refused while it arrives that is valid: {refused}"
            if isinstance(read, ChatBody) and not read.chat_template:
                read.convert(_runtime())
        except (pydantic.ValidationError, GraftError):
            continue


def endpoint_stream(data: bytes) -> None:
    config = EndpointConfig(base_url="http://127.0.0.1:1/v1", model="m")
    streamed = StreamedAnswers(1)
    try:
        for line in data.splitlines():
            try:
                piece = json.loads(line.removeprefix(b"data:"))
            except (ValueError, RecursionError):
                continue
            if isinstance(piece, dict):
                streamed.push(piece)
        streamed.check_complete(config)
        read_answers(streamed.body, config)
    except GraftError:
        pass


def _in_file(data: bytes, name: str, read: Callable[[Path], object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        path.chmod(0o600)
        with suppress(GraftError):
            read(path)


def gguf(data: bytes) -> None:
    _in_file(data, "a.gguf", read_gguf)


def safetensors(data: bytes) -> None:
    _in_file(data, "model.safetensors", tensor_header)


def cache_file(data: bytes) -> None:
    _in_file(data, "a.npz", load_arrays)
    _in_file(hashlib.sha256(data).digest() + data, "a.npz", load_arrays)


def _chunk(**delta: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}).encode()


def _arrays() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.arange(3))
    return file.getvalue()


_CALL = {"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"a": 1}'}}
_HEADER = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'

TARGETS = {
    "schema": Target(
        schema,
        (
            b'{"type":"object","properties":{"a":{"type":"integer","minimum":3}},"required":["a"]}',
            b'{"$defs":{"n":{"anyOf":[{"$ref":"#/$defs/n"},{"type":"null"}]}},"$ref":"#/$defs/n"}',
            b'{"type":"array","items":{"const":[2.5]},"uniqueItems":true,"minItems":1}',
            b'{"type":"string","pattern":"^a+$","format":"date","minLength":2}',
        ),
    ),
    "regex": Target(regex, (b"(?i)[a-f]{2,3}|x(?=y)\\w+", b"^(?:\\d+\\.)?\\d$", b"\\p{L}\\u00e9[^\\n]*?")),
    "lark": Target(lark, (b'start: "a" b*\nb: /[0-9]+/', b"start: x\nx: x? \"y\" | %json {}\n", b"root ::= [a-z]+")),
    "body": Target(
        body,
        (
            b'{"model":"m","messages":[{"role":"user","content":"a"}],"stop":["b"],"max_tokens":1}',
            b'{"model":"m","prompt":"a","regex":"a","cache_salt":"s","logit_bias":{"1":2}}',
            b'{"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":"b"}]}],'
            b'"max_tokens":1,"tools":[{"name":"f","input_schema":{}}],"output_config":{"format":null},"thinking":null}',
            b'{"input":[{"type":"function_call","call_id":"a","name":"f","arguments":"{}"},'
            b'{"type":"function_call_output","call_id":"a","output":"b"}],"text":{"format":null},"tools":[]}',
            b'{"messages":[{"role":"tool","content":"a","tool_calls":[{"function":{"name":"f","arguments":{}}}],'
            b'"images":[]}],"options":{"num_predict":1,"top_k":2},"format":"json"}',
            b'{"prompt":"a","system":"b","images":["aGk="],"options":{"stop":["a"],"seed":1},"think":false}',
        ),
    ),
    "endpoint_stream": Target(
        endpoint_stream,
        (
            _chunk(content="a") + b'\ndata: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\ndata: [DONE]',
            _chunk(tool_calls=[_CALL]),
            b'{"error":{"message":"m"}}\n{"choices":[{"text":"a","logprobs":{"tokens":["a"],"token_logprobs":[0]}}]}',
        ),
    ),
    "gguf": Target(
        gguf,
        (
            b"GGUF\x03\0\0\0" + bytes(16),
            b"GGUF\x03\0\0\0" + bytes(8) + b"\x01" + bytes(7) + b"\x14" + bytes(7) + b"general.architecture\x08\0\0\0"
            + b"\x05" + bytes(7) + b"llama",
        ),
    ),
    "safetensors": Target(safetensors, (len(_HEADER).to_bytes(8, "little") + _HEADER + bytes(4), b"\xff" * 12)),
    "cache_file": Target(cache_file, (bytes(64), b"PK\x03\x04" + bytes(40), _arrays())),
}  # fmt: skip
