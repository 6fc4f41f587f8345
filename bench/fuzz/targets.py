"""Fuzz targets: readers of untrusted bytes. Each raises its documented errors only, and ends soon.

Texts of a compiled schema are valid by jsonschema, those of a pattern by `re` or `regex`.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import re
import struct
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from decimal import localcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pydantic
import regex as another_regex

import graftlm as gl
from bench.grammar.validity import exact, write
from graftlm.adapters.server.bodies import JsonCounts, LongTexts
from graftlm.adapters.server.dialects.messages import MessagesBody
from graftlm.adapters.server.dialects.ollama import GenerateBody, OllamaChatBody
from graftlm.adapters.server.dialects.responses import ResponsesBody
from graftlm.adapters.server.endpoints.chat import ChatBody
from graftlm.adapters.server.endpoints.completions import CompletionBody
from graftlm.adapters.server.settings import Limits as ServerLimits
from graftlm.core.errors import GraftError
from graftlm.core.grammar.compile import Grammar
from graftlm.core.grammar.schema.validator import validator
from graftlm.core.grammar.spec import JsonSchema, Lark, Limits, Regex, Spec
from graftlm.core.grammar.vocabulary import Vocabulary
from graftlm.core.kv.tiers.folder import BLOCK, BlockFolder, FileKey
from graftlm.core.model import fingerprint
from graftlm.core.model.gguf.folder import description_files
from graftlm.core.model.gguf.reader import read_gguf
from graftlm.core.model.quantised.format_check import tensor_header
from graftlm.core.remote.config import EndpointConfig
from graftlm.core.remote.transport.answer import StreamedAnswers, read_answers
from graftlm.kernels.disk_cache import load_arrays

SMALL = Limits(states=4096, memory_bytes=32 << 20, seconds=1.0)
MOST_TOKENS = 100
"""Tokens of a generated text, of a byte each."""


class Target(NamedTuple):
    """A function of bytes that raises only for a fault, and inputs to begin with.

    words     words of the language that the inputs are of, for mutations.
    is_json   the inputs are mutated as JSON values.
    """

    check: Callable[[bytes], None]
    seeds: tuple[bytes, ...]
    words: tuple[str, ...] = ()
    is_json: bool = False


@functools.cache
def _vocabulary() -> Vocabulary:
    return Vocabulary([*(bytes([i]) for i in range(256)), b""], eos_token_id=256)


def _texts(spec: Callable[[], Spec], data: bytes) -> list[bytes]:
    """Compile a constraint and return two random texts of it, seeded by the input; none if it is refused."""
    try:
        grammar = Grammar.compile(spec(), _vocabulary(), limits=SMALL)
    except GraftError:
        return []
    matcher = grammar.matcher()
    for _ in range(64):
        forced = matcher.forced_bytes()
        if matcher.finished or not forced:
            break
        assert matcher.advance(list(forced[:1])) == 1, "a forced byte is refused"
    if grammar.matcher().min_tokens_to_accept() > MOST_TOKENS:
        return []
    rng = np.random.default_rng(zlib.crc32(data))
    return [write(grammar, _vocabulary(), rng, most)[0] for most in (MOST_TOKENS // 4, MOST_TOKENS)]


def schema(data: bytes) -> None:
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(given, dict | bool):
        for text in map(bytes.decode, _texts(lambda: JsonSchema(given), data)):
            assert (problem := _complaint(given, text)) is None, f"{text!r} is refused: {problem}"


def _complaint(schema: Any, text: str) -> str | None:
    """Return the reason why jsonschema refuses a text; None if it accepts it or cannot judge."""
    whole = json.loads(text, parse_float=exact)  # an error is a fault: the text is no JSON
    said = json.dumps(schema)
    if '"contentMediaType"' in said:  # a note to the standard, which the validator checks where the mask keeps it
        return None
    try:
        judge = validator(said, exact=True)
        with localcontext(prec=1000):
            found = next(judge.iter_errors(whole), None)
    except Exception:  # jsonschema raises errors of many kinds for schemas and values that it cannot read
        return None
    return None if found is None else str(found.message)


def regex(data: bytes) -> None:
    pattern = data.decode(errors="replace")
    for text in map(bytes.decode, _texts(lambda: Regex(pattern), data)):
        try:
            compiled = re.compile(pattern)
            accepted = another_regex.fullmatch(pattern, text, timeout=1) or compiled.fullmatch(text)
        except Exception:  # \\p{...}, or a pattern that takes for ever
            continue
        assert accepted, f"{text!r} is refused"


def lark(data: bytes) -> None:
    """Compile a grammar and write texts of it, which no validator judges; ~"a" is any other bytes."""
    _texts(lambda: Lark(data.decode(errors="replace")), data)


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
    _in_file(data, "a.gguf", lambda path: description_files(read_gguf(path)))


def safetensors(data: bytes) -> None:
    _in_file(data, "model.safetensors", tensor_header)
    fingerprint._add_tensors(hashlib.blake2b(), io.BytesIO(data), len(data))


def cache_file(data: bytes) -> None:
    _in_file(data, "a.npz", load_arrays)
    _in_file(hashlib.sha256(data).digest() + data, "a.npz", load_arrays)


TIER_IDS = np.arange(64, dtype=np.int32).tobytes()


def tier_file(data: bytes) -> None:
    """Read a file of cached KV: a block is what was written, or missing."""
    row = np.zeros(64, np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        blocks = BlockFolder(Path(folder), "context", 1 << 20)
        file = FileKey(BLOCK, bytes(16), TIER_IDS)
        (blocks.folder / file.name).write_bytes(data)
        blocks._scan()
        found = blocks.block(file.key, TIER_IDS[:200])
        assert found is None or found.ids == TIER_IDS
        if blocks._read(file, row):
            forged = data[:_TIER_HEAD] != _tier_file()[:_TIER_HEAD]  # its checksum guards against accidents only
            assert row.tobytes() == (data[-64:] if forged else TIER_ROW.tobytes()), "bytes that were not written"
        blocks.close(10)


TIER_ROW = np.arange(64, dtype=np.uint8)


_TIER_HEAD = 48  # bytes up to the checksum, and sizes


@functools.cache
def _tier_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        blocks = BlockFolder(Path(folder), "context", 1 << 20)
        blocks._write(file := FileKey(BLOCK, bytes(16), TIER_IDS), TIER_ROW)
        blocks.close(10)
        return (blocks.folder / file.name).read_bytes()


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _gguf(*entries: tuple[bytes, int, bytes], tensors: tuple[bytes, ...] = ()) -> bytes:
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(entries))
    return (
        head
        + b"".join(_string(key) + struct.pack("<I", kind) + value for key, kind, value in entries)
        + b"".join(tensors)
    )


_LLAMA = (b"general.architecture", 8, _string(b"llama"))
_NUMBER = (b"general.alignment", 4, struct.pack("<I", 32))
_LIST = (b"tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 2) + _string(b"a") + _string(b"b"))
_SIZES = tuple(
    (b"llama." + name, 4, struct.pack("<I", 32))
    for name in (
        b"attention.head_count",
        b"embedding_length",
        b"context_length",
        b"block_count",
        b"feed_forward_length",
    )
)
_TOKENIZER = (
    (b"tokenizer.ggml.model", 8, _string(b"gpt2")),
    (b"tokenizer.ggml.bos_token_id", 4, bytes(4)),
    (b"tokenizer.ggml.token_type", 9, struct.pack("<IQii", 5, 2, 1, 3)),
    (b"tokenizer.ggml.scores", 9, struct.pack("<IQff", 6, 2, 0, -1)),
    (b"tokenizer.ggml.merges", 9, struct.pack("<IQ", 8, 1) + _string(b"a b")),
    (b"llama.rope.scaling.type", 8, _string(b"yarn")),
    (b"llama.rope.scaling.original_context_length", 4, struct.pack("<I", 16)),
    (b"tokenizer.ggml.eos_token_id", 4, bytes(4)),
    (b"llama.rope.scaling.factor", 6, struct.pack("<f", 2)),
)
_LISTS = (b"lists", 9, struct.pack("<IQIQ", 9, 1, 5, 2) + bytes(8))
_TENSOR = _string(b"output.weight") + struct.pack("<IQQIQ", 2, 32, 1, 2, 0)


def _chunk(**delta: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}).encode()


def _arrays() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.arange(3))
    return file.getvalue()


_CALL = {"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"a": 1}'}}
_DEEP = struct.pack("<Q", 1800) + b'{"w":' + b"[" * 1795
_HEADER = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'

TARGETS = {
    "schema": Target(
        schema,
        (
            b'{"type":"object","properties":{"a":{"type":"integer","minimum":3}},"required":["a"]}',
            b'{"$defs":{"n":{"anyOf":[{"$ref":"#/$defs/n"},{"type":"null"}]}},"$ref":"#/$defs/n"}',
            b'{"type":"array","items":{"const":[2.5]},"uniqueItems":true,"minItems":1}',
            b'{"type":"string","pattern":"^a+$","format":"date","minLength":2}',
            b'{"type":["number","null"],"multipleOf":0.25,"exclusiveMaximum":7,"maximum":1e3,"exclusiveMinimum":-1}',
            b'{"type":"array","prefixItems":[{"enum":[1,"b",null]}],"items":false,"contains":{"const":1},"minContains":1,'
            b'"maxContains":2,"maxItems":3}',
            b'{"type":"object","patternProperties":{"^x":{"type":"boolean"}},"additionalProperties":{"maxLength":3},'
            b'"minProperties":1,"maxProperties":3,"propertyNames":{"pattern":"^[xy]"},"dependentRequired":{"x":["y"]}}',
            b'{"if":{"properties":{"a":{"const":1}}},"then":{"required":["b"]},"else":{"not":{"required":["c"]}},'
            b'"oneOf":[{"type":"object"},{"type":"string","maxLength":2}],"allOf":[true],"nullable":true}',
            b'{"type":"object","properties":{"b":{"type":"string","contentMediaType":"application/json",'
            b'"contentSchema":{"type":"integer"}}},"unevaluatedProperties":false,"dependentSchemas":{"b":{"minProperties":1}}}',
            b'{"type":"string","properties":[{}],"unevaluatedProperties":false}',
            b'{"items":{"const":[2.5]},"uniqueItems":1,"minItems":2}',
        ),
        is_json=True,
    ),
    "regex": Target(
        regex,
        (
            b"(?i)[a-f]{2,3}|x(?=y)\\w+",
            b"^(?:\\d+\\.)?\\d$",
            b"\\p{L}\\u00e9[^\\n]*?",
            b"(?s:a.)(?!b)(?P<n>[^\\W_]{,2})\\b",
        ),
        words=(
            *("(?i)", "(?m)", "(?s:", "(?=", "(?!", "(?:", "(?P<a>", "\\d", "\\W", "\\b", "\\p{Lu}", "\\Z"),
            *("[^", "{2,3}", "*?", "|"),
        ),
    ),
    "lark": Target(
        lark,
        (
            b'start: "a" b*\nb: /[0-9]+/',
            b'start: x\nx: x? "y" | %json {}\n',
            b"root ::= [a-z]+",
            b'start: A~2 | B\nA: "a"i\nB: A+',
        ),
        words=(
            *("start: ", "%json", "%ignore ", "%import common.INT", "%regex", "root ::= "),
            *("~2..3", "/[a-z]/", '"a"i', "[lazy]"),
        ),
    ),
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
            b'{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;'
            b'base64,aGk="}}]}],"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{}}},'
            b'"tool_choice":{"type":"function","function":{"name":"f"}},"tools":[{"type":"function","function":{"name":"f",'
            b'"parameters":{}}}],"stream":true,"stream_options":{"include_usage":true},"n":2,"logprobs":true}',
        ),
        is_json=True,
    ),
    "endpoint_stream": Target(
        endpoint_stream,
        (
            _chunk(content="a") + b'\ndata: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\ndata: [DONE]',
            _chunk(tool_calls=[_CALL]),
            _chunk(tool_calls=[_CALL, {**_CALL, "index": "b"}]) + b'\n{"choices":[{"finish_reason":"stop"}]}',
            b'{"error":{"message":"m"}}\n{"choices":[{"text":"a","logprobs":{"tokens":["a"],"token_logprobs":[0]}}]}',
        ),
    ),
    "gguf": Target(
        gguf,
        (
            b"GGUF\x03\0\0\0" + bytes(16),
            _gguf(_LLAMA),
            _gguf(_LLAMA, _NUMBER, _LIST, _LISTS, tensors=(_TENSOR,)) + bytes(82),
            _gguf((b"general.alignment", 4, bytes(4)), _LLAMA),
            _gguf(_LLAMA, _LIST, *_SIZES, *_TOKENIZER, tensors=(_TENSOR,)) + bytes(82),
            _gguf((b"deep", 9, struct.pack("<IQ", 9, 1) * 1500), _LLAMA),
        ),
        words=(
            *("general.architecture", "general.alignment", "expert_count", "GGUF"),
            *("llama", "gemma3", "qwen2", "phi3", "gpt-oss"),
        ),
    ),
    "safetensors": Target(safetensors, (len(_HEADER).to_bytes(8, "little") + _HEADER + bytes(4), b"\xff" * 12, _DEEP)),
    "cache_file": Target(cache_file, (bytes(64), b"PK\x03\x04" + bytes(40), _arrays())),
    "tier_file": Target(tier_file, (_tier_file(), bytes(160))),
}  # fmt: skip
