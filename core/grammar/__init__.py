"""Constrained decoding: regular expressions, choices, JSON schemas and Lark grammars as token masks and forced tokens.

    from graftlm.core.grammar import Grammar, Limits

Names are resolved when they are first used, so importing a module of this package loads no other.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graftlm.core.grammar.compile import Grammar as Grammar
    from graftlm.core.grammar.matcher import Matcher as Matcher
    from graftlm.core.grammar.spec import (
        Choices as Choices,
        Composite as Composite,
        Issue as Issue,
        JsonSchema as JsonSchema,
        Lark as Lark,
        Limits as Limits,
        Options as Options,
        Regex as Regex,
    )
    from graftlm.core.grammar.vocabulary import Vocabulary as Vocabulary

_HOME = {
    "compile": ("Grammar",),
    "matcher": ("Matcher",),
    "spec": ("Choices", "Composite", "Issue", "JsonSchema", "Lark", "Limits", "Options", "Regex"),
    "vocabulary": ("Vocabulary",),
}
_MODULES = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_MODULES)
