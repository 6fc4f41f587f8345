"""`GraftSelector`, a router's choice by likelihood, and `RepeatingOrder`, an order of retrieved nodes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from graftlm.adapters.llama_index.messages import native_messages
from graftlm.core.program.select import Selection, check_choices, submit_select
from llama_index.core.base.base_selector import BaseSelector, SelectorResult, SingleSelection
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.tools.types import ToolMetadata

if TYPE_CHECKING:
    from graftlm.adapters.llama_index.llm import GraftLLM


class GraftSelector(BaseSelector):
    """A selector that compares the likelihoods of a router's tools after the question; no text is parsed.

    The prompt (the tools and the question) is computed once and the tools' numbers are scored as its forks, so the
    result is always one of the tools. Its `probabilities` has one number per choice; they sum to 1.
    """

    def __init__(self, llm: GraftLLM) -> None:
        self._llm = llm

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _update_prompts(self, prompts_dict: PromptDictType) -> None:
        """Do nothing: the prompt cannot be replaced."""

    def _select(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> Selected:
        return Selected.of(self._submit(choices, query).result(), choices)

    async def _aselect(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> Selected:
        return Selected.of(await asyncio.wrap_future(self._submit(choices, query)), choices)

    def _submit(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> Future[Selection]:
        runtime = self._llm.runtime_for()
        labels = check_choices([str(number) for number in range(1, len(choices) + 1)], "exact")
        return submit_select(runtime, runtime.processor.encode(self._prompt(choices, query)), labels, "exact")

    def _prompt(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> Any:
        lines = [f"{number}. {' '.join(c.description.split())}" for number, c in enumerate(choices, 1)]
        text = "\n".join(["Choices:", *lines, "", f"Which choice fits this question best? {query.query_str}"])
        message = ChatMessage(role=MessageRole.USER, content=f"{text}\nAnswer with its number only.")
        return native_messages([message])


class Selected(SelectorResult):
    """A selection with the probability of every choice."""

    probabilities: list[float] = []

    @classmethod
    def of(cls, selection: Selection, choices: Sequence[ToolMetadata]) -> Selected:
        index, probabilities = selection.index, list(selection.probabilities)
        name = choices[index].name or f"choice {index + 1}"
        reason = f"{name} has probability {probabilities[index]:.2f}"
        return cls(selections=[SingleSelection(index=index, reason=reason)], probabilities=probabilities)


class RepeatingOrder(BaseNodePostprocessor):
    """Sorts retrieved nodes by when they were first retrieved, instead of by their score.

    Queries that retrieve some of the same nodes then begin their context with the same text, which the prefix cache
    has. The model reads the nodes in another order, so answers may change. The order is kept in this object.
    """

    _places: dict[str, int] = PrivateAttr(default_factory=dict)
    _lock: Any = PrivateAttr(default_factory=threading.Lock)

    @classmethod
    def class_name(cls) -> str:
        return "RepeatingOrder"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        with self._lock:
            for node in nodes:
                self._places.setdefault(node.node.hash, len(self._places))
            return sorted(nodes, key=lambda node: self._places[node.node.hash])
