"""Channels: answers of several messages, each with a header that names its channel, as GPT-OSS writes them.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

The channel "analysis" is thinking; "final", and "commentary" without a recipient, are content; a message to
`functions.NAME` is a tool call. It serves models whose chat template has these markers as special tokens; an answer is
read once, its headers by one regular expression each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from graftlm.core.chat.thinking import header_of, num_begun, special_id, template_text
from graftlm.core.chat.thinking_matcher import ThinkingRule

if TYPE_CHECKING:
    from graftlm.core.chat.tool_format import ToolFormat
    from graftlm.core.text.tokenizer import Tokenizer

_START, _CHANNEL, _MESSAGE, _END, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>"
_ENDINGS = (_END, "<|return|>", "<|call|>", _START)
_REQUIRED = (_START, _CHANNEL, _MESSAGE, _END)
_THOUGHT, _CONTENT = f"{_CHANNEL}analysis{_MESSAGE}", f"{_CHANNEL}final{_MESSAGE}"
_BETWEEN = f"{_START}assistant"
_CALL = f"{_CHANNEL}commentary to=functions."
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_NAME = re.compile(re.escape(_CHANNEL) + r"\s*(\w+)")


def learn_channels(tokenizer: Tokenizer, options: Mapping[str, Any]) -> ChannelFormat | None:
    """Return the format of a tokenizer whose chat template writes channels. The thinking family "channels"."""
    text = template_text(tokenizer)
    if _CHANNEL not in text or any(special_id(tokenizer, marker) is None for marker in _REQUIRED):
        return None
    if not header_of(tokenizer, options).endswith(_BETWEEN):
        return None
    markers = (*_REQUIRED, _CONSTRAIN, "<|return|>", "<|call|>")
    return ChannelFormat(tuple(marker for marker in markers if special_id(tokenizer, marker) is not None))


@dataclass(frozen=True)
class ChannelFormat:
    """Answers in channels. Implements `Thinking`.

    special  the special tokens in headers and between messages
    """

    special: tuple[str, ...]

    def reader(self) -> ChannelReader:
        return ChannelReader(self._middle)

    @property
    def _middle(self) -> str:
        """The text between the name and the arguments of a call."""
        return f" {_CONSTRAIN}json{_MESSAGE}" if _CONSTRAIN in self.special else f" json{_MESSAGE}"

    def tools(self, form: ToolFormat) -> ToolFormat:
        """Return the format of calls that the model writes; `<|call|>`, which ends one, ends the answer."""
        return replace(form, begin=_CALL, middle=self._middle, end="", several=False, header=_CONTENT)

    def rule(self, tokenizer: Tokenizer, budget: int | None, *, has_header: bool) -> ThinkingRule:
        encode = tokenizer.encode_continuation
        (end,) = encode(_END)
        header = () if has_header else tuple(encode(_CONTENT))
        eos = tokenizer.eos_token_ids
        return ThinkingRule(tuple(encode(_THOUGHT)), end, tuple(encode(_BETWEEN)), eos, budget, header)

    def num_tokens(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> int:
        ids, thought = list(token_ids), tokenizer.encode_continuation(_THOUGHT)
        (end,) = tokenizer.encode_continuation(_END)
        count = at = 0
        while thought[0] in ids[at:]:
            at = ids.index(thought[0], at) + 1
            if ids[at - 1 : at - 1 + len(thought)] == thought:
                first = at - 1 + len(thought)
                at = ids.index(end, first) if end in ids[first:] else len(ids)
                count += at - first
        return count


class ChannelReader:
    """A splitter of an answer in channels. Implements `Reader`.

    A call is given as content in the form of `ChannelFormat.tools`, wherever the model wrote its recipient.
    """

    def __init__(self, middle: str) -> None:
        self._middle = middle
        self._held = ""
        self._in_header = True
        self._thinks = False
        self._any = {True: False, False: False}  # by `_thinks`: whether there was text of that kind
        self._gap = {True: "", False: ""}

    def push(self, text: str) -> tuple[str, str]:
        """Take the next piece of the answer. -> (thinking, content) that it completes"""
        self._held += text
        said = {True: "", False: ""}
        while True:
            if self._in_header:
                header, found, rest = self._held.partition(_MESSAGE)
                if not found:
                    return said[True], said[False]
                self._held = rest
                self._open(header, said)
                continue
            at = min((at for mark in _ENDINGS if (at := self._held.find(mark)) >= 0), default=-1)
            if at < 0:
                held = max(num_begun(self._held, mark) for mark in _ENDINGS)
                self._say(self._held[: len(self._held) - held], said)
                self._held = self._held[len(self._held) - held :]
                return said[True], said[False]
            self._say(self._held[:at], said)
            self._held, self._in_header = self._held[at:], True

    def finish(self) -> tuple[str, str]:
        """End the answer. -> (thinking, content) that was held back; a header that is not complete is dropped."""
        held, self._held = self._held, ""
        if self._in_header:  # an answer without any header is content
            return ("", "") if self._any[True] or self._any[False] or _CHANNEL in held else ("", held)
        return (held, "") if self._thinks else ("", held)

    def _open(self, header: str, said: dict[bool, str]) -> None:
        self._in_header = False
        recipient, channel = _RECIPIENT.search(header), _NAME.search(header)
        self._thinks = recipient is None and channel is not None and channel.group(1) == "analysis"
        if recipient is not None:
            said[False] += f"{_CALL}{recipient.group(1)}{self._middle}"
            self._any[False], self._gap[False] = True, ""
        elif self._any[self._thinks]:
            self._gap[self._thinks] = "\n\n"  # between two messages of one kind

    def _say(self, text: str, said: dict[bool, str]) -> None:
        if text:
            said[self._thinks] += self._gap[self._thinks] + text
            self._any[self._thinks], self._gap[self._thinks] = True, ""
