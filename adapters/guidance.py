"""Guidance on GraftLM: a model object whose engine is a runtime in this process.

from graftlm.adapters.guidance import GraftModel
from guidance import gen

lm = GraftModel("sprout")
lm += "The answer is " + gen("answer", regex=r"[0-9]+")
"""

from __future__ import annotations

from typing import Any

from guidance._schema import SamplingParams
from guidance.models import Model

from graftlm.adapters.guidance_engine import GraftEngine
from graftlm.adapters.guidance_interpreter import GraftInterpreter
from graftlm.core.errors import ConfigError
from graftlm.core.runtime import Runtime

__all__ = ["GraftEngine", "GraftModel"]


class GraftModel(Model):
    """A guidance model. `+` gives a new one; all of them share one engine and its KV.

    model              a Hugging Face id, a local folder, "sprout", or a loaded transformers model.
    tokenizer          for a loaded model.
    runtime            a `graftlm.Runtime` to use instead; otherwise the process's shared one.
    echo               show what is written as it is written, with the tokens' probabilities.
    chat_template, enable_backtrack, enable_ff_tokens, enable_monitoring, sampling_params
                       as in guidance's own models; monitoring is off unless asked for.
    seed               makes sampling repeatable.
    options            of the runtime: device, dtype, max_model_len, cache, ...
    """

    def __init__(
        self,
        model: Any = "sprout",
        tokenizer: Any = None,
        *,
        runtime: Runtime | None = None,
        echo: bool = True,
        chat_template: Any = None,
        enable_backtrack: bool = True,
        enable_ff_tokens: bool = True,
        enable_monitoring: bool = False,
        sampling_params: SamplingParams | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        if runtime is None:
            runtime = Runtime.shared(model, tokenizer=tokenizer, **options)
        elif options or tokenizer is not None:
            given = [*options, *(["tokenizer"] if tokenizer is not None else [])]
            raise ConfigError(f"runtime= is given, so {', '.join(sorted(given))} cannot be; set them on the runtime")
        engine = GraftEngine(
            runtime,
            chat_template=chat_template,
            enable_backtrack=enable_backtrack,
            enable_ff_tokens=enable_ff_tokens,
            enable_monitoring=enable_monitoring,
            enable_token_probabilities=echo,
            enable_top_k=echo,
            seed=seed,
        )
        none_set = SamplingParams(top_p=None, top_k=None, min_p=None, repetition_penalty=None)
        super().__init__(
            interpreter=GraftInterpreter(engine, watched=echo), sampling_params=sampling_params or none_set, echo=echo
        )

    @property
    def runtime(self) -> Runtime:
        """The runtime behind the engine."""
        assert isinstance(self._interpreter, GraftInterpreter)
        return self._interpreter.engine.runtime
