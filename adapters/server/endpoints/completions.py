"""`/v1/completions`: prompts as text or token ids; `echo` and `logprobs` score a given text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from graftlm.adapters.server.endpoints.body import Body
from graftlm.adapters.server.http.wire import Envelope, escaped, usage_of
from graftlm.core.config import SamplingParams
from graftlm.core.errors import ConfigError
from graftlm.core.request import Chunk, Completion, Request, TokenLogprob
from graftlm.core.runtime import Runtime

DEFAULT_MAX_TOKENS = 16


class CompletionBody(Body):
    """The body of a text completion."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool = False
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One for each choice, before `n` multiplies them."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ConfigError("prompt is empty; give text or token ids")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @property
    def needs_ids(self) -> bool:
        """Whether the prompt's token ids are wanted before it runs."""
        return self.echo or self.return_token_ids

    def to_calls(self, runtime: Runtime) -> list[Call]:
        """One call for each prompt. Where `needs_ids`, this tokenises, so it belongs on a thread."""
        limit = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        if limit == 0 and not self.echo:
            raise ConfigError("max_tokens is 0; it must be at least 1, or echo must be true")
        if self.echo and self.stream and self.logprobs is not None:
            raise ConfigError("echo with logprobs cannot be streamed; leave out stream, or one of them")
        sampling = self.sampling(max(limit, 1), logprobs=self.logprobs, **self.constraint())
        calls = []
        for prompt in self.prompts:
            ids = runtime.tokenizer.encode_prompt(prompt).tolist() if self.needs_ids else None
            echoed = prompt if isinstance(prompt, str) else runtime.tokenizer.decode(prompt) if self.echo else ""
            call = Call(echoed if self.echo else "", ids)
            if limit:
                call.generate = self.request(ids if ids is not None else prompt, sampling)
            if self.echo and (self.logprobs is not None or not limit):
                scored = SamplingParams(logprobs=True, top_logprobs=self.logprobs or 0, timeout=sampling.timeout)
                assert ids is not None
                call.score = Request(ids[:1], scored, namespace=self.cache_salt or "", score_ids=ids[1:] or ids[:1])
            calls.append(call)
        return calls


@dataclass
class Call:
    """One prompt and what is asked about it.

    echoed     the prompt's text, where the answer begins with it
    ids        its token ids, where they are wanted
    generate   the request that writes; None where only the prompt is scored
    score      the request that gives the log-probabilities of the prompt
    """

    echoed: str
    ids: list[int] | None = None
    generate: Request | None = None
    score: Request | None = None


class CompletionWriter:
    """Writes the answer of one HTTP request. The choices of prompt i are those from i * n on."""

    def __init__(self, body: CompletionBody, envelope: Envelope, calls: Sequence[Call], runtime: Runtime) -> None:
        self._body = body
        self._envelope = envelope
        self._calls = calls
        self._tokenizer = runtime.tokenizer
        self._n = body.n or 1
        self._plain = body.logprobs is None and not body.return_token_ids and not body.counts_on
        self._offsets: dict[int, int] = {}

    @property
    def requests(self) -> list[Request]:
        return [r for call in self._calls for r in (call.generate, call.score) if r is not None]

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        usages = []
        given = iter(completions)
        for number, call in enumerate(self._calls):
            written = next(given) if call.generate is not None else None
            scored = next(given) if call.score is not None else None
            prompt = self._prompt_logprobs(call, scored)
            usages.append((written or scored).usage)  # type: ignore[union-attr]
            items: list[Completion | None] = [*(written.completions or [written])] if written else [None] * self._n
            choices += [self._choice(number * self._n + i, call, item, prompt) for i, item in enumerate(items)]
        return {**self._envelope.of("text_completion"), "choices": choices, "usage": usage_of(usages)}

    def pieces(self, number: int, chunk: Chunk) -> Iterator[bytes]:
        """The chunks of OpenAI's stream that say what `chunk` says."""
        index, text = number * self._n + chunk.index, chunk.text
        if index not in self._offsets:
            echoed = self._calls[number].echoed
            self._offsets[index] = len(echoed)
            text = echoed + text
        if self._plain and chunk.finish_reason is None:
            head, tail = self._envelope.around(index, b'"text":', b',"logprobs":null,"finish_reason":null')
            yield head + escaped(text) + tail
            return
        beside: dict[str, Any] = {"token_ids": chunk.token_ids} if self._body.return_token_ids else {}
        logprobs = None
        if chunk.logprobs is not None:
            logprobs = logprobs_of(chunk.logprobs, self._offsets[index])
            self._offsets[index] += sum(len(one.token) for one in chunk.logprobs)
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": chunk.finish_reason}
        yield self._envelope.chunk({**choice, **beside}, chunk.usage if self._body.counts_on else None)

    def _choice(
        self, index: int, call: Call, item: Completion | None, prompt: list[TokenLogprob] | None
    ) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs is not None:
            written = (item.logprobs or []) if item is not None else []
            logprobs = logprobs_of([*(prompt or []), *written], 0, scored=prompt is not None)
        choice = {
            "index": index,
            "text": call.echoed + (item.text if item is not None else ""),
            "logprobs": logprobs,
            "finish_reason": item.finish_reason if item is not None else "length",
            "stop_reason": item.stop if item is not None and isinstance(item.stop, str) else None,
        }
        if self._body.return_token_ids:
            choice |= {"prompt_token_ids": call.ids, "token_ids": item.token_ids if item is not None else []}
        return choice

    def _prompt_logprobs(self, call: Call, scored: Completion | None) -> list[TokenLogprob] | None:
        """Those of the prompt's tokens; the first has none."""
        if scored is None or call.ids is None or self._body.logprobs is None:
            return None
        rest = scored.logprobs or [] if len(call.ids) > 1 else []
        texts = token_texts(self._tokenizer, call.ids)
        return [
            TokenLogprob(token_id, text, one.logprob if one is not None else None, one.top if one is not None else ())
            for token_id, text, one in zip(call.ids, texts, [None, *rest], strict=True)
        ]


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token; special ones by their name."""
    table = tokenizer.token_bytes
    return [
        table[i].decode("utf-8", "replace")
        if i < len(table) and table[i]
        else str(tokenizer.hf.convert_ids_to_tokens(i))
        for i in ids
    ]


def logprobs_of(logprobs: Sequence[TokenLogprob], offset: int, *, scored: bool = False) -> dict[str, Any]:
    """Log-probabilities in the form of the older API.

    scored  whether the first token has none, because it begins the prompt.
    """
    offsets, values, tops = [], [], []
    for place, one in enumerate(logprobs):
        offsets.append(offset)
        offset += len(one.token)
        unknown = scored and place == 0
        value = None if unknown else 0.0 if one.logprob is None else one.logprob
        values.append(value)
        top = {text: chance for _, text, chance in one.top}
        if value is not None:
            top.setdefault(one.token, value)
        tops.append(None if unknown else top)
    tokens = [one.token for one in logprobs]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
