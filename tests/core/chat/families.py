"""Tokenizers of models that think, with the special tokens and the chat templates of their families, in small."""

from __future__ import annotations

from typing import Any

from graftlm.testing import byte_tokenizer

GPT_OSS_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
GPT_OSS = """\
<|start|>system<|message|>Reasoning: {{ reasoning_effort | default("medium") }}<|end|>
{%- if tools %}<|start|>developer<|message|>
{%- for tool in tools %}type {{ tool.function.name }} = {{ tool.function.parameters | tojson }};
{% endfor %}<|end|>{% endif %}
{%- set last = namespace(name=none) %}
{%- for message in messages %}
{%- if message.role == "assistant" %}
{%- if message.tool_calls %}
{%- if message.content and message.thinking %}{{ raise_exception("Cannot pass both content and thinking") }}{% endif %}
{%- if message.content or message.thinking %}<|start|>assistant<|channel|>analysis<|message|>\
{{ message.content or message.thinking }}<|end|>{% endif %}
{%- set call = message.tool_calls[0].function %}{% set last.name = call.name -%}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>\
{{ call.arguments | tojson }}<|call|>
{%- elif loop.last and not add_generation_prompt %}
{%- if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif -%}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|return|>
{%- else %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>{% endif %}
{%- elif message.role == "tool" -%}
<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ message.content | tojson }}<|end|>
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

MISTRAL_TOKENS = ("[INST]", "[/INST]", "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]") + (
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)
MISTRAL = """\
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
{%- if message.role == "user" %}[INST]{{ message.content }}[/INST]
{%- elif message.role == "tool" %}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]
{%- elif message.role == "assistant" %}
{%- if not message.content and not message.tool_calls %}{{ raise_exception("no content") }}{% endif %}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}
{%- if part.type == "thinking" %}{{ "[THINK]" + part.thinking + "[/THINK]" }}{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}\
{{- "[TOOL_CALLS]" + call.function.name + "[ARGS]" + call.function.arguments | tojson }}{% endfor %}{{ eos_token }}
{%- endif %}{% endfor %}"""


def tokenizer_of(template: str, special: tuple[str, ...], eos: str = "<|im_end|>") -> Any:
    """Return a byte tokenizer with more special tokens, and another chat template."""
    hf = byte_tokenizer()
    hf.add_special_tokens({"additional_special_tokens": list(special)})
    hf.chat_template = template
    hf.eos_token = eos
    return hf


def gpt_oss() -> Any:
    return tokenizer_of(GPT_OSS, GPT_OSS_TOKENS, "<|return|>")


def mistral() -> Any:
    return tokenizer_of(MISTRAL, MISTRAL_TOKENS)
