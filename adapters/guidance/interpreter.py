"""Guidance's interpreter over a runtime: text is appended without the engine, a whole grammar is one request."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator
from typing import Any, Self

from graftlm.adapters.guidance.engine import GraftEngine, GraftState, Grammar
from graftlm.adapters.guidance.lowering import leading_text
from graftlm.core.chat.messages import ImagePart, described
from graftlm.core.media.processor import text_of
from guidance._ast import GrammarNode, ImageBlob, ImageUrl, LiteralNode, RoleEnd, RoleStart
from guidance.models._base._interpreter import UnsupportedNodeError
from guidance.models._base._model import _event_queues
from guidance.models._engine import EngineInterpreter
from guidance.models._engine._interpreter import recode_special_tokens
from guidance.trace import ImageOutput, OutputAttr, TextOutput


class _Handed:
    """A wrapper that lets EngineInterpreter pass a node to the engine without converting it to text."""

    def __init__(self, node: GrammarNode) -> None:
        self._node = node

    def ll_grammar(self) -> Grammar:
        return Grammar(self._node)


class GraftInterpreter(EngineInterpreter):
    """The state of one model object. Copies share the engine; the cost of a copy does not depend on the prompt.

    watched  True with echo: every token is reported at once.
    """

    engine: GraftEngine
    state: GraftState

    def __init__(self, engine: GraftEngine, *, watched: bool = False) -> None:
        super().__init__(engine)
        self.state = GraftState()
        self.watched = watched

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__)
        state = copy.state = GraftState.__new__(GraftState)
        state.__dict__.update(self.state.__dict__)
        state.captures = {k: list(v) if isinstance(v, list) else v for k, v in self.state.captures.items()}
        return copy

    def role_start(self, node: RoleStart, **kwargs: Any) -> Iterator[OutputAttr]:
        self.state.active_role = node.role
        yield from self._append(self.get_role_start(node.role))

    def role_end(self, node: RoleEnd, **kwargs: Any) -> Iterator[OutputAttr]:
        self.state.active_role = None
        yield from self._append(self.get_role_end(node.role))

    def text(self, node: LiteralNode, **kwargs: Any) -> Iterator[OutputAttr]:
        """Append text. Its tokens are computed with the next grammar, as one prompt."""
        yield from self._append(node.value)

    def grammar(self, node: GrammarNode, **kwargs: Any) -> Iterator[OutputAttr]:
        """Append the text that a grammar begins with, and run the rest of it as one request."""
        text, rest = leading_text(node)
        if text:
            yield from self._append(text)
        followed = self.watched or bool(_event_queues.get())
        if followed or self.step_config is not None or self.engine.get_logits_replaced:
            handed: Any = _Handed(rest)
            yield from super().grammar(handed, **kwargs)
        else:
            yield from self._write(rest, kwargs.get("sampling_params"))

    def _write(self, node: GrammarNode, sampling_params: Any) -> Iterator[OutputAttr]:
        """Run a grammar without per-token events: its text is one output."""
        state = self.state
        written = self.engine.write(state, Grammar(node), sampling_params)
        state.add_usage(written.usage)
        # the first bytes of a character that a token limit cut are dropped
        text = recode_special_tokens(self.engine.tokenizer, written.text).decode(errors="ignore")
        state.prompt += text
        yield TextOutput(value=text, is_generated=True)
        for captures, scores in written.captures:
            for name, value in captures.items():
                if isinstance(value, list):
                    for one, score in zip(value, scores[name], strict=True):
                        yield state.apply_capture(name, one.decode(errors="ignore"), log_prob=score, is_append=True)
                else:
                    yield state.apply_capture(
                        name, value.decode(errors="ignore"), log_prob=scores[name], is_append=False
                    )

    def image_blob(self, node: ImageBlob, **kwargs: Any) -> Iterator[OutputAttr]:
        yield from self._picture(ImagePart(b64decode(node.data)), ImageOutput(value=node.data, is_input=True))

    def image_url(self, node: ImageUrl, **kwargs: Any) -> Iterator[OutputAttr]:
        """Append a picture that is fetched if the runtime has `media_urls`."""
        yield from self._picture(ImagePart(node.url), TextOutput(value="", is_input=True))

    def _picture(self, part: ImagePart, shown: OutputAttr) -> Iterator[OutputAttr]:
        media = self.engine.runtime.tokenizer.media
        if media is None:
            raise UnsupportedNodeError(interpreter=self, node=ImageUrl(described(part.image)))
        text = text_of(media, part)  # raises for a broken picture
        self.state.media = (*self.state.media, part)
        self.state.prompt += text
        yield shown

    def __str__(self) -> str:
        reads = "text only" if self.engine.runtime.tokenizer.media is None else "text and images"
        return f"a GraftModel over {self.engine.runtime.model_name!r}, which reads {reads},"

    def _append(self, text: str) -> Iterator[OutputAttr]:
        self.state.prompt += text
        self.engine.settle(self.state)
        yield TextOutput(value=text, is_input=True)
