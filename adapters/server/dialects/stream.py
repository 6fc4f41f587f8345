"""The parts that the writers of all dialects share: items of an answer in the order of the text, and their events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from graftlm.core.chat.thinking import Thinking
from graftlm.core.chat.tool_format import ToolFormat
from graftlm.core.chat.tool_parser import AnswerReader, ToolDelta, parse_completion, read_arguments
from graftlm.core.request import Chunk, Completion


@dataclass
class Call:
    """One tool call of an answer; `arguments` is the text that the model wrote."""

    id: str
    name: str
    arguments: str = ""

    @property
    def valid(self) -> bool:
        """True unless the answer ended inside the call, or wrote arguments that are no JSON object."""
        return not read_arguments(self.arguments)[1]


@dataclass
class Thought:
    """The thinking before an answer's content."""

    text: str = ""


Item = Thought | Call | str
"""A part of an answer; a string is text."""


def items_of(form: ToolFormat | None, thinking: Thinking | None, completion: Completion) -> list[Item]:
    """Return the items of a completion, at least one. A call that cannot be read keeps its raw text."""
    parsed = parse_completion(form, completion, thinking)
    calls = [Call(call.id, call.name, text) for call, text in zip(parsed.calls, parsed.written, strict=True)]
    calls += [Call(call.id, call.name, call.arguments) for call in parsed.invalid]
    thought = [Thought(parsed.thinking)] if parsed.thinking else []
    return [*thought, *([parsed.content] if parsed.content or not calls else []), *calls]


def object_of(call: Call) -> dict[str, Any]:
    """Return the arguments of a call; text that is no JSON object is the value of one name, INVALID_JSON."""
    value, error = read_arguments(call.arguments or "{}")
    return {"INVALID_JSON": call.arguments} if error else value


def named_event(name: str, value: Mapping[str, Any]) -> bytes:
    """Return a server-sent event with a name."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), json.dumps(value, separators=(",", ":")).encode())


@dataclass(frozen=True)
class Piece:
    """A piece of item `index` of an answer.

    item   the item so far
    opens  True for the first piece of an item; closes the item before it
    """

    index: int
    delta: str
    opens: bool
    item: Item


class ItemReader:
    """A converter of one answer's chunks into the pieces of its items: thinking, texts and tool calls, in order."""

    def __init__(self, form: ToolFormat | None, thinking: Thinking | None) -> None:
        self.items: list[Item] = []
        self._reader = AnswerReader(form, thinking)

    @property
    def called(self) -> bool:
        """True if the answer has called a tool, by a call that can be read."""
        return bool(self._reader.calls)

    def read(self, chunk: Chunk) -> Iterator[Piece]:
        deltas = self._reader.read(chunk)
        if self._reader.thought:
            yield self._add(Thought, self._reader.thought)
        for delta in deltas:
            if delta.index is None:
                yield self._add(str, delta.text)
            else:
                yield self._call(delta)

    def end(self) -> Iterator[Piece]:
        """Yield the one piece of an empty answer."""
        if all(isinstance(item, Thought) for item in self.items):
            yield self._add(str, "")

    def _add(self, kind: type[Thought] | type[str], text: str) -> Piece:
        last = self.items[-1] if self.items else None
        opens = not isinstance(last, kind)
        if kind is Thought:
            before = last.text if isinstance(last, Thought) else ""
            item: Item = Thought(before + text)
        else:
            item = text if opens else f"{last}{text}"
        self.items[len(self.items) - (not opens) :] = [item]
        return Piece(len(self.items) - 1, text, opens, item)

    def _call(self, delta: ToolDelta) -> Piece:
        opens = delta.name is not None
        if opens:
            self.items.append(Call(delta.id or "", delta.name or ""))
        call = self.items[-1]
        assert isinstance(call, Call)
        call.arguments += delta.text
        return Piece(len(self.items) - 1, delta.text, opens, call)
