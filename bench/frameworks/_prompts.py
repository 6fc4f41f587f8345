"""The prompts that reached a runtime, by the observer hook."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from graftlm import Completion, Request, Runtime
from graftlm.plugins import manager
from graftlm.plugins.hookspecs import hookimpl


class Prompts:
    """Token ids of every finished request of one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.seen: list[list[int]] = []

    @hookimpl
    def graftlm_request_finished(self, request: Request, completion: Completion) -> None:
        self.seen.append(self.runtime.processor.encode(request.prompt, request.tools).ids.tolist())

    @property
    def num_unique(self) -> int:
        """Tokens that any engine must run: each distinct prefix once, and the last token of each prompt."""
        root: dict[int, Any] = {}
        total = 0
        for prompt in self.seen:
            node, new = root, 0
            for token in prompt:
                new += token not in node
                node = node.setdefault(token, {})
            total += max(new, 1)
        return total


@contextmanager
def observed(runtime: Runtime) -> Iterator[Prompts]:
    """Collect the prompts of `runtime` while this context is open."""
    prompts = Prompts(runtime)
    registry = manager.load()
    registry.add(f"bench-{id(prompts)}", prompts)
    try:
        yield prompts
    finally:
        registry.remove(f"bench-{id(prompts)}")
