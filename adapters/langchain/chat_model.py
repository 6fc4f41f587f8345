"""`ChatGraftLM`: a LangChain chat model on a runtime in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput, ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.utils.pydantic import is_basemodel_subclass

from graftlm.adapters.langchain.base import CALL_OPTIONS, GraftSettings, token_usage
from graftlm.adapters.langchain.batch import GroupedChatModel
from graftlm.adapters.langchain.errors import langchain_errors
from graftlm.adapters.langchain.group import Call, acomplete, complete
from graftlm.adapters.langchain.messages import (
    StreamedMessage,
    ai_message,
    logprobs_content,
    message_chunk,
    native_messages,
    response_metadata,
    usage_metadata,
)
from graftlm.adapters.langchain.schemas import (
    Schema,
    ToolLike,
    kept_schema,
    langchain_schema,
    named_schema,
    openai_tool,
)
from graftlm.core.call_options import answer_schema, hold_for_tools, tool_request, with_thinking
from graftlm.core.chat.tool_format import ToolFormat
from graftlm.core.chat.tool_grammar import ToolChoice
from graftlm.core.chat.tool_parser import AnswerReader, parse_completion
from graftlm.core.chat.tools import Tool
from graftlm.core.request import Chunk, Completion, Request


class ChatGraftLM(GraftSettings, GroupedChatModel):
    """A chat model on GraftLM's runtime, for every place that takes a LangChain chat model.

    Construction is cheap: weights load with the first call, and models of one name share one engine. Sampling
    parameters may be given to the constructor, to `bind` and to each call; unknown ones raise.
    """

    if TYPE_CHECKING:  # options of the runtime are keywords too, and a type checker sees the fields alone

        def __init__(self, *, model: str = "sprout", **settings: Any) -> None: ...

    @property
    def _llm_type(self) -> str:
        return "graftlm-chat"

    def _resolve_model_profile(self) -> ModelProfile:
        profile = ModelProfile(
            text_inputs=True,
            audio_inputs=False,
            pdf_inputs=False,
            text_outputs=True,
            tool_calling=True,
            tool_choice=True,
            structured_output=True,
            reasoning_output=False,
        )
        if (reads := self._reads_pictures()) is not None:
            profile |= ModelProfile(image_inputs=reads, image_url_inputs=False, video_inputs=reads)
        length = self._known_context_length()
        if length is not None:
            profile["max_input_tokens"] = profile["max_output_tokens"] = length
        return profile

    def get_token_ids(self, text: str) -> list[int]:
        """Return the model's own token ids of `text`."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self.runtime_for().tokenizer.encode_continuation(text)

    def get_num_tokens_from_messages(
        self, messages: Sequence[BaseMessage], tools: Sequence[ToolLike] | None = None
    ) -> int:
        """Return the exact number of prompt tokens of these messages and tools."""
        with langchain_errors():
            call = self._prepare(messages, None, {"tools": [openai_tool(t, None) for t in tools or ()]})
            return len(call.runtime.processor.encode(call.request.prompt, call.request.tools))

    # -- one call ----------------------------------------------------------------------------------------------

    def _prepare(self, messages: Sequence[BaseMessage], stop: list[str] | None, options: dict[str, Any]) -> Call:
        model = options.pop("model", None)
        given = {name: value for name, value in options.items() if name not in CALL_OPTIONS}
        template = given.pop("chat_template_kwargs", self.chat_template_kwargs)
        tools = tuple(Tool.from_openai(tool) for tool in given.pop("tools", None) or ())
        choice, parallel = given.pop("tool_choice", None), given.pop("parallel_tool_calls", None)
        answer = answer_schema(given.pop("response_format", None), kept_schema)
        runtime = self.runtime_for(model)
        native = native_messages(messages)
        if not (tools or choice or answer is not None or any(m.tool_calls or m.role == "tool" for m in native)):
            request = with_thinking(runtime, Request(native, self._sampling(stop, given)), template)
            return Call(runtime, request, model or self.model_name)
        kept = given.get("on_unsupported") or self.on_unsupported or "error"
        bounded = {**self.model_kwargs, **given}.get("bounded_numbers", True)
        keeping = {"on_unsupported": kept, "bounded_numbers": bounded}
        asked = tool_request(runtime, native, tools, choice, parallel=parallel, answer=answer, **keeping)
        sampling = self._sampling(stop, given | asked.sampling)
        request = Request(asked.messages, sampling, tools=asked.listed, tool_fields=asked.fields)
        return Call(runtime, with_thinking(runtime, request, template), model or self.model_name)

    def _form(self, call: Call, options: Mapping[str, Any]) -> ToolFormat | None:
        """Return the model's format of tool calls; None for a call without tools, or at an endpoint."""
        if not options.get("tools") or options.get("tool_choice") == "none" or call.runtime.endpoint is not None:
            return None
        return ToolFormat.learn(call.runtime.tokenizer)

    def _result(self, call: Call, completion: Completion, form: ToolFormat | None) -> ChatResult:
        generations = []
        for index, item in enumerate(completion.completions or [completion]):
            text = parse_completion(form, item, call.request.thinking)
            hold_for_tools(call.runtime, call.request, text.calls)
            message = ai_message(item, text, call.model_name, completion.usage if index == 0 else None)
            info = {"finish_reason": message.response_metadata["finish_reason"]}
            generations.append(ChatGeneration(message=message, generation_info=info))
        llm_output = {"model_name": call.model_name, "token_usage": token_usage([completion.usage])}
        return ChatResult(generations=generations, llm_output=llm_output)

    def _message(self, call: Call, completion: Completion, options: dict[str, Any]) -> AIMessage:
        form = self._form(call, options)
        text = parse_completion(form, completion, call.request.thinking)
        hold_for_tools(call.runtime, call.request, text.calls)
        message = ai_message(completion, text, call.model_name, completion.usage)
        message.response_metadata["token_usage"] = token_usage([completion.usage])
        return message

    def _combine_llm_outputs(self, llm_outputs: list[dict[str, Any] | None], /) -> dict[str, Any]:
        total: dict[str, int] = {}
        for output in llm_outputs:
            for name, count in ((output or {}).get("token_usage") or {}).items():
                total[name] = total.get(name, 0) + count
        return {"model_name": self.model_name, "token_usage": total}

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with langchain_errors():
            call = self._prepare(messages, stop, dict(kwargs))
            return self._result(call, complete(call), self._form(call, kwargs))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with langchain_errors():
            call = self._prepare(messages, stop, dict(kwargs))
            completion = await acomplete(call)
            return self._result(call, completion, self._form(call, kwargs))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with langchain_errors():
            call = self._prepare(messages, stop, {**kwargs, "n": 1})
            reader = _StreamReader(call, self._form(call, kwargs), kwargs.get("stream_usage", self.stream_usage))
            with call.runtime.submit_stream(call.request) as chunks:
                for chunk in chunks:
                    yield from reader.read(chunk)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with langchain_errors():
            call = self._prepare(messages, stop, {**kwargs, "n": 1})
            reader = _StreamReader(call, self._form(call, kwargs), kwargs.get("stream_usage", self.stream_usage))
            async with aclosing(call.runtime.submit_astream(call.request)) as chunks:
                async for chunk in chunks:
                    for piece in reader.read(chunk):
                        yield piece

    # -- tools and structure -----------------------------------------------------------------------------------

    def bind_tools(
        self,
        tools: Sequence[ToolLike],
        *,
        tool_choice: dict[str, Any] | str | bool | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Let the model call `tools`: functions, LangChain tools, pydantic classes, TypedDicts or schemas.

        tool_choice  "auto" (a call or text), "none", "any" or "required" (at least one call), or a tool's name.
        strict       False drops the unsupported keywords of a tool's schema; otherwise they raise.
        """
        with langchain_errors():
            formatted = [openai_tool(tool, strict) for tool in tools]
            ToolChoice.read(tool_choice, tuple(map(Tool.from_openai, formatted)))
        if tool_choice is not None:
            kwargs["tool_choice"] = tool_choice
        if strict is False:
            kwargs.setdefault("on_unsupported", "warn")
        if parallel_tool_calls is not None:
            kwargs["parallel_tool_calls"] = parallel_tool_calls
        return self.bind(tools=formatted, **kwargs)

    def with_structured_output(
        self,
        schema: Schema,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Answer with an object of `schema`: a pydantic class, a TypedDict or a JSON schema.

        Every method uses the schema's grammar, so the text always parses. "json_schema" and "json_mode"
        write the object as the answer, "function_calling" as the arguments of a forced call. Unsupported keywords of
        the schema raise; with `strict=False` they are dropped with a warning. With `include_raw` the result
        is {"raw": message, "parsed": object or None, "parsing_error": error or None}.
        """
        schema = named_schema(schema)
        with langchain_errors():
            shown, kept = langchain_schema(schema), kept_schema(schema)
        form = {"kwargs": {"method": method, "strict": strict}, "schema": shown}
        pydantic = schema if isinstance(schema, type) and is_basemodel_subclass(schema) else None
        parser: BaseOutputParser[Any]
        if method == "function_calling":
            name = shown["title"]
            llm = self.bind_tools(
                [schema],
                tool_choice=name,
                strict=strict,
                parallel_tool_calls=False,
                ls_structured_output_format=form,
                **kwargs,
            )
            if pydantic is not None:
                parser = PydanticToolsParser(tools=[pydantic], first_tool_only=True)
            else:
                parser = JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
        elif method in ("json_schema", "json_mode"):
            response_format = {
                "type": "json_schema",
                "json_schema": {"name": shown["title"], "schema": kept},
            }
            if strict is False:
                kwargs.setdefault("on_unsupported", "warn")
            llm = self.bind(response_format=response_format, ls_structured_output_format=form, **kwargs)
            parser = PydanticOutputParser(pydantic_object=pydantic) if pydantic is not None else JsonOutputParser()
        else:
            raise ValueError(f"method is {method!r}; use 'json_schema', 'function_calling' or 'json_mode'")
        return llm | (_raw_and_parsed(parser) if include_raw else parser)


class _StreamReader:
    """A converter of an answer's chunks to LangChain's: text, parts of tool calls, and a last one with the usage."""

    def __init__(self, call: Call, form: ToolFormat | None, with_usage: bool) -> None:
        self._call = call
        self._reader = AnswerReader(form, call.request.thinking)
        self._with_usage = with_usage

    def read(self, chunk: Chunk) -> Iterator[ChatGenerationChunk]:
        messages = [message_chunk(delta) for delta in self._reader.read(chunk)]
        if self._reader.thought:
            messages.insert(
                0, StreamedMessage(content="", additional_kwargs={"reasoning_content": self._reader.thought})
            )
        if chunk.logprobs is not None:
            messages = messages or [StreamedMessage(content="")]
            messages[0].response_metadata = {"logprobs": logprobs_content(chunk.logprobs)}
        for message in messages:
            yield ChatGenerationChunk(message=message)
        if chunk.finish_reason is not None:
            yield ChatGenerationChunk(message=self._last(chunk))

    def _last(self, chunk: Chunk) -> AIMessageChunk:
        hold_for_tools(self._call.runtime, self._call.request, self._reader.calls)
        reason = "tool_calls" if self._reader.calls else chunk.finish_reason
        usage = usage_metadata(chunk.usage) if chunk.usage is not None and self._with_usage else None
        metadata = response_metadata(self._call.model_name, reason, None, chunk.usage)
        return StreamedMessage(content="", usage_metadata=usage, response_metadata=metadata, chunk_position="last")


def _raw_and_parsed(parser: BaseOutputParser[Any]) -> Runnable[AIMessage, dict[str, Any]]:
    """Parse in parallel to the message, so that the model stays a separate step and gets whole batches."""

    def parse(message: AIMessage) -> dict[str, Any]:
        try:
            return {"raw": message, "parsed": parser.invoke(message), "parsing_error": None}
        except Exception as error:  # validators of the user's class may raise any error; the result contains it
            return {"raw": message, "parsed": None, "parsing_error": error}

    async def aparse(message: AIMessage) -> dict[str, Any]:
        return parse(message)

    return RunnableLambda(parse, aparse)
