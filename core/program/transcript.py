"""Transcript: the text of one branch, its chat turns and its token ids."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

from graftlm.core.chat.chat import Chat, chat_format
from graftlm.core.chat.growing_text import GrowingText
from graftlm.core.chat.messages import ImagePart, VideoPart
from graftlm.core.errors import ConfigError
from graftlm.core.prompt_input import PromptInput

if TYPE_CHECKING:
    from graftlm.core.program.select import Selection
    from graftlm.core.request import Completion
    from graftlm.core.text.tokenizer import Tokenizer


class Transcript:
    """An append-only text. Computed and generated token ids are kept, so that the prefix cache finds them.

    A chat template may strip white space around the content of a turn. Constant text at the start of such a turn is
    therefore held separately until the turn ends or the model generates in it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = GrowingText()
        self._chat: Chat | None = None
        self._turn: str | None = None  # constant content of the open turn, which the template may strip

    def fork(self, num_copies: int) -> list[Transcript]:
        """Return copies that continue independently. The last token of each may merge with the text that follows."""
        self.settle()
        self._text.fix_all_but_last(self._tokenizer)
        return [self._copy() for _ in range(num_copies)]

    def _copy(self) -> Transcript:
        other = copy(self)
        other._text = self._text.copy()
        other._chat = self._chat.copy() if self._chat is not None else None
        return other

    @property
    def text(self) -> str:
        return self._text.text + (self._turn or "")

    @property
    def messages(self) -> list[dict[str, str]]:
        """The turns, as {"role", "content"}."""
        return self._chat.messages if self._chat is not None else []

    def write(self, text: str) -> None:
        """Append constant text."""
        if self._chat is not None and self._chat.open and text:
            self._text.write(self._chat.gap())
            self._chat.write(text)
            if self._chat.held:
                return
            if self._turn is not None:
                self._turn += text
                return
        self._text.write(text)

    def write_module(self, name: str, text: str) -> None:
        """Append a module. Raises ConfigError where none can stand."""
        if self._chat is not None and self._chat.open:
            self._text.write(self._chat.gap())
            self._chat.write(text)
            if self._chat.held:
                raise ConfigError(
                    f"module {name!r} stands in a system turn, which the chat template of this model writes inside the "
                    "next turn; put it into gl.user"
                )
        self.settle()
        self._text.write_module(name, text)

    def write_media(self, part: ImagePart | VideoPart, model_name: str = "the model") -> None:
        """Append a picture or a video to the open turn of a user, or to a text without turns.

        Raises: ConfigError, with the model's name, if the model reads text only; elsewhere in a chat.
        """
        noun = "image" if isinstance(part, ImagePart) else "video"
        media = self._tokenizer.media
        if media is None:
            raise ConfigError(f"{model_name} reads text only, not {noun}s; use a model that sees")
        if self._chat is not None and not (self._chat.open and self._chat.messages[-1]["role"] == "user"):
            raise ConfigError(f"the {noun} stands outside of a user's turn; put it into gl.user")
        self._text.expect_media(part)
        self.write(media.fragment("image" if noun == "image" else "video"))

    def begin(self, role: str) -> None:
        """Open a turn."""
        if self._chat is None:
            self._chat = Chat(chat_format(self._tokenizer))
        self._text.write(self._chat.begin(role))
        self._turn = "" if self._chat.trims and not self._chat.held else None

    def end(self) -> None:
        """Close the open turn."""
        assert self._chat is not None
        constant = self._chat.messages[-1]["content"] if self._chat.held else self._turn
        content = constant.strip() if constant is not None and self._chat.trims else None
        if self._turn is not None:
            self._text.write(self._turn if content is None else content)
            self._turn = None
        self._text.write(self._chat.end(content))

    def settle(self) -> int:
        """Append the open turn's constant text as it is; return the length of the text in characters."""
        if self._turn is not None:
            self._text.write(self._turn)
            self._turn = None
        return len(self._text.text)

    def prompt(self, *, whole: bool = False) -> PromptInput:
        """Return the prompt of a model call here; raise ConfigError where the model cannot generate.

        whole  for text that is scored: ids of an unfinished character at the end are dropped
        """
        self.settle()
        if self._chat is not None and self._chat.held:
            raise ConfigError(
                "the chat template of this model writes a system message inside the next turn, "
                "so the model cannot write in it; begin a user turn first"
            )
        prompt = self._text.prompt_input(self._tokenizer, whole=whole)
        if not len(prompt):
            raise ConfigError("the model was called before there was any text; append a prompt first")
        return prompt

    def write_generated(self, completion: Completion) -> None:
        """Append the output that the model generated after `prompt()`."""
        self._text.write_generated(self._tokenizer, completion.text, completion.token_ids)
        self._write_turn(completion.text)

    def write_selected(self, selection: Selection) -> None:
        """Append a choice that was scored after `prompt()`."""
        self._text.write_scored(selection.choice, selection.token_ids)
        self._write_turn(selection.choice)

    def _write_turn(self, text: str) -> None:
        if self._chat is not None and self._chat.open:
            self._chat.write(text)
