"""Thinking: the part of an answer that a model writes between markers, before its content.

`ThinkingFormat.learn` reads the markers and the text around them off the chat template, once per tokenizer and options.
It serves models whose template has such markers as text (Qwen3, DeepSeek R1, GLM 4.5, Kimi K2, MiniMax M2); a model
without them costs one search in its template. Markers that are special tokens are not part of any text: such an answer
stays whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from graftlm.core.errors import ConfigError

if TYPE_CHECKING:
    from graftlm.core.text.tokenizer import Tokenizer

_MARKERS: list[tuple[str, str]] = [
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<seed:think>", "</seed:think>"),
    ("<thought>", "</thought>"),
    ("<|think_start|>", "<|think_end|>"),
]
_THOUGHT, _ANSWER, _QUESTION = "probe thought", "probe answer", "probe question"


def register_markers(begin: str, end: str) -> None:
    """Let `ThinkingFormat.learn` find another pair of markers in chat templates."""
    _MARKERS.insert(0, (begin, end))
    _learned.clear()


@dataclass(frozen=True)
class ThinkingFormat:
    """The markers of a model, and where an answer begins.

    begin, end  the markers
    separator   the whitespace between the end marker and the content
    starts      "inside": the prompt ends with the begin marker; "before": the model may write the begin marker;
                "after": the prompt closes the thinking, the answer is content
    """

    begin: str
    end: str
    separator: str = "\n\n"
    starts: Literal["inside", "before", "after"] = "before"

    @classmethod
    def learn(cls, tokenizer: Tokenizer, options: Mapping[str, Any] | None = None) -> ThinkingFormat | None:
        """Return the format of a tokenizer's chat template; None if the model has no markers.

        options  arguments of the template, such as {"enable_thinking": False}
        Raises ConfigError if the template refuses the options.
        """
        cached = _learned.setdefault(tokenizer, {})
        key = repr(sorted((options or {}).items()))
        if key not in cached:
            if len(cached) >= _MAX_OPTIONS:
                cached.clear()
            cached[key] = _learn(tokenizer, dict(options or {}))
        return cached[key]


_MAX_OPTIONS = 64
"""Limit of the cached options of one tokenizer; they come from requests."""
_learned: WeakKeyDictionary[Tokenizer, dict[str, ThinkingFormat | None]] = WeakKeyDictionary()


def _learn(tokenizer: Tokenizer, options: dict[str, Any]) -> ThinkingFormat | None:
    template = getattr(tokenizer.hf, "chat_template", None)
    text = template if isinstance(template, str) else repr(template)
    found = next((pair for pair in _MARKERS if pair[1] in text), None)
    if found is None or any(_is_special(tokenizer, marker) for marker in found):
        return None
    begin, end = found
    header = tokenizer.render([{"role": "user", "content": _QUESTION}], options=options).rpartition(_QUESTION)[2]
    starts: Literal["inside", "before", "after"] = "before"
    if end in header:
        starts = "after"
    elif header.rstrip().endswith(begin):
        starts = "inside"
    return ThinkingFormat(begin, end, _separator(tokenizer, end, options), starts)


def _separator(tokenizer: Tokenizer, end: str, options: dict[str, Any]) -> str:
    """Return the whitespace behind the end marker of a rendered answer; two line breaks if it is not rendered."""
    turn = {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT}
    try:
        text = tokenizer.render(
            [{"role": "user", "content": _QUESTION}, turn], options=options, add_generation_prompt=False
        )
    except ConfigError:
        return "\n\n"
    between = text.partition(_THOUGHT)[2].partition(end)[2].partition(_ANSWER)[0]
    return between if between and not between.strip() else "\n\n"


def _is_special(tokenizer: Tokenizer, marker: str) -> bool:
    ids = tokenizer.encode_continuation(marker)
    return len(ids) == 1 and tokenizer.is_special(ids[0])


class ThinkingReader:
    """A splitter of one answer's text into thinking and content; a text that may be a marker is held back.

    A piece of whitespace beside a marker belongs to neither.
    """

    def __init__(self, form: ThinkingFormat) -> None:
        self._form = form
        self._state: Literal["before", "inside", "behind", "after"] = form.starts
        self._held = ""
        self._any_thought = False

    def push(self, text: str) -> tuple[str, str]:
        """Take the next piece of the answer. -> (thinking, content) that it completes"""
        self._held += text
        thought = ""
        if self._state == "before":
            self._read_before()
        if self._state == "inside":
            thought = self._read_inside()
        if self._state == "behind":
            self._held = self._held.lstrip()
            self._state = "after" if self._held else "behind"
        if self._state != "after":
            return thought, ""
        content, self._held = self._held, ""
        return thought, content

    def finish(self) -> tuple[str, str]:
        """End the answer. -> (thinking, content) that was held back"""
        held, self._held = self._held, ""
        return (held.rstrip(), "") if self._state == "inside" else ("", held if self._state == "before" else "")

    def _read_before(self) -> None:
        begun, begin = self._held.lstrip(), self._form.begin
        if begun.startswith(begin):
            self._held, self._state = begun[len(begin) :], "inside"
        elif not begin.startswith(begun):
            self._state = "after"

    def _read_inside(self) -> str:
        if not self._any_thought:
            self._held = self._held.lstrip()
        thought, found, rest = self._held.partition(self._form.end)
        if found:
            self._held, self._state = rest, "behind"
            return thought.rstrip()
        # Whitespace before the end marker belongs to neither part, so it is held back as well.
        end = self._form.end
        num = next((n for n in range(min(len(end) - 1, len(thought)), 0, -1) if thought.endswith(end[:n])), 0)
        told = thought[: len(thought) - num].rstrip()
        self._held = self._held[len(told) :]
        self._any_thought = self._any_thought or bool(told)
        return told


def split_thinking(form: ThinkingFormat | None, text: str) -> tuple[str, str]:
    """Return the thinking and the content of a whole answer."""
    if form is None:
        return "", text
    reader = ThinkingReader(form)
    thought, content = reader.push(text)
    rest, held = reader.finish()
    return thought + rest, content + held
