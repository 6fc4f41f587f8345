"""The provider "graftlm" of DSPy's model strings: `dspy.LM("graftlm/MODEL")` runs MODEL in this process.

DSPy keeps a table of providers; a provider is a pair of classes that answer lm15 requests. These answer by the engines
of this package, so no HTTP request is made and LiteLLM is not imported. Importing the adapter registers the provider.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Generic, TypeVar

from dspy import lm15
from graftlm.adapters.dspy import wire as wire
from graftlm.adapters.dspy.engine import AsyncEngine, Engine
from graftlm.core.runtime import Runtime

EngineKind = TypeVar("EngineKind", Engine, AsyncEngine)


def register() -> None:
    """Add "graftlm" to DSPy's providers; for LMs that are constructed afterwards."""
    lm15.register_provider(
        lm15.ProviderDefinition(
            id=wire.PROVIDER,
            dialect="openai-chat",
            adapter=_Provider,
            async_adapter=_AsyncProvider,
            access=_ACCESS,
            compat=lm15.OpenAIChatCompat(),
            placeholder_key="none",
            note="models in this process",
        ),
        supports=lm15.ModelSupport(function_calling=True, reasoning=False, response_schema=True),
        replace=True,
    )


def runs_here(lm: Any) -> bool:
    """Return True if the requests of `lm` reach an engine of this package, whole: its extensions included."""
    engine = getattr(lm, "engine", None)
    if isinstance(engine, str):
        return engine != "litellm" and str(lm.model).startswith(f"{wire.PROVIDER}/")
    return isinstance(engine, Engine)


class _Base(Generic[EngineKind]):
    """The classes that DSPy constructs with `api_key`, `access`, `compat` and `transport`; none of these is used."""

    provider = wire.PROVIDER
    supports = lm15.EndpointSupport()
    manifest: Any = None
    kind: type[EngineKind]

    def __init__(self, **_: Any) -> None:
        self._engines: dict[str, EngineKind] = {}

    def plan(self, request: lm15.Request) -> tuple[()]:
        """Return the settings that this provider would change: none. `complete` raises for one that it lacks."""
        return ()

    def _engine(self, model: str) -> EngineKind:
        runtime = Runtime.shared(model)
        known = self._engines.get(model)
        if known is None or known.runtime is not runtime:
            known = self._engines[model] = self.kind(runtime)
        return known


class _Provider(_Base[Engine]):
    kind = Engine

    def complete(self, request: lm15.Request) -> lm15.Response:
        return self._engine(request.model).complete(request)

    def stream(self, request: lm15.Request) -> Iterator[Any]:
        return self._engine(request.model).stream(request)


class _AsyncProvider(_Base[AsyncEngine]):
    kind = AsyncEngine

    async def complete(self, request: lm15.Request) -> lm15.Response:
        return await self._engine(request.model).complete(request)

    def stream(self, request: lm15.Request) -> AsyncIterator[Any]:
        return self._engine(request.model).stream(request)


_ACCESS = lm15.AccessPolicy(provider=wire.PROVIDER, supports=_Base.supports, base_url="in-process")
"""DSPy requires an address of a provider; it is shown in errors only."""
