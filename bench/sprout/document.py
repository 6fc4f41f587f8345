"""A training or test document: text in segments, some of them the model's to write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Parts = str | list[tuple[str, bool]]

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

CHAT_TEMPLATE = """\
{%- macro compact(value) -%}
{{ value if value is string else value | tojson(separators=(',', ':')) }}
{%- endmacro -%}
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}{%- for part in content if part.type == 'text' -%}{{ part.text }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
{{ '<|im_start|>system\\n' -}}
{%- if messages and messages[0].role == 'system' -%}{{ text(messages[0].content) + '\\n\\n' }}{%- endif -%}
{{ 'Tools:\\n' -}}
{%- for tool in tools -%}{{ compact(tool.function if tool.function is defined else tool) + '\\n' }}{%- endfor -%}
{{ 'To use a tool, reply with <tool_call>\\n{"name":...,"arguments":{...}}\\n</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if not (tools and loop.first and message.role == 'system') -%}
{{ '<|im_start|>' + message.role + '\\n' + text(message.content) -}}
{%- if message.tool_calls -%}
{%- if message.content -%}{{ '\\n' }}{%- endif -%}
{%- for call in message.tool_calls -%}
{%- set call = call.function if call.function is defined else call -%}
{{ '<tool_call>\\n{"name":' + compact({'name': call.name})[8:-1] + ',"arguments":' -}}
{{ compact(call.arguments) + '}\\n</tool_call>' + ('' if loop.last else '\\n') -}}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


@dataclass(frozen=True)
class Segment:
    """`text` is given (`learned` False) or written by the model (`learned` True)."""

    text: str
    learned: bool


@dataclass(frozen=True)
class Document:
    """Segments in order. The case under test is `segments[scored:]`; earlier learned segments are history.

    family: the row of the report; detail: what the case asks for (an attribute's key, a format).
    """

    family: str
    segments: tuple[Segment, ...]
    scored: int
    detail: str = ""

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)

    @property
    def prompt(self) -> str:
        return "".join(segment.text for segment in self.segments[: self.scored])

    @property
    def answer(self) -> str:
        return "".join(segment.text for segment in self.segments[self.scored :] if segment.learned)


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def tool_call_text(name: str, arguments: dict[str, Any]) -> str:
    """Return one tool call as the chat template writes it and the model must write it."""
    return f'<tool_call>\n{{"name":{compact(name)},"arguments":{compact(arguments)}}}\n</tool_call>'


def message_text(message: Message) -> str:
    """Return the text between the role line and <|im_end|>, as the chat template renders it."""
    content = message.get("content") or ""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = "\n".join(tool_call_text(function["name"], function["arguments"]) for function in functions)
    return content + ("\n" if content and calls else "") + calls


def system_text(system: str | None, tools: Sequence[dict[str, Any]]) -> str:
    """Return the system turn's text with the tools in it, as the chat template renders it."""
    lines = "".join(compact(tool["function"]) + "\n" for tool in tools)
    call = 'To use a tool, reply with <tool_call>\n{"name":...,"arguments":{...}}\n</tool_call>'
    return (system + "\n\n" if system is not None else "") + f"Tools:\n{lines}{call}"


def chat(
    family: str,
    messages: Sequence[Message],
    answer: Parts,
    *,
    tools: Sequence[dict[str, Any]] = (),
    detail: str = "",
    learn_history: bool = True,
) -> Document:
    """Return a chat in the model's own template that ends with `answer` by the assistant.

    `answer` as a list of (text, learned) parts mixes forced structure and generated values. The
    closing <|im_end|> is the model's to write, unless the last part is forced.
    """
    segments: list[Segment] = []
    given = ""
    rest = list(messages)
    if tools:
        system = rest.pop(0)["content"] if rest and rest[0]["role"] == "system" else None
        given = f"{IM_START}system\n{system_text(system, tools)}{IM_END}\n"
    for message in rest:
        given += f"{IM_START}{message['role']}\n"
        if message["role"] == "assistant" and learn_history:
            segments += [Segment(given, False), Segment(message_text(message) + IM_END, True)]
            given = "\n"
        else:
            given += message_text(message) + IM_END + "\n"
    segments.append(Segment(given + f"{IM_START}assistant\n", False))
    scored = len(segments)
    parts = [(answer, True)] if isinstance(answer, str) else answer
    segments += _joined([*parts, (IM_END, parts[-1][1])])
    return Document(family, (*segments, Segment("\n", False)), scored, detail)


def plain(
    family: str, parts: Sequence[tuple[str, bool]], *, detail: str = "", scored_from: int | None = None
) -> Document:
    """Running text without a chat template. `scored_from` indexes `parts` (default: the last learned one)."""
    start = scored_from if scored_from is not None else max(i for i, part in enumerate(parts) if part[1])
    head, tail = _joined(parts[:start]), _joined(parts[start:])
    return Document(family, (*head, *tail, Segment(END_OF_TEXT, tail[-1].learned)), len(head), detail)


def _joined(parts: Sequence[tuple[str, bool]]) -> list[Segment]:
    """Return parts as segments; join neighbours of the same sort, drop empty ones."""
    segments: list[Segment] = []
    for text, learned in parts:
        if not text:
            continue
        if segments and segments[-1].learned == learned:
            text = segments.pop().text + text
        segments.append(Segment(text, learned))
    return segments
