"""`GraftModel`: a guidance model whose engine is a runtime in this process, or at an endpoint."""

from __future__ import annotations

from typing import Any, Self

from graftlm.adapters.guidance.engine import GraftEngine
from graftlm.adapters.guidance.interpreter import GraftInterpreter
from graftlm.adapters.guidance.lazy import Task
from graftlm.adapters.guidance.remote import RemoteEngine, RemoteInterpreter
from graftlm.adapters.guidance.streaming import GraftStream
from graftlm.core.call_options import check_given, keywords_of, sort_keywords
from graftlm.core.config import OneConstructor
from graftlm.core.errors import ConfigError
from graftlm.core.remote.ledger.usage import RemoteUsage
from graftlm.core.runtime import Runtime
from guidance._ast import ASTNode, Function, LiteralNode, _parse_tags
from guidance._schema import SamplingParams
from guidance.models import Model
from guidance.models._base._model import _event_queues


class GraftModel(OneConstructor, Model):
    """A guidance model. `+` returns a new object; all objects share one engine and its KV.

    model              a Hugging Face id, a local folder, a GGUF file, "sprout", or a loaded model.
    tokenizer          for a loaded model.
    runtime            a `graftlm.Runtime` to use instead; otherwise the process's shared one.
    echo               display the text during generation, with the tokens' probabilities.
    chat_template, enable_backtrack, enable_ff_tokens, enable_monitoring, sampling_params
                       as in guidance's own models; monitoring is off by default.
    seed               makes sampling repeatable.
    lazy               `+` returns at once and the grammar runs in the background: branches of one object share a
                       batch without threads. Reading an attribute of an object waits for it, and raises its error.
                       Not available with `echo`.
    num_api_spec_tokens  at an endpoint: limit of the tokens that a call fetches for later appends. None: a call fetches
                       the text appended together with its gen.
    options            of the runtime: device, dtype, max_model_len, cache, ...; base_url, api_key, budget, ... for a
                       model at an endpoint.
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
        lazy: bool = False,
        num_api_spec_tokens: int | None = None,
        **options: Any,
    ) -> None:
        if lazy and echo:
            raise ConfigError("lazy=True shows nothing while it runs; give echo=False with it")
        _, options = sort_keywords(options, keywords_of(GraftModel.__init__), "GraftModel")
        if tokenizer is not None:
            options["tokenizer"] = tokenizer
        if runtime is None:
            runtime = Runtime.shared(model, **options)
        else:
            check_given(runtime, options)
        interpreter: Any
        if runtime.endpoint is not None:
            if chat_template is not None or seed is not None:
                raise ConfigError(
                    "chat_template and seed are for models in this process; leave them out at an endpoint"
                )
            runtime.load()
            interpreter = RemoteInterpreter(RemoteEngine(runtime, num_api_spec_tokens), watched=echo)
        elif num_api_spec_tokens is not None:
            raise ConfigError("num_api_spec_tokens is for models at an endpoint; give base_url= or leave it out")
        else:
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
            interpreter = GraftInterpreter(engine, watched=echo)
        self._lazy = lazy
        none_set = SamplingParams(top_p=None, top_k=None, min_p=None, repetition_penalty=None)
        super().__init__(interpreter=interpreter, sampling_params=sampling_params or none_set, echo=echo)

    # -- lazy: a pending object has a task in place of its fields ------------------------------------------------

    def __add__(self, other: Any) -> Self:
        before: Task | None = vars(self).get("_task")
        if _event_queues.get() or (before is None and (not self._lazy or not _runs(other))):
            added: Self = super().__add__(other)
            return added
        if isinstance(other, str):
            other = _parse_tags(other)
        if isinstance(other, Function):
            extended: Self = other(self)  # the user's code runs here, and waits only for the attributes that it reads
            return extended
        if not isinstance(other, ASTNode):
            return NotImplemented
        engine: GraftEngine | RemoteEngine = vars(self)["_engine"] if before is not None else self.engine
        later = object.__new__(type(self))
        with engine.seeded():
            vars(later).update(_engine=engine, _task=Task.start(_append, self, other, before))
        return later

    def __getattr__(self, name: str) -> Any:
        """Wait for a pending object and take its fields; called for missing fields only."""
        task: Task | None = vars(self).get("_task")
        if task is not None and not (name.startswith("__") and name.endswith("__")):
            vars(self).update(vars(task.result()))
            vars(self).pop("_task", None)
        if name in vars(self):
            return vars(self)[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def stream(self) -> GraftStream:
        """Return a stream that starts when it is iterated over."""
        return GraftStream(self)

    def copy(self) -> Self:
        _ = self._interpreter
        copied: Self = super().copy()
        return copied

    def __repr__(self) -> str:
        engine: GraftEngine | RemoteEngine = vars(self).get("_engine") or self.engine
        return f"GraftModel({engine.runtime.model_name!r})"

    @property
    def runtime(self) -> Runtime:
        """The runtime behind the engine."""
        assert isinstance(self._interpreter, GraftInterpreter | RemoteInterpreter)
        return self._interpreter.engine.runtime

    @property
    def usage(self) -> RemoteUsage:
        """The usage of all calls to an endpoint that led to this object. Raises ConfigError for a local model."""
        if not isinstance(self._interpreter, RemoteInterpreter):
            raise ConfigError("a model in this process has no bill; see runtime.stats()")
        return self._interpreter.state.usage


def _append(model: GraftModel, node: ASTNode) -> Any:
    return Model.__add__(model, node)


def _runs(item: Any) -> bool:
    """Return True if appending the item can run the engine; text and unsupported items do not."""
    return (
        isinstance(item, str)
        and "{{G|" in item
        or isinstance(item, ASTNode | Function)
        and not isinstance(item, LiteralNode)
    )
