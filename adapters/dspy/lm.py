"""`GraftLM`: `dspy.LM` over a runtime in this process."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import dspy
from graftlm.adapters.dspy.engine import AsyncEngine, Engine
from graftlm.adapters.dspy.sharing import sharing
from graftlm.core.call_options import check_given, keywords_of, sort_keywords
from graftlm.core.config import OneConstructor
from graftlm.core.errors import ConfigError
from graftlm.core.runtime import Runtime

_CALL_OPTIONS = frozenset(
    {"top_p", "top_k", "stop", "seed", "n", "frequency_penalty", "presence_penalty", "logit_bias", "logprobs"}
    | {"top_logprobs", "rollout_id", "prompt_cache", "response_format", "tool_choice", "parallel_tool_calls"}
)
"""Options that a call may set, and the constructor for all calls."""


class GraftLM(OneConstructor, dspy.LM):
    """`dspy.LM` over a model in this process, or with `base_url=` at an endpoint, with both engines set.

    model        a Hugging Face id, a local folder, a GGUF file, "sprout", or a loaded transformers model.
    runtime      a `graftlm.Runtime` to use instead; otherwise the process's shared one for `model` and its options.
    temperature  default of calls; None: 1.0.
    max_tokens   default of calls; None: 1,024 tokens, or fewer if the context ends before.
    on_unsupported  for keywords of a schema that no grammar supports: "error", the default, raises; "warn" drops them;
                    "check" validates the finished text with jsonschema and repeats the request up to
                    `num_retries` times.
    options      `seed`, `top_p`, `stop` and other defaults of calls; `device`, `dtype`, `cache_config` and other
                 options of the runtime. DSPy's `cache` is its response cache; `cache_config` is the KV pool.

    The model string contains a digest of the weights, so that DSPy's response cache never mixes two models.
    """

    def __init__(
        self,
        model: Any = "sprout",
        *,
        runtime: Runtime | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        cache: bool = True,
        cache_config: Any = None,
        callbacks: list[Any] | None = None,
        num_retries: int = 3,
        on_unsupported: Literal["error", "warn", "check"] = "error",
        engine: Engine | None = None,
        async_engine: AsyncEngine | None = None,
        **options: Any,
    ) -> None:
        own = keywords_of(GraftLM.__init__, dspy.LM.__init__) | _CALL_OPTIONS
        options, of_runtime = sort_keywords(options, own, "GraftLM")
        if cache_config is not None:
            of_runtime["cache"] = cache_config
        if engine is None:
            own_runtime = _runtime(model, runtime, of_runtime)
            engine = Engine(own_runtime, on_unsupported=on_unsupported, max_retries=num_retries)
        elif runtime is not None or of_runtime:
            raise ConfigError("engine= brings its own runtime; leave out runtime= and the options of a runtime")
        super().__init__(
            engine.model_string,
            temperature=temperature,
            max_tokens=max_tokens,
            cache=cache,
            callbacks=callbacks,
            num_retries=num_retries,
            engine=engine,
            async_engine=async_engine
            or AsyncEngine(engine.runtime, on_unsupported=engine.on_unsupported, max_retries=engine.max_retries),
            **options,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._sharing(kwargs):
            return super().__call__(*args, **kwargs)

    async def acall(self, *args: Any, **kwargs: Any) -> Any:
        with self._sharing(kwargs):
            return await super().acall(*args, **kwargs)

    def _sharing(self, kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        """Return a block in which the `n` answers that DSPy requests in turn come from one request to the endpoint."""
        given = {**self.kwargs, **kwargs}
        n = given.get("n") or given.get("num_generations") or 1
        return sharing(n) if n > 1 else nullcontext()

    def __repr__(self) -> str:
        return f"GraftLM({self.runtime.model_name!r})"

    @property
    def runtime(self) -> Runtime:
        """The runtime behind both engines."""
        found: Runtime = self.engine.runtime
        return found


def _runtime(model: Any, runtime: Runtime | None, options: dict[str, Any]) -> Runtime:
    if runtime is None:
        if options.get("base_url") is not None:  # DSPy repeats requests itself; a second loop would multiply them
            options = {"max_retries": 0, "retry_timeouts": 0, **options}
        return Runtime.shared(model, **options)
    check_given(runtime, options)
    return runtime
