"""Chat: render a conversation turn by turn, so that its text only grows and the cached prefix stays valid."""

from __future__ import annotations

from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING

from graftlm.core.chat.messages import Message
from graftlm.core.errors import ConfigError

if TYPE_CHECKING:
    from graftlm.core.text.tokenizer import Tokenizer

_MARK = "\u2983message-{}\u2984"


class ChatFormat:
    """The text that a chat template writes around messages, learned by rendering placeholders as their contents.

    trims  whether the template strips white space around a message's content.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[tuple[str, ...], bool], tuple[str, ...] | ConfigError] = {}
        self.exists = tokenizer.has_chat_template

    @cached_property
    def trims(self) -> bool:
        try:
            return "  x  " not in self._tokenizer.render([Message("user", "  x  ")])
        except ConfigError:
            return False

    def around(self, roles: tuple[str, ...], *, generation: bool = False) -> tuple[str, ...]:
        """Return the text before, between and after the contents of messages with these roles, [len(roles) + 1].

        With `generation` the last piece is the generation prompt.
        Raises: ConfigError if the template refuses these roles, or does not render each content once and in order.
        """
        key = roles, generation
        if key not in self._known:
            try:
                self._known[key] = self._learn(roles, generation)
            except ConfigError as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, ConfigError):
            raise found
        return found

    def _learn(self, roles: tuple[str, ...], generation: bool) -> tuple[str, ...]:
        marks = [_MARK.format(i) for i in range(len(roles))]
        messages = [Message(role, mark) for role, mark in zip(roles, marks, strict=True)]
        rest = self._tokenizer.render(messages, add_generation_prompt=generation)
        pieces: list[str] = []
        for mark in marks:
            if rest.count(mark) != 1 or any(other in rest.partition(mark)[0] for other in marks):
                raise ConfigError(
                    f"the chat template does not write messages of roles {', '.join(roles)} once each and in order, "
                    "so a chat cannot be continued turn by turn; write the prompt as text"
                )
            before, _, rest = rest.partition(mark)
            pieces.append(before)
        return (*pieces, rest)


def chat_format(tokenizer: Tokenizer) -> ChatFormat:
    """Return the format of a tokenizer's chat template, learned once."""
    found: ChatFormat | None = tokenizer.derived.get(ChatFormat)
    if found is None:
        found = tokenizer.derived[ChatFormat] = ChatFormat(tokenizer)
    return found


class Chat:
    """The turns of one conversation. `begin` and `end` return the text that the template writes there.

    Some templates write the system message inside the first user turn. Such a system message adds no text by itself;
    it is `held` until the next turn begins.
    """

    def __init__(self, chat_format: ChatFormat) -> None:
        self._format = chat_format
        self._roles: tuple[str, ...] = ()
        self._contents: tuple[str, ...] = ()
        self._ending = ""  # the template's text after the last turn
        self._gap = ""  # see `gap`
        self.open = False
        self.held = False

    def copy(self) -> Chat:
        return copy(self)

    @property
    def messages(self) -> list[dict[str, str]]:
        """All turns so far, the open one included."""
        return [{"role": role, "content": text} for role, text in zip(self._roles, self._contents, strict=True)]

    @property
    def trims(self) -> bool:
        return self._format.trims

    def begin(self, role: str) -> str:
        """Open a turn."""
        if self.open:
            raise ConfigError(f"{role} begins inside the turn of {self._roles[-1]}; close that one first")
        if not self._format.exists:
            self._format.around((role,))  # raises, with the remedy
        text = self._before(role)
        self._roles += (role,)
        self._contents += ("",)
        self.open = True
        return text

    def gap(self) -> str:
        """Return the white space between the generation prompt and a given answer; a generated answer has its own."""
        gap, self._gap = self._gap, ""
        return gap

    def write(self, text: str) -> None:
        """Append to the content of the open turn."""
        self._gap = ""
        self._contents = (*self._contents[:-1], self._contents[-1] + text)

    def end(self, content: str | None = None) -> str:
        """Close the turn. `content`, if given, replaces the turn's content: the template has trimmed it."""
        if not self.open:
            raise ConfigError("a turn ends that was not begun")
        self.open, self._gap = False, ""
        if content is not None:
            self._contents = (*self._contents[:-1], content)
        if self.held:
            return ""
        self._ending = self._around(self._roles)[-1]
        return self._ending

    def _before(self, role: str) -> str:
        """Return the text between the end of the conversation and the content of a new turn."""
        if self.held:
            first, second = self._format.around((*self._roles, role))[:2]
            self.held = False
            return first + self._contents[0] + second
        roles = (*self._roles, role)
        if role == "system" and not self._roles and not self._stands_alone(role):
            self.held = True
            return ""
        if role == "assistant" and self._roles:
            prompt = self._around(self._roles, generation=True)[-1]
            if prompt.startswith(self._ending):
                given = self._around(roles)[-2]
                if given.startswith(prompt) and given[len(prompt) :].isspace():
                    self._gap = given[len(prompt) :]
                return prompt[len(self._ending) :]
        text = self._around(roles)[-2]
        if not text.startswith(self._ending):
            raise ConfigError(
                f"the chat template rewrites the end of the {self._roles[-1]} turn before a {role} turn, "
                "so a chat cannot be continued turn by turn; write the prompt as text"
            )
        return text[len(self._ending) :]

    def _stands_alone(self, role: str) -> bool:
        try:
            self._format.around((role,))
        except ConfigError:
            return False
        return True

    def _around(self, roles: tuple[str, ...], *, generation: bool = False) -> tuple[str, ...]:
        """Return the format of these roles, without a system message that the template moves to a later turn."""
        try:
            return self._format.around(roles, generation=generation)
        except ConfigError:
            if roles[0] != "system" or len(roles) < 2 or len(self._roles) < 2:
                raise
            return self._format.around(roles[1:], generation=generation)
