"""DSPy's classes. It has none for a model in the process: its users write an engine, one `generate` at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from graftlm.ab.classes.client import Constructor, key, load, served
from graftlm.ab.classes.openvino import same_work


class TransformersEngine:
    """A local model behind DSPy the way a user writes it: the chat template, then `generate`, one call at a time."""

    def __init__(self, model: str, loader: Any = None, **options: Any) -> None:
        transformers = load("transformers")
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        self.model = (loader or transformers.AutoModelForCausalLM).from_pretrained(model, **options)
        self.lock = threading.Lock()

    def complete(self, request: Any) -> Any:
        lm15 = load("dspy").lm15
        messages = [{"role": m.role, "content": m.text} for m in request.messages]
        if request.system:
            messages.insert(0, {"role": "system", "content": str(request.system)})
        given = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with self.lock:
            output = self.model.generate(**given, max_new_tokens=request.config.max_tokens, do_sample=False)
        new = output[0, given["input_ids"].shape[1] :]
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        usage = lm15.Usage(input_tokens=given["input_ids"].shape[1], output_tokens=len(new))
        return lm15.Response(None, request.model, lm15.Message.assistant(text), "stop", usage)

    def stream(self, request: Any) -> Iterator[Any]:
        """The events of an answer that comes as one piece."""
        yield from load("dspy").lm15.response_to_events(self.complete(request))

    def close(self) -> None:
        """The model lives as long as the comparison's process."""


class AsyncTransformersEngine:
    """The same for event loops, which go on while a thread generates."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine

    async def complete(self, request: Any) -> Any:
        return await asyncio.to_thread(self.engine.complete, request)

    async def stream(self, request: Any) -> AsyncIterator[Any]:
        for event in load("dspy").lm15.response_to_events(await self.complete(request)):
            yield event

    async def aclose(self) -> None:
        """The model lives as long as the comparison's process."""


def engines(max_tokens: int) -> Mapping[str, Constructor]:
    greedy = {"temperature": 0.0, "max_tokens": max_tokens, "cache": False}

    def openai(model: str, url: str) -> Any:
        return load("dspy").LM(f"openai/{model}", api_base=url, api_key=key(), **greedy)

    def hf(model: str, loader: Any = None, **options: Any) -> Any:
        engine = TransformersEngine(model, loader, **options)
        return load("dspy").LM(
            "local/transformers", engine=engine, async_engine=AsyncTransformersEngine(engine), **greedy
        )

    return {
        "hf": hf,
        "graftlm": lambda model: load("graftlm.adapters.dspy").GraftLM(model, **greedy),
        "openai": openai,
        **served(openai),
        "openvino": lambda model: hf(model, load("optimum.intel").OVModelForCausalLM, ov_config=same_work(model)),
    }


def on_runtime(runtime: Any, max_tokens: int) -> Any:
    return load("graftlm.adapters.dspy").GraftLM(runtime=runtime, temperature=0.0, max_tokens=max_tokens, cache=False)
