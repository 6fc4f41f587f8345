"""Body: the fields of both endpoints that become SamplingParams, under OpenAI's, vLLM's and SGLang's names."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from graftlm.adapters.server.access import current
from graftlm.adapters.server.settings import Limits
from graftlm.core.answer_format import schema_of_format
from graftlm.core.config import SamplingParams
from graftlm.core.errors import ConfigError
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.spec import Composite
from graftlm.core.request import Request


class Fields(BaseModel):
    """Fields of a body, or of an object in it. A null is absent; an unknown field is refused with its name."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        if isinstance(given, dict) and None in given.values():
            return {name: value for name, value in given.items() if value is not None}
        return given


class StreamOptions(Fields):
    """`stream_options`: token counts in the last chunk, or in each one. Padding of chunks does not exist."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class StructuredOutputs(Fields):
    """`structured_outputs` of vLLM. Exactly one of the first four fields must be set."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: None = None


class Body(Fields):
    """Sampling and constraints of a request."""

    SAME_NAME: ClassVar[tuple[str, ...]] = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "min_tokens",
        "ignore_eos",
        "stop_token_ids",
        "seed",
        "logit_bias",
    ) + (
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "on_unsupported",
        "timeout",
        "stop",
        "allowed_token_ids",
    )

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=128)
    max_tokens: int | None = Field(default=None, ge=-1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    timeout: float | None = None

    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: dict[str, Any] | str | None = None
    response_format: dict[str, Any] | None = None
    on_unsupported: Literal["error", "warn"] | None = None

    cache_salt: str | None = None
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = Field(default=None, ge=0, le=20)
    truncate_prompt_tokens: int | None = Field(default=None)
    priority: int = 0
    request_id: str | None = Field(default=None, pattern=r"^[\w.:-]{1,128}$")
    spaces_between_special_tokens: bool = True

    # SGLang's router sends these in every request; only the values that have no effect are supported.
    no_stop_trim: Literal[False] = False
    return_hidden_states: Literal[False] = False
    separate_reasoning: bool = True
    stream_reasoning: bool = True

    # Accepted without an effect.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def num_sequences(self) -> int:
        """The number of sequences that the request runs."""
        return self.n or 1

    @property
    def limit_name(self) -> str:
        """The field that limits the generated tokens."""
        return "max_tokens"

    def check(self, limits: Limits) -> None:
        """Raise ConfigError for a request beyond the limits, before it costs more than its parsing."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        given = self.structured_outputs or StructuredOutputs()
        texts = [given.json_, given.regex, given.grammar, self.guided_json, self.guided_regex, self.guided_grammar]
        texts += [self.regex, self.ebnf, self.json_schema, *(given.choice or ()), *(self.guided_choice or ())]
        written = sum(len(text) for text in texts if isinstance(text, str))
        if self.truncate_prompt_tokens is not None and (
            self.truncate_prompt_tokens < -1 or not self.truncate_prompt_tokens
        ):
            raise ConfigError(f"truncate_prompt_tokens is {self.truncate_prompt_tokens}; give 1 or more, or -1")
        limit("stop", len(stop), limits.stop_strings, "strings")
        limit("stop", sum(map(len, stop)), limits.stop_chars, "characters")
        limit("bad_words", len(self.bad_words or ()), limits.stop_strings, "strings")
        limit("bad_words", sum(map(len, self.bad_words or ())), limits.stop_chars, "characters")
        limit("cache_salt", len(self.cache_salt or ""), limits.salt_chars, "characters")
        limit("constraint", written, limits.constraint_chars, "characters")
        limit("n times the prompts", self.num_sequences, limits.sequences_per_request, "sequences")

    @property
    def namespace(self) -> str:
        """The KV namespace: that of the current caller's key, and `cache_salt` within it."""
        return current().namespace + (self.cache_salt or "")

    @property
    def with_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def counts_on(self) -> bool:
        """True if each chunk reports the number of tokens so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def sampling(self, max_tokens: int | None, *, logprobs: int | None, **constraint: Any) -> SamplingParams:
        """Return the sampling parameters.

        logprobs    number of likeliest tokens to report with each token; None reports no log-probabilities.
        constraint  keywords of SamplingParams in addition to the body's own, or in their place.
        """
        given = {name: value for name in self.SAME_NAME if (value := getattr(self, name)) is not None}
        given |= {"n": self.n or 1, "max_tokens": max_tokens, "logprobs": logprobs is not None}
        given["top_logprobs"] = logprobs or 0
        compact = self.structured_outputs.disable_any_whitespace if self.structured_outputs is not None else None
        if compact is not None:
            given["whitespace"] = "compact" if compact else "flexible"
        given |= {"include_stop": self.include_stop_str_in_output, "special_tokens": not self.skip_special_tokens}
        if self.bad_words:
            if any(name in constraint for name in CONSTRAINTS):
                raise ConfigError("bad_words was given beside a constraint or tools; give one of them")
            given["constraint"] = without(tuple(self.bad_words))
        return SamplingParams.from_options(**{**given, **constraint})

    def request(self, prompt: Any, sampling: SamplingParams, tools: list[dict[str, Any]] | None = None) -> Request:
        return Request(
            prompt,
            sampling,
            namespace=self.namespace,
            stream=self.stream,
            stream_usage=self.counts_on,
            tools=tools,
            priority=self.priority,
        )

    def constraint(self) -> dict[str, Any]:
        """Return the constraint as keywords of SamplingParams; {} for free text. Raises ConfigError for two."""
        found: dict[str, dict[str, Any]] = {}
        if self.response_format is not None and (schema := schema_of_format(self.response_format)) is not None:
            found["response_format"] = {"json_schema": schema}
        given = self.structured_outputs or StructuredOutputs()
        for name, value, key in (
            ("structured_outputs.json", given.json_, "json_schema"),
            ("structured_outputs.json_object", {"type": "object"} if given.json_object else None, "json_schema"),
            ("structured_outputs.regex", given.regex, "regex"),
            ("structured_outputs.choice", given.choice, "choices"),
            ("structured_outputs.grammar", given.grammar, "grammar"),
            ("guided_json", self.guided_json, "json_schema"),
            ("guided_regex", self.guided_regex, "regex"),
            ("guided_choice", self.guided_choice, "choices"),
            ("guided_grammar", self.guided_grammar, "grammar"),
            ("regex", self.regex, "regex"),
            ("ebnf", self.ebnf, "grammar"),
            ("json_schema", self.json_schema, "json_schema"),
        ):
            if value is not None:
                found[name] = {key: _read_schema(name, value) if key == "json_schema" else value}
        if len(found) > 1:
            raise ConfigError(f"{' and '.join(found)} were both given; a request takes one constraint")
        return next(iter(found.values()), {})


CONSTRAINTS = ("regex", "choices", "json_schema", "grammar", "constraint")


@lru_cache(maxsize=64)
def without(words: tuple[str, ...]) -> Composite:
    """Return the language of all texts in which none of the words occurs, however they are tokenised."""
    if not all(words):
        raise ConfigError("bad_words has an empty string; leave it out")
    anything = nodes.star(nodes.char_set([(0, nodes.MAX_CODE_POINT)]))
    bad = nodes.concat(anything, nodes.alternation(*map(nodes.literal, words)), anything)
    return Composite(nodes.Difference(anything, bad))


def limit(name: str, value: int, most: int, unit: str) -> None:
    """Raise ConfigError if `value` is above `most`."""
    if value > most:
        raise ConfigError(f"{name} has {value:,} {unit}, the server takes {most:,}; send fewer")


def _read_schema(name: str, value: Any) -> Any:
    """Parse a schema given as an object, or as its JSON text."""
    if not isinstance(value, str):
        return value
    import json

    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is no JSON: {error}; give the schema as an object or as its JSON text") from error
