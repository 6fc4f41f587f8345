"""An OpenAI-compatible server on 127.0.0.1 that behaves as told: a language model by rule, knobs, and faults.

Written on sockets, because frameworks refuse to be as broken as servers are.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.regex.parser import parse
from tests.core.remote.models import Model, tokenise


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one request instead of, or during, its answer.

    status, headers, body  this is answered.
    after_s     first wait so long.
    reset       close the connection without an answer, with a TCP reset if `hard`.
    cut_after   a stream breaks off after so many pieces; `quiet`: with a proper end, only without a finish_reason.
    raw         these bytes are the body of a 200 answer.
    content     this replaces the text; None is null.
    finish      this replaces the finish_reason.
    """

    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    after_s: float = 0.0
    reset: bool = False
    cut_after: int | None = None
    quiet: bool = False
    raw: bytes | None = None
    raw_type: str = "application/json"
    content: Any = "keep"
    finish: str | None = None


@dataclass
class Logged:
    """One request as the server saw it."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    prompt: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    started_s: float = 0.0
    ended_s: float = 0.0
    answered: bool = False
    closed_by_client: bool = False


@dataclass
class Behaviour:
    """How the server differs from others; see Capabilities for the meaning of the names."""

    completions: bool = True
    chat: bool = True
    continue_turn: str = "continue_final_message"
    trailing: str = "new turn"  # what else becomes of a trailing assistant message: "new turn" or "refused"
    logprobs: bool = True
    constraints: Iterable[str] = ()  # fields that are honoured
    n: bool = True
    keeps_stop: bool = False
    usage: str = "given"  # "given", "absent" or "null"
    cached: bool = True
    done: bool = True
    unknown: str = "ignored"  # or "refused"
    max_tokens_field: str | None = None  # the only one that is taken
    seconds_per_token: float = 0.0
    seconds_per_call: float = 0.0
    model: str | None = None
    calls: Callable[[Mapping[str, Any]], list[tuple[str, str]]] | None = None  # tools: a body -> names and arguments
    drops: tuple[str, ...] = ()  # fields that are not looked at
    refuses: Mapping[str, str] = field(default_factory=dict)  # fields that are refused, and the words for it
    edit: Callable[[dict[str, Any]], Any] | None = None  # a body, or a piece of a stream, to what is sent for it
    hear: Callable[[dict[str, Any]], None] | None = None  # is told of each body
    streams: bool = True  # else a request for a stream is answered in one body


_FIELDS = {
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "n", "seed",
    "stream", "stream_options", "logprobs", "top_logprobs", "frequency_penalty", "presence_penalty", "echo",
    "logit_bias", "tools", "tool_choice", "parallel_tool_calls", "response_format",
}  # fmt: skip


def example_of_gbnf(grammar: str) -> str:
    """The first shortest text of a grammar of one rule."""
    parts = re.findall(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^]\\])*\]|\S', grammar.removeprefix("root ::="))
    return _shortest(parse("".join(re.escape(json.loads(part)) if part[0] == '"' else part for part in parts)))


def _shortest(node: nodes.Node) -> str:
    match node:
        case nodes.Literal(data):
            return data.decode()
        case nodes.CharSet(ranges):
            return chr(ranges[0][0])
        case nodes.Concat(items):
            return "".join(map(_shortest, items))
        case nodes.Alternation(items):
            return _shortest(items[0])
        case nodes.Repeat(item, low, _):
            return _shortest(item) * low
    return ""


class Server:
    """Serves until the `with` block ends.

    model    continues a text.
    faults   met by the requests in order; None lets one through.
    requests what was asked, in order of arrival.
    num_open, num_opened  connections that are open, and all that there were.
    """

    def __init__(self, model: Model, *, faults: Iterable[Fault | None] = (), seed: int = 0, **behaviour: Any) -> None:
        self.model = model
        self.behaviour = Behaviour(**behaviour)
        self.faults = list(faults)
        self.requests: list[Logged] = []
        self.most_in_flight = self._in_flight = 0
        self.num_open = self.num_opened = 0
        self._random = random.Random(seed)
        self._cache: set[str] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        assert self._ready.wait(120)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(120)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def calls(self) -> list[Logged]:
        """The requests for answers."""
        return [r for r in self.requests if r.path.endswith("completions")]

    @property
    def num_answered(self) -> int:
        return sum(r.answered for r in self.requests)

    def totals(self) -> tuple[int, int, int]:
        """Calls, prompt tokens and completion tokens, of all that was computed."""
        calls = self.calls
        return len(calls), sum(r.prompt_tokens for r in calls), sum(r.completion_tokens for r in calls)

    def wait_until(self, condition: Callable[[Server], bool], timeout_s: float = 60.0) -> None:
        end_s = time.monotonic() + timeout_s
        while not condition(self):
            assert time.monotonic() < end_s, "it never came to that"
            time.sleep(0.002)

    # -- connections -------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)

        async def start() -> asyncio.Server:
            return await asyncio.start_server(self._connection, "127.0.0.1", 0, backlog=2048)

        server = self._loop.run_until_complete(start())
        self.port: int = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        self._loop.run_until_complete(asyncio.sleep(0))  # what was accepted before the end becomes a task
        while tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        self.num_opened += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._request(reader, writer):
                pass
        with suppress(Exception, asyncio.CancelledError):
            writer.close()
            await writer.wait_closed()
        self.num_open -= 1

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        path = head[0].split()[1]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])}
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        logged = Logged(path, json.loads(data) if data else {}, headers, started_s=time.monotonic())
        self.requests.append(logged)
        for name in self.behaviour.drops:
            logged.body.pop(name, None)
        if self.behaviour.hear is not None:
            self.behaviour.hear(logged.body)
        fault = self.faults.pop(0) if self.faults else None
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        answer = asyncio.ensure_future(self._answer(logged, fault or Fault(), writer))
        closed = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({answer, closed}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                logged.closed_by_client = True
                answer.cancel()
                return False
            return answer.result()
        finally:
            logged.ended_s = time.monotonic()
            self._in_flight -= 1
            closed.cancel()
            with suppress(asyncio.CancelledError):
                await closed

    async def _answer(self, logged: Logged, fault: Fault, writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(fault.after_s + self.behaviour.seconds_per_call)
        if fault.reset:
            writer.get_extra_info("socket").setsockopt(1, 13, struct.pack("ii", 1, 0))  # SO_LINGER: a reset
            writer.transport.abort()
            return False
        if fault.status is not None:
            return await self._send(writer, fault.status, fault.body, fault.headers)
        if fault.raw is not None:
            return await self._send_bytes(writer, 200, fault.raw, fault.raw_type, fault.headers)
        refusal = self._refusal(logged)
        if refusal is not None:
            return await self._send(writer, *refusal)
        if logged.path.endswith("/models"):
            return await self._send(writer, 200, {"object": "list", "data": [{"id": "m", "owned_by": "tests"}]})
        choices = self._choices(logged, fault)
        if logged.body.get("stream") and self.behaviour.streams:
            return await self._stream(writer, logged, choices, fault)
        num_tokens = sum(len(c["tokens"]) for c in choices)
        await asyncio.sleep(self.behaviour.seconds_per_token * num_tokens)
        logged.completion_tokens, logged.answered = num_tokens, True
        body = {"id": "1", "object": "text", "choices": [self._choice(logged, c) for c in choices]}
        return await self._send(writer, 200, self._edited(body | self._usage(logged)))

    def _refusal(self, logged: Logged) -> tuple[int, Any] | None:
        own, body = self.behaviour, logged.body
        there = {"/v1/completions": own.completions, "/v1/chat/completions": own.chat, "/v1/models": True}
        if not there.get(logged.path, False):
            return 404, {"detail": "Not Found"}
        if own.model is not None and body.get("model") not in (None, own.model):
            return 404, {"error": {"message": f"The model {body['model']} does not exist", "code": "model_not_found"}}
        for name in set(own.refuses) & set(body):
            return 400, {"error": {"message": own.refuses[name], "code": None}}
        field = own.max_tokens_field
        wrong = {"max_tokens", "max_completion_tokens"} - {field} if field is not None else set()
        for name in wrong & set(body):
            text = f"Unsupported parameter: '{name}' is not supported with this model. Use '{field}' instead."
            return 400, {"error": {"message": text, "code": "unsupported_parameter"}}
        unknown = set(body) - _FIELDS - set(own.constraints) - {own.continue_turn, "add_generation_prompt"}
        if own.unknown == "refused" and unknown:
            return 422, {"detail": f"Unexpected fields in the request: {sorted(unknown)}"}
        trailing = bool(body.get("messages")) and body["messages"][-1]["role"] == "assistant"
        if trailing and not self._continues(body) and own.trailing == "refused":
            return 400, {"error": {"message": "This model does not support assistant message prefill."}}
        return None

    # -- answers -----------------------------------------------------------------------------------------------

    def _continues(self, body: Mapping[str, Any]) -> bool:
        last, manner = body["messages"][-1], self.behaviour.continue_turn
        if last["role"] != "assistant":
            return False
        flag = body.get("continue_final_message") is True and body.get("add_generation_prompt") is False
        return {"continue_final_message": flag, "prefix": last.get("prefix") is True, "bare": True}.get(manner, False)

    def _prompt(self, body: Mapping[str, Any]) -> str:
        if "messages" not in body:
            return str(body["prompt"])
        turns = [f"<{m['role']}>{m['content']}" for m in body["messages"]]
        return "".join(turns) + ("" if self._continues(body) else "<assistant>")

    def _choices(self, logged: Logged, fault: Fault) -> list[dict[str, Any]]:
        body = logged.body
        logged.prompt = self._prompt(body)
        logged.prompt_tokens = len(tokenise(logged.prompt))
        num = body.get("n", 1) if self.behaviour.n else 1
        return [self._generate(logged, fault) for _ in range(num)]

    def _generate(self, logged: Logged, fault: Fault) -> dict[str, Any]:
        body = logged.body
        limit = body.get("max_tokens", body.get("max_completion_tokens", 4096 if "messages" in body else 16))
        stops = body.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops
        allowed = self._allowed(body)
        tokens: list[str] = []
        finish = "length"
        while len(tokens) < limit:
            text = "".join(tokens)
            token = self.model(logged.prompt + text, self._random.random() if body.get("temperature", 1) else None)
            if allowed is not None:
                token = allowed[len(text) : len(text) + 1] or None
            if token is None:
                finish = "stop"
                break
            tokens.append(token)
            found = [(at + len(s), at) for s in stops if (at := (text + token).find(s)) >= 0]
            if found:
                end, at = min(found)
                cut = (text + token)[: end if self.behaviour.keeps_stop else at]
                return {"text": cut, "tokens": tokens, "finish": fault.finish or "stop"}
        text = "".join(tokens) if fault.content == "keep" else fault.content
        return {"text": text, "tokens": tokens, "finish": fault.finish or finish}

    def _allowed(self, body: Mapping[str, Any]) -> str | None:
        """What a constraint that is honoured makes of the answer: the least text of its kind."""
        fields: dict[str, Any] = {name: body[name] for name in self.behaviour.constraints if name in body}
        structured = fields.get("structured_outputs") or {}
        if "choice" in structured:
            return str(structured["choice"][0])
        pattern = structured.get("regex") or fields.get("regex")
        if "grammar" in fields:
            return example_of_gbnf(fields["grammar"])
        if pattern is not None:
            return example(pattern)
        schema = (
            structured.get("json")
            or fields.get("json_schema")
            or (fields.get("response_format") or {}).get("json_schema", {}).get("schema")
        )
        return json.dumps(least(schema), separators=(",", ":")) if schema is not None else None

    def _choice(self, logged: Logged, made: Mapping[str, Any], index: int = 0) -> dict[str, Any]:
        chat = "messages" in logged.body
        if logged.body.get("echo"):
            made = {**made, "text": logged.prompt + made["text"], "tokens": tokenise(logged.prompt) + made["tokens"]}
        choice: dict[str, Any] = {"index": index, "finish_reason": made["finish"]}
        choice |= {"message": {"role": "assistant", "content": made["text"]}} if chat else {"text": made["text"]}
        if calls := self._calls(logged):
            choice["message"] |= {"content": None, "tool_calls": calls}
            choice["finish_reason"] = "tool_calls"
        if self.behaviour.logprobs and logged.body.get("logprobs") not in (None, False):
            tokens = made["tokens"]
            entries = [{"token": t, "logprob": -0.5, "top_logprobs": []} for t in tokens]
            flat = {"tokens": tokens, "token_logprobs": [-0.5] * len(tokens), "top_logprobs": None}
            choice["logprobs"] = {"content": entries} if chat else flat
        return choice

    def _calls(self, logged: Logged) -> list[dict[str, Any]]:
        """The calls of tools in the answer."""
        made = self.behaviour.calls(logged.body) if self.behaviour.calls is not None else []
        return [
            {"id": f"call_{i}", "index": i, "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(made)
        ]

    def _usage(self, logged: Logged) -> dict[str, Any]:
        if self.behaviour.usage != "given":
            return {} if self.behaviour.usage == "absent" else {"usage": None}
        cached = 0
        if self.behaviour.cached:
            cached = max((len(tokenise(p)) for p in self._cache if logged.prompt.startswith(p)), default=0)
            self._cache.add(logged.prompt)
        usage = {"prompt_tokens": logged.prompt_tokens, "completion_tokens": logged.completion_tokens}
        details = {"prompt_tokens_details": {"cached_tokens": cached}} if self.behaviour.cached else {}
        return {"usage": usage | details}

    def _edited(self, body: dict[str, Any]) -> Any:
        return body if self.behaviour.edit is None else self.behaviour.edit(body)

    # -- sending -----------------------------------------------------------------------------------------------

    async def _send(
        self, writer: asyncio.StreamWriter, status: int, body: Any, headers: Mapping[str, str] | None = None
    ) -> bool:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        kind = "text/html" if isinstance(body, str) else "application/json"
        return await self._send_bytes(writer, status, data, kind, headers or {})

    async def _send_bytes(
        self, writer: asyncio.StreamWriter, status: int, data: bytes, kind: str, headers: Mapping[str, str]
    ) -> bool:
        lines = [f"HTTP/1.1 {status} X", f"content-type: {kind}", f"content-length: {len(data)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + data)
        await writer.drain()
        return True

    async def _stream(
        self, writer: asyncio.StreamWriter, logged: Logged, choices: list[dict[str, Any]], fault: Fault
    ) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        num = 0
        async for piece in self._pieces(logged, choices):
            if num == fault.cut_after:
                if fault.quiet:
                    writer.write(b"0\r\n\r\n")
                    await writer.drain()
                    return True
                writer.transport.abort()
                return False
            num += 1
            _write_event(writer, json.dumps(self._edited(piece)))
            await writer.drain()
        if self.behaviour.done:
            _write_event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        logged.answered = True
        return True

    async def _pieces(self, logged: Logged, choices: list[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
        chat = "messages" in logged.body
        if chat:
            yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        calls = self._calls(logged)
        for call in calls:
            whole = call["function"]["arguments"]
            yield {
                "choices": [
                    {"index": 0, "delta": {"tool_calls": [call | {"function": {**call["function"], "arguments": ""}}]}}
                ]
            }
            for piece in tokenise(whole):
                part = {"index": call["index"], "function": {"arguments": piece}}
                yield {"choices": [{"index": 0, "delta": {"tool_calls": [part]}}]}
        if calls:
            yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
            yield {"choices": []} | self._usage(logged)
            return
        for index, made in enumerate(choices):
            sent = ""
            for token in made["tokens"]:
                await asyncio.sleep(self.behaviour.seconds_per_token)
                logged.completion_tokens += 1
                text = made["text"][len(sent) : len(sent) + len(token)]
                sent += text
                one = self._choice(logged, {"text": text, "tokens": [token], "finish": None}, index)
                if chat:
                    one["delta"] = one.pop("message")
                yield {"choices": [one]}
            last: dict[str, Any] = {"index": index, "finish_reason": made["finish"]}
            yield {"choices": [last | ({"delta": {}} if chat else {"text": ""})]}
        if self.behaviour.usage == "given":
            yield {"choices": []} | self._usage(logged)


def _write_event(writer: asyncio.StreamWriter, data: str) -> None:
    event = f"data: {data}\n\n".encode()
    writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")


def example(pattern: str) -> str:
    """A text of a simple pattern: its classes' first characters, each as often as it has to be."""
    text = re.sub(r"\[(\w)[^\]]*\]\{(\d+)(,\d*)?\}", lambda m: m[1] * int(m[2]), pattern)
    return re.sub(r"\[(\w)[^\]]*\]\+?|\(([^|)]*)\|[^)]*\)", lambda m: m[1] or m[2], text)


def least(schema: Mapping[str, Any]) -> Any:
    """A value of a simple schema."""
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("type") == "object":
        return {name: least(inner) for name, inner in schema.get("properties", {}).items()}
    return {"string": "x", "integer": 7, "number": 1.5, "boolean": True, "array": [], "null": None}[schema["type"]]
