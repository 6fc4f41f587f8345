"""GraftSettings: the settings of ChatGraftLM and GraftLLM, and the conversion of a call to a request."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from langchain_core.language_models import LangSmithParams
from langchain_core.utils import secret_from_env
from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from graftlm.core import call_options
from graftlm.core.config import OneConstructor, SamplingParams
from graftlm.core.errors import GraftError
from graftlm.core.request import Usage
from graftlm.core.runtime import Runtime

CALL_OPTIONS = ("model", "stream", "stream_usage", "ls_structured_output_format", "structured_output_format")
"""Keywords of a call that are not sampling parameters and that every model accepts."""


class GraftSettings(OneConstructor, BaseModel):
    """The parameters of a model object. None selects GraftLM's default of a sampling parameter.

    runtime          a running `graftlm.Runtime` to use; without it, the process-wide one for `model`.
    runtime_options  options of the process-wide runtime, such as `dtype` or `cache`; names that have no meaning in
                     LangChain may also be given as keywords.
    max_tokens       limit of an answer; None: the rest of the context.
    base_url         an endpoint in place of a local model. Its key is `api_key`, else GRAFTLM_API_KEY.
    on_unsupported   for keywords of a schema that no grammar supports: "error", the default, raises; "warn" drops them;
                     "check" validates the finished text with jsonschema and repeats the request up to `max_retries`
                     times.
    chat_template_kwargs  arguments of the chat template, such as {"enable_thinking": False}.
    max_retries      repetitions of requests to `base_url`, in one loop, and of answers that fail their check.
    """

    model_config = ConfigDict(populate_by_name=True, arbitrary_types_allowed=True, protected_namespaces=())

    model_name: str = Field(default="sprout", alias="model")
    runtime: Any = Field(default=None, exclude=True, repr=False)
    runtime_options: dict[str, Any] = Field(default_factory=dict)
    base_url: str | None = None
    api_key: SecretStr | None = Field(default_factory=secret_from_env("GRAFTLM_API_KEY", default=None))
    temperature: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: list[str] | str | None = Field(default=None, alias="stop_sequences")
    seed: int | None = None
    n: int = 1
    logprobs: bool | None = None
    top_logprobs: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    on_unsupported: Literal["error", "warn", "check"] | None = None
    timeout: float | None = None
    max_retries: int = 2
    streaming: bool = False
    stream_usage: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further sampling parameters, by their names in `graftlm.SamplingParams`."""

    @model_validator(mode="before")
    @classmethod
    def _sort_keywords(cls, values: Any) -> Any:
        return sort_keywords(cls, values)

    @model_validator(mode="after")
    def _name_the_model(self) -> GraftSettings:
        if self.runtime is not None:
            call_options.check_given(self.runtime, self.runtime_options)
            if "model_name" not in self.model_fields_set:
                self.model_name = self.runtime.model_name
        self._sampling(None, {})  # an out-of-range value raises here instead of at the first call
        return self

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        return ["graftlm", "adapters", "langchain"]

    @property
    def lc_secrets(self) -> dict[str, str]:
        return {"api_key": "GRAFTLM_API_KEY"}

    def to_json(self) -> Any:
        """Return the form of `langchain_core.load.dumps`; a running runtime has none."""
        if self.runtime is not None:
            return self.to_json_not_implemented()  # type: ignore[attr-defined]
        return super().to_json()  # type: ignore[misc]

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        shown = call_options.shown_fields(self, GraftSettings, "model_name")
        return (("model" if name == "model_name" else name, value) for name, value in shown)

    def __str__(self) -> str:
        return repr(self)

    def runtime_for(self, model: str | None = None) -> Runtime:
        """Return the runtime of a call: the given one, or the process-wide one for `model`."""
        if self.runtime is not None and model in (None, self.model_name):
            return self.runtime  # type: ignore[no-any-return]
        key = self.api_key.get_secret_value() if self.api_key else None
        return call_options.shared_runtime(
            model or self.model_name, self.runtime_options, self.base_url, key, self.max_retries
        )

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """All parameters that change an answer; LangChain's cache uses them as its key."""
        sampling = call_options.sampling_set_on(self)
        options = {"chat_template_kwargs": self.chat_template_kwargs} if self.chat_template_kwargs else {}
        return {
            "model_name": self.model_name,
            **sampling,
            **self.model_kwargs,
            **options,
            **self._options_for_cache_key(),
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params: LangSmithParams = super()._get_ls_params(stop=stop or self._stop_list(), **kwargs)  # type: ignore[misc]
        params["ls_provider"] = "graftlm"
        return params

    def _stop_list(self) -> list[str] | None:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def _known_context_length(self) -> int | None:
        """Return the context length in tokens; None if it is unknown, or would need a download."""
        local = self.model_name == "sprout" or self.model_name.startswith("ollama:") or os.path.exists(self.model_name)
        if self.runtime is None and not local:
            return None
        try:
            return self.runtime_for().max_model_len
        except GraftError:  # an endpoint or a plugin without a known context length
            return None

    def _reads_pictures(self) -> bool | None:
        """Return whether the model reads pictures; None if it is unknown, or would need a download."""
        if self.runtime is None and not (self.model_name == "sprout" or os.path.exists(self.model_name)):
            return None
        try:
            return self.runtime_for().reads_pictures
        except GraftError:
            return None

    def _options_for_cache_key(self) -> dict[str, Any]:
        options = {name: str(value) for name, value in self.runtime_options.items()}
        return {"base_url": self.base_url, **options} if self.base_url else options

    def _sampling(self, stop: list[str] | None, given: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling parameters of a call: its own keywords, else the object's, else the defaults.

        `given` may hold any name of SamplingParams; an unknown one raises ConfigError that suggests the closest name.
        """
        if "max_completion_tokens" in given:  # OpenAI's newer name
            given = {"max_tokens": given["max_completion_tokens"], **given}
        own = {name: value for name, value in given.items() if name != "max_completion_tokens"}
        if stop is not None:
            own["stop"] = stop
        return call_options.sampling_params(call_options.sampling_set_on(self), self.model_kwargs, own)


def sort_keywords(cls: type[BaseModel], values: Any) -> Any:
    """Move runtime options to `runtime_options`. Raises ConfigError for an unknown keyword."""
    if not isinstance(values, Mapping):
        return values
    own = set(cls.model_fields) | {field.alias for field in cls.model_fields.values() if field.alias}
    kept, options = call_options.sort_keywords(values, own, cls.__name__)
    return {**kept, "runtime_options": {**(values.get("runtime_options") or {}), **options}}


def token_usage(usages: Iterable[Usage]) -> dict[str, int]:
    """Return the sum of token counts in the form of `llm_output`."""
    total = sum(usages, Usage())
    return {
        "prompt_tokens": total.prompt_tokens,
        "completion_tokens": total.completion_tokens,
        "total_tokens": total.total_tokens,
        "cached_tokens": total.cached_tokens,
        "forced_tokens": total.forced_tokens,
    }
