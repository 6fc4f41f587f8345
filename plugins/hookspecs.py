"""Hook specifications: the kinds of factories that a plugin may register, their arguments and results.

A plugin is a module named by an entry point of the group `graftlm`:

    [project.entry-points.graftlm]
    acme = "acme_graftlm"

Each `graftlm_register_*` hook is called once, when the first runtime is built, with a `register` callback:

    register(name, factory, description="")

`factory` is a callable, or the text "package.module:attribute" that is imported when the name is first used.
Hooks must not import anything heavy; factories may.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

import pluggy

if TYPE_CHECKING:
    from graftlm.core.request import Completion, Request

Factory = Callable[..., Any]
Kind = Literal["engines", "grammars", "attention", "models", "thinking"]

CALLS: Mapping[Kind, str] = {
    "engines": "model, config, *, tokenizer, wake",
    "grammars": "spec, vocabulary, options",
    "attention": "store",
    "models": "model, config, tokenizer",
    "thinking": "tokenizer, options",
}
"""Arguments of a factory of each kind; keyword arguments follow the asterisk."""

hookspec = pluggy.HookspecMarker("graftlm")
hookimpl = pluggy.HookimplMarker("graftlm")


class Register(Protocol):
    """Register `factory` under `name`; raises PluginError if another plugin has registered that name."""

    def __call__(self, name: str, factory: Factory | str, description: str = "") -> None: ...


@hookspec
def graftlm_register_engines(register: Register) -> None:
    """Register engines, which turn requests into completions.

    factory(model, config, *, tokenizer, wake) -> graftlm.core.engine_protocol.Engine

    Chosen by `Runtime(engine=...)`. Called on the thread that owns the engine; `wake()` wakes that thread from any
    other. A factory with the attribute `takes_ids = False` builds an engine that takes prompts and constraints as the
    caller gave them: no tokenizer is loaded for it, `tokenizer` is None and so are `Submission.prompt_ids` and
    `.grammar`. With `takes_constraints = False` only `.grammar` is None.
    With `takes_media = True` prompts may hold pictures and videos, as `Submission.prompt.spans`.
    The engine notifies observers of each finished request: `graftlm.plugins.manager.load().request_finished`.
    """


@hookspec
def graftlm_register_grammars(register: Register) -> None:
    """Register grammar engines, which compile constraints to token masks; chosen by `Runtime(grammar_engine=...)`.

    factory(spec, vocabulary, options) -> graftlm.core.grammar.compile.Grammar
    """


@hookspec
def graftlm_register_attention(register: Register) -> None:
    """Register attention kernels, chosen by `Runtime(attention=...)`.

    factory(store) -> graftlm.kernels.attention.Attention
    """


@hookspec
def graftlm_register_models(register: Register) -> None:
    """Register model loaders, chosen by `Runtime(loader=...)`.

    factory(model, config, tokenizer) -> graftlm.core.loaded_model.LoadedModel
    """


@hookspec
def graftlm_register_thinking(register: Register) -> None:
    """Register families of models that think, which tell the thinking of an answer from its content.

    factory(tokenizer, options) -> graftlm.core.chat.thinking.Thinking

    Called once for each tokenizer and arguments of its chat template (`options`); returns None if the model is of
    another family. Families of plugins are asked before the built-in ones.
    """


@hookspec
def graftlm_request_finished(request: Request, completion: Completion) -> None:
    """Observe a request that ended with a completion; called once for it, never inside the token loop.

    Runs on the engine's thread, so it must be quick. An exception is logged and changes nothing.
    """
