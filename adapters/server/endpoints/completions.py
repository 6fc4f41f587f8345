"""`/v1/completions`: prompts as text or token ids; `echo` and `logprobs` score a given text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import Field

from graftlm.adapters.server.endpoints.body import Body
from graftlm.adapters.server.endpoints.prompt_fields import needs_prompt_ids, prompt_ids, prompt_logprobs_of, scoring
from graftlm.adapters.server.http.responses import OpenAIStream
from graftlm.adapters.server.http.wire import Envelope, escaped, usage_of
from graftlm.core.errors import ConfigError
from graftlm.core.request import Chunk, Completion, Request, TokenLogprob, Usage
from graftlm.core.runtime import Runtime
from graftlm.core.text.detokenizer import MAX_UNFINISHED
from graftlm.core.text.tokenizer import Tokenizer

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
        """Return the prompts, before `n` multiplies them."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ConfigError("prompt is empty; give text or token ids")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @property
    def num_sequences(self) -> int:
        many = isinstance(self.prompt, list) and not (self.prompt and isinstance(self.prompt[0], int))
        return (self.n or 1) * (len(self.prompt) if many else 1)

    @property
    def needs_ids(self) -> bool:
        """True if the prompt's token ids are needed before it runs."""
        return self.echo or self.return_token_ids or needs_prompt_ids(self)

    def to_calls(self, runtime: Runtime) -> list[Call]:
        """Return one call for each prompt. Tokenises if `needs_ids`, so a thread should run it."""
        limit = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        unlimited = limit == -1
        if limit == 0 and not self.echo:
            raise ConfigError("max_tokens is 0; it must be at least 1, or echo must be true")
        if self.echo and self.stream and self.logprobs is not None:
            raise ConfigError("echo with logprobs cannot be streamed; leave out stream, or one of them")
        sampling = self.sampling(None if unlimited else max(limit, 1), logprobs=self.logprobs, **self.constraint())
        calls = []
        for prompt in self.prompts:
            ids = prompt_ids(self, runtime, prompt) if self.needs_ids else None
            whole = isinstance(prompt, str) and self.truncate_prompt_tokens is None
            echoed = str(prompt) if whole else runtime.tokenizer.decode(ids or ()) if self.echo else ""
            call = Call(echoed if self.echo else "", ids)
            if limit:
                call.generate = self.request(ids if ids is not None else prompt, sampling)
            if self.prompt_logprobs is not None or (self.echo and (self.logprobs is not None or not limit)):
                assert ids is not None
                top = max(self.logprobs or 0, self.prompt_logprobs or 0)
                call.score = scoring(ids, top, self.request(ids, sampling))
            calls.append(call)
        return calls


@dataclass
class Call:
    """One prompt and its requests.

    echoed     the prompt's text if the answer begins with it; else empty
    ids        its token ids, if needed
    generate   the request that generates; None if only the prompt is scored
    score      the request for the log-probabilities of the prompt
    """

    echoed: str
    ids: list[int] | None = None
    generate: Request | None = None
    score: Request | None = None

    def offsets(self, tokenizer: Tokenizer) -> TokenOffsets:
        """Return the offsets of the generated tokens, which follow the echoed text."""
        return TokenOffsets(tokenizer, len(self.echoed), (self.ids or [])[-MAX_UNFINISHED:])

    def usage(self, completion: Completion) -> Usage:
        """Return the usage of the call; a scored prompt is counted whole, its last token too."""
        if self.generate is not None or self.ids is None:
            return completion.usage
        return replace(completion.usage, prompt_tokens=len(self.ids))


class CompletionWriter(OpenAIStream):
    """A writer of the answer of one HTTP request. The choices of prompt i begin at i * n."""

    def __init__(self, body: CompletionBody, envelope: Envelope, calls: Sequence[Call], runtime: Runtime) -> None:
        super().__init__(envelope)
        self._body = body
        self._calls = calls
        self._tokenizer = runtime.tokenizer
        self._n = body.n or 1
        self._plain = body.logprobs is None and not body.return_token_ids and not body.counts_on
        self._offsets: dict[int, TokenOffsets] = {}

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
            usages.append(call.usage(written or scored))  # type: ignore[arg-type]
            items: list[Completion | None] = [*(written.completions or [written])] if written else [None] * self._n
            own = [self._choice(number * self._n + i, call, item, prompt) for i, item in enumerate(items)]
            if self._body.prompt_logprobs is not None and scored is not None:
                top = self._body.prompt_logprobs
                told = prompt_logprobs_of(call.ids or (), scored, top)
                own = [{**choice, "prompt_logprobs": told} for choice in own]
            choices += own
        return {**self._envelope.of("text_completion"), "choices": choices, "usage": usage_of(usages)}

    def pieces(self, number: int, chunk: Chunk) -> Iterator[bytes]:
        """Yield the chunks of OpenAI's stream for `chunk`."""
        index, text = number * self._n + chunk.index, chunk.text
        if index not in self._offsets:
            call = self._calls[number]
            self._offsets[index] = call.offsets(self._tokenizer)
            text = call.echoed + text
        if self._plain and chunk.finish_reason is None:
            head, tail = self._envelope.around(index, b'"text":', b',"logprobs":null,"finish_reason":null')
            yield head + escaped(text) + tail
            return
        beside: dict[str, Any] = {"token_ids": chunk.token_ids} if self._body.return_token_ids else {}
        logprobs = None
        if chunk.logprobs is not None:
            logprobs = logprobs_of(self._tokenizer, chunk.logprobs, self._offsets[index].push(chunk.logprobs))
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": chunk.finish_reason}
        yield self._envelope.chunk({**choice, **beside}, chunk.usage if self._body.counts_on else None)

    def ended(self, number: int, completion: Completion) -> Iterator[bytes]:
        """Return the chunks of a call that only scores its prompt, which generates none."""
        call = self._calls[number]
        if call.generate is None:
            for index in range(number * self._n, (number + 1) * self._n):
                ids = {"prompt_token_ids": call.ids, "token_ids": []} if self._body.return_token_ids else {}
                choice = {"index": index, "text": call.echoed, "logprobs": None, "finish_reason": "length", **ids}
                yield self._envelope.chunk(choice, call.usage(completion) if self._body.counts_on else None)

    def usages(self, completions: Sequence[Completion]) -> list[Usage]:
        """Return the usage of each call of a stream, which has one request per call."""
        return [call.usage(one) for call, one in zip(self._calls, completions, strict=True)]

    def _choice(
        self, index: int, call: Call, item: Completion | None, prompt: list[TokenLogprob] | None
    ) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs is not None:
            written = (item.logprobs or []) if item is not None else []
            offsets = [
                *(prompt_offsets(self._tokenizer, call) if prompt else ()),
                *call.offsets(self._tokenizer).push(written),
            ]
            logprobs = logprobs_of(self._tokenizer, [*(prompt or []), *written], offsets, scored=prompt is not None)
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
        """Return the log-probabilities of the prompt's tokens; the first has none."""
        if scored is None or call.ids is None or self._body.logprobs is None or not self._body.echo:
            return None
        rest = scored.logprobs or [] if len(call.ids) > 1 else []
        return [
            replace(one, token_id=token_id, top=one.top[: self._body.logprobs], top_data=None)
            if one is not None
            else TokenLogprob(token_id, "", None)
            for token_id, one in zip(call.ids, [None, *rest], strict=True)
        ]


class TokenOffsets:
    """The start offsets of tokens, in characters of an answer's text.

    start   length of the text before the tokens
    before  the last ids of the prompt
    """

    def __init__(self, tokenizer: Tokenizer, start: int, before: Sequence[int] = ()) -> None:
        self._detokenizer = tokenizer.detokenizer(before)
        self.end = start

    def push(self, tokens: Iterable[TokenLogprob]) -> list[int]:
        """Return the start offsets of the next tokens. Tokens within one character have the character's offset."""
        offsets = []
        for one in tokens:
            offsets.append(self.end)
            self.end += len(self._detokenizer.push([one.token_id]))
        return offsets


def prompt_offsets(tokenizer: Tokenizer, call: Call) -> list[int]:
    """Return the start offset of each token of an echoed prompt in its text, which may lack the first token's space."""
    offsets = TokenOffsets(tokenizer, 0)
    begins = offsets.push(TokenLogprob(i, "", None) for i in call.ids or ())
    missing = max(0, offsets.end - len(call.echoed))
    return [max(0, begin - missing) for begin in begins]


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text of a token: the name of a special one, `bytes:` and escaped bytes for part of a character."""
    table = tokenizer.token_bytes
    data = table[token_id] if 0 <= token_id < len(table) else b""
    if not data:
        return str(tokenizer.hf.convert_ids_to_tokens(token_id))
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def logprobs_of(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], offsets: Sequence[int], *, scored: bool = False
) -> dict[str, Any]:
    """Return log-probabilities in the form of the older API.

    offsets  start offset of each token in the text
    scored   True if the first token has no log-probability, because it begins the prompt
    """
    tokens = [token_text(tokenizer, one.token_id) for one in logprobs]
    values, tops = [], []
    for index, one in enumerate(logprobs):
        unknown = scored and index == 0
        value = None if unknown else one.logprob or 0.0
        values.append(value)
        top = {token_text(tokenizer, i): chance for i, _, chance in one.top}
        if value is not None:
            top.setdefault(tokens[index], value)
        tops.append(None if unknown else top)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": list(offsets)}
