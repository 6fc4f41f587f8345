"""RemoteTranscript: the text of one branch and its chat turns, in the endpoint's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from graftlm.core.errors import ConfigError
from graftlm.core.program.transcript import Transcript
from graftlm.core.remote.speculation.text import RemoteText

if TYPE_CHECKING:
    from graftlm.core.remote.endpoint import Endpoint


class RemoteTranscript(Transcript):
    """Plain text or chat turns, without token ids.

    With a given tokenizer turns are rendered by its chat template and the whole is text, as with a model in this
    process. Otherwise they are sent as messages, and `text` has their contents, divided by blank lines.
    """

    def __init__(self, endpoint: Endpoint, remote: RemoteText) -> None:
        known, tokenizer = endpoint.capabilities.continue_turn, endpoint.tokenizer
        self._rendered = tokenizer is not None and tokenizer.has_chat_template and known in (None, "template")
        super().__init__(tokenizer)  # type: ignore[arg-type]  # used only where turns are rendered
        self.remote = remote
        self._text = remote
        self._turns: tuple[Mapping[str, str], ...] = ()
        self._role: str | None = None

    def fork(self, num_copies: int) -> list[Transcript]:
        """Return copies that continue independently; a surplus passes to the copies that may use it."""
        self.settle()
        copies: list[Transcript] = []
        for i in range(num_copies):
            other = self._copy()
            assert isinstance(other, RemoteTranscript)
            other._text = other.remote = self.remote.branch(first=i == 0)
            copies.append(other)
        self.remote.surplus = None
        return copies

    @property
    def messages(self) -> list[dict[str, str]]:
        if self._rendered:
            return super().messages
        opened = [] if self._role is None else [{"role": self._role, "content": self.remote.open_text}]
        return [dict(turn) for turn in self._turns] + opened

    def write(self, text: str) -> None:
        if self._rendered or self._role is not None or not self._turns:
            return super().write(text)
        raise ConfigError(
            f"the text {text[:40]!r} stands outside of the chat's turns, where an endpoint takes none; "
            "put it into gl.system, gl.user or gl.assistant"
        )

    def begin(self, role: str) -> None:
        if self._rendered:
            self.remote.end_turn()
            return super().begin(role)
        if self._role is not None:
            raise ConfigError(f"{role} begins inside the turn of {self._role}; close that one first")
        if self.remote.text and not self._turns:
            raise ConfigError(
                f"the text {self.remote.text[:40]!r} stands before the first turn, where an endpoint takes none; "
                "put it into gl.system or gl.user"
            )
        self._role = role
        if self._turns:
            self.remote.text += "\n\n"
        self.remote.begin_turn(self._turns)

    def end(self) -> None:
        self.remote.end_turn()
        if self._rendered:
            return super().end()
        assert self._role is not None
        self._turns += ({"role": self._role, "content": self.remote.open_text},)
        self._role = None

    def check_writable(self, what: str) -> None:
        """Raise ConfigError where the model cannot generate."""
        self.settle()
        if self._role is not None and self._role != "assistant":
            raise ConfigError(f"{what} stands in the turn of {self._role}; at an endpoint models write as assistant")
        if self._turns and self._role is None:
            raise ConfigError(f"{what} stands outside of the chat's turns; put it into gl.assistant")
        if not self.remote.text and not self._turns:
            raise ConfigError("the model was called before there was any text; append a prompt first")

    def written(self, text: str) -> None:
        """Record an output that the text already contains."""
        if self._rendered:
            self._write_turn(text)
