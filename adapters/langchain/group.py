"""Groups of calls whose requests are submitted together, before LangChain makes the calls one by one.

Each call claims its request, which already runs, from the group of its context. Unclaimed requests are cancelled, so
a wrong guess costs compute and never changes an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from graftlm.core.chat.messages import Message
from graftlm.core.errors import GraftError
from graftlm.core.request import Completion, Request
from graftlm.core.runtime import Runtime
from graftlm.core.serving import loop_batching


@dataclass(frozen=True)
class Call:
    """A request, and the runtime that answers it under the name `model_name`."""

    runtime: Runtime
    request: Request
    model_name: str

    @property
    def key(self) -> Hashable:
        """A hash key of the call: equal for equal prompts, and possibly for different ones."""
        prompt = self.request.prompt
        return prompt if isinstance(prompt, str) else tuple(map(_message_key, prompt))

    def same_as(self, other: Call) -> bool:
        mine, theirs = self.request, other.request
        return (
            self.runtime is other.runtime
            and mine.prompt == theirs.prompt
            and mine.sampling == theirs.sampling
            and (mine.tools, mine.tool_fields) == (theirs.tools, theirs.tool_fields)
        )


def _message_key(message: Message) -> Hashable:
    return (message.role, message.content if isinstance(message.content, str) else len(message.content))


@dataclass
class Group:
    """A group of calls that were submitted together and wait for their claims."""

    waiting: dict[Hashable, list[tuple[Call, Future[Completion]]]] = field(default_factory=dict)

    @classmethod
    def submit(cls, calls: Iterable[Call]) -> Group:
        """Submit all calls, one submission for each runtime."""
        group = cls()
        by_runtime: dict[int, list[Call]] = {}
        for call in calls:
            by_runtime.setdefault(id(call.runtime), []).append(call)
        for same in by_runtime.values():
            try:
                futures = same[0].runtime.submit_many([call.request for call in same])
            except GraftError:
                continue  # each call will submit its own request and raise its own error
            for call, future in zip(same, futures, strict=True):
                group.waiting.setdefault(call.key, []).append((call, future))
        return group

    def __len__(self) -> int:
        """The number of submitted, unclaimed calls."""
        return sum(map(len, self.waiting.values()))

    def claim(self, call: Call) -> Future[Completion] | None:
        """Return the future of an equal call, which is claimed once; None without one."""
        candidates = self.waiting.get(call.key, ())
        for candidate in tuple(candidates):
            if candidate[0].same_as(call):
                try:
                    self.waiting[call.key].remove(candidate)
                except ValueError:  # another thread claimed it
                    continue
                return candidate[1]
        return None

    def cancel(self) -> None:
        """Cancel the unclaimed requests."""
        for candidates in self.waiting.values():
            for _, future in candidates:
                future.cancel()


laid_out_group: ContextVar[Group | None] = ContextVar("graftlm_langchain_group", default=None)
"""The group from which calls of this context claim."""


def _claim(call: Call) -> Future[Completion] | None:
    group = laid_out_group.get()
    return group.claim(call) if group is not None else None


def complete(call: Call) -> Completion:
    """Return the answer of the group's equal request, or of `call`, submitted now."""
    claimed = _claim(call)
    if claimed is None:
        return call.runtime.complete(call.request)
    try:
        return claimed.result()
    finally:
        claimed.cancel()  # has an effect only after an interrupted wait


def submit_all(calls: Sequence[Call]) -> list[Future[Completion]]:
    """Claim the group's request for a single call, or submit `calls`, all of one runtime, now."""
    if len(calls) == 1 and (claimed := _claim(calls[0])) is not None:
        return [claimed]
    return calls[0].runtime.submit_many([call.request for call in calls]) if calls else []


async def acomplete(call: Call) -> Completion:
    """Return the answer of the group's equal request, or of `call`, submitted with others of the loop's turn."""
    claimed = _claim(call)
    if claimed is not None:
        return await asyncio.wrap_future(claimed)
    return await loop_batching.complete(call.runtime, call.request)


@contextmanager
def laid_out(group: Group) -> Iterator[None]:
    """Let the calls made in this context claim from `group`."""
    token = laid_out_group.set(group)
    try:
        yield
    finally:
        laid_out_group.reset(token)
        group.cancel()
