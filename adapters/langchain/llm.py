"""`GraftLLM`: LangChain's text-in, text-out model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.globals import get_llm_cache
from langchain_core.language_models import BaseLLM, LanguageModelInput
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_config_list

from graftlm.adapters.langchain.base import CALL_OPTIONS, GraftSettings, token_usage
from graftlm.adapters.langchain.batch import MAX_THREADS
from graftlm.adapters.langchain.errors import langchain_errors
from graftlm.adapters.langchain.group import Call, Group, complete, laid_out, submit_all
from graftlm.adapters.langchain.messages import logprobs_content
from graftlm.core.request import Chunk, Completion, Request


class GraftLLM(GraftSettings, BaseLLM):
    """Text completion on GraftLM's runtime. The prompt is used unchanged and not echoed; a list is one engine batch."""

    if TYPE_CHECKING:  # options of the runtime are keywords too, and a type checker sees the fields alone

        def __init__(self, *, model: str = "sprout", **settings: Any) -> None: ...

    @property
    def _llm_type(self) -> str:
        return "graftlm"

    def get_token_ids(self, text: str) -> list[int]:
        """Return the model's own token ids of `text`."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self.runtime_for().tokenizer.encode_continuation(text)

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """Complete all prompts in one engine batch. With `return_exceptions`, an invalid prompt fails alone."""
        if not return_exceptions or len(inputs) < 2:
            return super().batch(inputs, config, return_exceptions=return_exceptions, **kwargs)
        configs = get_config_list(config, len(inputs))
        if configs[0].get("max_concurrency") is None:
            configs = [{**c, "max_concurrency": min(len(inputs), MAX_THREADS)} for c in configs]
        with laid_out(self._group(inputs, config, kwargs)):  # LangChain makes one call per prompt
            return super(BaseLLM, self).batch(inputs, configs, return_exceptions=True, **kwargs)

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """Complete all prompts as `batch` does, on an event loop."""
        if not return_exceptions or len(inputs) < 2:
            return await super().abatch(inputs, config, return_exceptions=return_exceptions, **kwargs)
        with laid_out(self._group(inputs, config, kwargs)):
            return await super(BaseLLM, self).abatch(inputs, config, return_exceptions=True, **kwargs)

    def _group(self, inputs: Sequence[LanguageModelInput], config: Any, kwargs: dict[str, Any]) -> Group:
        limited = get_config_list(config, len(inputs))[0].get("max_concurrency") is not None
        if limited or self.cache or (self.cache is None and get_llm_cache() is not None):
            return Group()
        options = dict(kwargs)
        stop = options.pop("stop", None)
        calls: list[Call] = []
        for item in inputs:
            with suppress(Exception):  # the call itself raises the error
                calls += self._prepare([self._convert_input(item).to_string()], stop, options)
        return Group.submit(calls)

    def _prepare(self, prompts: list[str], stop: list[str] | None, options: dict[str, Any]) -> list[Call]:
        model = options.get("model")
        sampling = self._sampling(stop, {name: value for name, value in options.items() if name not in CALL_OPTIONS})
        runtime = self.runtime_for(model)
        return [Call(runtime, Request(prompt, sampling), model or self.model_name) for prompt in prompts]

    def _result(self, calls: list[Call], completions: list[Completion]) -> LLMResult:
        generations = [[_generation(item) for item in c.completions or [c]] for c in completions]
        usage = token_usage(completion.usage for completion in completions)
        name = calls[0].model_name if calls else self.model_name
        return LLMResult(generations=generations, llm_output={"model_name": name, "token_usage": usage})

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        with langchain_errors():
            calls = self._prepare(prompts, stop, kwargs)
            if len(calls) == 1:
                return self._result(calls, [complete(calls[0])])
            futures = submit_all(calls)
            try:
                completions = [future.result() for future in futures]
            finally:
                for future in futures:
                    future.cancel()  # has an effect only after a failure or an interrupted wait
            return self._result(calls, completions)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        with langchain_errors():
            calls = self._prepare(prompts, stop, kwargs)
            futures = submit_all(calls)
            try:
                completions = await asyncio.gather(*map(asyncio.wrap_future, futures))
            finally:
                for future in futures:
                    future.cancel()
            return self._result(calls, list(completions))

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        with langchain_errors():
            (call,) = self._prepare([prompt], stop, {**kwargs, "n": 1})
            with call.runtime.submit_stream(call.request) as chunks:
                for chunk in chunks:
                    piece = _chunk(chunk)
                    if run_manager:
                        run_manager.on_llm_new_token(piece.text, chunk=piece)
                    yield piece

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        with langchain_errors():
            (call,) = self._prepare([prompt], stop, {**kwargs, "n": 1})
            async with aclosing(call.runtime.submit_astream(call.request)) as chunks:
                async for chunk in chunks:
                    piece = _chunk(chunk)
                    if run_manager:
                        await run_manager.on_llm_new_token(piece.text, chunk=piece)
                    yield piece


def _generation(completion: Completion) -> Generation:
    info: dict[str, Any] = {"finish_reason": completion.finish_reason}
    if completion.logprobs is not None:
        info["logprobs"] = logprobs_content(completion.logprobs)
    return Generation(text=completion.text, generation_info=info)


def _chunk(chunk: Chunk) -> GenerationChunk:
    info: dict[str, Any] = {}
    if chunk.logprobs is not None:
        info["logprobs"] = logprobs_content(chunk.logprobs)
    if chunk.finish_reason is not None:
        info["finish_reason"] = chunk.finish_reason
    if chunk.usage is not None:
        info["token_usage"] = token_usage([chunk.usage])
    return GenerationChunk(text=chunk.text, generation_info=info or None)
