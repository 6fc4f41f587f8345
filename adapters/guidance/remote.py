"""Guidance's interpreter over a model at an endpoint: grammars run as texts, gens and selects, with speculation."""

from __future__ import annotations

import threading
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, Self

from graftlm.adapters.guidance.remote_parts import Part, parts_of
from graftlm.adapters.guidance.streaming import cancelled_with_reader
from graftlm.core.chat.messages import ImagePart
from graftlm.core.config import SamplingParams
from graftlm.core.errors import RemoteError
from graftlm.core.program.expression import Gen, Select, Text
from graftlm.core.remote.endpoint import Endpoint
from graftlm.core.remote.language.layout import ahead_of
from graftlm.core.remote.language.transcript import RemoteTranscript
from graftlm.core.remote.language.values import Values
from graftlm.core.remote.ledger.usage import RemoteUsage, uncounted
from graftlm.core.remote.speculation.live import Follow
from graftlm.core.remote.speculation.surplus import Ahead
from graftlm.core.remote.speculation.text import RemoteText
from graftlm.core.remote.transport.answer import Answer
from graftlm.core.remote.transport.prompt import RemotePrompt
from graftlm.core.request import Chunk
from graftlm.core.runtime import Runtime
from guidance._ast import GrammarNode, ImageBlob, ImageUrl, LiteralNode, RoleEnd, RoleStart
from guidance._schema import TokenUsage
from guidance.models._base import Interpreter, State
from guidance.models._base._model import _event_queues
from guidance.trace import ImageOutput, OutputAttr, TextOutput

DEFAULT_MAX_TOKENS = 1024
"""Default token limit of a gen. Reaching it is an error, because the cut was not requested."""
_ALL = 1 << 30


class RemoteEngine:
    """The shared state of all copies of one `GraftModel` at an endpoint.

    num_api_spec_tokens  limit of the tokens that a call fetches for later appends; None: a call fetches only the text
                         that is appended together with its gen.
    """

    def __init__(self, runtime: Runtime, num_api_spec_tokens: int | None = None) -> None:
        self.runtime = runtime
        self.num_api_spec_tokens = num_api_spec_tokens
        assert runtime.endpoint is not None
        self.endpoint: Endpoint = runtime.endpoint

    def seeded(self) -> AbstractContextManager[None]:
        """Do nothing: an endpoint chooses its own seeds."""
        return nullcontext()


class _Place:
    """The transcript that copies of a model object share until one of them is extended."""

    def __init__(self, transcript: RemoteTranscript) -> None:
        self.transcript = transcript
        self._lock = threading.Lock()

    def leave(self) -> RemoteTranscript:
        """Return a copy of the transcript with its surplus; only the first copy gets the surplus of sampled text."""
        with self._lock:
            taken, left = self.transcript.fork(2)
            assert isinstance(taken, RemoteTranscript) and isinstance(left, RemoteTranscript)
            self.transcript = left
        return taken


class RemoteState(State):
    """The state of one model object."""

    def __init__(self, place: _Place) -> None:
        super().__init__()
        self.place = place
        self.spent = RemoteUsage()

    @property
    def usage(self) -> RemoteUsage:
        """The usage of all calls that led to this object, including the unused surplus."""
        return self.spent + self.place.transcript.remote.pending

    def __str__(self) -> str:
        return self.place.transcript.text


class RemoteInterpreter(Interpreter[RemoteState]):
    """The state of one model object; copies share the endpoint.

    watched  True with echo: values are reported during generation.
    """

    step_config = None

    def __init__(self, engine: RemoteEngine, *, watched: bool = False) -> None:
        num = engine.num_api_spec_tokens
        text = RemoteText(_unasked, uncounted, _ALL if num is None else num, engine.endpoint.num_tokens_of)
        super().__init__(RemoteState(_Place(RemoteTranscript(engine.endpoint, text))))
        self.engine = engine
        self.watched = watched

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__)
        state = copy.state = RemoteState.__new__(RemoteState)
        state.__dict__.update(self.state.__dict__)
        state.captures = {k: list(v) if isinstance(v, list) else v for k, v in self.state.captures.items()}
        return copy

    def __str__(self) -> str:
        return f"a GraftModel over {self.engine.runtime.model_name!r} at an endpoint"

    def role_start(self, node: RoleStart, **kwargs: Any) -> Iterator[OutputAttr]:
        self.state.active_role = node.role
        self._go_on().begin(node.role)
        yield TextOutput(value="", is_input=True)

    def role_end(self, node: RoleEnd, **kwargs: Any) -> Iterator[OutputAttr]:
        self.state.active_role = None
        self._go_on().end()
        yield TextOutput(value="", is_input=True)

    def text(self, node: LiteralNode, **kwargs: Any) -> Iterator[OutputAttr]:
        self._go_on().write(node.value)
        yield TextOutput(value=node.value, is_input=True)

    def image_blob(self, node: ImageBlob, **kwargs: Any) -> Iterator[OutputAttr]:
        self._go_on().write_media(ImagePart(b64decode(node.data)))
        yield ImageOutput(value=node.data, is_input=True)

    def image_url(self, node: ImageUrl, **kwargs: Any) -> Iterator[OutputAttr]:
        """Append a picture that the endpoint itself fetches."""
        self._go_on().write_media(ImagePart(node.url))
        yield TextOutput(value="", is_input=True)

    def grammar(self, node: GrammarNode, **kwargs: Any) -> Iterator[OutputAttr]:
        """Run a grammar; a gen's call also fetches the parts after it."""
        given = {name: value for name, value in (kwargs.get("sampling_params") or {}).items() if value is not None}
        parts = parts_of(node)
        shown = [_with_defaults(part.expression, given) for part in parts]
        transcript = self._go_on()
        for i, (part, expression) in enumerate(zip(parts, shown, strict=True)):
            if isinstance(expression, Text):
                transcript.write(expression.text)
                yield TextOutput(value=expression.text, is_input=True)
            else:
                yield from self._value(part, expression, shown[i + 1 :], transcript)

    def _value(
        self,
        part: Part,
        expression: Gen | Select,
        following: Sequence[Text | Gen | Select],
        transcript: RemoteTranscript,
    ) -> Iterator[OutputAttr]:
        transcript.check_writable(f"gen {expression.name!r}")
        ahead = ahead_of(following, {}, complete=self.engine.num_api_spec_tokens is None)

        async def look_ahead() -> Ahead:
            return ahead

        followed = self.watched or bool(_event_queues.get())
        chunks: SimpleQueue[Chunk | None] = SimpleQueue()
        spent: list[RemoteUsage] = []
        values = Values(self.engine.endpoint, spent.append, chunks.put if followed else None)
        transcript.remote.bind(values.ask, values.count)
        call: Any
        if isinstance(expression, Gen):
            call = values.gen(transcript.remote, expression.sampling({}), look_ahead, expression)
        else:
            call = values.select(transcript.remote, expression, SamplingParams(temperature=0.0), look_ahead)
        future = self.engine.endpoint.start(call)
        future.add_done_callback(lambda _: chunks.put(None))
        try:
            with cancelled_with_reader(future.cancel):
                while (chunk := chunks.get()) is not None:
                    if chunk.text:
                        yield TextOutput(value=chunk.text, is_generated=True)
                done = future.result()
        finally:
            future.cancel()  # has an effect only after an interrupted wait
            transcript.remote.bind(_unasked, self._count)
            self._count(sum(spent, start=RemoteUsage()))
        text: str = done.text if isinstance(expression, Gen) else done.choice
        if isinstance(expression, Gen) and part.unlimited and done.completion.finish_reason == "length":
            raise RemoteError(
                f"gen {expression.name!r} sets no max_tokens and wrote {DEFAULT_MAX_TOKENS:,} tokens without an end: "
                f"{text[:80]!r}; set max_tokens or stop"
            )
        transcript.written(text)
        if not followed or isinstance(expression, Select):
            yield TextOutput(value=text, is_generated=True)
        for name, value in part.captures(text).items():
            for one in value if isinstance(value, list) else [value]:
                yield self.state.apply_capture(name, one, log_prob=None, is_append=isinstance(value, list))

    def _go_on(self) -> RemoteTranscript:
        """Return a transcript of this object's own, which copies do not share."""
        transcript = self.state.place.leave()
        transcript.remote.bind(_unasked, self._count)
        self.state.place = _Place(transcript)
        return transcript

    def _count(self, spent: RemoteUsage) -> None:
        self.state.spent += spent
        self.state.add_usage(
            TokenUsage(
                input_tokens=spent.prompt_tokens,
                cached_input_tokens=spent.cached_tokens,
                forward_passes=spent.completion_tokens,
                round_trips=spent.api_calls,
            )
        )


def _with_defaults(expression: Text | Gen | Select, given: Mapping[str, Any]) -> Text | Gen | Select:
    """Return the expression with the model object's sampling parameters and a token limit."""
    if not isinstance(expression, Gen):
        return expression
    return replace(expression, options={"max_tokens": DEFAULT_MAX_TOKENS, **given, **expression.options})


async def _unasked(
    prompt: RemotePrompt,
    sampling: SamplingParams,
    *,
    stops: tuple[str, ...],
    tokens: bool = False,
    follow: Follow | None = None,
) -> Answer:
    raise AssertionError("a text that was never bound to a call asks for nothing")
