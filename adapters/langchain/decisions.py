"""`GraftDecisionModel`: LangChain's decision models (langchain-core 1.8) as fork and select.

The state is computed once. Each question is a fork of it. A label's probability is the exact likelihood of the label as
the answer, normalised over the question's labels.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from langchain_core.messages import BaseMessage
from pydantic import ConfigDict, Field, model_validator

from graftlm.adapters.langchain.base import sort_keywords
from graftlm.adapters.langchain.errors import langchain_errors
from graftlm.adapters.langchain.messages import native_messages, usage_metadata
from graftlm.core.call_options import check_given, shared_runtime
from graftlm.core.chat.messages import Message
from graftlm.core.errors import ConfigError
from graftlm.core.program.select import Selection, check_choices, submit_select
from graftlm.core.request import Usage
from graftlm.core.runtime import Runtime

try:
    from langchain_core.decisions import (
        BaseDecisionModel,
        Box,
        Choice,
        ChoiceAnswer,
        ClassifierResponse,
        Noul,
        NoulAnswer,
        Score,
        ScoreAnswer,
    )
except ImportError as error:
    raise ImportError("GraftDecisionModel needs langchain-core 1.8 or newer: pip install -U langchain-core") from error


class GraftDecisionModel(BaseDecisionModel):
    """A model of typed answers with probabilities: a label (Choice), yes or no (Noul), a level (Score).

    The confidence of an answer is the probability of its likeliest label. Box questions, which locate objects in an
    image, raise.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    if TYPE_CHECKING:  # options of the runtime are keywords too, and a type checker sees the fields alone

        def __init__(self, *, model: str = "sprout", **settings: Any) -> None: ...

    model: str = "sprout"
    runtime: Any = Field(default=None, exclude=True, repr=False)
    runtime_options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _sort_keywords(cls, values: Any) -> Any:
        return sort_keywords(cls, values)

    @model_validator(mode="after")
    def _name_the_model(self) -> GraftDecisionModel:
        if self.runtime is not None:
            check_given(self.runtime, self.runtime_options)
            if "model" not in self.model_fields_set:
                self.model = self.runtime.model_name
        return self

    @property
    def _provider(self) -> str:
        return "graftlm"

    def runtime_for(self) -> Runtime:
        """Return the runtime of a call: the given one, or the process-wide one for `model`."""
        return self.runtime or shared_runtime(self.model, self.runtime_options)

    def _classify(self, state: Any, questions: dict[str, Any]) -> Any:
        with langchain_errors():
            futures = self._submit(state, questions)
            try:
                return self._response(questions, [future.result() for future in futures])
            finally:
                for future in futures:
                    future.cancel()  # has an effect only after a failure or an interrupted wait

    async def _aclassify(self, state: Any, questions: dict[str, Any]) -> Any:
        with langchain_errors():
            futures = self._submit(state, questions)
            try:
                done = await asyncio.gather(*map(asyncio.wrap_future, futures))
            finally:
                for future in futures:
                    future.cancel()
            return self._response(questions, list(done))

    def _submit(self, state: Any, questions: Mapping[str, Any]) -> list[Future[Selection]]:
        if not questions:
            raise ConfigError("questions is empty; give at least one")
        runtime = self.runtime_for()
        conversation = _state_messages(state)
        prompts = [[*conversation[:-1], _ask(conversation[-1], question)] for question in questions.values()]
        labels = [check_choices(_labels(question), "exact") for question in questions.values()]
        inputs = [runtime.processor.encode(prompt) for prompt in prompts]
        return [submit_select(runtime, each, own, "exact") for each, own in zip(inputs, labels, strict=True)]

    def _response(self, questions: Mapping[str, Any], selections: Sequence[Selection]) -> Any:
        answers = {
            name: _answer(question, selection)
            for (name, question), selection in zip(questions.items(), selections, strict=True)
        }
        usage = usage_metadata(sum((selection.usage for selection in selections), Usage()))
        return ClassifierResponse(model=self.model, answers=answers, usage=usage)


def _state_messages(state: Any) -> list[Message]:
    """Return the state as a conversation; any value that is no message becomes one message of the user."""
    if isinstance(state, BaseMessage):
        return native_messages([state])
    if isinstance(state, Sequence) and not isinstance(state, str) and state:
        messages = [item for item in state if isinstance(item, BaseMessage)]
        if len(messages) == len(state):
            return native_messages(messages)
    return [Message("user", _text(state))]


def _ask(last: Message, question: Any) -> Message:
    """Return the state's last message with the question appended, so that all questions share the prefix."""
    options = _options(question)
    lines = [last.text, "", f"Question: {_text(question.instructions)}", "Answer with one of:"]
    lines += [f"- {label}" + (f": {_text(told)}" if told is not None else "") for label, told in options.items()]
    return Message("user", "\n".join(lines)) if last.role == "user" else Message("user", "\n".join(lines[2:]))


def _options(question: Any) -> dict[str, Any]:
    """Return the labels of a question, each with its description."""
    match question:
        case Choice():
            return dict(question.criteria)
        case Noul():
            criteria = question.criteria
            return {"yes": criteria and criteria.true, "no": criteria and criteria.false}
        case Score():
            return {str(level): told for level, told in enumerate(question.criteria)}
        case Box():
            raise ConfigError("a Box question locates things in an image, and this model reads text only; remove it")
    raise ConfigError(f"{type(question).__name__} is no kind of question known here; use Choice, Noul or Score")


def _labels(question: Any) -> list[str]:
    return list(_options(question))


def _answer(question: Any, selection: Selection) -> Any:
    shares = [min(1.0, max(0.0, share)) for share in selection.probabilities]
    match question:
        case Choice():
            probabilities = dict(zip(_labels(question), shares, strict=True))
            return ChoiceAnswer(
                type="choice", choice=selection.choice, probabilities=probabilities, confidence=max(shares)
            )
        case Noul():
            return NoulAnswer(type="noul", noul=shares[0])
        case _:
            return ScoreAnswer(
                type="score",
                score=sum(level * share for level, share in enumerate(shares)),
                legend=dict(enumerate(question.criteria)),
                probabilities=dict(enumerate(shares)),
                confidence=max(shares),
            )


def _text(value: Any) -> str:
    """Return a text unchanged, any other value as JSON; messages inside by role and content."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseMessage):
        (message,) = native_messages([value])
        return {"role": message.role, "content": message.text}
    if isinstance(value, Mapping):
        return dict(value)
    raise ConfigError(f"the state holds a {type(value).__name__}; use text, numbers, lists, mappings and messages")
