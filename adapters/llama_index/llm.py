"""`GraftLLM`: a LlamaIndex LLM on a runtime in this process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Literal

import llama_index.core
from graftlm.adapters.llama_index.errors import GraftCallError, call_errors, is_default_tokenizer
from graftlm.adapters.llama_index.messages import (
    INVALID_CALLS,
    ChatReader,
    CompletionReader,
    chat_response,
    completion_response,
    native_messages,
)
from graftlm.adapters.llama_index.structured import StructuredPrediction
from graftlm.core import call_options
from graftlm.core.chat.tool_format import ToolFormat
from graftlm.core.chat.tools import Tool
from graftlm.core.config import OneConstructor, SamplingParams
from graftlm.core.errors import ConfigError, GraftError
from graftlm.core.grammar.python_types.pydantic_schema import class_schema
from graftlm.core.request import Request
from graftlm.core.runtime import Runtime
from graftlm.core.serving import loop_batching
from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import BaseModel, Field, model_validator
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW, DEFAULT_NUM_OUTPUTS, DEFAULT_TEMPERATURE
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import ToolSelection

if TYPE_CHECKING:
    from llama_index.core.tools.types import BaseTool

_PROBE = "The quick brown fox jumps over 13 lazy dogs, doesn't it?\nNaïve: {'price': 12.50}\n" * 4
_TOLERANCE = 1.02

_compared: set[tuple[int, str]] = set()


class GraftLLM(OneConstructor, StructuredPrediction):
    """An LLM on GraftLM's runtime: all eight methods are native, and no state is bound to one event loop.

    Construction is cheap: weights load with the first call, and models of one name share one engine. Sampling
    parameters may be given to the constructor, in `additional_kwargs` and to each call; unknown ones raise.

    runtime          a running `graftlm.Runtime` to use; without it, the process-wide one for `model`.
    chat_template_kwargs  arguments of the chat template, such as {"enable_thinking": False}.
    context_window   in tokens; None reads it from the model, or is 3,900 at an endpoint.
    on_unsupported   for keywords of a schema that no grammar supports: "error", the default, raises; "warn" drops them;
                     "check" validates the finished text with jsonschema and repeats the request up to `max_retries`
                     times.
    is_chat_model    None: True if the tokenizer has a chat template.
    """

    if TYPE_CHECKING:  # options of the runtime are keywords too, and a type checker sees the fields alone

        def __init__(self, *, model: str = "sprout", **settings: Any) -> None: ...

    model: str = Field(default="sprout", description="A Hugging Face id, a local folder, a GGUF file, or 'sprout'.")
    runtime: Any = Field(default=None, exclude=True, repr=False)
    runtime_options: dict[str, Any] = Field(default_factory=dict, exclude=True)
    temperature: float = Field(default=DEFAULT_TEMPERATURE, ge=0.0)
    max_tokens: int | None = Field(default=DEFAULT_NUM_OUTPUTS, gt=0)
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: list[str] | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    on_unsupported: Literal["error", "warn", "check"] | None = None
    timeout: float | None = None
    max_retries: int = Field(default=3, description="Of requests to `api_base`, and of answers that fail their check.")
    api_base: str | None = None
    api_key: str | None = Field(default=None, exclude=True, repr=False)
    context_window: int | None = None
    is_chat_model: bool | None = None
    is_function_calling_model: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    additional_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _sort_keywords(cls, values: Any) -> Any:
        """Move runtime options to `runtime_options`; raise for a keyword that neither the class nor Runtime has."""
        if not isinstance(values, Mapping):
            return values
        kept, options = call_options.sort_keywords(values, {*cls.model_fields, "class_name"}, cls.__name__)
        return {**kept, "runtime_options": {**(values.get("runtime_options") or {}), **options}}

    @model_validator(mode="after")
    def _check(self) -> GraftLLM:
        if self.runtime is not None:
            call_options.check_given(self.runtime, self.runtime_options)
            if "model" not in self.model_fields_set:
                self.model = self.runtime.model_name
        self._sampling({})  # an out-of-range value raises here instead of at the first call
        return self

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        own = GraftLLM.__annotations__.keys()
        return (item for item in call_options.shown_fields(self, GraftLLM, "model") if item[0] in own)

    def __str__(self) -> str:
        return repr(self)

    @classmethod
    def class_name(cls) -> str:
        return "GraftLLM"

    @property
    def metadata(self) -> LLMMetadata:
        runtime = self.runtime_for()
        _compare_tokenizers(self)
        return LLMMetadata(
            context_window=self.context_window or _context_window(runtime),
            num_output=self.max_tokens or DEFAULT_NUM_OUTPUTS,
            is_chat_model=_is_chat(self, runtime),
            is_function_calling_model=self.is_function_calling_model,
            model_name=self.model,
        )

    def runtime_for(self) -> Runtime:
        """Return the runtime of a call: the given one, or the process-wide one for `model`."""
        if self.runtime is not None:
            return self.runtime  # type: ignore[no-any-return]
        return call_options.shared_runtime(
            self.model, self.runtime_options, self.api_base, self.api_key, self.max_retries
        )

    def tokenize(self, text: str) -> list[int]:
        """Return the model's own token ids of `text`. LlamaIndex packs prompts by it, as `Settings.tokenizer`."""
        return self.runtime_for().tokenizer.ids_alone(text)

    # -- from a call to a request ------------------------------------------------------------------------------

    def _sampling(self, given: Mapping[str, Any]) -> SamplingParams:
        own = call_options.sampling_set_on(self)
        return call_options.sampling_params({**own, "max_tokens": self.max_tokens}, self.additional_kwargs, given)

    def _chat_request(
        self, messages: Sequence[ChatMessage], given: dict[str, Any]
    ) -> tuple[Request, ToolFormat | None]:
        """Return the request of a chat, and the tool format that reads its answer; None without tools."""
        runtime = self.runtime_for()
        tools = tuple(map(Tool.from_openai, given.pop("tools", None) or ()))
        choice, parallel = given.pop("tool_choice", None), given.pop("parallel_tool_calls", None)
        answer = call_options.answer_schema(given.pop("response_format", None), _json_schema)
        template = given.pop("chat_template_kwargs", self.chat_template_kwargs)
        kept = given.get("on_unsupported") or self.on_unsupported or "error"
        as_text = self.messages_to_prompt is not generic_messages_to_prompt or not _is_chat(self, runtime)
        asked = call_options.tool_request(
            runtime,
            [] if as_text else native_messages(messages),
            tools,
            choice,
            parallel=parallel,
            answer=answer,
            on_unsupported=kept,
            bounded_numbers={**self.additional_kwargs, **given}.get("bounded_numbers", True),
        )
        sampling = self._sampling(given | asked.sampling)
        if as_text:
            assert self.messages_to_prompt is not None  # the base class sets its default
            return Request(self.messages_to_prompt(messages), sampling), asked.form
        request = Request(asked.messages, sampling, tools=asked.listed, tool_fields=asked.fields)
        return call_options.with_thinking(runtime, request, template), asked.form

    def _text_request(self, prompt: str, formatted: bool, given: dict[str, Any]) -> Request:
        """Return the request of a completion: a formatted prompt unchanged, any other as one message of the user."""
        assert self.completion_to_prompt is not None  # the base class sets its default
        text = prompt if formatted else self.completion_to_prompt(prompt)
        if formatted or text != prompt or not _is_chat(self, self.runtime_for()):
            return Request(text, self._sampling(given))
        return self._chat_request([ChatMessage(role=MessageRole.USER, content=prompt)], given)[0]

    # -- the eight methods -------------------------------------------------------------------------------------

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        with call_errors():
            request, form = self._chat_request(messages, kwargs)
            runtime = self.runtime_for()
            return chat_response(self.model, runtime.complete(request), form, request.thinking, runtime)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        with call_errors():
            request, form = self._chat_request(messages, kwargs)
            runtime = self.runtime_for()
            completion = await loop_batching.complete(runtime, request)
            return chat_response(self.model, completion, form, request.thinking, runtime)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        with call_errors():
            request, form = self._chat_request(messages, kwargs)
        reader = ChatReader(self.model, form, request.thinking)

        def read() -> ChatResponseGen:
            runtime = self.runtime_for()
            with call_errors(), runtime.submit_stream(request) as chunks:
                for chunk in chunks:
                    yield reader.read(chunk)
            call_options.hold_for_tools(runtime, request, reader.calls)

        return read()

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        with call_errors():
            request, form = self._chat_request(messages, kwargs)
        reader = ChatReader(self.model, form, request.thinking)

        async def read() -> ChatResponseAsyncGen:
            runtime = self.runtime_for()
            with call_errors():
                async with aclosing(runtime.submit_astream(request)) as chunks:
                    async for chunk in chunks:
                        yield reader.read(chunk)
            call_options.hold_for_tools(runtime, request, reader.calls)

        return read()

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        with call_errors():
            request = self._text_request(prompt, formatted, kwargs)
            return completion_response(self.model, self.runtime_for().complete(request), request.thinking)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        with call_errors():
            request = self._text_request(prompt, formatted, kwargs)
            return completion_response(
                self.model, await loop_batching.complete(self.runtime_for(), request), request.thinking
            )

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        with call_errors():
            request = self._text_request(prompt, formatted, kwargs)
        reader = CompletionReader(self.model, request.thinking)

        def read() -> CompletionResponseGen:
            with call_errors(), self.runtime_for().submit_stream(request) as chunks:
                for chunk in chunks:
                    yield reader.read(chunk)

        return read()

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        with call_errors():
            request = self._text_request(prompt, formatted, kwargs)
        reader = CompletionReader(self.model, request.thinking)

        async def read() -> CompletionResponseAsyncGen:
            with call_errors():
                async with aclosing(self.runtime_for().submit_astream(request)) as chunks:
                    async for chunk in chunks:
                        yield reader.read(chunk)

        return read()

    # -- tools -------------------------------------------------------------------------------------------------

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        messages = list(chat_history or [])
        if user_msg is not None:
            message = ChatMessage(role=MessageRole.USER, content=user_msg) if isinstance(user_msg, str) else user_msg
            messages.append(message)
        prepared: dict[str, Any] = {"messages": messages, **kwargs}
        if tools:
            prepared["tools"] = [_openai_tool(tool) for tool in tools]
            if prepared.get("tool_choice") is None:  # LlamaIndex's programs pass None beside tool_required=True
                prepared["tool_choice"] = "required" if tool_required else "auto"
            prepared.setdefault("parallel_tool_calls", allow_parallel_tool_calls)
        return prepared

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the tool calls of an answer. Raises ValueError for one that cannot be read."""
        for reason in response.message.additional_kwargs.get(INVALID_CALLS, ()):
            raise ValueError(reason)
        calls = native_messages([response.message])[0].tool_calls
        if not calls and error_on_no_tool_call:
            raise ValueError(f"expected at least one tool call, the model answered: {response.message.content!r}")
        return [ToolSelection(tool_id=c.id, tool_name=c.name, tool_kwargs=c.arguments) for c in calls]


def _is_chat(llm: GraftLLM, runtime: Runtime) -> bool:
    if llm.is_chat_model is not None:
        return llm.is_chat_model
    return runtime.endpoint is not None or runtime.tokenizer.has_chat_template


def _context_window(runtime: Runtime) -> int:
    """Return the context in tokens; LlamaIndex's default for an endpoint or a plugin without a known length."""
    try:
        return runtime.max_model_len
    except GraftError:
        return DEFAULT_CONTEXT_WINDOW


def _openai_tool(tool: Any) -> dict[str, Any]:
    if not hasattr(tool, "metadata"):
        raise GraftCallError(f"{tool!r} is no tool; give a BaseTool, such as FunctionTool.from_defaults(a_function)")
    described: dict[str, Any] = tool.metadata.to_openai_tool(skip_length_check=True)
    kind = tool.metadata.fn_schema
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return described
    whole, closed = class_schema(kind)
    if closed or "$ref" in whole:  # LlamaIndex drops a schema's own $ref
        described["function"]["parameters"] = whole
    return described


def _json_schema(cls: type) -> Any:
    if not issubclass(cls, BaseModel):
        raise ConfigError(f"response_format is {cls!r}; give a pydantic class, or its JSON schema as a dict")
    return class_schema(cls)[0]


def _compare_tokenizers(llm: GraftLLM) -> None:
    """Warn once if a `Settings.tokenizer` of the user counts fewer tokens than the model: full prompts then overflow.

    The setting itself stays: splitters cut documents by it, so setting it would cut one document in two ways.
    """
    current = llama_index.core.global_tokenizer
    if current is None or is_default_tokenizer(current):
        return  # the error of a prompt that is too long names the remedy
    if getattr(current, "__self__", None) is llm or (id(current), llm.model) in _compared:
        return
    _compared.add((id(current), llm.model))
    with suppress(GraftError):  # an endpoint may have no tokenizer
        _compare(current, llm)


def _compare(current: Callable[[str], Any], llm: GraftLLM) -> None:
    counted, really = len(current(_PROBE)), len(llm.tokenize(_PROBE))
    if really > counted * _TOLERANCE:
        warnings.warn(
            f"Settings.tokenizer counts {counted} tokens in a text in which {llm.model!r} reads {really}, so prompts "
            "that LlamaIndex packs full do not fit the model; set Settings.tokenizer = llm.tokenize before "
            "documents are split",
            stacklevel=3,
        )
