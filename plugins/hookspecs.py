"""The seams: what a plugin may offer, and what each thing it offers must take and return.

A plugin is a module named by an entry point of the group `graftlm`:

    [project.entry-points.graftlm]
    acme = "acme_graftlm"

Each `graftlm_register_*` hook is called once, when the first runtime is built, with a `register` callback:

    register(name, factory, description="")

`factory` is a callable, or the text "package.module:attribute" that is imported when the name is first used.
Hooks must not import anything heavy; factories may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

if TYPE_CHECKING:
    from graftlm.core.request import Completion, Request

Factory = Callable[..., Any]

hookspec = pluggy.HookspecMarker("graftlm")
hookimpl = pluggy.HookimplMarker("graftlm")


class Register(Protocol):
    """Offer `factory` under `name`; PluginError if another plugin offers that name."""

    def __call__(self, name: str, factory: Factory | str, description: str = "") -> None: ...


@hookspec
def graftlm_register_engines(register: Register) -> None:
    """Offer engines: what turns requests into completions.

    factory(model, config, *, tokenizer, wake) -> graftlm.core.engine.Engine

    Chosen by `Runtime(engine=...)`. Runs on the thread that will own the engine; `wake()` rouses it from any other.
    A factory with the attribute `takes_ids = False` makes an engine that takes prompts and constraints as the caller
    gave them: no tokenizer is loaded for it, `tokenizer` is None and so are `Submission.prompt_ids` and `.grammar`.
    """


@hookspec
def graftlm_register_grammars(register: Register) -> None:
    """Offer grammar engines: what turns a constraint into token masks.

    factory(spec, vocabulary, options) -> graftlm.core.grammar.compile.Grammar
    """


@hookspec
def graftlm_register_attention(register: Register) -> None:
    """Offer attention kernels, chosen by `Runtime(attention=...)`.

    factory(store) -> graftlm.kernels.attention.Attention
    """


@hookspec
def graftlm_register_models(register: Register) -> None:
    """Offer model loaders, chosen by `Runtime(loader=...)`.

    factory(model, config, tokenizer) -> graftlm.core.loaded_model.LoadedModel
    """


@hookspec
def graftlm_request_finished(request: Request, completion: Completion) -> None:
    """Observe a request that ended with a completion; called once for it, never inside the token loop.

    Runs on the engine's thread, so it must be quick. An exception is logged and changes nothing.
    """
