"""Recording: the prompts that a pipeline of any framework submits, for `Runtime.explain`."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftlm.core.config import SamplingParams
from graftlm.core.errors import ConfigError
from graftlm.core.program.compiler.sharing import Message, Suggestion, blocks_of, encoder, messages_of, suggest
from graftlm.core.request import Request

if TYPE_CHECKING:
    from graftlm.core.runtime import Runtime

_CHATML = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
_TURN = re.compile(r"(?=<\|start_header_id\|>|<start_of_turn>|\[INST\])")

MAX_PROMPTS = 200
"""Prompts that are compared, the first of a recording: comparing is quadratic."""


@contextmanager
def recorded(runtimes: Runtime | type[Runtime]) -> Generator[list[tuple[Runtime, Request]]]:
    """Record the requests that one runtime, or every runtime of this process, submits inside the block."""
    found: list[tuple[Runtime, Request]] = []
    original = runtimes._prepare

    def prepare(*arguments: Any) -> Any:
        runtime = arguments[0] if isinstance(runtimes, type) else runtimes
        found.extend((runtime, request) for request in arguments[-2])
        return original(*arguments)

    setattr(runtimes, "_prepare", prepare)  # noqa: B010
    try:
        yield found
    finally:
        if isinstance(runtimes, type):
            setattr(runtimes, "_prepare", original)  # noqa: B010
        else:
            del runtimes.__dict__["_prepare"]


def explain(runtime: Runtime, prompts: Iterable[Any], sources: Sequence[Path] = ()) -> Suggestion:
    """Compare prompts (texts, messages or requests) and suggest an order; see `Runtime.explain`."""
    asked = [one for one in prompts if not (isinstance(one, Request) and one.score_ids is not None)][:MAX_PROMPTS]
    parsed = [_messages(runtime, one) if isinstance(one, Request) else messages_of(one) for one in asked]
    found = suggest(parsed, encoder(runtime.processor), sources)
    rate = _tokens_per_second(runtime, asked[-1]) if found.saved_tokens > 0 else None
    return found if rate is None else found.timed(rate)


def _messages(runtime: Runtime, request: Request) -> list[Message]:
    """Return a prompt in blocks; a chat that the adapter has rendered is split into its turns again."""
    prompt: Any = request.prompt
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], dict):
        return messages_of(prompt)
    if not isinstance(prompt, str):
        prompt = runtime.tokenizer.decode(runtime.processor.encode(prompt).ids, skip_special=False)
    turns = _CHATML.findall(prompt)
    if turns:
        if turns[-1][0] == "assistant" and not turns[-1][1]:
            turns.pop()  # the answer's turn, which rendering opens
        return [(role, blocks_of(content)) for role, content in turns]
    return [("", blocks_of(turn)) for turn in _TURN.split(prompt) if turn]


def _tokens_per_second(runtime: Runtime, prompt: Any) -> float | None:
    """Return the rate at which a prompt is computed with nothing cached; None without a loaded model in this process.

    The prompt is computed once, in a namespace of its own.
    """
    if runtime.endpoint is not None or runtime.unavailable() is not None:
        return None
    request = prompt if isinstance(prompt, Request) else Request(prompt)
    ids = runtime.processor.encode(request.prompt, request.tools).ids
    sampling = SamplingParams(max_tokens=1, temperature=0)
    started = time.perf_counter()
    try:
        runtime.complete(Request(ids.tolist(), sampling, namespace=f"explain {uuid.uuid4()}"))
    except ConfigError:  # an engine without namespaces
        return None
    return len(ids) / (time.perf_counter() - started)
