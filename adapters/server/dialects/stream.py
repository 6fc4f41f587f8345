"""The parts that the writers of all dialects share: items of an answer in the order of the text, and their events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from graftlm.core.chat.tool_format import ToolFormat
from graftlm.core.chat.tool_parser import AnswerReader, ToolDelta, parse_completion
from graftlm.core.request import Chunk, Completion


@dataclass
class Call:
    """One tool call of an answer; `arguments` is the text that the model wrote."""

    id: str
    name: str
    arguments: str = ""


def calls_of(form: ToolFormat | None, completion: Completion) -> tuple[str, list[Call]]:
    """Return the content of a completion, then its tool calls. A call that cannot be read keeps its raw text."""
    parsed = parse_completion(form, completion)
    calls = [Call(call.id, call.name, text) for call, text in zip(parsed.calls, parsed.written, strict=True)]
    return parsed.content, calls + [Call(call.id, call.name, call.arguments) for call in parsed.invalid]


def named_event(name: str, value: Mapping[str, Any]) -> bytes:
    """Return a server-sent event with a name."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), json.dumps(value, separators=(",", ":")).encode())


@dataclass(frozen=True)
class Piece:
    """A piece of item `index` of an answer: the first of a call has `call`, the first of a text does not.

    opens  True for the first piece of an item; closes the item before it
    """

    index: int
    delta: str
    opens: bool
    call: Call | None = None


class ItemReader:
    """A converter of one answer's chunks into the pieces of its items: texts and tool calls, in order."""

    def __init__(self, form: ToolFormat | None) -> None:
        self.items: list[str | Call] = []
        self._reader = AnswerReader(form)

    @property
    def called(self) -> bool:
        """True if the answer has called a tool."""
        return any(isinstance(item, Call) for item in self.items)

    def read(self, chunk: Chunk) -> Iterator[Piece]:
        for delta in self._reader.read(chunk):
            yield self._piece(delta)

    def _piece(self, delta: ToolDelta) -> Piece:
        last = self.items[-1] if self.items else None
        if delta.index is None:
            opens = not isinstance(last, str)
            self.items[len(self.items) - (not opens) :] = [delta.text if opens else f"{last}{delta.text}"]
            return Piece(len(self.items) - 1, delta.text, opens)
        opens = delta.name is not None
        if opens:
            self.items.append(Call(delta.id or "", delta.name or ""))
        call = self.items[-1]
        assert isinstance(call, Call)
        call.arguments += delta.text
        return Piece(len(self.items) - 1, delta.text, opens, call)
