"""Hostile constraints: each is compiled or refused within the limits of time and memory.

Each is compiled in a process of its own, for single bytes, with the default limits. Time is by the clock, so on a busy
machine it is the machine's; memory is what the process grew by at most.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.grammar.suite import BYTES
from bench.harness import Options, Row
from graftlm import Grammar, GrammarError, JsonSchema, Regex
from graftlm.core.grammar.automata import jit
from graftlm.core.grammar.spec import Spec

MOST_SECONDS, MOST_MB = 5.0, 500
_KILLED_AFTER_S = 60

Make = Callable[[], Any]


def _doubled(depth: int) -> Any:
    """Build definitions that each reference the next one twice: 2 ** depth values in all."""
    definitions: dict[str, Any] = {
        f"d{i}": {
            "type": "object",
            "properties": {name: {"$ref": f"#/$defs/d{i + 1}"} for name in "ab"},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
        for i in range(depth)
    }
    return {"$defs": {**definitions, f"d{depth}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def _nested(depth: int, keyword: str) -> Any:
    schema: Any = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema} if keyword == "items" else {keyword: [schema, {"type": "array"}]}
    return schema


def _chain(length: int, *, closed: bool) -> Any:
    """Build a chain of references, which leads back to the first if `closed`."""
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$defs": {**definitions, f"d{length}": {"$ref": "#/$defs/d0"} if closed else {}}, "$ref": "#/$defs/d0"}


def _overlapping(count: int, keyword: str) -> Any:
    """Build objects that may match several alternatives at once."""
    return {
        keyword: [
            {"properties": {f"p{i}": {"type": "integer"}, f"p{(i * 7 + 1) % count}": {"type": "string"}}}
            for i in range(count)
        ]
    }


def _object(count: int, **more: Any) -> Any:
    return {"type": "object", "properties": {f"name{i}": {"type": "string"} for i in range(count)}, **more}


def _text(**keywords: Any) -> Any:
    return {"type": "string", **keywords}


SCHEMAS: dict[str, Make] = {
    "2**40 values by definitions": lambda: _doubled(40),
    "2**200 values by definitions": lambda: _doubled(200),
    "arrays 60 deep": lambda: _nested(60, "items"),
    "arrays 5,000 deep": lambda: _nested(5_000, "items"),
    "anyOf 60 deep": lambda: _nested(60, "anyOf"),
    "oneOf 60 deep": lambda: _nested(60, "oneOf"),
    "a chain of 3,000 references": lambda: _chain(3_000, closed=False),
    "a circle of 3,000 references": lambda: _chain(3_000, closed=True),
    "oneOf of 40 overlapping objects": lambda: _overlapping(40, "oneOf"),
    "oneOf of 400 overlapping objects": lambda: _overlapping(400, "oneOf"),
    "allOf of 400 objects": lambda: _overlapping(400, "allOf"),
    "anyOf of 400 objects": lambda: _overlapping(400, "anyOf"),
    "if, then, else, 30 in a row": lambda: {
        "allOf": [
            {"if": {"required": [f"a{i}"]}, "then": {"required": [f"b{i}"]}, "else": {"required": [f"c{i}"]}}
            for i in range(30)
        ]
    },
    "30 dependencies": lambda: {
        "type": "object",
        "properties": {f"p{i}": {} for i in range(30)},
        "dependentRequired": {f"p{i}": [f"p{(i * 11 + 3) % 30}"] for i in range(30)},
    },
    "20 overlapping patternProperties": lambda: {
        "patternProperties": {f"{chr(97 + i)}.*{chr(98 + i)}": {"minimum": i} for i in range(20)}
    },
    "6 overlapping patternProperties": lambda: {
        "patternProperties": {f"{chr(97 + i)}.{{5}}{chr(98 + i)}": {"minimum": i} for i in range(6)}
    },
    "an enum of 100,000 strings": lambda: {"enum": [f"value {i * 7919}" for i in range(100_000)]},
    "an enum of 300 objects": lambda: {"enum": [{"a": i, "b": [i, {"c": str(i)}]} for i in range(300)]},
    "not an enum of 20,000 strings": lambda: {"type": "string", "not": {"enum": [f"v{i}" for i in range(20_000)]}},
    "3,000 optional members": lambda: _object(3_000),
    "3,000 required members": lambda: _object(3_000, required=[f"name{i}" for i in range(3_000)]),
    "300 members, half of them needed": lambda: _object(300, minProperties=150, additionalProperties=False),
    "300 members, at most half": lambda: _object(300, maxProperties=150),
    "a string of 10**9 characters": lambda: _text(minLength=10**9),
    "a pattern of 10**6 characters": lambda: _text(pattern="^[a-z]{1000000}$"),
    "a pattern within a length": lambda: _text(pattern="(a|b|ab)*c.*d", minLength=1_000, maxLength=2_000),
    "a format within a length": lambda: _text(format="email", minLength=200, maxLength=5_000),
    "a pattern of 2**25 states": lambda: _text(pattern="a.{25}$"),
    "two patterns of many states": lambda: {"allOf": [_text(pattern="a.{12}b"), _text(pattern="c.{12}d")]},
    "no match of a hard pattern": lambda: {"type": "string", "not": {"pattern": "(a|b)*a(a|b){18}"}},
    "twelve lookaheads": lambda: _text(pattern="^" + "".join(f"(?=.*{c})" for c in "abcdefghijkl") + ".*$"),
    "twelve patterns at once": lambda: {"allOf": [_text(pattern=f"{c}.*{c}.*{c}") for c in "abcdefghijkl"]},
    "a multiple of 1/997 and of 1/991": lambda: {"type": "number", "multipleOf": 0.997, "allOf": [{"multipleOf": 991}]},
    "a range of 300 digits": lambda: {"type": "integer", "minimum": -(10**300) + 7, "maximum": 10**300 - 13},
    "no multiple of 8,191": lambda: {"type": "integer", "not": {"multipleOf": 8191}},
    "an array of 10**9 items": lambda: {"type": "array", "items": {"type": "null"}, "minItems": 10**9},
    "1,000 different items out of 1,000": lambda: {
        "type": "array", "items": {"enum": list(range(1_000))}, "uniqueItems": True, "minItems": 1_000
    },
    "contains 500 of a kind": lambda: {
        "type": "array", "items": {"type": "integer"}, "contains": {"minimum": 5}, "minContains": 500
    },
    "a definition without an end": lambda: {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#/$defs/a"}}}},
    },
    "unevaluated under 20 anyOf": lambda: {
        "allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(3)]} for i in range(20)],
        "unevaluatedProperties": False,
    },
}  # fmt: skip

PATTERNS = {
    "repeats of repeats": "((a{1,1000}){1,1000}){1,1000}",
    "2**30 states": "(?:a|b)*a(?:a|b){30}",
    "5,000 nested groups": "(" * 5_000 + "a" + ")" * 5_000,
    "alternatives that share letters": "|".join(f"(?:a{{{i}}}b)*" for i in range(1, 120)),
    "60,000 letters": "ab" * 30_000,
    "ten lookaheads": "".join(f"(?=.*{c})" for c in "abcdefghij") + ".*",
    "unicode words between dots": r"\w{1,50}(?:.\w{1,50}){20}",
}


def _compile(kind: str, name: str) -> tuple[str, float, float]:
    """Return the outcome, seconds and megabytes."""
    spec: Spec = JsonSchema(SCHEMAS[name]()) if kind == "schema" else Regex(PATTERNS[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    try:
        outcome = f"taken ({Grammar.compile(spec, BYTES, strict=False).engine})"
    except GrammarError as error:
        outcome = f"refused: {error}"
    seconds = time.perf_counter() - started
    return outcome, seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def _build(kind: str, name: str) -> tuple[str, float, float]:
    """Compile a constraint, or refuse it before compilation."""
    started = time.perf_counter()
    try:
        return _compile(kind, name)
    except GrammarError as error:
        return f"refused: {error}", time.perf_counter() - started, 0.0


def run(options: Options) -> Sequence[Row]:
    jit.wait()
    Grammar.compile(JsonSchema({"type": "object", "properties": {"a": {"type": "string"}}}), BYTES)
    cases = [("schema", name) for name in SCHEMAS] + [("pattern", name) for name in PATTERNS]
    longest, most, unfinished = 0.0, 0.0, 0
    context = multiprocessing.get_context("fork")
    for case in cases[:: options.choose(5, 1)]:
        with context.Pool(1) as pool:
            try:
                outcome, seconds, megabytes = pool.apply_async(_build, case).get(_KILLED_AFTER_S)
            except multiprocessing.TimeoutError:
                outcome, seconds, megabytes = "not finished", _KILLED_AFTER_S, 0.0
                unfinished += 1
        longest, most = max(longest, seconds), max(most, megabytes)
        print(f"{seconds:6.2f} s {megabytes:6.0f} MB  {case[1]}: {outcome[:150]}", flush=True)
    shape = {"constraints": len(cases[:: options.choose(5, 1)]), "not finished": unfinished}
    return [
        Row("hostile", "longest time to an answer", longest, "s", floor=MOST_SECONDS, at_most=True, shape=shape),
        Row("hostile", "most memory", most, "MB", floor=MOST_MB, at_most=True, shape=shape),
    ]
