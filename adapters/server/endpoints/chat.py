"""`/v1/chat/completions`: conversion of a body to a request, and of completions and chunks to OpenAI's objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

from pydantic import Field

from graftlm.adapters.server.endpoints.body import Body, limit
from graftlm.adapters.server.endpoints.prompt_fields import PromptScore, needs_prompt_ids
from graftlm.adapters.server.http.responses import OpenAIStream
from graftlm.adapters.server.http.wire import Envelope, escaped, usage_of
from graftlm.adapters.server.media import check_picture_options, frames_of_videos
from graftlm.adapters.server.settings import Limits
from graftlm.core.call_options import with_thinking
from graftlm.core.chat.messages import to_messages
from graftlm.core.chat.thinking import Thinking
from graftlm.core.chat.tool_format import ToolFormat
from graftlm.core.chat.tool_grammar import ToolChoice, tool_constraint
from graftlm.core.chat.tool_parser import AnswerReader, ToolDelta, parse_completion
from graftlm.core.chat.tools import Tool, named_apart
from graftlm.core.errors import ConfigError
from graftlm.core.grammar.spec import Composite
from graftlm.core.request import Chunk, Completion, Request, TokenLogprob, Usage
from graftlm.core.runtime import Runtime


class ChatBody(Body):
    """The body of a chat completion."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=-1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    thinking_budget: int | None = Field(default=None, ge=0)

    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None

    @cached_property
    def native_tools(self) -> tuple[Tool, ...]:
        return named_apart(map(Tool.from_openai, self.tools or ()))

    @property
    def limit_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens in (None, -1) else "max_completion_tokens"

    def form(self, runtime: Runtime) -> ToolFormat | None:
        """Return the model's format of tool calls; None if the answer can contain none."""
        choice = ToolChoice.read(self.tool_choice, self.native_tools, parallel=self.parallel_tool_calls)
        return None if choice.mode == "none" else ToolFormat.learn(runtime.tokenizer)

    @property
    def frames_of_videos(self) -> int | None:
        return frames_of_videos(self.media_io_kwargs)

    def check(self, limits: Limits) -> None:
        self.frames_of_videos  # noqa: B018  (checked without videos as well)
        limit("messages", len(self.messages), limits.messages, "entries")
        limit("tools", len(self.tools or ()), limits.tools, "entries")
        super().check(limits)

    def convert(self, runtime: Runtime) -> tuple[Request, ToolFormat | None, PromptScore | None]:
        """Return the native request, the format of its tool calls and the score of its prompt.

        Raises GraftError for an invalid body. Encodes the prompt if `slow`, so a thread should run it.
        """
        request, score = self.to_request(runtime), None
        if needs_prompt_ids(self):
            request, score = PromptScore.of(self, runtime, request)
        return request, self.form(runtime), score

    @property
    def slow(self) -> bool:
        """True if the conversion encodes the prompt, or renders it with a template of the client."""
        return self.chat_template is not None or needs_prompt_ids(self)

    @cached_property
    def template_options(self) -> dict[str, Any]:
        """The arguments of the chat template, under the names that the templates of most models read."""
        options = dict(self.chat_template_kwargs or {})
        reserved = sorted(options.keys() & _OF_THE_RENDERER)
        if reserved:
            raise ConfigError(f"chat_template_kwargs.{reserved[0]} is set by the server; leave it out")
        if self.documents is not None:
            options["documents"] = self.documents
        effort = self.reasoning_effort
        if self.enable_thinking is not None or effort == "none":
            thinks = self.enable_thinking is not False and effort != "none"
            options = {"enable_thinking": thinks, "thinking": thinks, **options}
        return options if effort in (None, "none") else {"reasoning_effort": effort, **options}

    def to_request(self, runtime: Runtime) -> Request:
        """Return the native request. Raises ConfigError or GrammarError for an invalid body."""
        if self.top_logprobs and not self.logprobs:
            raise ConfigError("top_logprobs was given without logprobs=true; give both")
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit not in (None, -1)]
        most = min(limits, default=None)
        if self.mm_processor_kwargs:
            check_picture_options(runtime, self.mm_processor_kwargs)
        messages: list[Any] = to_messages(self.messages)
        constraint, listed = self.constraint(), None
        if self.tools or any(m.tool_calls or m.role == "tool" for m in messages):
            form = ToolFormat.learn(runtime.tokenizer)
            messages, listed = form.prepare(messages, self.native_tools)
            constraint = self._with_tools(form, constraint)
        sampling = self.sampling(most, logprobs=(self.top_logprobs or 0) if self.logprobs else None, **constraint)
        options = self.template_options
        if self.chat_template is not None:
            options = {**options, "chat_template": self.chat_template}
        elif not self.continue_final_message and self.add_generation_prompt:
            request = with_thinking(runtime, self.request(messages, sampling, listed), self.template_options)
            if not self.separate_reasoning and request.thinking is not None:  # the markers stay in the text
                shows = replace(sampling, special_tokens=sampling.special_tokens or bool(request.thinking.special))
                return replace(request, sampling=shows, thinking=None)
            return replace(request, thinking_budget=self.thinking_budget)
        text = runtime.tokenizer.render(
            messages,
            listed,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            options=options,
        )
        return self.request(text, sampling)

    def _with_tools(self, form: ToolFormat, constraint: dict[str, Any]) -> dict[str, Any]:
        """Return a constraint that allows tool calls, or text under the body's own constraint."""
        choice = ToolChoice.read(self.tool_choice, self.native_tools)
        if choice.mode == "none":
            return constraint
        if constraint and "json_schema" not in constraint:
            raise ConfigError(f"{next(iter(constraint))} was given beside tools; only a JSON schema can be")
        given = tool_constraint(
            form,
            self.native_tools,
            self.tool_choice,
            parallel=self.parallel_tool_calls,
            answer=constraint.get("json_schema"),
            on_unsupported=self.on_unsupported or "check",
        )
        checks = isinstance(composite := given.get("constraint"), Composite) and composite.check is not None
        return {**given, "on_unsupported": "check"} if checks else given


_OF_THE_RENDERER = frozenset(
    ("messages", "conversation", "conversations", "tools", "tokenize", "chat_template", "add_generation_prompt")
    + ("continue_final_message", "return_dict", "return_tensors", "return_assistant_tokens_mask", "padding")
    + ("truncation", "max_length", "tokenizer_kwargs", "template_kwargs")
)
"""Arguments of transformers' renderer that are no arguments of a template."""


class ChatWriter(OpenAIStream):
    """A writer of the answer of one call. Each call needs its own: a stream keeps its state in it."""

    def __init__(
        self,
        body: ChatBody,
        envelope: Envelope,
        form: ToolFormat | None,
        thinking: Thinking | None,
        prompt: Callable[[Completion], list[dict[str, Any] | None]] | None = None,
    ) -> None:
        super().__init__(envelope)
        self._prompt = prompt
        self._form = form
        self._thinking = thinking
        told_more = body.logprobs or body.return_token_ids or body.counts_on
        self._plain = form is None and thinking is None and not told_more
        self._counts_on = body.counts_on
        self._with_ids = body.return_token_ids
        self._readers: dict[int, AnswerReader] = {}
        self._begun: set[int] = set()

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        done, *scored = completions
        beside = {"prompt_logprobs": self._prompt(scored[0])} if self._prompt is not None else {}
        choices = [self._choice(index, item) for index, item in enumerate(done.completions or [done])]
        return {**self._envelope.of("chat.completion"), "choices": choices, "usage": usage_of([done.usage]), **beside}

    def pieces(self, number: int, chunk: Chunk) -> Iterator[bytes]:
        """Yield the chunks of OpenAI's stream for `chunk`."""
        index, envelope, usage = chunk.index, self._envelope, chunk.usage if self._counts_on else None
        if index not in self._begun:
            self._begun.add(index)
            yield envelope.chunk(_delta(index, {"role": "assistant", "content": ""}), usage)
        if self._plain:
            if chunk.text:
                head, tail = envelope.around(index, b'"delta":{"content":', b'},"logprobs":null,"finish_reason":null')
                yield head + escaped(chunk.text) + tail
            if chunk.finish_reason is not None:
                yield envelope.chunk(_delta(index, {}, finish_reason=chunk.finish_reason))
            return
        yield from self._rich_pieces(index, chunk, usage)

    def ended(self, number: int, completion: Completion) -> Iterator[bytes]:
        """Return nothing: the last chunk of a choice has ended it."""
        return iter(())

    def _rich_pieces(self, index: int, chunk: Chunk, usage: Usage | None) -> Iterator[bytes]:
        reader = self._readers.get(index) or self._readers.setdefault(index, AnswerReader(self._form, self._thinking))
        reason = chunk.finish_reason
        deltas = reader.read(chunk)
        if reason is not None and reader.calls:
            reason = "tool_calls"
        beside: dict[str, Any] = {"logprobs": logprobs_of(chunk.logprobs)} if chunk.logprobs is not None else {}
        if self._with_ids:
            beside["token_ids"] = chunk.token_ids
        if not deltas and (chunk.logprobs or (self._with_ids and chunk.token_ids)):
            deltas = [ToolDelta("")]
        if reader.thought:
            yield self._envelope.chunk(_delta(index, {"reasoning_content": reader.thought}, **beside), usage)
            beside, deltas = {}, [delta for delta in deltas if delta.text or delta.index is not None]
        for delta in deltas:
            yield self._envelope.chunk(_delta(index, _fields_of(delta), **beside), usage)
            beside = {}
        if reason is not None:
            yield self._envelope.chunk(_delta(index, {}, finish_reason=reason), usage)

    def _choice(self, index: int, item: Completion) -> dict[str, Any]:
        parsed = parse_completion(self._form, item, self._thinking)
        calls = [(c.id, c.name, written) for c, written in zip(parsed.calls, parsed.written, strict=True)]
        calls += [(c.id, c.name, c.arguments) for c in parsed.invalid]
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
        if self._thinking is not None:
            message["reasoning_content"] = parsed.thinking or None
        if calls:
            message["content"] = parsed.content or None
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for call_id, name, arguments in calls
            ]
        choice = {
            "index": index,
            "message": message,
            "logprobs": logprobs_of(item.logprobs),
            "finish_reason": "tool_calls" if parsed.calls else item.finish_reason,
            "stop_reason": item.stop if isinstance(item.stop, str) else None,
        }
        return {**choice, "token_ids": item.token_ids} if self._with_ids else choice


def _delta(index: int, delta: dict[str, Any], **beside: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, **{"logprobs": None, "finish_reason": None, **beside}}


def _fields_of(delta: ToolDelta) -> dict[str, Any]:
    if delta.index is None:
        return {"content": delta.text}
    if delta.name is None:
        return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}
    call = {"index": delta.index, "id": delta.id, "type": "function"}
    return {"tool_calls": [{**call, "function": {"name": delta.name, "arguments": delta.text}}]}


def logprobs_of(logprobs: list[TokenLogprob] | None) -> dict[str, Any] | None:
    """Return log-probabilities in OpenAI's form; a forced token has 0."""
    if logprobs is None:
        return None
    return {"content": [one.to_openai() for one in logprobs], "refusal": None}
