"""A tokenizer's own chat template as guidance's role markers."""

from __future__ import annotations

from graftlm.core.errors import ConfigError
from graftlm.core.text.tokenizer import Tokenizer
from guidance.chat import CHAT_TEMPLATE_CACHE, ChatTemplate, UnsupportedRoleException

_SAID = {"system": "probe system", "user": "probe user", "assistant": "probe assistant"}


def chat_template_of(tokenizer: Tokenizer) -> str | type[ChatTemplate] | None:
    """Return the `chat_template` for guidance: guidance's own, otherwise one derived from rendered conversations.

    None, for which guidance uses ChatML, without a template or for a template that cannot be split.
    """
    text = getattr(tokenizer.hf, "chat_template", None)
    if not isinstance(text, str):
        return None
    if text in CHAT_TEMPLATE_CACHE:
        return text
    starts, ends = _learn(tokenizer)
    if not {"user", "assistant"} <= starts.keys() & ends.keys():
        return None

    class Learned(ChatTemplate):
        template_str = text

        def get_role_start(self, role_name: str, **_: object) -> str:
            return self._part(starts, role_name)

        def get_role_end(self, role_name: str | None = None) -> str:
            return self._part(ends, role_name or "assistant")

        def _part(self, parts: dict[str, str], role: str) -> str:
            if role not in parts:
                raise UnsupportedRoleException(role, self)
            return parts[role]

    return Learned


def _learn(tokenizer: Tokenizer) -> tuple[dict[str, str], dict[str, str]]:
    """Return the texts before and after each role's content."""
    starts: dict[str, str] = {}
    ends: dict[str, str] = {}
    asked = _between(_render(tokenizer, "user"), "user", None)
    asking = _between(_render(tokenizer, "user", generate=True), "user", None)
    if asked is not None and asking is not None and asking.startswith(asked):
        ends["user"], starts["assistant"] = asked, asking[len(asked) :]
    answered = _render(tokenizer, "user", "assistant")
    ends_assistant = _between(answered, "assistant", None)
    again = _render(tokenizer, "user", "assistant", "user")
    between = None if again is None else _between(again.partition(_SAID["user"])[2], "assistant", "user")
    if ends_assistant is not None and between is not None and between.startswith(ends_assistant):
        ends["assistant"], starts["user"] = ends_assistant, between[len(ends_assistant) :]
    told = _render(tokenizer, "system", "user")
    told_end = _between(told, "system", "user")
    if told is not None and told_end is not None and told_end.endswith(starts.get("user", "\0")):
        bos = tokenizer.hf.bos_token or ""
        starts["system"] = told.partition(_SAID["system"])[0].removeprefix(bos)
        ends["system"] = told_end.removesuffix(starts["user"])
    return starts, ends


def _render(tokenizer: Tokenizer, *roles: str, generate: bool = False) -> str | None:
    messages = [{"role": role, "content": _SAID[role]} for role in roles]
    try:
        return tokenizer.render(messages, add_generation_prompt=generate)
    except ConfigError:
        return None  # the template does not support this conversation


def _between(text: str | None, before: str, after: str | None) -> str | None:
    """Return the text between two roles' contents, or after one; None if the rendered text lacks a content."""
    if text is None:
        return None
    _, found, rest = text.partition(_SAID[before])
    if not found or (after is not None and _SAID[after] not in rest):
        return None
    return rest if after is None else rest.partition(_SAID[after])[0]
