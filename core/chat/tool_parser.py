"""ToolParser: split a model's answer into content and tool calls, whole or streamed."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from graftlm.core.chat.messages import ToolCall
from graftlm.core.chat.thinking import Thinking, num_begun, split_thinking
from graftlm.core.chat.tool_format import ToolFormat
from graftlm.core.request import Chunk, Completion

_ID_ALPHABET = string.ascii_letters + string.digits


def new_call_id() -> str:
    """Return nine random letters and digits, the form that the strictest chat templates accept."""
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(9))


@dataclass(frozen=True)
class InvalidCall:
    """A tool call that cannot be read. `arguments` is its raw text, `error` the reason."""

    id: str
    name: str
    arguments: str
    error: str


@dataclass(frozen=True)
class ParsedAnswer:
    """The content of an answer and its tool calls.

    written   the arguments of each of `calls`, as the model wrote them
    thinking  the text that the model wrote before its content
    """

    content: str
    calls: tuple[ToolCall, ...] = ()
    invalid: tuple[InvalidCall, ...] = ()
    written: tuple[str, ...] = ()
    thinking: str = ""


@dataclass(frozen=True)
class ToolDelta:
    """A piece of a streamed answer: content if `index` is None, else a part of the arguments of call `index`.

    The first delta of a call has its `id` and `name` and no text.
    """

    text: str
    index: int | None = None
    id: str | None = None
    name: str | None = None


def parse_answer(form: ToolFormat, text: str) -> ParsedAnswer:
    """Split a whole answer. A call that cannot be read is in `invalid`, never dropped."""
    parser = ToolParser(form)
    deltas = [*parser.push(text), *parser.finish()]
    content = "".join(delta.text for delta in deltas if delta.index is None)
    return ParsedAnswer(content, tuple(parser.calls), tuple(parser.invalid), tuple(parser.written))


def parse_completion(form: ToolFormat | None, completion: Completion, thinking: Thinking | None = None) -> ParsedAnswer:
    """Split a completion into thinking, content and tool calls.

    form      the format of calls in the text; None if it contains no calls. The text of an endpoint is content: calls
              are reported beside it.
    thinking  how the text contains thinking; None if it contains none. An endpoint reports its thinking beside it.
    """
    thought, content = completion.thinking, completion.text
    if thought is None and thinking is not None:
        thought, content = split_thinking(thinking, completion.text)
    if thought is not None:
        completion = replace(completion, text=content, thinking=None)
        return replace(parse_completion(form, completion), thinking=thought)
    if completion.tool_calls is not None:
        reported = _Reported(completion.tool_calls)
        return ParsedAnswer(completion.text, tuple(reported.calls), tuple(reported.invalid), tuple(reported.written))
    return ParsedAnswer(completion.text) if form is None else parse_answer(form, completion.text)


class AnswerReader:
    """A converter of one answer's chunks into deltas of content and of tool calls; see `parse_completion`.

    thought  the thinking in the chunk that was read last
    """

    def __init__(self, form: ToolFormat | None, thinking: Thinking | None = None) -> None:
        self.thought = ""
        self._thinking = thinking.reader() if thinking is not None else None
        self._parser = ToolParser(form) if form is not None else None
        self._reported: _Reported | None = None

    @property
    def calls(self) -> list[ToolCall]:
        """The complete calls so far."""
        found = self._reported or self._parser
        return found.calls if found is not None else []

    @property
    def invalid(self) -> list[InvalidCall]:
        """The calls so far that cannot be read."""
        found = self._reported or self._parser
        return found.invalid if found is not None else []

    def read(self, chunk: Chunk) -> list[ToolDelta]:
        """Take the next chunk."""
        self.thought = chunk.thinking or ""
        if self._thinking is not None:
            self.thought, content = self._thinking.push(chunk.text)
            if chunk.finish_reason is not None:
                thought, held = self._thinking.finish()
                self.thought, content = self.thought + thought, content + held
            chunk = replace(chunk, text=content)
        if self._parser is not None and chunk.tool_calls is None:
            deltas = self._parser.push(chunk.text)
            return deltas + self._parser.finish() if chunk.finish_reason is not None else deltas
        deltas = [ToolDelta(chunk.text)] if chunk.text else []
        if chunk.tool_calls:
            self._reported = _Reported(chunk.tool_calls)
            for index, (call_id, name, arguments) in enumerate(self._reported.given):
                deltas += [ToolDelta("", index, call_id, name), ToolDelta(arguments, index)]
        return deltas


class _Reported:
    """The calls that an endpoint reports beside an answer's text.

    given    id, name and the text of the arguments of each call, in order
    written  the arguments of each of `calls`
    """

    def __init__(self, calls: Iterable[Mapping[str, Any]]) -> None:
        self.given: list[tuple[str, str, str]] = []
        self.calls: list[ToolCall] = []
        self.invalid: list[InvalidCall] = []
        self.written: list[str] = []
        for call in calls:
            function = call.get("function")
            function = function if isinstance(function, Mapping) else {}
            arguments = function.get("arguments") or "{}"
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            call_id, name = str(call.get("id") or new_call_id()), str(function.get("name") or "")
            self.given.append((call_id, name, text))
            value, error = read_arguments(text)
            if not name:
                error = NO_NAME
            if error:
                self.invalid.append(InvalidCall(call_id, name, text, error))
            else:
                self.calls.append(ToolCall(call_id, name, value))
                self.written.append(text)


def read_arguments(text: str) -> tuple[dict[str, Any], str]:
    """Return the arguments of a call, and "" or the reason why they are invalid."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as invalid:
        brackets = _Brackets()
        brackets.scan(text)
        if text.strip() and brackets.closed:
            return {}, f"the arguments are not JSON: {invalid}"
        return {}, _CUT
    return (value, "") if isinstance(value, dict) else ({}, "the arguments are not a JSON object")


NO_NAME = "the call names no tool"
_CUT = "the answer ends inside the call; raise max_tokens, or remove a stop string that its arguments contain"


class _Brackets:
    """A counter of the open brackets of JSON that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    @property
    def closed(self) -> bool:
        return self._depth == 0 and not self._in_string

    def scan(self, text: str) -> int:
        """Take a piece; return the number of its characters up to the end of the outermost bracket."""
        for i, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = character == "\\", character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return i + 1
        return len(text)


class ToolParser:
    """A streaming parser: splits an answer into deltas of content and of tool calls.

    Text that may be a prefix of a call is held back until the next piece decides. Complete calls are in `calls`,
    the texts of their arguments in `written`, calls that cannot be read in `invalid`.
    """

    def __init__(self, form: ToolFormat) -> None:
        self.calls: list[ToolCall] = []
        self.written: list[str] = []
        self.invalid: list[InvalidCall] = []
        self._form = form
        self._held = ""
        self._state: Literal["content", "name", "arguments", "after"] = "content"
        self._name = self._id = self._arguments = ""
        self._brackets = _Brackets()  # of the arguments
        self._any_content = False

    @property
    def _index(self) -> int:
        return len(self.calls) + len(self.invalid)

    def push(self, text: str) -> list[ToolDelta]:
        """Take the next piece of the answer."""
        self._held += text
        deltas: list[ToolDelta] = []
        while True:
            before = (self._state, self._held)
            deltas.extend(getattr(self, f"_read_{self._state}")())
            if (self._state, self._held) == before:
                return deltas

    def finish(self) -> list[ToolDelta]:
        """End the answer: release held-back text; an incomplete call becomes invalid."""
        held, self._held = self._held, ""
        if self._state == "content":
            return self._content(held)
        if self._state == "after":
            return []
        if self._state == "name":  # no tool of this name: the raw text is content
            self._state = "content"
            return self._content(self._form.begin + held)
        self._end_call(_CUT)
        return []

    def _content(self, text: str) -> list[ToolDelta]:
        self._any_content = self._any_content or bool(text)
        return [ToolDelta(text)] if text else []

    def _read_content(self) -> list[ToolDelta]:
        begin, tagged = self._form.begin, bool(self._form.marker)
        if not tagged and (self._any_content or self._index):
            held, self._held = self._held, ""  # bare JSON is a call only at the start of the answer
            return self._content(held)
        at = self._held.find(begin) if tagged else (0 if self._held.startswith(begin) else -1)
        if at >= 0:
            content, self._held = self._held[:at], self._held[at + len(begin) :]
            self._state = "name"
            return self._content(content.rstrip() if not content.strip() else content.rstrip("\n"))
        # Line breaks before a call belong neither to it nor to the content, so they are held back as well.
        content = self._held[: len(self._held) - _num_held(self._held, begin, anywhere=tagged)].rstrip("\n")
        self._held = self._held[len(content) :]
        return self._content(content)

    def _read_name(self) -> list[ToolDelta]:
        name, middle, rest = self._held.partition(self._form.middle)
        if not middle:
            return []
        self._name, self._held = name, rest
        self._id, self._arguments, self._brackets = new_call_id(), "", _Brackets()
        self._state = "arguments"
        return [ToolDelta("", self._index, self._id, self._name)]

    def _read_arguments(self) -> list[ToolDelta]:
        length = self._brackets.scan(self._held)
        piece, self._held = self._held[:length], self._held[length:]
        self._arguments += piece
        delta = [ToolDelta(piece, self._index)] if piece else []
        if self._arguments and self._brackets.closed:
            self._end_call()
        return delta

    def _end_call(self, error: str = "") -> None:
        arguments, error = ({}, error) if error else read_arguments(self._arguments)
        if error:
            self.invalid.append(InvalidCall(self._id, self._name, self._arguments, error))
        else:
            self.calls.append(ToolCall(self._id, self._name, arguments))
            self.written.append(self._arguments)
        self._state = "after"

    def _read_after(self) -> list[ToolDelta]:
        end = self._form.end
        if len(self._held) < len(end) and end.startswith(self._held):
            return []
        self._held = self._held.removeprefix(end)
        self._state = "content"
        return []


def _num_held(text: str, begin: str, *, anywhere: bool) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `begin`."""
    if not anywhere:
        return len(text) if begin.startswith(text) else 0
    return num_begun(text, begin)
