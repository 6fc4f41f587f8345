"""Thinking: the part of an answer that a model writes between markers, before its content.

`learn_thinking` asks each family of formats (a kind of plugin) once per tokenizer and options. The built-in families
are markers around one thought (Qwen3, DeepSeek R1, GLM 4.5, Kimi K2, MiniMax M2, Mistral) and the channels of GPT-OSS.
A model without either costs one search in its template a family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol
from weakref import WeakKeyDictionary

from graftlm.core.chat.messages import Message
from graftlm.core.errors import ConfigError

if TYPE_CHECKING:
    from graftlm.core.chat.thinking_matcher import ThinkingRule
    from graftlm.core.chat.tool_format import ToolFormat
    from graftlm.core.text.tokenizer import Tokenizer

Starts = Literal["inside", "before", "after"]

_MARKERS: list[tuple[str, str]] = [
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<seed:think>", "</seed:think>"),
    ("<thought>", "</thought>"),
    ("<|think_start|>", "<|think_end|>"),
    ("[THINK]", "[/THINK]"),
]
_THOUGHT, _ANSWER, _QUESTION = "probe thought", "probe answer", "probe question"


class Reader(Protocol):
    """A splitter of one answer's text into thinking and content."""

    def push(self, text: str) -> tuple[str, str]:
        """Take the next piece of the answer. -> (thinking, content) that it completes"""

    def finish(self) -> tuple[str, str]:
        """End the answer. -> (thinking, content) that was held back"""


class Thinking(Protocol):
    """How a family of models writes its thinking.

    special  the special tokens among its markers, whose names the text of an answer must show
    """

    @property
    def special(self) -> tuple[str, ...]: ...

    def reader(self) -> Reader:
        """Return a splitter of one answer."""

    def rule(self, tokenizer: Tokenizer, budget: int | None, *, has_header: bool) -> ThinkingRule | None:
        """Return the tokens around the thinking, for constraints; None if they cannot be told.

        budget      limit of thinking tokens
        has_header  whether the constraint includes what precedes the content
        """

    def num_tokens(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> int:
        """Return the number of tokens of an answer that are thinking, markers not counted."""

    def tools(self, form: ToolFormat) -> ToolFormat:
        """Return the format of the family's tool calls, given the one that its chat template shows."""


def register_markers(begin: str, end: str) -> None:
    """Let `learn_thinking` find another pair of markers in chat templates."""
    _MARKERS.insert(0, (begin, end))
    _learned.clear()


_MAX_OPTIONS = 64
"""Limit of the cached options of one tokenizer; they come from requests."""
_learned: WeakKeyDictionary[Tokenizer, dict[str, Thinking | None]] = WeakKeyDictionary()


def learn_thinking(tokenizer: Tokenizer, options: Mapping[str, Any] | None = None) -> Thinking | None:
    """Return how the model of a tokenizer's chat template writes its thinking; None if it does not think.

    options  arguments of the template, such as {"enable_thinking": False}

    Families of other plugins are asked before the built-in ones. Raises ConfigError if the template refuses the
    options.
    """
    from graftlm.plugins import manager

    cached = _learned.setdefault(tokenizer, {})
    key = repr(sorted((options or {}).items()))
    if key not in cached:
        if len(cached) >= _MAX_OPTIONS:
            cached.clear()
        families = manager.load().kinds["thinking"]
        asked = (families[name](tokenizer, dict(options or {})) for name in reversed(list(families)))
        cached[key] = next((found for found in asked if found is not None), None)
    return cached[key]


def template_text(tokenizer: Tokenizer) -> str:
    """Return the text of a tokenizer's chat templates; "" if there is none."""
    template = getattr(tokenizer.hf, "chat_template", None)
    return template if isinstance(template, str) else "" if template is None else repr(template)


def special_id(tokenizer: Tokenizer, marker: str) -> int | None:
    """Return the id of a marker that is one special token; None for other texts."""
    ids = tokenizer.encode_continuation(marker)
    return ids[0] if len(ids) == 1 and tokenizer.is_special(ids[0]) else None


def header_of(tokenizer: Tokenizer, options: Mapping[str, Any]) -> str:
    """Return the generation prompt of a rendered question, with what the template writes after the question."""
    return tokenizer.render([{"role": "user", "content": _QUESTION}], options=options).rpartition(_QUESTION)[2]


@dataclass(frozen=True)
class ThinkingFormat:
    """A pair of markers around one thought, and where an answer begins. Implements `Thinking`.

    begin, end  the markers
    separator   the whitespace between the end marker and the content
    starts      "inside": the prompt ends with the begin marker; "before": the model may write the begin marker;
                "after": the prompt closes the thinking, the answer is content
    special     those of the markers that are special tokens
    """

    begin: str
    end: str
    separator: str = "\n\n"
    starts: Starts = "before"
    special: tuple[str, ...] = ()

    def reader(self) -> ThinkingReader:
        return ThinkingReader(self)

    def rule(self, tokenizer: Tokenizer, budget: int | None, *, has_header: bool) -> ThinkingRule | None:
        """Return the rule of a request.

        None if its answer begins behind the thinking, or if a marker is no single token: such a model thinks without a
        constraint only.
        """
        from graftlm.core.chat.thinking_matcher import ThinkingRule

        begin, end = tokenizer.encode_continuation(self.begin), tokenizer.encode_continuation(self.end)
        if self.starts == "after" or len(end) != 1 or (self.starts == "before" and len(begin) != 1):
            return None
        opening = (begin[0],) if self.starts == "before" else ()
        separator = tuple(tokenizer.encode_continuation(self.separator))
        return ThinkingRule(opening, end[0], separator, tokenizer.eos_token_ids, budget)

    def num_tokens(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> int:
        """Return the number of thinking tokens; those of markers that are no single tokens are found by their text."""
        begin, end = tokenizer.encode_continuation(self.begin), tokenizer.encode_continuation(self.end)
        if self.starts == "after":
            return 0
        if len(begin) != 1 or len(end) != 1:
            detokenizer, reader = tokenizer.detokenizer(special=frozenset(self.special)), self.reader()
            states = []
            for token_id in token_ids:
                reader.push(detokenizer.push([token_id]))
                states.append(reader.state)
            return states.count("inside")
        first = 0
        if self.starts == "before":
            if begin[0] not in token_ids[:_MAX_BLANKS]:
                return 0
            first = list(token_ids[:_MAX_BLANKS]).index(begin[0]) + 1
        try:
            return token_ids.index(end[0], first) - first
        except ValueError:  # cut inside the thinking
            return len(token_ids) - first

    def tools(self, form: ToolFormat) -> ToolFormat:
        return form


_MAX_BLANKS = 4
"""Tokens of an answer among which its begin marker is: blanks may precede it."""


def learn_markers(tokenizer: Tokenizer, options: Mapping[str, Any]) -> ThinkingFormat | None:
    """Return the pair of markers in a tokenizer's chat template. The thinking family "markers"."""
    text = template_text(tokenizer)
    found = next((pair for pair in _MARKERS if pair[1] in text), None)
    if found is None:
        return None
    begin, end = found
    special = tuple(marker for marker in found if special_id(tokenizer, marker) is not None)
    header = header_of(tokenizer, options)
    starts: Starts = "before"
    if end in header:
        starts = "after"
    elif header.rstrip().endswith(begin):
        starts = "inside"
    return ThinkingFormat(begin, end, _separator(tokenizer, end, options), starts, special)


def _separator(tokenizer: Tokenizer, end: str, options: Mapping[str, Any]) -> str:
    """Return the whitespace behind the end marker of a rendered answer; two line breaks if it is not rendered."""
    turn = Message("assistant", _ANSWER, thinking=_THOUGHT)
    try:
        text = tokenizer.render([Message("user", _QUESTION), turn], options=options, add_generation_prompt=False)
    except ConfigError:
        return "\n\n"
    _, thought, rest = text.partition(_THOUGHT)
    between = rest.partition(end)[2].partition(_ANSWER)[0]
    return between if thought and not between.strip() else "\n\n"


class ThinkingReader:
    """A splitter of one answer's text into thinking and content; a text that may be a marker is held back.

    A piece of whitespace beside a marker belongs to neither.
    """

    def __init__(self, form: ThinkingFormat) -> None:
        self._form = form
        self.state: Literal["before", "inside", "behind", "after"] = form.starts
        self._held = ""
        self._any_thought = False

    def push(self, text: str) -> tuple[str, str]:
        """Take the next piece of the answer. -> (thinking, content) that it completes"""
        self._held += text
        thought = ""
        if self.state == "before":
            self._read_before()
        if self.state == "inside":
            thought = self._read_inside()
        if self.state == "behind":
            self._held = self._held.lstrip()
            self.state = "after" if self._held else "behind"
        if self.state != "after":
            return thought, ""
        content, self._held = self._held, ""
        return thought, content

    def finish(self) -> tuple[str, str]:
        """End the answer. -> (thinking, content) that was held back"""
        held, self._held = self._held, ""
        return (held.rstrip(), "") if self.state == "inside" else ("", held if self.state == "before" else "")

    def _read_before(self) -> None:
        begun, begin = self._held.lstrip(), self._form.begin
        if begun.startswith(begin):
            self._held, self.state = begun[len(begin) :], "inside"
        elif not begin.startswith(begun):
            self.state = "after"

    def _read_inside(self) -> str:
        if not self._any_thought:
            self._held = self._held.lstrip()
        thought, found, rest = self._held.partition(self._form.end)
        if found:
            self._held, self.state = rest, "behind"
            return thought.rstrip()
        # Whitespace before the end marker belongs to neither part, so it is held back as well.
        told = thought[: len(thought) - num_begun(thought, self._form.end)].rstrip()
        self._held = self._held[len(told) :]
        self._any_thought = self._any_thought or bool(told)
        return told


def num_begun(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that begins `marker`, and is not all of it."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)


def split_thinking(form: Thinking | None, text: str) -> tuple[str, str]:
    """Return the thinking and the content of a whole answer."""
    if form is None:
        return "", text
    reader = form.reader()
    thought, content = reader.push(text)
    rest, held = reader.finish()
    return thought + rest, content + held


# -- the thinking of earlier turns ---------------------------------------------------------------------------------


def _as_field(name: str) -> Place:
    return lambda message, thought: {**message, name: thought}


def _as_part(message: dict[str, Any], thought: str) -> dict[str, Any]:
    """Put a thought before the content, as a part of its own: Mistral's form."""
    content = message.get("content") or []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    return {**message, "content": [{"type": "thinking", "thinking": thought}, *parts]}


Place = Callable[[dict[str, Any], str], dict[str, Any]]
"""Puts a thought into a message in the form of the OpenAI API."""
_PLACES: tuple[Place, ...] = (_as_field("reasoning_content"), _as_field("reasoning"), _as_field("thinking"), _as_part)


@dataclass(frozen=True)
class ThoughtPlace:
    """The place in a chat template for the thinking of an earlier turn.

    put    puts it there; None if the template reads it nowhere
    joins  the template refuses a turn of calls with both content and thinking (GPT-OSS): they become one thought
    """

    put: Place | None
    joins: bool = False

    @classmethod
    def of(cls, tokenizer: Tokenizer, render: Callable[[list[dict[str, Any]]], str]) -> ThoughtPlace:
        """Find the place by rendering probes, once per tokenizer.

        render  writes dicts with the chat template, without a generation prompt
        """
        found: ThoughtPlace | None = tokenizer.derived.get(cls)
        if found is None:
            found = tokenizer.derived[cls] = cls._find(render)
        return found

    @classmethod
    def _find(cls, render: Callable[[list[dict[str, Any]]], str]) -> ThoughtPlace:
        function = {"name": "probe_tool", "arguments": {}}
        calls = {"tool_calls": [{"id": "abcdefghi", "type": "function", "function": function}]}

        def rendered(put: Place, content: str, **beside: Any) -> str | None:
            turn = put({"role": "assistant", "content": content, **beside}, _THOUGHT)
            try:
                return render([{"role": "user", "content": _QUESTION}, turn])
            except ConfigError:
                return None

        put = next((put for put in _PLACES if _THOUGHT in (rendered(put, _ANSWER) or "")), None)
        if put is None:
            return cls(None)
        return cls(put, joins=rendered(put, _ANSWER, **calls) is None and rendered(put, "", **calls) is not None)

    def fill(self, messages: list[dict[str, Any]], thoughts: Sequence[str]) -> list[dict[str, Any]]:
        """Return the messages with their thoughts in place; a thought that the template does not read is left out."""
        return [self._filled(m, thought) if thought else m for m, thought in zip(messages, thoughts, strict=True)]

    def _filled(self, message: dict[str, Any], thought: str) -> dict[str, Any]:
        if self.put is None:
            return message
        if self.joins and message.get("tool_calls") and message["content"]:
            message, thought = {**message, "content": ""}, f"{thought}\n\n{message['content']}"
        return self.put(message, thought)
