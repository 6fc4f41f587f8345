"""StructuredPrediction: LlamaIndex's structured_predict family, as JSON under the schema's grammar."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import suppress
from typing import Any

from llama_index_instrumentation import get_dispatcher

from graftlm.adapters.llama_index.errors import GraftCallError
from graftlm.core.grammar.python_types.pydantic_schema import class_schema
from llama_index.core.base.llms.types import ChatResponse
from llama_index.core.bridge.pydantic import BaseModel, ValidationError
from llama_index.core.instrumentation.events.llm import LLMStructuredPredictEndEvent, LLMStructuredPredictStartEvent
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.program.utils import process_streaming_objects
from llama_index.core.prompts import PromptTemplate
from llama_index.core.types import Model, PydanticProgramMode

dispatcher = get_dispatcher(__name__)


class StructuredPrediction(FunctionCallingLLM):
    """A function calling LLM whose `chat` accepts `response_format` and always satisfies it.

    With `pydantic_program_mode` at its default the answer is the object's JSON; other modes run LlamaIndex's programs
    (FUNCTION: a forced tool call, LLM: free text that is parsed).
    """

    @property
    def _native_structure(self) -> bool:
        """Return True if objects are JSON under the schema's grammar; otherwise LlamaIndex's program runs."""
        return self.pydantic_program_mode == PydanticProgramMode.DEFAULT

    @dispatcher.span
    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """Return an `output_cls` from the answer to a prompt; the answer is JSON of its schema by construction."""
        if not self._native_structure:
            answer: Model = super().structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return answer
        dispatcher.event(
            LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=prompt_args)
        )
        response = self.chat(**self._structured_call(output_cls, prompt, llm_kwargs, prompt_args))
        result: Model = output_cls.model_validate_json(response.message.content or "")
        dispatcher.event(LLMStructuredPredictEndEvent(output=result))
        return result

    @dispatcher.span
    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """Return an `output_cls` as `structured_predict` does, on an event loop."""
        if not self._native_structure:
            answer: Model = await super().astructured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return answer
        dispatcher.event(
            LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=prompt_args)
        )
        response = await self.achat(**self._structured_call(output_cls, prompt, llm_kwargs, prompt_args))
        result: Model = output_cls.model_validate_json(response.message.content or "")
        dispatcher.event(LLMStructuredPredictEndEvent(output=result))
        return result

    def _structured_stream_call(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        if not self._native_structure:
            yield from super()._structured_stream_call(output_cls, prompt, llm_kwargs, **prompt_args)
            return
        partial: Any = None
        for response in self.stream_chat(**self._structured_call(output_cls, prompt, llm_kwargs, prompt_args)):
            partial = _partial(response, output_cls, partial)
            yield partial

    async def _structured_astream_call(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        if not self._native_structure:
            return await super()._structured_astream_call(output_cls, prompt, llm_kwargs, **prompt_args)

        async def read() -> AsyncGenerator[Any, None]:
            partial: Any = None
            call = self._structured_call(output_cls, prompt, llm_kwargs, prompt_args)
            async for response in await self.astream_chat(**call):
                partial = _partial(response, output_cls, partial)
                yield partial

        return read()

    def _structured_call(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None,
        prompt_args: dict[str, Any],
    ) -> dict[str, Any]:
        if not hasattr(output_cls, "model_json_schema"):
            raise GraftCallError(f"output_cls is {output_cls!r}; give a pydantic class")
        schema = {"name": output_cls.__name__, "schema": class_schema(output_cls)[0]}
        response_format = {"type": "json_schema", "json_schema": schema}
        messages = self._extend_messages(prompt.format_messages(llm=self, **prompt_args))
        return {"messages": messages, "response_format": response_format, **(llm_kwargs or {})}


def _partial(response: ChatResponse, output_cls: type[BaseModel], partial: Any) -> Any:
    """Return the object written so far; a complete one is validated. A RootModel is returned only when complete."""
    with suppress(ValidationError):
        return output_cls.model_validate_json(response.message.content or "")
    seen = [partial] if partial is not None else None
    return process_streaming_objects(response, output_cls, seen)
