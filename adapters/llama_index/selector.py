"""`GraftSelector`: a router's choice by likelihood, without parsing text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from graftlm.adapters.llama_index.messages import native_messages
from graftlm.core.program.select import Selection, check_choices, submit_select
from llama_index.core.base.base_selector import BaseSelector, SelectorResult, SingleSelection
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.schema import QueryBundle
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
