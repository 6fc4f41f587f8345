"""Answers whose probabilities are measured: DSPy's decision evidence (Choice, Score, Noul) and lm15's judgments.

DSPy lets a model write such probabilities as numbers. Here they are computed: the likelihood of each label as the
continuation, normalised over the labels. Other fields of the same reply are generated between the decisions.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from dspy.adapters.decision import evidence_type
from graftlm.adapters.dspy.pieces import joined, literal, lower_schema
from graftlm.core.config import SamplingParams
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.schema.lowering import Lowered
from graftlm.core.grammar.spec import Composite
from graftlm.core.request import Request, Usage

if TYPE_CHECKING:
    from graftlm.core.prompt_input import PromptInput
    from graftlm.core.runtime import Runtime

Form = Literal["Choice", "Score", "Noul", "json", "json-text"]


@dataclass(frozen=True)
class Decision:
    """A choice among `labels`. `form` is the notation of the answer."""

    name: str
    labels: tuple[str, ...]
    form: Form

    def scored(self, label: str) -> str:
        """Return the text whose likelihood is the label's."""
        return json.dumps(label, ensure_ascii=False) if self.form == "json-text" else label

    def text(self, probabilities: dict[str, float]) -> str:
        """Return the measured answer as it is written in the reply."""
        if self.form in ("json", "json-text"):
            return self.scored(max(self.labels, key=probabilities.__getitem__))
        if self.form == "Noul":
            return json.dumps({"noul": probabilities["True"]})
        return json.dumps({"probabilities": probabilities, "confidence": max(probabilities.values())})


@dataclass
class Measured:
    """A reply composed of generated and measured pieces."""

    prompt: PromptInput
    text: str = ""
    probabilities: dict[str, dict[str, float]] = field(default_factory=dict)
    usage: Usage = Usage()
    complete: bool = True


def decision_form(annotation: Any) -> tuple[Form, list[str]] | None:
    """Return the form and labels of one of DSPy's evidence types; None for any other type."""
    if not inspect.isclass(annotation) or annotation.__module__ != evidence_type.__module__:
        return None
    evidence: Any = annotation
    name = evidence.__name__.removesuffix("Evidence")
    if name == "Noul":
        return "Noul", ["True", "False"]
    forms: dict[str, Form] = {"Choice": "Choice", "Score": "Score"}
    if name not in forms:
        return None
    options = evidence.model_fields["probabilities"].annotation.model_fields.values()
    return forms[name], [option.alias for option in options]


def measure(
    runtime: Runtime, prompt: PromptInput, pieces: Sequence[Lowered | Decision], sampling: SamplingParams
) -> Measured:
    """Write a reply piece by piece: languages are generated, decisions measured. Blocks until the reply is complete.

    Each piece computes only the tokens that the piece before it added, on the prompt's KV.
    """
    reply = Measured(prompt)
    for decides, group in groupby(pieces, lambda piece: isinstance(piece, Decision)):
        if decides:
            for decision in (piece for piece in group if isinstance(piece, Decision)):
                _decide(runtime, reply, decision)
            continue
        for language in joined(piece for piece in group if isinstance(piece, Lowered)):
            if isinstance(language.node, nodes.Literal):
                _append(runtime, reply, language.node.data.decode())
            else:
                _generate(runtime, reply, language, sampling)
    return reply


def _decide(runtime: Runtime, reply: Measured, decision: Decision) -> None:
    selection = runtime.select(reply.prompt, [decision.scored(label) for label in decision.labels], method="exact")
    probabilities = dict(zip(decision.labels, map(float, selection.probabilities), strict=True))
    reply.probabilities[decision.name] = probabilities
    _append(runtime, reply, decision.text(probabilities))


def _append(runtime: Runtime, reply: Measured, text: str) -> None:
    reply.text += text
    reply.prompt = reply.prompt.extended(runtime.tokenizer.encode_continuation(text))


def _generate(runtime: Runtime, reply: Measured, constraint: Composite, sampling: SamplingParams) -> None:
    constrained = SamplingParams.from_options(sampling, constraint=constraint, close_on_length=True, n=1)
    completion = runtime.complete(Request(reply.prompt, constrained))
    reply.text += completion.text
    reply.prompt = reply.prompt.extended(runtime.tokenizer.encode_continuation(completion.text))
    reply.usage += completion.usage
    reply.complete = reply.complete and completion.finish_reason == "stop"


def judgment_pieces(response_format: Mapping[str, Any] | None) -> list[Lowered | Decision]:
    """Return the pieces of a JSON object whose judgments are measured and whose other properties are generated.

    A judgment is a top-level property that is a boolean, one of several texts, or an integer from 0 up to a level.
    [] if the schema declares none.
    """
    schema = (response_format or {}).get("schema") or {}
    properties = schema.get("properties") or {}
    decisions = {name: _judgment(name, inner) for name, inner in properties.items()}
    if not any(decisions.values()):
        return []
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    pieces: list[Lowered | Decision] = []
    for i, (name, inner) in enumerate(properties.items()):
        pieces.append(literal(("," if i else "{") + json.dumps(name, ensure_ascii=False) + ":"))
        pieces.append(decisions[name] or lower_schema({**inner, **definitions}))
    return [*pieces, literal("}")]


def _judgment(name: str, schema: Any) -> Decision | None:
    if not isinstance(schema, Mapping):
        return None
    if schema.get("type") == "boolean":
        return Decision(name, ("true", "false"), "json")
    branches = schema.get("anyOf")
    options = schema.get("enum")
    if branches and all(isinstance(branch, Mapping) and "const" in branch for branch in branches):
        options = [branch["const"] for branch in branches]
    if not isinstance(options, list) or len(options) < 2:
        return None
    if all(isinstance(option, str) and option for option in options):
        return Decision(name, tuple(options), "json-text")
    if options == list(range(len(options))):
        return Decision(name, tuple(map(str, options)), "json")
    return None
