"""GraftLM: a fast language-model runtime under LangChain, DSPy, LlamaIndex and Guidance.

    import graftlm as gl

    with gl.Runtime("sprout") as runtime:
        print(runtime.generate("The capital of France is", max_tokens=8).text)

Names are resolved on first use, so importing this package loads neither torch nor a framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # "as" exports each name to type checkers; _HOME below exports it at run time.
    from graftlm.core.config import (
        CacheConfig as CacheConfig,
        EngineConfig as EngineConfig,
        SamplingParams as SamplingParams,
        SchedulerConfig as SchedulerConfig,
    )
    from graftlm.core.errors import (
        ConfigError as ConfigError,
        EngineError as EngineError,
        GraftError as GraftError,
        GrammarError as GrammarError,
        ModelError as ModelError,
        PluginError as PluginError,
        RemoteError as RemoteError,
        RequestCancelled as RequestCancelled,
        RequestTimeout as RequestTimeout,
        RequestTooLong as RequestTooLong,
    )
    from graftlm.core.grammar.compile import Grammar as Grammar
    from graftlm.core.grammar.spec import (
        Choices as Choices,
        JsonSchema as JsonSchema,
        Lark as Lark,
        Regex as Regex,
    )
    from graftlm.core.grammar.vocabulary import Vocabulary as Vocabulary
    from graftlm.core.media.limits import MediaLimits as MediaLimits
    from graftlm.core.metrics import (
        CacheReport as CacheReport,
        Stats as Stats,
    )
    from graftlm.core.program.expression import (
        assistant as assistant,
        gen as gen,
        image as image,
        module as module,
        part as part,
        select as select,
        system as system,
        user as user,
        video as video,
    )
    from graftlm.core.program.primitives import (
        beam as beam,
        best_of as best_of,
        chain_of_thought as chain_of_thought,
        map as map,
        vote as vote,
    )
    from graftlm.core.program.program import (
        program as program,
        set_default_runtime as set_default_runtime,
    )
    from graftlm.core.program.select import Selection as Selection
    from graftlm.core.request import (
        Chunk as Chunk,
        Completion as Completion,
        Request as Request,
        Score as Score,
        Usage as Usage,
    )
    from graftlm.core.runtime import Runtime as Runtime
    from graftlm.core.semantic_cache.semantic_cache import SemanticCache as SemanticCache

_HOME = {
    "graftlm.core.config": ("CacheConfig", "EngineConfig", "SamplingParams", "SchedulerConfig"),
    "graftlm.core.errors": (
        "ConfigError",
        "EngineError",
        "GraftError",
        "GrammarError",
        "ModelError",
        "PluginError",
        "RemoteError",
        "RequestCancelled",
        "RequestTimeout",
        "RequestTooLong",
    ),
    "graftlm.core.program.expression": (
        "assistant",
        "gen",
        "image",
        "module",
        "part",
        "select",
        "system",
        "user",
        "video",
    ),
    "graftlm.core.grammar.compile": ("Grammar",),
    "graftlm.core.grammar.spec": ("Choices", "JsonSchema", "Lark", "Regex"),
    "graftlm.core.grammar.vocabulary": ("Vocabulary",),
    "graftlm.core.media.limits": ("MediaLimits",),
    "graftlm.core.metrics": ("CacheReport", "Stats"),
    "graftlm.core.program.primitives": ("beam", "best_of", "chain_of_thought", "map", "vote"),
    "graftlm.core.program.program": ("program", "set_default_runtime"),
    "graftlm.core.request": ("Chunk", "Completion", "Request", "Score", "Usage"),
    "graftlm.core.runtime": ("Runtime",),
    "graftlm.core.semantic_cache.semantic_cache": ("SemanticCache",),
    "graftlm.core.program.select": ("Selection",),
}
_ELSEWHERE = ("AutoModelForCausalLM", "Engine", "LLM", "Llama", "Model", "from_pretrained", "load", "pipeline")
"""Names by which other libraries load a model."""
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("graftlm")
    elif name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    else:
        remedy = "; the class to begin with is graftlm.Runtime" if name in _ELSEWHERE else ""
        raise AttributeError(f"module 'graftlm' has no attribute {name!r}{remedy}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF, "__version__"])
