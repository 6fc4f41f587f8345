"""ModelSource: a runtime's access to its model before the weights are read."""

from __future__ import annotations

import os
import reprlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from graftlm.core.chat.messages import to_messages
from graftlm.core.config import EngineConfig
from graftlm.core.errors import ConfigError, GraftError, failure_of

if TYPE_CHECKING:
    from concurrent.futures import Future

    from graftlm.core.engine_protocol import Engine
    from graftlm.core.grammar.compile import Grammar
    from graftlm.core.prompt_input import PromptInput
    from graftlm.core.request import Request
    from graftlm.core.text.processor import Processor
    from graftlm.core.text.tokenizer import Tokenizer


class Prepared(NamedTuple):
    """The rendered prompt and the grammar of a request; both None for an engine that renders requests itself."""

    prompt: PromptInput | None = None
    grammar: Future[Grammar] | None = None


class ModelSource:
    """A model by name, by folder or loaded, with its tokenizer and options. Each part is read at first use."""

    def __init__(self, model: Any, tokenizer: Any, config: EngineConfig) -> None:
        self.model = model
        self.config = config
        self.given_tokenizer = tokenizer
        self._lock = threading.Lock()
        self._tokenizer: Tokenizer | None = None
        self._failure: GraftError | None = None
        self._compiles = False

    @property
    def name(self) -> str:
        if isinstance(self.model, str | os.PathLike):
            return os.fspath(self.model)
        return getattr(getattr(self.model, "config", None), "_name_or_path", "") or type(self.model).__name__

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer, loaded once on the first caller's thread. A failure is raised again in later calls."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._tokenizer is None:
                self.compile_ahead()
                from graftlm.core.model.description import load_tokenizer

                try:
                    self._tokenizer = load_tokenizer(self.model, self.given_tokenizer, self.config)
                    self._tokenizer.model_name = self.name
                except GraftError as error:
                    self._failure = error
                    raise
            return self._tokenizer

    @cached_property
    def processor(self) -> Processor:
        """Return the renderer of prompts; load the tokenizer."""
        from graftlm.core.text.processor import TextProcessor

        return TextProcessor(self.tokenizer, lambda: self.max_model_len)

    @cached_property
    def max_model_len(self) -> int:
        """Return the context in tokens, from the model's configuration."""
        from graftlm.core.model.description import context_length

        return context_length(self.model, self.config)

    @cached_property
    def reads_pictures(self) -> bool:
        """Return True if the model's configuration has a part for pictures."""
        from graftlm.core.model.description import describes_vision

        return describes_vision(self.model, self.config)

    @property
    def fingerprint(self) -> str:
        """Return a digest of weights, tokenizer and precision without reading whole weight files."""
        from graftlm.core.model.fingerprint import model_fingerprint

        return model_fingerprint(self.model, self.config)

    def answers_on(self) -> bool:
        """Return False: no thread beside the engine's delivers answers."""
        return False

    def compile_ahead(self) -> None:
        """Start to compile CPU loops, once, before torch is imported; not for models of other engines."""
        if not self._compiles and self.config.engine == "local":
            self._compiles = True
            from graftlm.core.model.loop_shapes import start_compiling

            start_compiling(self.model, self.config)

    def waves(self, requests: Sequence[Request]) -> Iterator[slice]:
        """Cut a batch into waves to prepare one after the other; new pictures of the next one are read meanwhile."""
        from graftlm.core.media.processor import media_parts
        from graftlm.core.serving.prompt_waves import messages_of, waves

        media = None if self._tokenizer is None else self._tokenizer.media
        if media is None:
            yield from waves(requests)
            return
        cut = list(waves(requests, media.knows))
        held: list[Any] = []
        for number, part in enumerate(cut):
            if len(cut) > 1:
                with suppress(GraftError):  # which `prepare` raises again, for its own request
                    near = [request for each in cut[number : number + 2] for request in requests[each]]
                    chats = [messages_of(request.prompt) for request in near]
                    held = media.expect([media_parts(to_messages(chat)) for chat in chats if chat])
            yield part
        held.clear()

    def prepare(self, requests: Sequence[Request]) -> list[Prepared | GraftError]:
        """Tokenise prompts as one batch and start to compile constraints, on the caller's thread.

        An error belongs to its request alone.
        """
        if not self._takes_ids:
            return [Prepared() for _ in requests]
        try:
            prompts = self.processor.encode_batch([(request.prompt, request.tools) for request in requests])
        except GraftError as error:  # the tokenizer is missing
            return [error for _ in requests]
        return [self._with_grammar(request, prompt) for request, prompt in zip(requests, prompts, strict=True)]

    def _with_grammar(self, request: Request, prompt: PromptInput | GraftError) -> Prepared | GraftError:
        if isinstance(prompt, GraftError):
            return prompt
        limited = request.thinking is not None and request.thinking_budget is not None
        if not (request.sampling.constrained or limited) or not self._takes_constraints:
            return Prepared(prompt)
        from graftlm.core.constraint import compile_constraint, constraint_behind_thinking

        try:
            if request.thinking is not None:
                return Prepared(prompt, constraint_behind_thinking(request, self.tokenizer, self.config.grammar_engine))
            engine = self.config.grammar_engine
            grammar = compile_constraint(request.sampling, self.tokenizer, engine, prompt=request.prompt)
            return Prepared(prompt, grammar)
        except BaseException as error:  # a panic of Rust code
            return failure_of(error)

    @cached_property
    def _takes_ids(self) -> bool:
        return self._engine("takes_ids")

    @cached_property
    def _takes_constraints(self) -> bool:
        return self._engine("takes_constraints")

    def _engine(self, attribute: str) -> bool:
        """Return a flag of the engine's factory; True for the local engine and for factories without the flag."""
        from graftlm.plugins import manager

        return self.config.engine == "local" or getattr(manager.load().engines[self.config.engine], attribute, True)

    def build_engine(self, wake: Callable[[], None]) -> Engine:
        """Load the model and build the configured engine over it, on the thread that will own it."""
        self.compile_ahead()
        from graftlm.plugins import manager

        build = manager.load().engines[self.config.engine]
        tokenizer = self.tokenizer if self._takes_ids else None
        engine: Engine = build(self.model, self.config, tokenizer=tokenizer, wake=wake)
        return engine


def check_model(model: Any, config: EngineConfig) -> None:
    """Raise a ConfigError unless `model` is a model; a plugin's engine or loader checks its own models."""
    wanted = "give a Hugging Face id, a local folder, a GGUF file, a loaded transformers model or 'sprout'"
    if model is None or (isinstance(model, str) and not model):
        raise ConfigError(f"model is empty; {wanted}")
    if hasattr(model, "submit_many"):
        raise ConfigError(f"model is {model!r}, a runtime already; {wanted}, or pass it to an adapter as runtime=")
    of_plugin = (config.engine, config.loader) != ("local", "hf")
    loaded = callable(getattr(model, "named_parameters", None))
    if not (of_plugin or loaded or isinstance(model, str | os.PathLike)):
        raise ConfigError(f"model is {reprlib.repr(model)}; {wanted}")
    if config.revision is not None:
        name = "" if loaded else os.fspath(model)
        local = not name or name == "sprout" or name.startswith("ollama:") or os.path.exists(os.path.expanduser(name))
        if local:
            what = repr(name) if name else "a loaded model"
            raise ConfigError(f"revision is {config.revision!r}, but {what} has none; leave revision out")
