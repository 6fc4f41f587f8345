"""TemplateSkeletons: what a chat template writes around the contents of messages, kept and filled with others."""

from __future__ import annotations

import marshal
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from sys import getsizeof
from typing import TYPE_CHECKING, Any

from graftlm.core.chat.opaque_text import MARK, Looked, OpaqueTemplate, Place, Run

if TYPE_CHECKING:
    from graftlm.core.chat.messages import Message

MAX_BYTES = 4 << 20
MAX_VARIANTS = 4
"""Skeletons of the same roles and tools, which differ by the contents that are empty."""

Key = tuple[bool, tuple[str, ...], bytes]


@dataclass(frozen=True)
class Skeleton:
    """The text around contents.

    parts      constants and places of contents, in order
    emptiness  whether the contents at places are to be empty;  dates  what the clock has to say, by format
    """

    parts: tuple[str | Place, ...]
    emptiness: dict[Place, bool]
    dates: dict[str, str]

    def fill(self, contents: list[str]) -> str | None:
        """The text with these contents; None if the template would write another one."""
        if any(bool(place.of(contents)) != full for place, full in self.emptiness.items()):
            return None
        if any(datetime.now().strftime(pattern) != date for pattern, date in self.dates.items()):
            return None
        return "".join([part if isinstance(part, str) else part.of(contents) for part in self.parts])

    @property
    def num_bytes(self) -> int:
        return sum(getsizeof(part) for part in self.parts) + getsizeof(self.emptiness) + getsizeof(self.dates)


class TemplateSkeletons:
    """Writes messages as a chat template does without running it, where it is known to look into no content.

    A skeleton holds for messages of the same roles and the same tools. It is learned when these come for the second
    time, by a run of the template with opaque contents, and compared with what the template wrote. A template that
    looks into contents, be they those of later messages, is rendered as a whole each time, and so are messages that
    hold more than a role and a text. Least recently used skeletons are dropped beyond `max_bytes`. Thread-safe.
    """

    def __init__(self, hf: Any, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._hf = hf
        self._source: str | None = None
        self._template: OpaqueTemplate | None = None
        self._known: OrderedDict[Key, tuple[Skeleton, ...] | None] = OrderedDict()  # None: is never written so
        self._lock = threading.Lock()

    def text(self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool) -> str | None:
        """The text of messages; None where the template has to be asked."""
        key = self._key(messages, tools, add_generation_prompt)
        if key is None:
            return None
        with self._lock:
            if self._hf.chat_template != self._source:
                return None
            skeletons = self._known.get(key)
            if not skeletons:
                return None
            self._known.move_to_end(key)
        contents = _contents(messages)
        texts = (skeleton.fill(contents) for skeleton in skeletons)
        return next((text for text in texts if text is not None), None)

    def learn(self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool, text: str) -> None:
        """Note that the template wrote this text, so that later ones need not be asked of it."""
        key = self._key(messages, tools, add_generation_prompt)
        source = self._hf.chat_template
        if key is None or not isinstance(source, str):
            return
        with self._lock:
            if source != self._source:
                self._source, self._template, self.num_bytes = source, None, 0
                self._known.clear()
            skeletons = self._known.get(key)
            if key not in self._known:  # many are seen once
                self._keep(key, ())
                return
            if skeletons is None or len(skeletons) == MAX_VARIANTS:
                return
            template = self._template = self._template or _opaque(self._hf, source)
        learned = self._run(template, messages, tools, add_generation_prompt) if template is not None else None
        if learned is not None and learned.fill(_contents(messages)) != text:
            learned = None
        with self._lock:
            if source == self._source:
                self._keep(key, None if learned is None else (*skeletons, learned))

    def _run(
        self, template: OpaqueTemplate, messages: Sequence[Message], tools: Any, add_generation_prompt: bool
    ) -> Skeleton | None:
        run = Run(_contents(messages))
        given = {
            "messages": [{"role": m.role, "content": run.text(Place(i))} for i, m in enumerate(messages)],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            written = template.write(run, {**self._hf.special_tokens_map, **given})
        except (Looked, Exception):  # the caller has the template's own text, and asks it again the next time
            return None
        marks = "|".join(re.escape(mark) for mark in run.places)
        parts = [run.places.get(part, part) for part in re.split(f"({marks})", written)]
        return Skeleton(tuple(part for part in parts if part), run.emptiness, run.dates)

    def _key(self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool) -> Key | None:
        for message in messages:
            if type(message.content) is not str or message.tool_calls or message.tool_call_id is not None:
                return None
            if message.name is not None or MARK in message.role:
                return None
        try:
            written = marshal.dumps(tools, 2) if tools is not None else b""
        except ValueError:  # they hold what only the template understands
            return None
        if MARK.encode() in written:
            return None
        return add_generation_prompt, tuple(message.role for message in messages), written

    def _keep(self, key: Key, skeletons: tuple[Skeleton, ...] | None) -> None:
        if key in self._known:
            self.num_bytes -= _size(key, self._known.pop(key))
        self._known[key] = skeletons
        self.num_bytes += _size(key, skeletons)
        while self.num_bytes > self.max_bytes:
            self.num_bytes -= _size(*self._known.popitem(last=False))


def _size(key: Key, skeletons: tuple[Skeleton, ...] | None) -> int:
    return 300 + getsizeof(key[1]) + getsizeof(key[2]) + sum(skeleton.num_bytes for skeleton in skeletons or ())


def _contents(messages: Sequence[Message]) -> list[str]:
    return [message.text for message in messages]


def _opaque(hf: Any, source: str) -> OpaqueTemplate | None:
    """The template for opaque contents; None for a tokenizer that renders in a way of its own."""
    from transformers import PreTrainedTokenizerBase
    from transformers.utils import chat_template_utils

    from graftlm.core.text.plain_tokenizer import PlainTokenizer

    renders = type(hf).apply_chat_template
    if renders not in (PlainTokenizer.apply_chat_template, PreTrainedTokenizerBase.apply_chat_template):
        return None
    compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
    if compile_template is None or MARK in source:
        return None
    return OpaqueTemplate(compile_template(source), source)
