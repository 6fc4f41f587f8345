"""Guidance's engine over a runtime: each grammar is one request in the continuous batch.

Guidance passes a whole grammar per call. The matcher of a regular grammar is the compressed automaton; for any other
grammar, guidance's own parser (llguidance) runs beside the sequence. All threads on one engine share every forward, and
captures, stops, token limits and temperatures have guidance's semantics.
"""

from __future__ import annotations

import codecs
import math
import random
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import llguidance
import numpy as np

from graftlm.adapters.guidance.chat import chat_template_of
from graftlm.adapters.guidance.fsm import FsmParser
from graftlm.adapters.guidance.lowering import Regular, lower
from graftlm.adapters.guidance.parser import Parser
from graftlm.adapters.guidance.prompt import Known, PromptTokens
from graftlm.adapters.guidance.scores import Scores
from graftlm.adapters.guidance.streaming import cancelled_with_reader
from graftlm.core.chat.messages import ImagePart
from graftlm.core.config import SamplingParams
from graftlm.core.constraint import vocabulary_of
from graftlm.core.errors import ConfigError, GrammarError, RequestTooLong
from graftlm.core.grammar.cache import compile_cached
from graftlm.core.grammar.engines.fsm import FsmGrammar
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.spec import Composite
from graftlm.core.request import Completion, Request, TokenLogprob
from graftlm.core.runtime import Runtime
from guidance._ast import GrammarNode
from guidance._schema import EngineResponse, GenToken, GenTokenExtra, TokenUsage
from guidance.chat import ChatMLTemplate
from guidance.models._engine import Engine, EngineState, LogitsOutput
from guidance.models._engine._interpreter import recode_special_tokens
from guidance.models._transformers import TransformersTokenizer

_HEALED = 64  # tokens at the end that are compared first
_seeds: ContextVar[random.Random | None] = ContextVar("graftlm_guidance_seeds", default=None)


class Grammar:
    """A grammar node and its compiled forms, computed on demand."""

    def __init__(self, node: GrammarNode) -> None:
        self.node = node

    @property
    def text(self) -> str:
        """The grammar in llguidance's Lark."""
        return self.node.ll_grammar()

    @property
    def regular(self) -> Regular | None:
        return lower(self.node)


class GraftState(EngineState):
    """The transcript; `known` are the ids of a prefix of it, `media` the pictures whose markers it holds, in order."""

    known: Known = Known()
    media: tuple[ImagePart, ...] = ()


@dataclass
class Written:
    """The text of one grammar. `captures` are the variables of each step with their log-probabilities, in order."""

    text: bytes = b""
    captures: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    usage: TokenUsage = field(default_factory=lambda: TokenUsage(round_trips=1, ff_tokens=0))


class GraftEngine(Engine):
    """The engine that all copies of one `GraftModel` share.

    With `enable_token_probabilities` tokens carry the model's probability, and with `enable_top_k` the likeliest
    `top_k` too. An engine whose `get_logits` was replaced, and a call with a step configuration, run guidance's
    own loop over `get_logits`: slower, token by token.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        chat_template: Any = None,
        enable_backtrack: bool = True,
        enable_ff_tokens: bool = True,
        enable_monitoring: bool = False,
        enable_token_probabilities: bool = False,
        enable_top_k: bool = False,
        top_k: int = 5,
        seed: int | None = None,
    ) -> None:
        if chat_template is None:
            chat_template = chat_template_of(runtime.tokenizer) or ChatMLTemplate
        tokenizer = TransformersTokenizer(runtime.tokenizer.complete, chat_template)
        super().__init__(
            tokenizer,
            enable_backtrack=enable_backtrack,
            enable_ff_tokens=enable_ff_tokens,
            enable_monitoring=enable_monitoring,
            enable_token_probabilities=enable_token_probabilities,
            enable_top_k=enable_top_k,
            top_k=top_k,
        )
        self.runtime = runtime
        self._vocab_size = tokenizer._vocab_size
        self._prompts = PromptTokens(tokenizer, runtime.tokenizer)
        self._seeds = None if seed is None else random.Random(seed)
        self._seeds_lock = threading.Lock()

    def get_logits(self, token_ids: list[int], include_all_uncached_tokens: bool = False) -> LogitsOutput:
        """Return the logits after the last token, float32 [1, vocab_size], computed in the runtime's batch."""
        completion = self.runtime.submit(Request(list(token_ids), want_logits=True)).result()
        assert completion.logits is not None
        logits = completion.logits[np.newaxis, : self._vocab_size]
        return LogitsOutput(logits=logits, n_tokens=len(token_ids), n_cached=completion.usage.cached_tokens)

    def __call__(
        self,
        state: EngineState,
        grammar: str | Grammar,
        ensure_bos_token: bool = True,
        sampling_params: Any = None,
        step_config: Any = None,
    ) -> Generator[EngineResponse, None, TokenUsage]:
        """Extend the prompt by the grammar: yield the progress of each step, return the usage.

        A grammar given as a node, as `GraftModel` does, runs on the compressed automaton if it is regular.
        Closing the generator cancels the request and frees its KV. Texts and captures end with whole characters: bytes
        of a character that a token limit cuts are dropped.
        """
        responses = self._run(state, grammar, ensure_bos_token, sampling_params, step_config)
        return _whole_characters(self.tokenizer, responses)

    def _run(
        self, state: EngineState, grammar: str | Grammar, ensure_bos_token: bool, sampling_params: Any, step_config: Any
    ) -> Generator[EngineResponse, None, TokenUsage]:
        """Run `__call__` without the handling of cut characters."""
        media = state.media if isinstance(state, GraftState) else ()
        if step_config is not None or self.get_logits_replaced:
            if media:
                raise ConfigError("guidance's own loop reads no pictures; leave out the step configuration")
            text = grammar if isinstance(grammar, str) else grammar.text
            usage: TokenUsage = yield from super().__call__(state, text, ensure_bos_token, sampling_params, step_config)
            return usage
        started = time.monotonic()
        usage = TokenUsage(round_trips=1, ff_tokens=0)
        parser, first = self._parser(grammar, state, ensure_bos_token)
        scores = Scores(self.runtime.tokenizer.token_bytes)
        scores.put(first)
        given = [self._token(token_id, is_input=True) for token_id in first]
        yield from self._responses(parser, scores, deque(), given=given)
        while not parser.stopped:
            yield from self._stream(parser, scores, (sampling_params, media), usage)
        parser.check_end()
        usage.total_latency_ms += (time.monotonic() - started) * 1000
        return usage

    def write(self, state: GraftState, grammar: Grammar, sampling_params: Any) -> Written:
        """Return the whole output of `__call__` at once, without the events for display. Blocks."""
        started = time.monotonic()
        written = Written()
        parser, first = self._parser(grammar, state, True)
        scores = Scores(self.runtime.tokenizer.token_bytes)
        scores.put(first)
        self._gather(parser, scores, deque(), written)
        while not parser.stopped:
            began = time.monotonic()
            num_given = len(parser.tokens)
            done = self.runtime.complete(self._request(parser, sampling_params, state.media))
            self._settle(parser, num_given, done)
            self._gather(parser, scores, deque(done.logprobs or ()), written)
            _count(written.usage, parser, done, (time.monotonic() - began) * 1000)
        parser.check_end()
        written.usage.total_latency_ms += (time.monotonic() - started) * 1000
        return written

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """Draw the seeds of grammars that start in this context from a generator of its own, in any order."""
        if self._seeds is None:
            yield
            return
        with self._seeds_lock:
            token = _seeds.set(random.Random(self._seeds.getrandbits(62)))
        try:
            yield
        finally:
            _seeds.reset(token)

    @property
    def get_logits_replaced(self) -> bool:
        """True if `get_logits` is replaced, so that guidance's own loop has to call it."""
        return "get_logits" in vars(self) or type(self).get_logits is not GraftEngine.get_logits

    def _parser(
        self, grammar: str | Grammar, state: EngineState, ensure_bos_token: bool
    ) -> tuple[Parser | FsmParser, tuple[int, ...]]:
        """Return a parser positioned after the prompt, and the tokens that it changed there: forced or healed ones."""
        known = state.known if isinstance(state, GraftState) else Known()
        given, known = self._prompts.encode(state.prompt, known)
        if isinstance(state, GraftState):
            state.known = known
        regular = None if isinstance(grammar, str) else grammar.regular
        compiled = None if regular is None else self._compiled(regular)
        parser: Parser | FsmParser
        if regular is not None and compiled is not None:
            parser = FsmParser(regular, *compiled)
            forced = compiled[0].run(compiled[0].dfa.start)[0]
            whole = self._behind(state.prompt, forced, known) if forced else given
            with_bos = self._prompts.with_bos(whole) if ensure_bos_token else whole
            parser.start(with_bos, forced)
            tokens = parser.tokens[len(with_bos) > len(whole) :]
        else:
            text = grammar if isinstance(grammar, str) else grammar.text
            interpreter = llguidance.LLInterpreter(
                self.tokenizer._ll_tokenizer, text, self.enable_backtrack, self.enable_ff_tokens, log_level=1
            )
            tokens = interpreter.process_prompt(given)
            parser = Parser(interpreter, self.tokenizer.eos_token_id)
            parser.start(self._prompts.with_bos(tokens) if ensure_bos_token else tokens)
        if not parser.tokens:
            parser.tokens = [self.tokenizer.eos_token_id]  # models without a BOS token start with the end-of-text token
        return parser, tuple(tokens[_num_same(given, tokens) :])

    def settle(self, state: GraftState) -> None:
        """Tokenise a long appended text now, so that states derived from this one reuse the ids."""
        state.known = self._prompts.settle(state.prompt, state.known)

    def _behind(self, prompt: str, forced: bytes, known: Known) -> list[int]:
        """Return the ids of the prompt followed by the grammar's first bytes."""
        try:
            return self._prompts.encode(prompt + forced.decode(), known)[0]
        except UnicodeDecodeError:  # the bytes end within a character
            return self.tokenizer.encode(prompt.encode() + forced)

    def _compiled(self, regular: Regular) -> tuple[FsmGrammar, FsmGrammar | None] | None:
        """Return the automata of a regular grammar and of the part after its free text; None if one is too large."""
        rest = None if regular.free is None else regular.free.rest
        try:
            return self._automaton(regular.node), None if rest is None else self._automaton(rest)
        except GrammarError:
            return None

    def _automaton(self, node: nodes.Node) -> FsmGrammar:
        grammar = compile_cached(Composite(node), vocabulary_of(self.runtime.tokenizer)).compiled
        if not isinstance(grammar, FsmGrammar):
            raise GrammarError("the language is not regular")
        return grammar

    def _stream(
        self, parser: Parser | FsmParser, scores: Scores, options: tuple[Any, tuple[ImagePart, ...]], usage: TokenUsage
    ) -> Iterator[EngineResponse]:
        """Run one request until the end of the text, or until the parser backtracks.

        options  guidance's sampling parameters, and the pictures of the prompt
        """
        num_given, request = len(parser.tokens), self._request(parser, *options)
        began = time.monotonic()
        logprobs: deque[TokenLogprob] = deque()
        num_read = 0
        with self.runtime.submit_stream(request) as chunks, cancelled_with_reader(chunks.close):
            for chunk in chunks:
                num_read += len(chunk.token_ids)
                logprobs.extend(chunk.logprobs or ())
                yield from self._responses(parser, scores, logprobs, up_to=num_read)
            done = chunks.completion
        assert done is not None
        self._settle(parser, num_given, done)
        yield from self._responses(parser, scores, logprobs)
        _count(usage, parser, done, (time.monotonic() - began) * 1000)

    def _gather(
        self, parser: Parser | FsmParser, scores: Scores, logprobs: deque[TokenLogprob], written: Written
    ) -> None:
        """Append the parser's new steps to `written`."""
        for step in parser.steps:
            scores.step(step, logprobs)
            text, captures = step.told()
            written.text += text
            if captures:
                written.captures.append((captures, scores.of(captures)))
        parser.steps.clear()

    def _request(self, parser: Parser | FsmParser, sampling_params: Any, media: tuple[ImagePart, ...]) -> Request:
        """Build the request that continues the parser's text, with the parser as its constraint."""
        prompt: Any = parser.tokens.copy()
        if media:
            processor = self.runtime.tokenizer.media
            assert processor is not None
            prompt = processor.between(prompt, media)
        request = Request(prompt, self._sampling(parser, sampling_params))
        parser.run_in(request)
        return request

    def _settle(self, parser: Parser | FsmParser, num_given: int, done: Completion) -> None:
        """Report an end that the parser did not see: an end-of-text token, or the context length.

        num_given  tokens of the parser before the request
        """
        if parser.finished:
            return
        if isinstance(done.stop, int):
            if num_given + len(done.token_ids) > len(parser.tokens):
                parser.end_of_text(done.stop)  # otherwise the grammar forced that token and continues after it
            return
        length = done.usage.prompt_tokens + len(done.token_ids)
        remedy = "" if self.runtime.config.max_model_len is None else " or raise max_model_len"
        raise RequestTooLong(
            f"the text is {length:,} tokens and the grammar goes on, the context is {self.runtime.max_model_len:,}; "
            f"bound it with max_tokens{remedy}",
            length=length,
            limit=self.runtime.max_model_len,
        )

    def _sampling(self, parser: Parser | FsmParser, given: Any) -> SamplingParams:
        options: dict[str, Any] = {k: v for k, v in (given or {}).items() if v is not None}
        seeds = _seeds.get() or self._seeds
        if seeds is not None:
            with self._seeds_lock:
                options["seed"] = seeds.getrandbits(62)
        top = self._top_k if self._enable_top_k else 0
        return SamplingParams.from_options(
            constraint=parser, max_tokens=None, logprobs=True, top_logprobs=top, **options
        )

    def _responses(
        self,
        parser: Parser | FsmParser,
        scores: Scores,
        logprobs: deque[TokenLogprob],
        *,
        up_to: int | None = None,
        given: Sequence[GenToken] = (),
    ) -> Iterator[EngineResponse]:
        """Yield one response per new step of the parser; the first one begins with `given`.

        up_to  yield only the steps of the request's first `up_to` tokens: the parser runs ahead of the consumer.
        """
        while (step := next(iter(parser.steps), None)) is not None and (up_to is None or step.at <= up_to):
            del parser.steps[0]
            tokens = list(given)
            given = ()
            for i, (token_id, scored) in enumerate(scores.step(step, logprobs)):
                generated = i == 0 and step.issued
                shown = scored if self._enable_token_probabilities else None
                tokens.append(self._token(token_id, shown, is_generated=generated, is_force_forwarded=not generated))
            text, captures = step.told()
            yield EngineResponse(
                new_bytes=text,
                backtrack_bytes=b"",
                capture_groups=captures,
                capture_group_log_probs=scores.of(captures),
                backtrack=0,
                tokens=tokens,
            )

    def _token(self, token_id: int, scored: TokenLogprob | None = None, **flags: bool) -> GenTokenExtra:
        prob = math.nan if scored is None or scored.logprob is None else math.exp(scored.logprob)
        top = () if scored is None else scored.top
        return GenTokenExtra(
            token_id=token_id,
            bytes=self.tokenizer.decode([token_id]),
            prob=prob,
            top_k=[
                GenToken(token_id=i, bytes=self.tokenizer.decode([i]), prob=math.exp(value), **flags)
                for i, _, value in top
            ],
            **flags,
        )


def _whole_characters(
    tokenizer: Any, responses: Generator[EngineResponse, None, TokenUsage]
) -> Generator[EngineResponse, None, TokenUsage]:
    """Yield the responses without incomplete characters at the ends of texts and captures; return the usage."""
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    with closing(responses):
        while True:
            try:
                response = next(responses)
            except StopIteration as stop:
                usage: TokenUsage = stop.value
                return usage
            response.new_bytes = decoder.decode(recode_special_tokens(tokenizer, response.new_bytes)).encode()
            response.capture_groups = {name: _whole(value) for name, value in response.capture_groups.items()}
            yield response


def _whole(captured: Any) -> Any:
    if isinstance(captured, list):
        return [_whole(one) for one in captured]
    return captured.decode(errors="ignore").encode()


def _num_same(a: list[int], b: list[int]) -> int:
    """Return the number of equal first tokens; healing changes only the last ones."""
    least = max(min(len(a), len(b)) - _HEALED, 0)
    least = least if a[:least] == b[:least] else 0
    pairs = enumerate(zip(a[least:], b[least:], strict=False), least)
    return next((i for i, (one, other) in pairs if one != other), min(len(a), len(b)))


def _count(usage: TokenUsage, parser: Parser | FsmParser, done: Completion, latency_ms: float) -> None:
    """Count as guidance's own engines do: each sampled token is one forward pass, forced tokens are none."""
    native = done.usage
    sampled = native.completion_tokens - native.forced_tokens
    usage.input_tokens += native.prompt_tokens + max(native.completion_tokens - 1, 0)
    usage.cached_input_tokens += native.cached_tokens
    usage.forward_passes += sampled
    usage.ff_tokens = (usage.ff_tokens or 0) + parser.num_forced
    parser.num_forced = 0
    if usage.ttft_ms == 0 and sampled:
        usage.ttft_ms = latency_ms / sampled
