"""The LangChain integration of GraftLM; everything lives in `graftlm.adapters.langchain`."""

from typing import Any

from graftlm.adapters import langchain as _langchain
from graftlm.adapters.langchain import ChatGraftLM, GraftLLM

__all__ = ["ChatGraftLM", "GraftDecisionModel", "GraftLLM"]


def __getattr__(name: str) -> Any:
    if name == "GraftDecisionModel":  # needs langchain-core 1.8
        return _langchain.GraftDecisionModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
