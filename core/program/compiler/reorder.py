"""Reorder: `Program.compile`, which finds the order of a prompt's parts that shares the most between inputs."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from graftlm.core.errors import ConfigError
from graftlm.core.program.compiler.sharing import (
    BlockOrder,
    Message,
    Suggestion,
    blocks_of,
    encoder,
    hit_rate,
    joined,
    reference_in,
    suggest,
)
from graftlm.core.program.compiler.trace import Trace, traces
from graftlm.core.program.expression import Gen, Part, RoleBegin, RoleEnd, Select, Text

if TYPE_CHECKING:
    from graftlm.core.program.program import Program

Group = tuple[tuple[int, ...], int]
"""Adjacent texts and parts: the path of their branch, and the number of the group there."""
Arrange = Callable[[list[str]], Sequence[int]]
DEFAULT_AGREEMENT = 0.95


@dataclass(frozen=True)
class PartsOrder:
    """The order of the parts of each group, learned from traces. A group that refers to places keeps its order."""

    groups: Mapping[Group, BlockOrder]

    def arrange(self, group: Group, texts: Sequence[Text]) -> str:
        """Return the text of a group; parts change places among themselves."""
        source = "".join(one.text for one in texts)
        order = self.groups.get(group)
        parts = [i for i, one in enumerate(texts) if isinstance(one, Part)]
        if order is None or len(parts) < 2 or reference_in(source) is not None:
            return source
        found = [one.text for one in texts]
        for place, i in zip(parts, order.order([texts[i].text for i in parts]), strict=True):
            found[place] = texts[parts[i]].text
        return "".join(found)


@dataclass(frozen=True)
class FixedOrder:
    """One order of the blocks of each group, by position. A group with another number of blocks keeps its order."""

    groups: Mapping[Group, tuple[int, ...]]

    def arrange(self, group: Group, texts: Sequence[Text]) -> str:
        blocks, order = units(texts), self.groups.get(group)
        return "".join(blocks) if order is None or len(order) != len(blocks) else joined(blocks, order)


def units(texts: Sequence[Text]) -> list[str]:
    """Return the blocks of a group: its parts and the texts between, or its paragraphs where no part is declared."""
    if any(isinstance(one, Part) for one in texts):
        return [one.text for one in texts]
    return list(blocks_of("".join(one.text for one in texts)))


@dataclass
class CompileReport:
    """The result of `compile`, which prints `str(report)`.

    before, after  share of the sample's prompt tokens that a cache without limit has
    agreement      share of the inputs whose answers stayed equal; None if no model was asked
    applied        whether the compiled program uses the new order
    """

    name: str
    reorder: str
    num_inputs: int
    before: float
    after: float
    diff: str
    agreement: float | None = None
    applied: bool = False
    suggestion: Suggestion | None = None
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        inputs = f"{self.num_inputs} input{'' if self.num_inputs == 1 else 's'}"
        lines = [f"{self.name} over {inputs}, reorder={self.reorder}"]
        if self.suggestion is not None:
            lines.append(str(self.suggestion))
        else:
            lines.append(f"expected hit rate {self.before:.0%} -> {self.after:.0%}")
            if self.agreement is not None:
                lines.append(f"equal answers on the sample: {self.agreement:.0%}")
            lines.append("applied" if self.applied else "not applied: the original order stays")
            lines += [self.diff] if self.diff else []
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def compile_program(
    program: Program,
    inputs: Iterable[Mapping[str, Any]],
    reorder: Literal["suggest", "parts"] | Arrange,
    agreement: float | None,
    runtime: Any,
) -> Program:
    """Trace the program over `inputs` and return it with a new order of parts, and with its report."""
    items = list(inputs)
    if agreement is not None and not (isinstance(agreement, int | float) and 0 <= agreement <= 1):
        raise ConfigError(f"agreement is {agreement!r}; it must lie between 0 and 1, or be None")
    if reorder not in ("suggest", "parts") and not callable(reorder):
        raise ConfigError(f"reorder is {reorder!r}; use 'suggest', 'parts' or a function of the parts")
    found = traces(program, items, runtime)
    backend: Any = program._run_of(runtime, {}).backend
    name = reorder if isinstance(reorder, str) else getattr(reorder, "__name__", "a function")
    before = _prompts(found)
    report = CompileReport(program._name, name, len(found), hit_rate(before), 0.0, "", notes=_notes(found))
    if reorder == "suggest":
        report.suggestion = suggest([_first_prompt(trace) for trace in found], encoder(backend.processor))
        report.before, report.after = report.suggestion.before, report.suggestion.after
        return program._derived(report=report)
    order = _parts_order(found) if reorder == "parts" else _fixed_order(found, reorder)
    changed = program._derived(part_order=order, report=report)
    traced = traces(changed, items, runtime)
    report.after = hit_rate(_prompts(traced))
    report.diff = _diff(backend, found[-1], traced[-1])
    if callable(reorder) and agreement is None:
        agreement = DEFAULT_AGREEMENT
    if agreement is not None:
        report.agreement = _agreement(program, changed, items, runtime)
    report.applied = agreement is None or report.agreement is None or report.agreement >= agreement
    if not report.applied:
        report.notes.append(f"answers agree on {report.agreement:.0%} of the inputs, {agreement:.0%} were asked for")
        return program._derived(report=report)
    return changed


def _prompts(found: Sequence[Trace]) -> list[Any]:
    """Return the prompts of all calls that depend on no answer, input by input."""
    return [call.prompt for trace in found for call in trace.calls.values() if not call.reads and call.after is None]


def _groups(trace: Trace) -> dict[Group, list[Text]]:
    """Return the groups of adjacent texts of a trace that its branches number as they run."""
    found: dict[Group, list[Text]] = {}
    for path, expressions in trace.branches.items():
        number, texts = 0, list[Text]()
        for one in [*expressions, RoleEnd("")]:
            if isinstance(one, Text):
                texts.append(one)
            elif texts:
                found[path, number] = texts
                number, texts = number + 1, []
    return found


def _parts_order(found: Sequence[Trace]) -> PartsOrder:
    sample: dict[Group, list[list[str]]] = {}
    for number, trace in enumerate(found):
        for group, texts in _groups(trace).items():
            parts = [one.text for one in texts if isinstance(one, Part)]
            if len(parts) < 2:
                continue
            reference = reference_in("".join(one.text for one in texts))
            if reference is not None:
                raise ConfigError(
                    f"input {number} refers to a part by its place, {reference!r}, so its parts are not independent; "
                    "name the part instead, leave out gl.part, or use reorder='suggest'"
                )
            sample.setdefault(group, []).append(parts)
    if not sample:
        raise ConfigError(
            "the program declares no two parts side by side; mark independent texts with gl.part(text), "
            "or use reorder='suggest'"
        )
    return PartsOrder({group: BlockOrder.learn(parts) for group, parts in sample.items()})


def _fixed_order(found: Sequence[Trace], arrange: Arrange) -> FixedOrder:
    orders: dict[Group, tuple[int, ...]] = {}
    for group, texts in _groups(found[0]).items():
        blocks = units(texts)
        if len(blocks) < 2:
            continue
        order = [*arrange(list(blocks))]
        if sorted(order) != list(range(len(blocks))):
            raise ConfigError(
                f"the order {order!r} is no order of {len(blocks)} parts; return each index from 0 to "
                f"{len(blocks) - 1} once"
            )
        orders[group] = tuple(order)
    return FixedOrder(orders)


def _first_prompt(trace: Trace) -> list[Message]:
    """Return the messages of the first call, in blocks."""
    messages: list[tuple[str, list[Text]]] = []
    path = next(iter(trace.calls))[0] if trace.calls else ()
    for start in range(len(path) + 1):
        for one in trace.branches.get(path[:start], []):
            if isinstance(one, Gen | Select):
                return [(role, tuple(units(texts))) for role, texts in messages if texts]
            if isinstance(one, RoleBegin):
                messages.append((one.role, []))
            elif isinstance(one, Text):
                if not messages:
                    messages.append(("", []))
                messages[-1][1].append(one)
    return [(role, tuple(units(texts))) for role, texts in messages if texts]


def _agreement(program: Program, changed: Program, items: Sequence[Mapping[str, Any]], runtime: Any) -> float:
    """Return the share of inputs on which both programs give equal variables under greedy decoding."""
    answers = []
    for one in (program, changed):
        states = one.batch(items, runtime=runtime, temperature=0)
        answers.append([state.error or {**state.variables, "": state._run.result} for state in states])
    return sum(bool(a == b) for a, b in zip(*answers, strict=True)) / len(items)


def _diff(backend: Any, before: Trace, after: Trace) -> str:
    old, new = (backend.tokenizer.decode(_prompts([trace])[0], skip_special=False) for trace in (before, after))
    return "\n".join(difflib.unified_diff(old.splitlines(), new.splitlines(), "before", "after", lineterm="", n=1))


def _notes(found: Sequence[Trace]) -> list[str]:
    reading = [call for trace in found for call in trace.calls.values() if call.reads]
    if not reading:
        return []
    return [
        f"prompts after the program reads {reading[0].reads[0]} may depend on the answer: traced up to there, "
        "and left out of the hit rates"
    ]
