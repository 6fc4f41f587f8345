"""Options of a runtime and of a request: frozen dataclasses, validated on construction."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache, wraps
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypedDict, TypeVar

from graftlm.core.errors import ConfigError, shortened
from graftlm.core.media.limits import MediaLimits

if TYPE_CHECKING:
    from graftlm.core.kv.radix import Node

LEAST_FOLDER_BYTES = 64 << 20
"""Bytes: a smaller cache folder would hold a few hundred tokens of a usual model."""

EvictionKey = Callable[["Node"], Any]
_Options = TypeVar("_Options")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _check_whole(name: str, value: Any, least: int, unit: str = "", *, optional: bool = False) -> None:
    if value is None and optional:
        return
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    _check(
        whole and value >= least,
        f"{name} is {value!r}; it must be {'' if whole else 'a whole number, '}at least {least}{unit}"
        + (", or None" if optional else ""),
    )


def _check_switch(name: str, value: Any, *, optional: bool = False, hint: str = "") -> None:
    given = isinstance(value, bool) or (optional and value is None)
    _check(given, f"{name} is {value!r}; it must be True or False{', or None' if optional else ''}{hint}")


def _is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def near_name(name: str, known: Sequence[str], likeness: float = 0.5) -> str | None:
    """Return the known name nearest to `name`, None below `likeness`; equal names have a likeness of 1."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=likeness)), None)


_ELSEWHERE = {
    "gpu_memory_utilization": ("cache", "cache=CacheConfig(memory_share=...)"),
    "mem_fraction_static": ("cache", "cache=CacheConfig(memory_share=...)"),
    "kv_cache_dtype": ("cache", "cache=CacheConfig(dtype=...)"),
    "enable_prefix_caching": ("cache", "cache=CacheConfig(enabled=...)"),
    "max_num_seqs": ("max_batch", "max_batch"),
    "max_num_batched_tokens": ("max_step_tokens", "max_step_tokens"),
    "n_ctx": ("max_model_len", "max_model_len"),
    "num_ctx": ("max_model_len", "max_model_len"),
    "n_threads": ("device", "the environment variable OMP_NUM_THREADS"),
    "n_gpu_layers": ("device", "device='cuda', which holds all layers"),
    "tensor_parallel_size": ("tensor_parallel", "tensor_parallel"),
    "load_in_8bit": ("quantization", "quantization='bnb-8bit'"),
    "load_in_4bit": ("quantization", "quantization='bnb-4bit'"),
    "max_new_tokens": ("max_tokens", "max_tokens"),
    "max_completion_tokens": ("max_tokens", "max_tokens"),
    "num_predict": ("max_tokens", "max_tokens"),
    "stop_sequences": ("stop", "stop"),
    "stop_strings": ("stop", "stop"),
    "response_format": ("json_schema", "json_schema; {'type': 'object'} for any object"),
    "do_sample": ("temperature", "temperature=0 for greedy decoding, above 0 for samples"),
    "num_return_sequences": ("n", "n"),
    "guided_json": ("json_schema", "json_schema"),
    "guided_regex": ("regex", "regex"),
    "guided_choice": ("choices", "choices"),
    "guided_grammar": ("grammar", "grammar"),
    "num_beams": ("", "gl.beam, a search over continuations"),
    "generate_kwargs": ("max_tokens", "its entries themselves: max_tokens=, temperature=, top_p=, ..."),
    "pipeline_kwargs": ("max_tokens", "its entries themselves: max_tokens=, temperature=, top_p=, ..."),
    "token": ("", "the environment variable HF_TOKEN"),
    "use_auth_token": ("", "the environment variable HF_TOKEN"),
    "cache_dir": ("", "the environment variable HF_HUB_CACHE"),
    "local_files_only": ("", "the environment variable HF_HUB_OFFLINE=1"),
}
"""Options of other libraries: the option of GraftLM that does the same, "" for what is no option; how to write it."""

_OF_REQUESTS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "json_schema", "regex")
"""Options of a request that are given to a runtime."""

_SAME = {"torch_dtype": "dtype", "device_map": "device"}
"""Options as transformers calls them, and their names here."""


def with_own_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a runtime with `torch_dtype` and `device_map`, as transformers calls them, under their names.

    Raises ConfigError for an option that is given under both names.
    """
    for theirs, ours in _SAME.items():
        both = theirs in options and ours in options
        _check(not both, f"{theirs} and {ours} were both given; they are one option: give {ours}")
    return {_SAME.get(name, name): value for name, value in options.items()}


def reject_unknown(given: Sequence[str], known: Sequence[str], what: str) -> None:
    """Raise a ConfigError that names the first unknown keyword and the one to use instead."""
    for name in given:
        if name not in known:
            meant = near_name(name, [*known, *_ELSEWHERE, *_OF_REQUESTS], 0.85) or ""
            option, remedy = _ELSEWHERE.get(meant, ("", ""))
            if meant in _OF_REQUESTS and "max_step_tokens" in known:
                remedy = f"{meant}= with a prompt: it is an option of a request"
            if meant not in known and (option in known or (remedy and not option)):
                raise ConfigError(f"unknown {what} {name!r}; use {remedy}")
            near = near_name(name, known)
            hint = f"; did you mean {near!r}?" if near else f"; known: {', '.join(sorted(known))}"
            raise ConfigError(f"unknown {what} {name!r}{hint}")


class OneConstructor:
    """A class that says so where it is built by a constructor of transformers or LangChain."""

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> NoReturn:
        """Raise ConfigError: the class itself is the constructor."""
        name = cls.__name__
        raise ConfigError(f"{name} has one constructor, {name} itself: {name}(model=NAME, dtype=..., device=...)")

    from_model_id = from_pretrained


def _names_unknown(options: type[_Options]) -> type[_Options]:
    """Make a dataclass raise a ConfigError for an unknown keyword, with the one to use, instead of a TypeError."""
    build: Any = options.__init__
    known = [f.name for f in fields(options)]  # type: ignore[arg-type]

    @wraps(build)
    def checked(self: Any, *values: Any, **given: Any) -> None:
        reject_unknown(list(given), known, f"option of {options.__name__}")
        build(self, *values, **given)

    setattr(options, "__init__", checked)  # noqa: B010 (a class's own constructor, which mypy protects)
    return options


def _as_tuple(value: Any, name: str, kind: str) -> tuple[Any, ...]:
    if isinstance(value, str) or not (value is None or isinstance(value, Iterable)):
        raise ConfigError(f"{name} is {value!r}; give {kind}")
    return tuple(value or ())


def _as_bias(given: Any) -> dict[int, float]:
    """Return the bias of each token id's logit; ids may be strings, as in JSON."""
    try:
        bias = {token if type(token) is int else _as_id(token): float(value) for token, value in given.items()}
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"logit_bias is {shortened(given)}; give token ids and what to add to their logits"
        ) from error
    for token, value in bias.items():
        _check(
            0 <= token < _MOST_IDS, f"logit_bias names token id {shortened(token)}; ids are 0 to the vocabulary's last"
        )
        _check(not math.isnan(value), f"logit_bias of token {token} is nan; give a number")
        _check(
            -_MOST_BIAS <= value <= _MOST_BIAS or value == -math.inf,
            f"logit_bias of token {token} is {value}; it must lie between -1e20 and 1e20, or be -inf for never",
        )
    return bias


def _as_id(token: Any) -> int:
    if isinstance(token, str):
        return int(token)
    if isinstance(token, bool) or not isinstance(token, Integral):
        raise ValueError(token)
    return int(token)


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


@_names_unknown
@dataclass(frozen=True)
class CacheConfig:
    """The KV pool and the radix tree over it.

    max_tokens    slots in the pool.
    max_bytes     size of the pool in bytes.
    memory_share  share of the memory beside the weights, above 0 and at most 1. The least of these three
                  applies; without any, 0.85 on a GPU, and 0.25 on a CPU for at most 64 full contexts.
    eviction      "lru", "lfu" or a sort key `Node -> comparable`: the smallest leaf goes first.
    page_size     tokens per page; matching is by whole pages.
    enabled       False computes every prompt anew.
    states        slots for states, in a model that has layers with a state (Qwen3.5, LFM2, Granite 4 hybrid, ...): one
                  for each running sequence and each cached prefix. None: two for each of `max_batch` sequences, as far
                  as they fit into half of the memory for the pools.
    dtype         "model": the model's own. "compact": bfloat16 in 12 bits a number, for a third more tokens in the same
                  memory and faster decoding of many rows, on a Hopper GPU or a newer one. "fp8": float8_e4m3fn, on a
                  GPU, for twice the tokens. "int8": eight bits, with a scale for each token and head, on a CPU, for
                  nearly twice the tokens of bfloat16 and four times those of float32. "auto": compact where the model
                  and the card allow it and it was measured to be faster (Hopper), otherwise the model's own.
    """

    max_tokens: int | None = None
    max_bytes: int | None = None
    memory_share: float | None = None
    eviction: Literal["lru", "lfu"] | EvictionKey = "lru"
    page_size: int = 1
    enabled: bool = True
    states: int | None = None
    dtype: Literal["auto", "model", "compact", "fp8", "int8"] = "auto"
    host_bytes: int | None = None
    folder: str | os.PathLike[str] | None = None
    folder_bytes: int = 8 << 30

    def __post_init__(self) -> None:
        _check(
            self.dtype in ("auto", "model", "compact", "fp8", "int8"),
            f"the KV dtype is {self.dtype!r}; use 'auto', 'model', 'compact', 'fp8' or 'int8'",
        )
        _check(
            self.folder is None or (isinstance(self.folder, str | os.PathLike) and bool(os.fspath(self.folder))),
            f"folder is {self.folder!r}; give the path of a folder, or None",
        )
        _check_whole("folder_bytes", self.folder_bytes, LEAST_FOLDER_BYTES, " bytes")
        for name in ("max_tokens", "max_bytes", "states", "host_bytes"):
            _check_whole(name, getattr(self, name), 1, optional=True)
        _check_switch("enabled", self.enabled)
        share = self.memory_share
        _check(
            share is None or (_is_real(share) and 0 < share <= 1),
            f"memory_share is {share!r}; it must lie in (0, 1], or be None",
        )
        _check(
            callable(self.eviction) or self.eviction in ("lru", "lfu"),
            f"eviction is {self.eviction!r}; use 'lru', 'lfu' or a function of a radix node",
        )
        _check_whole("page_size", self.page_size, 1)


@_names_unknown
@dataclass(frozen=True)
class SchedulerConfig:
    """The order in which waiting requests start.

    policy      "lpm": longest cached prefix first, aged by waiting time; of requests that arrived together and have as
                much cached, those whose `max_tokens` is above half of the largest start first, then those with the
                fewest prompt tokens to compute. "fcfs": in order of arrival. "random".
    max_age_s   a request that waited longer starts before every younger one, whatever its prefix; requests within
                1/16 of it count as arrived together.
    """

    policy: Literal["lpm", "fcfs", "random"] = "lpm"
    max_age_s: float = 2.0

    def __post_init__(self) -> None:
        _check(
            self.policy in ("lpm", "fcfs", "random"),
            f"policy is {self.policy!r}; use 'lpm', 'fcfs' or 'random'",
        )
        _check(
            _is_real(self.max_age_s) and self.max_age_s >= 0,
            f"max_age_s is {self.max_age_s!r}; it must be a number, 0 or more seconds",
        )


@dataclass(frozen=True)
class EngineConfig:
    """All options of an engine, except the model itself.

    device           "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1", ...
    dtype            "auto" (the checkpoint's own), "float32", "bfloat16" or "float16".
    attention        the kernels, by a name that `graftlm plugins` lists; "auto" takes the best for the device.
    max_model_len    context in tokens; None is the model's own.
    max_batch        sequences that run at once.
    max_step_tokens  prompt tokens computed in one step, beside one token of each row that decodes; longer prompts run
                     in chunks. None is 8,192 on a Hopper GPU, or a newer one, with 4 GB free beside weights and
                     KV pool, otherwise 2,048.
    max_mixed_tokens  prompt tokens in a step that also decodes a streamed answer, to bound its delay; at most
                     `max_step_tokens`.
    strict           answers do not depend on the batch or the cache in any dtype. A CPU computes everything in
                     float32; on a GPU every sum keeps one order, at the price that the page on GPUs states.
    seed             seed of requests without one; None draws one.
    quantization     "fp8", "int8" or "int4" rounds linear layers to codes while a model is loaded; other names are
                     quantizers of transformers.
    activations      "exact": quantised weights multiply activations of `dtype`. "int8": on a CPU they multiply
                     activations rounded to eight bits, with a scale for every 32; faster for several rows. "fp8": on
                     a Hopper GPU weights in FP8 multiply activations rounded to FP8, with a scale for each token, in
                     steps of more than 64 rows.
    revision         branch, tag or commit of a model on the Hugging Face hub; None is its main branch.
    engine, loader   the engine and the model loader, by names that `graftlm plugins` lists.
    replicas         runtimes with a copy of the model each, with engine="ray".
    tensor_parallel  processes that hold a part of each layer, on a GPU each, or on the CPU; it must divide the number
                     of KV heads.
    grammar_engine   the compiler of constraints, by such a name; None takes the fastest engine that supports each.
    shared_prefix_decode  read a prefix that rows of a step share once for all of them.
    jump_forward     append the tokens that a grammar forces without running the model for them.
    overlap          launch a step before the tokens of the previous step are available; None: on a GPU only.
    compact_weights  hold bfloat16 weights a second time, in 12 bits each and without loss, for steps of few tokens on
                     a Hopper GPU; None: if the copy takes at most three tenths of the memory beside the weights.
                     False also widens quantised weights there, for steps of many rows.
    speculation      "auto": on a CPU a step also verifies draft tokens, copied from the request's own text or from
                     recent answers, and keeps the accepted ones; "off".
    quiet            no progress line during preparation; only terminals show one.
    media            limits of pictures and videos in prompts.
    media_urls       whether pictures are fetched from https URLs of public addresses.
    mm_processor_kwargs  options of the model's image processor for all pictures, such as {"max_pixels": 602112}.
    media_cache_bytes  memory of the device for the embeddings of known pictures; None: a 50th of a GPU's memory, 256 MB
                     on a CPU.
    """

    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    max_model_len: int | None = None
    max_batch: int = 256
    max_step_tokens: int | None = None
    max_mixed_tokens: int = 4096
    cache: CacheConfig = field(default_factory=CacheConfig)
    schedule: SchedulerConfig = field(default_factory=SchedulerConfig)
    strict: bool = False
    seed: int | None = None
    quantization: str | None = None
    activations: Literal["exact", "int8", "fp8"] = "exact"
    trust_remote_code: bool = False
    revision: str | None = None
    engine: str = "local"
    replicas: int = 1
    tensor_parallel: int = 1
    loader: str = "hf"
    grammar_engine: str | None = None
    shared_prefix_decode: bool = True
    jump_forward: bool = True
    overlap: bool | None = None
    compact_weights: bool | None = None
    speculation: Literal["auto", "off"] = "auto"
    quiet: bool = False
    media: MediaLimits = field(default_factory=MediaLimits)
    media_urls: bool = False
    mm_processor_kwargs: Mapping[str, Any] | None = field(default=None, hash=False)
    media_cache_bytes: int | None = None

    def __post_init__(self) -> None:
        if type(self.dtype).__module__ == "torch":
            object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        _check(
            self.dtype in ("auto", "float32", "bfloat16", "float16"),
            f"dtype is {self.dtype!r}; use 'auto', 'float32', 'bfloat16' or 'float16'",
        )
        if type(self.device).__module__ == "torch":
            object.__setattr__(self, "device", str(self.device))
        _check(
            isinstance(self.device, str),
            f"device is {shortened(self.device)}; all layers lie on one device: use 'auto', 'cpu', 'cuda' or 'cuda:N'",
        )
        _check(
            self.revision is None or isinstance(self.revision, str),
            f"revision is {self.revision!r}; it must be a branch, a tag or a commit of the hub, or None",
        )
        _check_whole("max_model_len", self.max_model_len, 2, " tokens", optional=True)
        _check(self.speculation in ("auto", "off"), f"speculation is {self.speculation!r}; use 'auto' or 'off'")
        _check(
            self.activations in ("exact", "int8", "fp8"),
            f"activations is {self.activations!r}; use 'exact', 'int8' (CPU) or 'fp8' (Hopper)",
        )
        _check(
            self.grammar_engine is None or isinstance(self.grammar_engine, str),
            f"grammar_engine is {self.grammar_engine!r}; it must be a name, or None",
        )
        _check_whole("max_batch", self.max_batch, 1)
        _check_whole("replicas", self.replicas, 1)
        _check_whole("tensor_parallel", self.tensor_parallel, 1)
        _check(
            self.replicas == 1 or self.engine != "local",
            f"replicas is {self.replicas} with engine='local', which is one; use engine='ray'",
        )
        _check_whole("max_step_tokens", self.max_step_tokens, 1, optional=True)
        _check_whole("max_mixed_tokens", self.max_mixed_tokens, 1)
        _check(
            self.seed is None or isinstance(self.seed, Integral),
            f"seed is {self.seed!r}; it must be a whole number, or None",
        )
        for name in ("strict", "trust_remote_code", "shared_prefix_decode", "jump_forward", "quiet", "media_urls"):
            _check_switch(name, getattr(self, name))
        for name in ("overlap", "compact_weights"):
            _check_switch(name, getattr(self, name), optional=True)
        _check(isinstance(self.cache, CacheConfig), f"cache is {self.cache!r}; give a CacheConfig")
        _check(isinstance(self.schedule, SchedulerConfig), f"schedule is {self.schedule!r}; give a SchedulerConfig")
        _check(isinstance(self.media, MediaLimits), f"media is {self.media!r}; give a MediaLimits")
        _check(
            self.mm_processor_kwargs is None or isinstance(self.mm_processor_kwargs, Mapping),
            f"mm_processor_kwargs is {shortened(self.mm_processor_kwargs)}; give a dict, as {{'max_pixels': 602112}}",
        )
        _check_whole("media_cache_bytes", self.media_cache_bytes, 1, " bytes", optional=True)

    @classmethod
    def from_options(cls, **options: Any) -> Self:
        """Build from keyword options; an unknown one raises and names its nearest neighbour.

        `torch_dtype` and `device_map`, as transformers calls them, set `dtype` and `device`.
        """
        options = with_own_names(options)
        reject_unknown(list(options), [f.name for f in fields(cls)], "runtime option")
        return cls(**options)


_WHOLE = ("max_tokens", "min_tokens", "top_k", "n", "seed", "top_logprobs", "max_retries")
_REAL = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "timeout")
_OPTIONAL = frozenset({"max_tokens", "seed", "timeout"})
_MOST_IDS = 2**31
_MOST_BIAS = 1e20
"""Largest bias: a logit with it, divided by the lowest temperature, stays a float32."""
_MOST_PENALTY = 1e6


class SamplingOptions(TypedDict, total=False):
    """The fields of SamplingParams as keywords of a call."""

    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    n: int
    seed: int | None
    logprobs: bool
    top_logprobs: int
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float] | None
    timeout: float | None
    regex: str | None
    choices: Sequence[str] | None
    json_schema: Any
    grammar: str | None
    constraint: Any
    close_on_length: bool | None
    on_unsupported: Literal["error", "warn", "check"]
    max_retries: int
    bounded_numbers: bool
    whitespace: Literal["auto", "compact", "single", "flexible"]
    strict_schema: bool
    allowed_token_ids: Sequence[int] | None
    include_stop: bool
    special_tokens: bool


@dataclass(frozen=True)
class SamplingParams:
    """The decoding parameters of one request.

    Greedy at temperature 0. `top_k` 0 or -1 and `top_p` 1 switch the filter off. `logprobs=True`
    reports the chosen token's log-probability (natural log, after temperature 1, before filters);
    `top_logprobs=k` also the k likeliest. `timeout` is in seconds from submission. At most one of
    `regex`, `choices`, `json_schema` and `grammar` (Lark) constrains the text; `constraint` takes any
    object that `Grammar.compile` accepts. `close_on_length` ends a constrained output validly before
    `max_tokens` is spent; None means True for schemas only. `on_unsupported` decides about a
    schema keyword that the mask cannot enforce: "error" raises a GrammarError, "warn" drops it with
    a warning, "check" drops it, validates the finished output with jsonschema, and retries up to
    `max_retries` times (a greedy request then samples) before it raises a GrammarError; its stream
    arrives as one chunk. `bounded_numbers` limits numbers that a schema does not bound to the usual
    precision: 18 digits for integers, 17 significant digits for others, also in `gen(dtype=)`.
    `whitespace` and `strict_schema` are `whitespace` and `strict` of `Grammar.compile`, for the JSON of
    `json_schema`. "auto" writes JSON as the prompt last shows it: "flexible" after indented JSON, "single" after
    `{"a": 1}`, else "compact".
    `allowed_token_ids` excludes all other tokens, the end of the text too unless it is among them.
    `include_stop` leaves the stop string at the text's end. `special_tokens` shows special tokens in
    the text by their names, but for one that ends it.
    """

    max_tokens: int | None = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    seed: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    timeout: float | None = None
    regex: str | None = None
    choices: tuple[str, ...] | None = None
    json_schema: Any = None
    grammar: str | None = None
    constraint: Any = None
    close_on_length: bool | None = None
    on_unsupported: Literal["error", "warn", "check"] = "error"
    max_retries: int = 2
    bounded_numbers: bool = True
    whitespace: Literal["auto", "compact", "single", "flexible"] = "auto"
    strict_schema: bool = True
    allowed_token_ids: tuple[int, ...] | None = None
    include_stop: bool = False
    special_tokens: bool = False

    def __post_init__(self) -> None:
        stop: Any = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _as_tuple(stop, "stop", "text or a list of texts"))
        object.__setattr__(
            self, "stop_token_ids", _as_tuple(self.stop_token_ids, "stop_token_ids", "a list of token ids")
        )
        if self.allowed_token_ids is not None:
            ids = _as_tuple(self.allowed_token_ids, "allowed_token_ids", "a list of token ids")
            object.__setattr__(self, "allowed_token_ids", ids)
            _check(len(ids) > 0, "allowed_token_ids is empty; give at least one token id, or leave it out")
        if self.choices is not None:
            object.__setattr__(self, "choices", _as_tuple(self.choices, "choices", "a list of texts"))
        self._check_types()
        self._check_ranges()
        self._check_constraint()

    def _check_types(self) -> None:
        for name in _WHOLE:
            value = getattr(self, name)
            if type(value) is int or (value is None and name in _OPTIONAL):
                continue  # fast path: runs for every request
            _check(isinstance(value, Integral), f"{name} is {value!r}; it must be a whole number")
        for name in _REAL:
            value = getattr(self, name)
            if type(value) is float and math.isfinite(value) or (value is None and name in _OPTIONAL):
                continue
            _check(_is_finite(value), f"{name} is {shortened(value)}; it must be a finite number")
        for name in ("ignore_eos", "include_stop", "special_tokens"):
            _check_switch(name, getattr(self, name))
        _check_switch("bounded_numbers", self.bounded_numbers)
        _check_switch("strict_schema", self.strict_schema)
        _check(
            self.whitespace in ("auto", "compact", "single", "flexible"),
            f"whitespace is {self.whitespace!r}; use 'auto', 'compact', 'single' or 'flexible'",
        )
        _check_switch("logprobs", self.logprobs, hint="; top_logprobs takes a number")
        _check_switch("close_on_length", self.close_on_length, optional=True)
        _check(
            self.on_unsupported in ("error", "warn", "check"),
            f"on_unsupported is {self.on_unsupported!r}; use 'error', 'warn' or 'check'",
        )
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            _check(value is None or isinstance(value, str), f"{name} is {value!r}; it must be text, or None")
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token_id in getattr(self, name) or ():
                _check(isinstance(token_id, Integral), f"{name} holds {token_id!r}; it must hold token ids")
        for option in self.choices or ():
            _check(isinstance(option, str), f"choices holds {option!r}; it must hold text")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _as_bias(self.logit_bias))

    def _check_ranges(self) -> None:
        _check(
            self.max_tokens is None or self.max_tokens >= 1,
            f"max_tokens is {self.max_tokens}; it must be at least 1, or None for the rest of the context",
        )
        _check(self.min_tokens >= 0, f"min_tokens is {self.min_tokens}; it must be 0 or more")
        _check(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})",
        )
        _check(self.temperature >= 0, f"temperature is {self.temperature}; it must be 0 (greedy) or more")
        _check(0 < self.top_p <= 1, f"top_p is {self.top_p}; it must lie in (0, 1]")
        _check(self.top_k >= -1, f"top_k is {self.top_k}; it must be at least 1, or 0 to switch it off")
        _check(0 <= self.min_p <= 1, f"min_p is {self.min_p}; it must lie in [0, 1]")
        _check(self.n >= 1, f"n is {self.n}; it must be at least 1")
        _check(self.max_retries >= 0, f"max_retries is {self.max_retries}; it must be 0 or more")
        _check(self.top_logprobs >= 0, f"top_logprobs is {self.top_logprobs}; it must be 0 or more")
        _check(self.repetition_penalty > 0, f"repetition_penalty is {self.repetition_penalty}; it must be above 0")
        _check(
            1 / _MOST_PENALTY <= self.repetition_penalty <= _MOST_PENALTY,
            f"repetition_penalty is {self.repetition_penalty}; it must lie between 1e-6 and 1e6, usually near 1",
        )
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _check(
                abs(value) <= _MOST_PENALTY,
                f"{name} is {value}; it must lie between -1e6 and 1e6, usually between -2 and 2",
            )
        _check(self.timeout is None or self.timeout > 0, f"timeout is {self.timeout}; it must be above 0 seconds")
        _check(all(isinstance(s, str) and s for s in self.stop), "stop strings must be non-empty text")

    def _check_constraint(self) -> None:
        given = [
            n for n in ("regex", "choices", "json_schema", "grammar", "constraint") if getattr(self, n) is not None
        ]
        _check(len(given) <= 1, f"{' and '.join(given)} were both given; a request takes one constraint")
        if self.choices is not None:
            _check(len(self.choices) > 0, "choices is empty; give at least one option")
            _check(len(set(self.choices)) == len(self.choices), f"choices has duplicates: {list(self.choices)!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def constrained(self) -> bool:
        given = self.regex is not None or self.choices is not None or self.json_schema is not None
        return given or self.grammar is not None or self.constraint is not None

    @classmethod
    def from_options(cls, base: SamplingParams | None = None, **options: Any) -> SamplingParams:
        """Build from keywords on top of `base`; an unknown one raises and names its nearest neighbour."""
        if base is None and all(type(value) in _PLAIN for value in options.values()):
            return _checked_once(tuple((name, type(value), value) for name, value in options.items()))
        reject_unknown(list(options), _sampling_names(), "sampling parameter")
        return replace(base, **options) if base is not None else cls(**options)


_PLAIN = (int, float, str, bool, type(None))


@cache
def _sampling_names() -> tuple[str, ...]:
    return tuple(field.name for field in fields(SamplingParams))


@lru_cache(256)
def _checked_once(options: tuple[tuple[str, type, Any], ...]) -> SamplingParams:
    """Return the parameters of these names and values; the types keep 1, 1.0 and True apart."""
    given = {name: value for name, _, value in options}
    reject_unknown(list(given), _sampling_names(), "sampling parameter")
    return SamplingParams(**given)
