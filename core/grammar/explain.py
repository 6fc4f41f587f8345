"""Explain a constraint: which engine keeps which part, how much of it is forced, what is refused and why."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.automata.stack.dpda import Dpda
from graftlm.core.grammar.budget import limited
from graftlm.core.grammar.compile import Grammar, compile_spec
from graftlm.core.grammar.engines.automaton import AutomatonGrammar
from graftlm.core.grammar.spec import Issue, JsonSchema, Options, Spec
from graftlm.core.grammar.vocabulary import Vocabulary

_NUM_TEXTS = 16
_FREE_BYTES = 40
"""How many bytes of a sampled text are drawn at random; then it takes its shortest ending."""
_MAX_PARTS = 400


@dataclass(frozen=True)
class Explanation:
    """What becomes of one constraint.

    engine        the engine that keeps it; None if it is refused
    num_states    states of the native automaton; None for other engines
    forced_share  share of the bytes of sampled texts that the constraint forces, from 0 to 1
    native        pointers of the subschemas that are regular
    lazy          pointers of the innermost subschemas that are not: what contains itself or may be anything
    annotations   keywords that restrict nothing
    refused       what cannot be kept, or cannot be satisfied
    nearest       the nearest schema that would be taken; None where the schema is taken, or none was found
    """

    engine: str | None
    num_states: int | None = None
    forced_share: float = 0.0
    native: tuple[str, ...] = ()
    lazy: tuple[str, ...] = ()
    annotations: tuple[Issue, ...] = ()
    refused: tuple[Issue, ...] = ()
    nearest: Any = None

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.engine is None:
            yield "refused"
        else:
            states = f", {self.num_states:,} states" if self.num_states is not None else ""
            yield f"kept by {self.engine}{states}; {self.forced_share:.0%} of the text is forced"
        if self.native or self.lazy:
            yield f"regular: {', '.join(pointer or '/' for pointer in self.native) or 'nothing'}"
        for pointer in self.lazy:
            yield f"not regular: {pointer or '/'}"
        for issue in self.annotations:
            yield f"annotation: {issue}"
        for issue in self.refused:
            yield f"refused: {issue}"
        if self.nearest is not None:
            import json

            yield f"the nearest schema that would be taken: {json.dumps(self.nearest, ensure_ascii=False)}"


def explain(spec: Spec, options: Options | None = None) -> Explanation:
    """Compile `spec` over single bytes and say what became of it; a refusal is an answer, not an error."""
    options = replace(options or Options(), on_unsupported="error")
    native, lazy = _parts(spec, options) if isinstance(spec, JsonSchema) else ((), ())
    try:
        grammar = compile_spec(spec, _BYTES, options)
    except GrammarError as error:
        refused, nearest = _weakened(spec, options, error)
        return Explanation(None, native=native, lazy=lazy, refused=refused, nearest=nearest)
    automaton = grammar.compiled.automaton if isinstance(grammar.compiled, AutomatonGrammar) else None
    return Explanation(
        grammar.engine,
        automaton.num_states if isinstance(automaton, Dfa | Dpda) else None,
        _forced_share(grammar),
        native,
        lazy,
        grammar.annotations,
    )


_BYTES = Vocabulary([*(bytes([i]) for i in range(256)), b""], eos_token_id=256)


def _parts(spec: JsonSchema, options: Options) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Pointers of the subschemas that are regular, and of the innermost that are not."""
    from graftlm.core.grammar.schema.reading.references import subschemas

    verdicts: dict[str, bool] = {}
    blamed: list[str] = []
    test = _is_regular(spec, replace(options, on_unsupported="warn"))

    def visit(schema: Any, pointer: str) -> bool:
        below = [visit(item, pointer + more) for more, item in subschemas(schema)] if isinstance(schema, dict) else []
        if len(verdicts) < _MAX_PARTS:
            verdicts[pointer] = test(pointer)
            if not verdicts[pointer] and all(below):
                blamed.append(pointer)
        return verdicts.get(pointer, True)

    visit(spec.schema, "")
    return tuple(pointer for pointer, regular in sorted(verdicts.items()) if regular), tuple(blamed)


def _is_regular(spec: JsonSchema, options: Options) -> Callable[[str], bool]:
    """A test of the subschemas of `spec` by their pointers: False where one contains itself or may be anything."""
    from graftlm.core.grammar.nodes.rules import written_out
    from graftlm.core.grammar.schema.algebra.shapes import Reference
    from graftlm.core.grammar.schema.lowering import Lowering
    from graftlm.core.grammar.schema.reading.json_schema import SchemaReader

    reader = SchemaReader(spec, options, items_differ=True)

    def test(pointer: str) -> bool:
        try:
            with limited(options.limits):
                lowering = Lowering(spec, options, reader)
                return written_out(lowering.value(Reference(pointer)), lowering.rules) is not None
        except GrammarError:
            pass  # refused, whatever the engine
        return True

    return test


def _forced_share(grammar: Grammar) -> float:
    """Forced bytes among all, over texts that follow the grammar at random for a while and then end."""
    rng = np.random.default_rng(0)
    row = np.zeros(_BYTES.num_words, np.int32)
    num_forced = num_bytes = 0
    for _ in range(_NUM_TEXTS):
        matcher = grammar.matcher()
        left = _FREE_BYTES
        ending: list[int] | None = None  # what is left of it
        while not matcher.finished:
            forced = list(matcher.forced_bytes())
            if not forced and (left == 0 and matcher.accepting):
                break
            if left == 0 and ending is None:
                ending = matcher.ending([])
            if forced:
                chosen = forced
                num_forced += len(forced)
            elif ending is None:
                matcher.fill_mask(row)
                bits = np.unpackbits(row.view(np.uint8), bitorder="little")[:257]
                chosen = [int(rng.choice(np.flatnonzero(bits)))]
                left -= 1
            else:
                chosen = ending[:1]
            if chosen == [256] or matcher.advance(chosen) != len(chosen):
                break
            if ending is not None:
                ending = ending[len(chosen) :]
            num_bytes += len(chosen)
    return num_forced / num_bytes if num_bytes else 1.0


def _weakened(spec: Spec, options: Options, error: GrammarError) -> tuple[tuple[Issue, ...], Any]:
    """What is refused, and the schema without it or, for misspelled keywords, with what was meant."""
    first = Issue(
        error.pointer or "", (error.pointer or "").rpartition("/")[2], str(error).partition(": ")[2] or str(error)
    )
    if not isinstance(spec, JsonSchema):
        return (first,), None
    nearest: Any = copy.deepcopy(spec.schema)
    lost: list[Issue] = []  # references that lead nowhere
    while True:
        try:
            weaker = compile_spec(JsonSchema(nearest, spec.documents), _BYTES, replace(options, on_unsupported="warn"))
        except GrammarError as found:
            pointer = found.pointer or ""
            if pointer in _REFERENCES or not pointer.endswith(_REFERENCES) or not _has(nearest, pointer):
                return (first,), None
            lost.append(Issue(pointer, pointer.rpartition("/")[2], str(found).partition(": ")[2]))
            _change(nearest, pointer, None)
        else:
            break
    issues = (*lost, *weaker.warnings)
    for issue in weaker.warnings:
        meant = re.search(r"did you mean '([^']+)'", issue.message)
        _change(nearest, issue.pointer, meant[1] if meant and issue.keyword != "format" else None)
    try:
        compile_spec(JsonSchema(nearest, spec.documents), _BYTES, options)
    except GrammarError:
        nearest = None
    return issues, nearest


_REFERENCES = ("/$ref", "/$dynamicRef", "/$recursiveRef")


def _has(schema: Any, pointer: str) -> bool:
    """Whether `pointer` leads to a keyword of this document, and not of another that it refers to."""
    try:
        place, keyword = _place(schema, pointer)
    except (LookupError, ValueError):
        return False
    return isinstance(place, dict) and keyword in place


def _place(schema: Any, pointer: str) -> tuple[Any, str]:
    """The schema that the keyword at `pointer` is in, and the keyword."""
    *above, last = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
    for part in above:
        schema = schema[int(part)] if isinstance(schema, list) else schema[part]
    return schema, last


def _change(schema: Any, pointer: str, renamed: str | None) -> None:
    """Remove the keyword at `pointer`, or rename it."""
    schema, last = _place(schema, pointer)
    value = schema.pop(last, None)
    if renamed is not None:
        schema[renamed] = value
