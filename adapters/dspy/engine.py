"""DSPy's engines: one lm15 request in, one response out, through the runtime's continuous batch.

DSPy owns caching, retries, history and callbacks; an engine makes one attempt. `complete` may be called from any
number of threads and `AsyncEngine.complete` from any event loop: a call only enqueues and waits.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, Self
from weakref import WeakKeyDictionary

from dspy import lm15
from graftlm.adapters.dspy import wire as wire
from graftlm.adapters.dspy.chain import Chain
from graftlm.adapters.dspy.choosing import Choosing
from graftlm.adapters.dspy.continuing import Reply, mended
from graftlm.adapters.dspy.decisions import Decision, Measured, judgment_pieces, measure
from graftlm.adapters.dspy.inflight import InFlight
from graftlm.adapters.dspy.scaffold import Scaffold
from graftlm.adapters.dspy.sharing import shared
from graftlm.core.call_options import ToolRequest, hold_for_tools, tool_request
from graftlm.core.chat.thinking import Thinking, learn_thinking, split_thinking
from graftlm.core.chat.tool_format import ToolFormat
from graftlm.core.chat.tool_parser import parse_completion
from graftlm.core.chat.tools import Tool
from graftlm.core.config import CacheConfig, SamplingParams, SchedulerConfig
from graftlm.core.constraint import vocabulary_of
from graftlm.core.errors import GraftError, GrammarError
from graftlm.core.grammar.cache import compile_cached
from graftlm.core.grammar.schema.lowering import Lowered
from graftlm.core.grammar.spec import Composite, JsonSchema
from graftlm.core.prompt_input import PromptInput
from graftlm.core.request import Completion, Request, Usage
from graftlm.core.runtime import Runtime
from graftlm.core.serving import loop_batching


@dataclass(frozen=True)
class _Call:
    """One lm15 request, ready to run.

    prompt  a PromptInput; messages for an endpoint.
    pieces  the pieces of the reply if probabilities are measured; else empty.
    listed  tools for an endpoint.
    reply   the fields that an endpoint's answer must contain.
    thinking, thinking_budget  as in Request.
    """

    model: str
    prompt: Any
    sampling: SamplingParams
    key: Any
    form: ToolFormat | None = None
    pieces: tuple[Lowered | Decision, ...] = ()
    judged: bool = False
    listed: ToolRequest | None = None
    reply: Reply | None = None
    thinking: Thinking | None = None
    thinking_budget: int | None = None

    def request(self, *, stream: bool = False) -> Request:
        if stream and self.sampling.n > 1:
            message = f"n is {self.sampling.n} and a stream has one answer; leave n out, or do not stream"
            raise wire.unsupported(message, "n")
        if stream and self.pieces:
            message = "a stream has no probabilities; leave probabilities out, or do not stream"
            raise wire.unsupported(message, "probabilities")
        thinking = {"thinking": self.thinking, "thinking_budget": self.thinking_budget}
        if self.listed is None:
            return Request(self.prompt, self.sampling, stream=stream, **thinking)  # type: ignore[arg-type]
        tools, fields = self.listed.listed, self.listed.fields
        return Request(self.prompt, self.sampling, stream=stream, tools=tools, tool_fields=fields)


class _EngineBase:
    """The base of both engines: capabilities, the translation of requests, saving and copying."""

    supports_function_calling = True
    supports_reasoning = False
    supports_response_schema = True
    supported_params = wire.SUPPORTED_PARAMS

    def __init__(
        self, runtime: Runtime, *, on_unsupported: Literal["error", "warn", "check"] = "error", max_retries: int = 2
    ) -> None:
        self.runtime = runtime
        self.on_unsupported = on_unsupported
        self.max_retries = max_retries
        self._in_flight: InFlight[Completion] = InFlight()
        self._grammars: WeakKeyDictionary[Scaffold, Any] = WeakKeyDictionary()

    @property
    def model_string(self) -> str:
        """The model's name in DSPy and in the key of DSPy's cache; it contains a digest of the weights."""
        name = self.runtime.model_name
        if os.path.isabs(name):
            name = os.path.basename(os.path.normpath(name))
        return f"{wire.PROVIDER}/{name}@{self.runtime.fingerprint[:12]}"

    def dump_state(self) -> dict[str, Any]:
        """Return the model's name and the runtime's options as JSON. Raises TypeError for a loaded model."""
        options = {name: _to_json(value) for name, value in self.runtime.options.items()}
        if not isinstance(self.runtime.model, str):
            raise TypeError(
                "an engine over a loaded model cannot be saved; make its runtime from the model's name or folder"
            )
        kept = {"on_unsupported": self.on_unsupported, "max_retries": self.max_retries}
        return {"model": self.runtime.model, "options": options, **kept}

    @classmethod
    def load_state(cls, state: dict[str, Any]) -> Self:
        """Return an engine over the process's shared runtime of that model and these options."""
        options = {name: _from_json(name, value) for name, value in state["options"].items()}
        kept = {name: state[name] for name in ("on_unsupported", "max_retries") if name in state}
        return cls(Runtime.shared(state["model"], **options), **kept)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # copies of programs and LMs share the weights

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).load_state, (self.dump_state(),)

    def _prepare(self, request: lm15.Request, n: int = 1) -> _Call:
        config = request.config
        kept = {"on_unsupported": self.on_unsupported, "max_retries": self.max_retries}
        options = {**kept, **wire.sampling_options(request)}
        native = wire.native_extensions(config)
        tools, form, prompt = self._prompt(request)
        thinking, reasoning = self._thinking(request), config.reasoning
        options["max_tokens"] = self._max_tokens(options.get("max_tokens"), len(prompt))
        listed: ToolRequest | None = None
        pieces: tuple[Lowered | Decision, ...] = ()
        measured = config.probabilities not in (None, "off") and config.response_format is not None
        if self.runtime.endpoint is not None and ("scaffold" in native or measured):
            raise wire.unsupported(
                "GraftAdapter and measured probabilities need a model in this process; at an endpoint use "
                "dspy.ChatAdapter() or dspy.JSONAdapter()",
                "scaffold" if "scaffold" in native else "probabilities",
            )
        if "scaffold" in native:
            scaffold = Scaffold.from_json(native["scaffold"])
            if scaffold.measured:
                pieces = tuple(scaffold.pieces())
            else:
                options |= {"constraint": self._grammar(scaffold), "close_on_length": True}
        elif measured:
            assert config.response_format is not None
            pieces = tuple(judgment_pieces(config.response_format))
        elif tools:
            answer = options.pop("json_schema", None)
            choice = config.tool_choice
            mode = "auto" if choice is None else choice.mode
            parallel = None if choice is None else choice.parallel
            keeping = {name: options[name] for name in ("on_unsupported", "bounded_numbers") if name in options}
            asked = tool_request(self.runtime, (), tuple(tools), mode, parallel=parallel, answer=answer, **keeping)
            options, form = options | asked.sampling, asked.form
            listed = asked if self.runtime.endpoint is not None else None
        if pieces:
            options.pop("json_schema", None)
        key = None
        if wire.deterministic(options) and not pieces:
            key = (prompt.ids.tobytes() if isinstance(prompt, PromptInput) else repr(prompt), repr(config), repr(tools))
        judged = bool(pieces) and "scaffold" not in native
        sampling = SamplingParams.from_options(**options)
        if n > 1:
            sampling, key = replace(sampling, n=n), None
        at_endpoint = self.runtime.endpoint is not None and not tools
        reply = Reply.of(prompt, sampling) if at_endpoint else None
        budget = reasoning.thinking_budget if reasoning is not None else None
        return _Call(request.model, prompt, sampling, key, form, pieces, judged, listed, reply, thinking, budget)

    def _thinking(self, request: lm15.Request) -> Thinking | None:
        """Return the markers of the model's thinking. Raises for `reasoning` of a model that has none."""
        options, found = wire.template_options(request), None
        if self.runtime.endpoint is None and self.runtime.tokenizer.has_chat_template:
            found = learn_thinking(self.runtime.tokenizer, options)
        if found is None and options.get("enable_thinking"):
            message = "reasoning needs a model whose chat template has markers of thinking; leave it out"
            raise wire.unsupported(message, "reasoning")
        return found

    def _prompt(self, request: lm15.Request) -> tuple[list[Tool], ToolFormat | None, Any]:
        messages, tools = wire.native_messages(request), wire.native_tools(request)
        if self.runtime.endpoint is not None:
            return tools, None, list(messages)
        tokenizer = self.runtime.tokenizer
        form, listed = None, None
        if tools or any(message.tool_calls or message.role == "tool" for message in messages):
            form = ToolFormat.learn(tokenizer)
            messages, listed = form.prepare(messages, tools)
        if not tokenizer.has_chat_template:
            # DSPy's own format of conversations for text completion models
            text = "\n\n".join([*(message.text for message in messages), "BEGIN RESPONSE:"])
            return tools, form, self.runtime.processor.encode(text)
        options = wire.template_options(request)
        prompt = tokenizer.render(messages, listed, options=options) if options else messages
        return tools, form if tools else None, self.runtime.processor.encode(prompt, None if options else listed)

    def _max_tokens(self, wanted: int | None, num_prompt_tokens: int) -> int:
        if self.runtime.endpoint is not None:
            return wanted or wire.DEFAULT_MAX_TOKENS
        room = self.runtime.max_model_len - num_prompt_tokens
        return max(1, min(wanted or wire.DEFAULT_MAX_TOKENS, room))

    def _grammar(self, scaffold: Scaffold) -> Any:
        """Return the scaffold's grammar, cached; blocks while it compiles.

        The grammar is one automaton if possible, otherwise a chain in which llguidance compiles the large schemas.
        Raises GrammarError if neither compiles.
        """
        known = self._grammars.get(scaffold)
        if known is None:
            known = self._compile(scaffold)
            if choices := scaffold.choices:
                known = Choosing(known, choices, vocabulary_of(self.runtime.tokenizer))
            self._grammars[scaffold] = known
        return known

    def _compile(self, scaffold: Scaffold) -> Any:
        vocabulary = vocabulary_of(self.runtime.tokenizer)
        links: list[Composite | JsonSchema] = list(scaffold.links)
        if len(links) == 1:
            separate = scaffold.separate_links
            try:
                whole = compile_cached(links[0], vocabulary)
                if whole.engine in ("fsm", "pda") or len(separate) == 1:
                    return whole
            except GrammarError:
                if len(separate) == 1:
                    raise
            links = separate
        grammars = [compile_cached(link, vocabulary, on_unsupported="warn") for link in links]
        return Chain(grammars, vocabulary.eos_token_ids)

    def _must_compile(self, request: lm15.Request) -> bool:
        """Return True if `_prepare` would compile a grammar, which is too slow for an event loop."""
        text = wire.native_extensions(request.config).get("scaffold")
        return text is not None and Scaffold.from_json(text) not in self._grammars

    def _send_for_reply(self, call: _Call) -> Future[Completion] | None:
        """Submit a call to an endpoint and continue an incomplete reply; None for a call without a required reply."""
        endpoint = self.runtime.endpoint
        if call.reply is None or endpoint is None:
            return None
        asked = self.runtime.submit(call.request())
        return endpoint.start(mended(endpoint, call.reply, call.prompt, call.sampling, asked))

    def _taken(self, request: lm15.Request) -> tuple[lm15.Response | None, int]:
        """Return an answer of an earlier shared request, or None and the number of answers to request."""
        sharing = shared()
        return (None, 1) if sharing is None or self.runtime.endpoint is None else sharing.take(request)

    def _answer(self, call: _Call, completion: Completion, request: lm15.Request) -> lm15.Response:
        """Return the response. Further answers of the same request are kept for the calls that share them."""
        sharing = shared()
        if sharing is None or call.sampling.n == 1 or self.runtime.endpoint is None:
            return self._response(call, completion)
        first, *others = completion.completions or [completion]
        free = [replace(one, usage=Usage(0, 0, 0)) for one in others]  # the first response carries the usage of all
        sharing.put(request, [self._response(call, one) for one in free])
        return self._response(call, replace(first, usage=completion.usage, completions=[]))

    def _response(self, call: _Call, completion: Completion) -> lm15.Response:
        said = parse_completion(call.form, completion, call.thinking)
        wire.check_calls(said)
        hold_for_tools(self.runtime, completion, said.calls)
        others = completion.completions
        if call.thinking is not None:
            others = [replace(one, text=split_thinking(call.thinking, one.text)[1]) for one in others]
        content = replace(completion, text=said.content, completions=others)
        return wire.response(call.model, content, said.calls, said.thinking)

    def _measured(self, call: _Call) -> lm15.Response:
        reply = measure(self.runtime, call.prompt, call.pieces, call.sampling)
        return _measured_response(call, reply)


class Engine(_EngineBase):
    """A synchronous DSPy engine: `dspy.LM(engine.model_string, engine=engine)`."""

    def complete(self, request: lm15.Request) -> lm15.Response:
        """Answer one request; blocks only the calling thread."""
        with _translated():
            taken, num = self._taken(request)
            if taken is not None:
                return taken
            call = self._prepare(request, num)
            if call.pieces:
                return self._measured(call)
            key, complete = call.key, partial(self._complete, call)
            completion = complete() if key is None else self._in_flight.answer(key, complete)
            return self._answer(call, completion, request)

    def _complete(self, call: _Call) -> Completion:
        reply = self._send_for_reply(call)
        return reply.result() if reply is not None else self.runtime.complete(call.request())

    def stream(self, request: lm15.Request) -> Iterator[Any]:
        """Yield lm15's stream events. Closing the iterator frees the request's KV."""
        with _translated():
            call = self._prepare(request)
            events = wire.Events(call.model, call.form, call.thinking)
            yield events.start()
            with self.runtime.submit_stream(call.request(stream=True)) as chunks:
                for chunk in chunks:
                    yield from events.of(chunk)

    def close(self) -> None:
        """Do nothing: the runtime is closed by its creator."""


class AsyncEngine(_EngineBase):
    """A DSPy engine for event loops. Cancelling the awaiting task frees the request's KV."""

    async def complete(self, request: lm15.Request) -> lm15.Response:
        with _translated():
            taken, num = self._taken(request)
            if taken is not None:
                return taken
            slow = self._must_compile(request)
            call = await asyncio.to_thread(self._prepare, request) if slow else self._prepare(request, num)
            if call.pieces:
                return await asyncio.to_thread(self._measured, call)
            key, complete = call.key, partial(self._complete, call)
            completion = await (complete() if key is None else self._in_flight.aanswer(key, complete))
            return self._answer(call, completion, request)

    async def _complete(self, call: _Call) -> Completion:
        if (reply := self._send_for_reply(call)) is not None:
            return await asyncio.wrap_future(reply)
        return await loop_batching.complete(self.runtime, call.request())

    async def stream(self, request: lm15.Request) -> AsyncIterator[Any]:
        with _translated():
            slow = self._must_compile(request)
            call = await asyncio.to_thread(self._prepare, request) if slow else self._prepare(request)
            events = wire.Events(call.model, call.form, call.thinking)
            yield events.start()
            async for chunk in self.runtime.submit_astream(call.request(stream=True)):
                for event in events.of(chunk):
                    yield event

    async def aclose(self) -> None:
        """Do nothing: the runtime is closed by its creator."""


_CONFIGS = {"cache": CacheConfig, "schedule": SchedulerConfig}


def _to_json(value: Any) -> Any:
    return asdict(value) if isinstance(value, CacheConfig | SchedulerConfig) else value


def _from_json(name: str, value: Any) -> Any:
    return _CONFIGS[name](**value) if name in _CONFIGS and isinstance(value, dict) else value


@contextmanager
def _translated() -> Iterator[None]:
    """Raise the runtime's errors from the block as the lm15 errors that DSPy handles."""
    try:
        yield
    except GraftError as error:
        raise wire.translate(error) from error


def _measured_response(call: _Call, reply: Measured) -> lm15.Response:
    part: Any = lm15.TextPart(reply.text)
    if call.judged:
        part = lm15.DataPart(
            json.loads(reply.text), probabilities=reply.probabilities, method="candidate_sequence_likelihood"
        )
    usage = replace(wire.usage(reply.usage), input_tokens=len(call.prompt), total_tokens=None)
    return lm15.Response(
        id=f"{wire.PROVIDER}-measured",
        model=call.model,
        message=lm15.Message(role="assistant", parts=(part,)),
        finish_reason="stop" if reply.complete else "length",
        usage=usage,
    )
