"""RemoteTranscript: the text of one branch and its chat turns, in the endpoint's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from graftlm.core.chat.messages import ImagePart, VideoPart
from graftlm.core.errors import ConfigError
from graftlm.core.program.transcript import Transcript
from graftlm.core.remote.speculation.text import RemoteText
from graftlm.core.remote.transport.prompt import media_dict

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
        self._turns: tuple[Mapping[str, Any], ...] = ()
        self._role: str | None = None
        self._media: tuple[tuple[int, dict[str, Any]], ...] = ()  # of the open turn, each with the text's length there

    def write_module(self, name: str, text: str) -> None:
        """Append the text of a module: an endpoint has no modules."""
        self.write(text)

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
    def messages(self) -> list[dict[str, Any]]:
        if self._rendered:
            return super().messages
        opened = [] if self._role is None else [{"role": self._role, "content": self._content}]
        return [dict(turn) for turn in self._turns] + opened

    @property
    def _content(self) -> str | list[dict[str, Any]]:
        """The open turn: its text, or its texts, pictures and videos in order."""
        text, start = self.remote.open_text, 0
        if not self._media:
            return text
        parts: list[dict[str, Any]] = []
        for at, part in (*self._media, (len(text), None)):
            parts += [{"type": "text", "text": text[start:at]}] if at > start else []
            parts += [part] if part is not None else []
            start = at
        return parts

    def write_media(self, part: ImagePart | VideoPart, model_name: str = "the model") -> None:
        """Append a picture or a video to the open turn of a user. It has no text.

        Raises: ConfigError elsewhere, and where the turns are rendered here to one text.
        """
        noun = "a picture" if isinstance(part, ImagePart) else "a video"
        if self._rendered:
            raise ConfigError(
                f"{noun} cannot be sent, because a tokenizer was given and chats are rendered here; leave tokenizer out"
            )
        if self._role in (None, "assistant"):
            raise ConfigError(f"{noun} stands outside of a user's turn; put it into gl.user")
        self.settle()
        where = f"turn {len(self._turns)} ({self._role})"
        self._media += ((len(self.remote.open_text), media_dict(part, where)),)

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
        self._turns += ({"role": self._role, "content": self._content},)
        self._role, self._media = None, ()

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
