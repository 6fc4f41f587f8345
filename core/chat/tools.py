"""Tools: how a model writes a call, the text a call may be, and calls read back out of text.

A chat template knows how its model writes tool calls. `ToolFormat.learn` finds that out by rendering a made-up
call once, so that what the grammar lets the model write is what the template will render in the next turn: an
agent's loop then extends its own prefix, token by token. Templates without tools get a generic format.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from graftlm.core.chat.messages import Message, ToolCall
from graftlm.core.errors import ConfigError

if TYPE_CHECKING:
    from graftlm.core.text.tokenizer import Tokenizer

ToolChoice = Literal["auto", "none", "required"]

_ID_ALPHABET = string.ascii_letters + string.digits
_NAME, _KEY, _VALUE, _RESULT = "probe_tool", "probe_key", "probe value", "probe result"
_ARGUMENTS = re.compile(r'\{\s*"probe_key"(\s*):\s*"probe value"\s*\}')


def new_call_id() -> str:
    """Nine letters and digits: unique in practice, and what the strictest chat templates accept."""
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(9))


@dataclass(frozen=True, init=False)
class Tool:
    """A function that the model may call. `parameters` is the JSON schema of its arguments, an object's.

    Two tools are equal when their names, descriptions and the JSON texts of their schemas are.
    """

    name: str
    description: str
    schema_text: str

    def __init__(self, name: str, parameters: Mapping[str, Any] | None = None, description: str = "") -> None:
        if not isinstance(name, str) or not re.fullmatch(r"[^\s\"\\]+", name):
            raise ConfigError(f"a tool is named {name!r}; a name is text without spaces, quotes and backslashes")
        schema = dict(parameters) if parameters else {"type": "object", "properties": {}}
        if schema.get("type", "object") != "object":
            raise ConfigError(
                f"the parameters of tool {name!r} have type {schema['type']!r}; a tool takes a JSON object"
            )
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "description", description or "")
        object.__setattr__(self, "schema_text", json.dumps(schema, ensure_ascii=False))

    @classmethod
    def from_openai(cls, tool: Mapping[str, Any]) -> Tool:
        """Read `{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}`."""
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or "name" not in function:
            raise ConfigError(
                f"a tool is {str(tool)[:80]!r}; "
                "give {'type': 'function', 'function': {'name': ..., 'parameters': ...}}"
            )
        return cls(function["name"], function.get("parameters"), function.get("description") or "")

    @cached_property
    def parameters(self) -> dict[str, Any]:
        return dict(json.loads(self.schema_text))

    def to_openai(self) -> dict[str, Any]:
        """The form that chat templates read. Equal tools render equally: the order of keys is fixed."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class InvalidCall:
    """A call that was begun but cannot be read; `arguments` is its text."""

    id: str
    name: str
    arguments: str
    error: str


@dataclass(frozen=True)
class ToolText:
    """What an answer says and which tools it calls."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    invalid: tuple[InvalidCall, ...] = ()


@dataclass(frozen=True)
class ToolDelta:
    """A piece of a streamed answer. With `index` None, `text` is content; else a part of call `index`'s arguments.

    The first delta of a call has its `id` and `name` and no text.
    """

    text: str
    index: int | None = None
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class ToolFormat:
    """How calls are written: begin NAME middle ARGUMENTS end, the next one after `separator`.

    single_spaces    arguments have one space after "," and ":", as `json.dumps` writes them.
    lists_tools, renders_calls, renders_results
                     what the chat template does by itself; the rest `prepare` writes into the messages.
    """

    begin: str = '<tool_call>\n{"name": "'
    middle: str = '", "arguments": '
    end: str = "}\n</tool_call>"
    separator: str = "\n"
    single_spaces: bool = True
    lists_tools: bool = False
    renders_calls: bool = False
    renders_results: bool = False

    @classmethod
    def learn(cls, tokenizer: Tokenizer) -> ToolFormat:
        """Find the format of a tokenizer's chat template; learned once per tokenizer."""
        known = _learned.get(tokenizer)
        if known is None:
            known = _learned[tokenizer] = _learn(tokenizer)
        return known

    @property
    def marker(self) -> str:
        """The tag that opens a call, such as "<tool_call>"; "" where a call is bare JSON."""
        found = re.match(r"\s*(<[^<>\s]+>|\[[A-Z_]+\])", self.begin)
        return found.group(1) if found else ""

    def write(self, calls: Iterable[ToolCall]) -> str:
        """Write calls as the model would."""
        return self.separator.join(
            f"{self.begin}{call.name}{self.middle}{self._dump(call.arguments)}{self.end}" for call in calls
        )

    def _dump(self, arguments: Mapping[str, Any]) -> str:
        separators = (", ", ": ") if self.single_spaces else (",", ":")
        return json.dumps(arguments, ensure_ascii=False, separators=separators)

    def prepare(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """Messages and tools as the chat template can render them.

        What the template cannot (the list of tools, earlier calls, their results) is written into the messages.
        """
        prepared = [self._prepare_message(message) for message in messages]
        if not tools:
            return prepared, None
        listed = [tool.to_openai() for tool in tools]
        return (prepared, listed) if self.lists_tools else (self._instruct(prepared, listed), None)

    def _prepare_message(self, message: Message) -> Message:
        if message.tool_calls and not self.renders_calls:
            text = "\n".join(filter(None, [message.text, self.write(message.tool_calls)]))
            return replace(message, content=text, tool_calls=())
        if message.role == "tool" and not self.renders_results:
            return Message("user", f"<tool_response>\n{message.text}\n</tool_response>")
        return message

    def _instruct(self, messages: list[Message], listed: list[dict[str, Any]]) -> list[Message]:
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in listed)
        example = f"{self.begin}<name>{self.middle}<arguments as JSON>{self.end}"
        text = f"You may call these tools:\n<tools>\n{lines}\n</tools>\nTo call one, write:\n{example}"
        if messages and messages[0].role == "system":
            return [Message("system", f"{messages[0].text}\n\n{text}"), *messages[1:]]
        return [Message("system", text), *messages]

    def parse(self, text: str) -> ToolText:
        """Part an answer into its content and its calls. What cannot be read is in `invalid`, never dropped."""
        stream = ToolStream(self)
        deltas = [*stream.push(text), *stream.finish()]
        return ToolText("".join(d.text for d in deltas if d.index is None), tuple(stream.calls), tuple(stream.invalid))


class ToolStream:
    """Part a streamed answer into content and tool calls, as it comes.

    Text that may be the beginning of a call is held back until more comes.
    """

    def __init__(self, form: ToolFormat) -> None:
        self.calls: list[ToolCall] = []
        self.invalid: list[InvalidCall] = []
        self._form = form
        self._held = ""
        self._state: Literal["content", "name", "arguments", "after"] = "content"
        self._name = self._id = self._arguments = ""
        self._depth = 0
        self._in_string = self._escaped = False
        self._any_content = False

    @property
    def _index(self) -> int:
        return len(self.calls) + len(self.invalid)

    def push(self, text: str) -> list[ToolDelta]:
        """Take the next piece of text."""
        self._held += text
        deltas: list[ToolDelta] = []
        while True:
            before = (self._state, self._held)
            deltas.extend(getattr(self, f"_read_{self._state}")())
            if (self._state, self._held) == before:
                return deltas

    def finish(self) -> list[ToolDelta]:
        """The text has ended: give what was held back; a call that is not complete becomes invalid."""
        held, self._held = self._held, ""
        if self._state == "content":
            return self._content(held)
        if self._state == "after":
            return []
        if self._state == "name":
            self._id, self._name = new_call_id(), held
        self._close("the answer ends inside the call; raise max_tokens")
        return []

    def _content(self, text: str) -> list[ToolDelta]:
        self._any_content = self._any_content or bool(text)
        return [ToolDelta(text)] if text else []

    def _read_content(self) -> list[ToolDelta]:
        begin = self._form.begin
        if not self._form.marker and (self._any_content or self._index):
            held, self._held = self._held, ""  # bare JSON opens a call only where the answer starts
            return self._content(held)
        at = self._held.find(begin) if self._form.marker else (0 if self._held.startswith(begin) else -1)
        if at >= 0:
            content, self._held = self._held[:at], self._held[at + len(begin) :]
            self._state = "name"
            return self._content(content.rstrip() if not content.strip() else content.rstrip("\n"))
        keep = _num_held(self._held, begin, anywhere=bool(self._form.marker))
        content, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        if self._held and self._form.marker:  # line breaks before a call belong to neither
            trimmed = content.rstrip("\n")
            content, self._held = trimmed, content[len(trimmed) :] + self._held
        elif content.endswith("\n"):
            trimmed = content.rstrip("\n")
            content, self._held = trimmed, content[len(trimmed) :]
        return self._content(content)

    def _read_name(self) -> list[ToolDelta]:
        at = self._held.find(self._form.middle)
        if at < 0:
            return []
        self._name, self._held = self._held[:at], self._held[at + len(self._form.middle) :]
        self._id, self._arguments, self._depth = new_call_id(), "", 0
        self._in_string = self._escaped = False
        self._state = "arguments"
        return [ToolDelta("", self._index, self._id, self._name)]

    def _read_arguments(self) -> list[ToolDelta]:
        length = self._scan(self._held)
        piece, self._held = self._held[:length], self._held[length:]
        self._arguments += piece
        delta = [ToolDelta(piece, self._index)] if piece else []
        if self._arguments and self._depth == 0:
            self._close(None)
        return delta

    def _scan(self, text: str) -> int:
        """Follow JSON's brackets through `text`; how much of it belongs to the arguments."""
        for i, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return i + 1
        return len(text)

    def _close(self, error: str | None) -> None:
        arguments: Any = None
        if error is None:
            try:
                arguments = json.loads(self._arguments)
            except ValueError as invalid:
                error = f"the arguments are not JSON: {invalid}"
        if isinstance(arguments, dict):
            self.calls.append(ToolCall(self._id, self._name, arguments))
        else:
            self.invalid.append(
                InvalidCall(self._id, self._name, self._arguments, error or "the arguments are no object")
            )
        self._state = "after"

    def _read_after(self) -> list[ToolDelta]:
        end = self._form.end
        if len(self._held) < len(end) and end.startswith(self._held):
            return []
        self._held = self._held.removeprefix(end)
        self._state = "content"
        return []


_learned: WeakKeyDictionary[Tokenizer, ToolFormat] = WeakKeyDictionary()


def _num_held(text: str, begin: str, *, anywhere: bool) -> int:
    """How much of the end of `text` may be the beginning of `begin`."""
    if not anywhere:
        return len(text) if begin.startswith(text) else 0
    for length in range(min(len(begin) - 1, len(text)), 0, -1):
        if text.endswith(begin[:length]):
            return length
    return 0


def _learn(tokenizer: Tokenizer) -> ToolFormat:
    """Render made-up calls and read off what stands around their names and arguments."""
    if not tokenizer.has_chat_template:
        return ToolFormat()
    listed = [Tool(_NAME, {"type": "object", "properties": {_KEY: {"type": "string"}}}, "probes").to_openai()]
    user = Message("user", "x")
    call = ToolCall("abcdefghi", _NAME, {_KEY: _VALUE})
    prompt = _render(tokenizer, [user], listed, add_generation_prompt=True)
    lists_tools = prompt is not None and _NAME in prompt
    tools = listed if lists_tools else None
    start = _render(tokenizer, [user], tools, add_generation_prompt=True) or ""
    ask = Message("assistant", "", tool_calls=(call,))
    one = _after(start, _render(tokenizer, [user, ask], tools))
    two = _after(
        start, _render(tokenizer, [user, replace(ask, tool_calls=(call, replace(call, id="bcdefghij")))], tools)
    )
    plain = _after(start, _render(tokenizer, [user, Message("assistant", _VALUE)], tools))
    special = [token.content for token in tokenizer.hf.added_tokens_decoder.values() if token.special]
    learned = _read_off(one, two, plain.partition(_VALUE)[2], special)
    told = _render(tokenizer, [user, ask, Message("tool", _RESULT, tool_call_id=call.id, name=_NAME)], tools)
    if learned is None:
        return ToolFormat(lists_tools=lists_tools, renders_results=_RESULT in (told or ""))
    return replace(learned, lists_tools=lists_tools, renders_results=_RESULT in (told or ""))


def _render(
    tokenizer: Tokenizer,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    *,
    add_generation_prompt: bool = False,
) -> str | None:
    try:
        return tokenizer.render(messages, tools, add_generation_prompt=add_generation_prompt)
    except ConfigError:
        return None  # the template refuses such a conversation


def _after(start: str, text: str | None) -> str:
    """What `text` says beyond the part it shares with `start`."""
    if text is None:
        return ""
    shared = next((i for i, (a, b) in enumerate(zip(start, text, strict=False)) if a != b), min(len(start), len(text)))
    return text[shared:]


def _read_off(one: str, two: str, turn_end: str, special: Sequence[str]) -> ToolFormat | None:
    """The format behind one rendered call and, where the template renders it, two of them."""
    name, arguments = one.find(_NAME), _ARGUMENTS.search(one)
    if name < 0 or arguments is None or arguments.start() < name:
        return None
    begin, middle = one[:name], one[name + len(_NAME) : arguments.start()]
    tail = one[arguments.end() :]
    if turn_end and tail.endswith(turn_end):
        end = tail.removesuffix(turn_end)
    else:  # the template ends a turn of calls in another way
        end = tail[: min((at for text in special if (at := tail.find(text)) >= 0), default=len(tail))].rstrip()
    separator = "\n"
    second = _ARGUMENTS.search(two, arguments.end()) if two.startswith(begin) else None
    if second is not None:
        between = two[arguments.end() : two.find(_NAME, arguments.end())]
        if between.startswith(end) and between.endswith(begin):
            separator = between[len(end) : len(between) - len(begin)]
    spaces = '": "' in arguments.group()
    return ToolFormat(begin, middle, end, separator, single_spaces=spaces, renders_calls=True)
