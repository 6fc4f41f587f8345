"""ToolFormat: how a model writes tool calls, read off its chat template.

`ToolFormat.learn` renders a made-up call with the chat template once. The grammar then allows exactly the string that
the template renders for that call in the next turn, so an agent's prompt extends its own cached prefix token by
token. A chat template without tools gets a generic format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from graftlm.core.chat.messages import Message, ToolCall
from graftlm.core.chat.thinking import learn_thinking, special_id
from graftlm.core.chat.tools import Tool
from graftlm.core.errors import ConfigError
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.vocabulary import SPECIAL

if TYPE_CHECKING:
    from graftlm.core.text.tokenizer import Tokenizer

_NAME, _KEY, _VALUE, _RESULT = "probe_tool", "probe_key", "probe value", "probe result"
_ARGUMENTS = re.compile(r'\{\s*"probe_key"(\s*):\s*"probe value"\s*\}')


@dataclass(frozen=True)
class ToolFormat:
    """The text of calls: `begin` NAME `middle` ARGUMENTS `end`, with `separator` between two calls.

    single_spaces    arguments have one space after "," and ":", as `json.dumps` writes them.
    lists_tools, renders_calls, renders_results
                     whether the chat template renders the list of tools, earlier calls, and their results;
                     `prepare` writes the parts that it does not render into the messages.
    several          whether one answer may hold several calls
    header           the text before content that is no call; see `graftlm.core.chat.harmony`
    special          special tokens whose names these texts may contain
    """

    begin: str = '<tool_call>\n{"name": "'
    middle: str = '", "arguments": '
    end: str = "}\n</tool_call>"
    separator: str = "\n"
    single_spaces: bool = True
    lists_tools: bool = False
    renders_calls: bool = False
    renders_results: bool = False
    several: bool = True
    header: str = ""
    special: tuple[str, ...] = ()

    @classmethod
    def learn(cls, tokenizer: Tokenizer) -> ToolFormat:
        """Return the format of a tokenizer's chat template, learned once per tokenizer."""
        if tokenizer not in _learned:
            _learned[tokenizer] = _learn(tokenizer)
        return _learned[tokenizer]

    @property
    def marker(self) -> str:
        """The tag that opens a call, such as "<tool_call>"; "" where a call is bare JSON."""
        found = re.match(r"\s*(<[^<>\s]+>|\[[A-Z_]+\])", self.begin)
        return found.group(1) if found else ""

    def node(self, text: str) -> nodes.Node:
        """Return the node of a text of this format, in which special tokens are required as tokens."""
        data = text.encode()
        for name in self.special:
            data = data.replace(name.encode(), SPECIAL + name.encode())
        return nodes.literal(data)

    def write(self, calls: Iterable[ToolCall]) -> str:
        """Return the text that the model writes to make `calls`."""
        separators = (", ", ": ") if self.single_spaces else (",", ":")
        written = [
            f"{self.begin}{call.name}{self.middle}"
            f"{json.dumps(call.arguments, ensure_ascii=False, separators=separators)}{self.end}"
            for call in calls
        ]
        return self.separator.join(written)

    def prepare(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """Convert messages and tools to the form that the chat template renders.

        Parts that it does not render (the list of tools, earlier calls, their results) are written into the messages.
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


_learned: WeakKeyDictionary[Tokenizer, ToolFormat] = WeakKeyDictionary()


def _learn(tokenizer: Tokenizer) -> ToolFormat:
    """Render made-up calls and read off the text around their names and arguments."""
    if not tokenizer.has_chat_template:
        return ToolFormat()
    schema = {"type": "object", "properties": {_KEY: {"type": "string"}}}
    tools: list[dict[str, Any]] | None = [Tool(_NAME, schema, "probes").to_openai()]

    def render(*messages: Message, add_generation_prompt: bool = False) -> str:
        try:
            return tokenizer.render(
                [Message("user", "x"), *messages], tools, add_generation_prompt=add_generation_prompt
            )
        except ConfigError:
            return ""  # the template refuses such a conversation

    lists_tools = _NAME in render(add_generation_prompt=True)
    tools = tools if lists_tools else None
    start = render(add_generation_prompt=True)
    call = ToolCall("abcdefghi", _NAME, {_KEY: _VALUE})
    ask = Message("assistant", "", tool_calls=(call,))
    one = _after(start, render(ask))
    two = _after(start, render(replace(ask, tool_calls=(call, replace(call, id="bcdefghij")))))
    plain = _after(start, render(Message("assistant", _VALUE)))
    answered = render(ask, Message("tool", _RESULT, tool_call_id=call.id, name=_NAME))
    special = [token.content for token in tokenizer.hf.added_tokens_decoder.values() if token.special]
    form = _read_off(one, two, plain.partition(_VALUE)[2], special) or ToolFormat()
    form = replace(form, lists_tools=lists_tools, renders_results=_RESULT in answered)
    thinking = learn_thinking(tokenizer)
    if thinking is not None:
        form = thinking.tools(form)
    texts, ends = form.header + form.begin + form.middle + form.end + form.separator, tokenizer.eos_token_ids
    return replace(form, special=tuple(n for n in special if n in texts and special_id(tokenizer, n) not in ends))


def _after(start: str, text: str) -> str:
    """Return the part of `text` behind the prefix that it shares with `start`."""
    return text[len(commonprefix([start, text])) :]


def _read_off(one: str, two: str, turn_end: str, special: Sequence[str]) -> ToolFormat | None:
    """Return the format of one rendered call, with the separator of two where the template renders two.

    turn_end  the string that the template writes after an answer without calls.
    special   the tokenizer's special tokens, one of which may end a turn of calls instead.
    """
    name, arguments = one.find(_NAME), _ARGUMENTS.search(one)
    if name < 0 or arguments is None or arguments.start() < name:
        return None
    begin, middle = one[:name], one[name + len(_NAME) : arguments.start()]
    tail = one[arguments.end() :]
    if turn_end and tail.endswith(turn_end):
        end = tail.removesuffix(turn_end)
    else:
        end = tail[: min((at for text in special if (at := tail.find(text)) >= 0), default=len(tail))].rstrip()
    separator = "\n"
    if two.startswith(begin) and _ARGUMENTS.search(two, arguments.end()):
        between = two[arguments.end() : two.find(_NAME, arguments.end())]
        if between.startswith(end) and between.endswith(begin):
            separator = between[len(end) : len(between) - len(begin)]
    spaces = '": "' in arguments.group()
    return ToolFormat(begin, middle, end, separator, single_spaces=spaces, renders_calls=True)
