"""`graftlm ab FILE --suggest`: where the prompts of a pipeline stop sharing, and the line of code to change."""

from __future__ import annotations

import re
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graftlm.ab.pipeline import Pipeline
from graftlm.core.errors import ConfigError
from graftlm.core.program.compiler.sharing import Message, Suggestion, blocks_of, messages_of, suggest
from graftlm.core.request import Completion, Request
from graftlm.core.runtime import Runtime

_CHATML = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
_TURN = re.compile(r"(?=<\|start_header_id\|>|<start_of_turn>|\[INST\])")

MAX_PROMPTS = 200
"""Prompts that are compared, the first of the pipeline."""


@contextmanager
def recorded() -> Generator[list[tuple[Runtime, Request]]]:
    """Record the requests that runtimes of this process submit inside the block."""
    found: list[tuple[Runtime, Request]] = []
    original = Runtime._prepare

    def prepare(self: Runtime, requests: Any, listeners: Any) -> Any:
        found.extend((self, request) for request in requests)
        return original(self, requests, listeners)

    Runtime._prepare = prepare  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Runtime._prepare = original  # type: ignore[method-assign]


def suggest_for(path: Path, model: str, framework: str | None = None) -> Suggestion:
    """Run a pipeline once on GraftLM and return what another order of its prompts' blocks would bring.

    Raises: ConfigError if the pipeline makes fewer than two calls of text.
    """
    pipeline = Pipeline.load(path, framework)
    llm = pipeline.engine("graftlm").open(model)
    with recorded() as requests:
        pipeline.answer(llm, [*pipeline.inputs])
    asked = [(runtime, request) for runtime, request in requests if request.score_ids is None][:MAX_PROMPTS]
    if len(asked) < 2:
        raise ConfigError(f"pipeline {str(path)!r} made {len(asked)} model calls; give it at least two inputs")
    runtime = asked[0][0]
    prompts = [_messages(runtime, request) for _, request in asked]
    return suggest(prompts, _encode(runtime), [path, *_beside(path)], rate=_tokens_per_second(runtime, asked[-1][1]))


def _messages(runtime: Runtime, request: Request) -> list[Message]:
    """Return a prompt in blocks; a chat that the adapter has rendered is split into its turns again."""
    prompt: Any = request.prompt
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], dict):
        return messages_of(prompt)
    if not isinstance(prompt, str):
        prompt = runtime.tokenizer.decode(runtime.processor.encode(prompt).ids, skip_special=False)
    turns = _CHATML.findall(prompt)
    if turns:
        return [(role, blocks_of(content)) for role, content in turns]
    return [("", blocks_of(turn)) for turn in _TURN.split(prompt) if turn]


def _encode(runtime: Runtime) -> Any:
    def encode(messages: Any) -> Any:
        if any(role for role, _ in messages):
            chat = [{"role": role or "user", "content": text} for role, text in messages]
            return runtime.processor.encode(chat).ids
        return runtime.processor.encode("".join(text for _, text in messages)).ids

    return encode


def _beside(path: Path) -> list[Path]:
    """Return the other Python files of the pipeline's folder, which it may import."""
    return sorted(other for other in path.resolve().parent.glob("*.py") if other.resolve() != path.resolve())


def _tokens_per_second(runtime: Runtime, request: Request) -> float | None:
    """Return the rate at which a prompt is computed that nothing is cached of."""
    runtime.clear_cache()
    ids = runtime.processor.encode(request.prompt, request.tools).ids
    started = time.perf_counter()
    done: Completion = runtime.generate(ids.tolist(), max_tokens=1, temperature=0)
    return (done.usage.prompt_tokens - done.usage.cached_tokens) / (time.perf_counter() - started)
