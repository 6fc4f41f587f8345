"""Collections of schemas in folders: supported schemas, right and wrongly accepted instances, compile times by engine.

    python -m bench grammar collections --folder DIR [--folder DIR2] [--sample N]

Every `*.json` below the folder is one of: a schema; an object with `schema` and `tests`, or a list of such objects
(each test has `data` and `valid`). The instances of a schema `.../NAME.json` may also lie in folders named
`test/NAME` (valid) and `negative_test/NAME` (invalid) above it. Instances are written as compact JSON in the order of
their file. An engine is right about an instance when it accepts the valid and rejects the invalid; a schema that it
refuses counts as nothing right. GraftLM is given the files of the folder that a schema refers to, as `documents=`; the
other engines take one schema.

Compile times are CPU time from a schema to the first token mask, or to the refusal, over single bytes, each schema for
the first time in the process. What a process does once (imports, the vocabulary, a first small schema) is done before.
GraftLM reads schemas by the standard, as the others do; `as it comes` is `strict=True`, in one more run.
"""

from __future__ import annotations

import gc
import json
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag, urljoin

from bench.grammar import suite
from bench.harness import Options, Row
from graftlm import GrammarError
from graftlm.core.grammar.automata import jit

_SMALL = {"type": "object", "properties": {"a": {"type": "string"}}}


@dataclass
class Result:
    """The results of one engine on the schemas of a folder."""

    num_schemas: int = 0
    num_taken: int = 0
    num_right: int = 0
    num_rejected: int = 0
    num_instances: int = 0
    let_through: list[str] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def reasons(self) -> Counter[str]:
        """Return the reasons of refusals, without pointers, names and numbers."""
        return Counter(
            re.sub(r"'[^']*'|\d[\d,]*", "…", text.partition(": ")[2] or text) for text in self.refusals.values()
        )


Group = tuple[str, Any, list[tuple[Any, bool]]]
"""Name, schema, and instances with whether they are valid."""


def groups(folder: Path, sample: int | None = None) -> Iterator[Group]:
    """Yield the schemas below `folder`; with `sample` every n-th file, about `sample` in all."""
    paths = sorted(path for path in folder.rglob("*.json") if not {"test", "negative_test"} & set(path.parts))
    step = max(1, len(paths) // sample) if sample else 1
    for path in paths[::step]:
        try:
            content = json.loads(path.read_text())
        except ValueError:
            continue  # comments, merge conflicts: no JSON
        name = str(path.relative_to(folder))
        found = content if isinstance(content, list) else [content]
        if all(isinstance(group, dict) and "tests" in group and "schema" in group for group in found):
            for i, group in enumerate(found):
                tests = [(test["data"], test["valid"]) for test in group["tests"]]
                yield f"{name}[{i}] {group.get('description', '')}", group["schema"], tests
        elif isinstance(content, dict):
            yield name, content, list(_instances_beside(path))


def _instances_beside(path: Path) -> Iterator[tuple[Any, bool]]:
    for above in path.parents[:3]:
        for kind, valid in (("test", True), ("negative_test", False)):
            for instance in sorted((above / kind / path.stem).glob("*.json")):
                try:
                    yield json.loads(instance.read_text()), valid
                except ValueError:
                    continue


class Neighbours:
    """The schemas of a folder by their URIs and file names, for those that refer to them."""

    def __init__(self, folder: Path) -> None:
        self._by_uri = {Path(name).name: schema for name, schema, _ in groups(folder)} | {
            urldefrag(uri)[0]: schema
            for _, schema, _ in groups(folder)
            if isinstance(schema, dict) and isinstance(uri := schema.get("$id", schema.get("id")), str)
        }

    def documents(self, schema: Any) -> dict[str, Any]:
        """Return the documents of the folder that `schema` references, directly or indirectly."""
        found: dict[str, Any] = {}
        own = schema.get("$id", schema.get("id")) if isinstance(schema, dict) else None
        known = {urldefrag(own)[0]} if isinstance(own, str) else set()
        work = [("", schema)]
        while work:
            base, document = work.pop()
            for uri in _references(document, base):
                if uri in self._by_uri and uri not in found and uri not in known:
                    found[uri] = self._by_uri[uri]
                    work.append((uri, found[uri]))
        return found


def _references(schema: Any, base: str) -> Iterator[str]:
    """Yield the documents that the references in `schema` name, as URIs."""
    if isinstance(schema, dict):
        name, reference = schema.get("$id", schema.get("id")), schema.get("$ref")
        base = urljoin(base, name) if isinstance(name, str) else base
        if isinstance(reference, str):
            yield urldefrag(urljoin(base, reference))[0]
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _references(inner, base)


def judge(compile_schema: Callable[[Any], suite.Accepts], found: Sequence[Group]) -> Result:
    """Check every schema and instance with one engine."""
    result = Result()
    compile_schema(_SMALL)
    gc.collect()
    gc.freeze()  # a collection in the middle of a compilation would look through all schemas of the folder
    for name, schema, tests in found:
        result.num_schemas += 1
        result.num_instances += len(tests)
        started = time.process_time()
        try:
            accepts = compile_schema(schema)
        except (GrammarError, RuntimeError) as error:
            result.refusals[name] = str(error)
            continue
        finally:
            result.seconds.append(time.process_time() - started)
        result.num_taken += 1
        for data, valid in tests:
            accepted = accepts(suite.instance(data))
            result.num_right += accepted == valid
            result.num_rejected += valid and not accepted
            if accepted and not valid:
                result.let_through.append(name)
    gc.unfreeze()
    return result


def _graftlm(schema: Any, documents: dict[str, dict[str, Any]], *, strict: bool = False) -> suite.Accepts:
    return suite.graftlm(schema, strict=strict, documents=documents.get(json.dumps(schema)))


def _compile_times(found: Sequence[Group], compile_schema: Callable[[Any], suite.Accepts]) -> list[float]:
    """Return the seconds to the first mask of each schema, or to its refusal, sorted.

    No instance is read in between: masks that threads compute ahead for one would be counted for the next schema.
    """
    return sorted(judge(compile_schema, [(name, schema, []) for name, schema, _ in found]).seconds)


def xgrammar(schema: Any) -> suite.Accepts:
    """xgrammar alone, with its own reading of schemas."""
    import xgrammar as xgr

    info = xgr.TokenizerInfo(suite.BYTES.tokens, vocab_type=xgr.VocabType.RAW, stop_token_ids=[256])
    compiled = xgr.GrammarCompiler(info, max_threads=1, cache_enabled=False).compile_json_schema(
        json.dumps(schema), any_whitespace=False, separators=(",", ":"), strict_mode=False
    )

    xgr.GrammarMatcher(compiled).fill_next_token_bitmask(xgr.allocate_token_bitmask(1, 257))

    def accepts(data: bytes) -> bool:
        matcher = xgr.GrammarMatcher(compiled)
        return all(matcher.accept_token(byte) for byte in data) and matcher.accept_token(256)

    return accepts


def run(options: Options) -> Sequence[Row]:
    rows: list[Row] = []
    jit.wait()
    for folder in options.folders:
        found = list(groups(folder, options.choose(50, options.sample)))
        neighbours = Neighbours(folder)
        documents = {json.dumps(schema): neighbours.documents(schema) for _, schema, _ in found}
        engines: dict[str, Callable[[Any], suite.Accepts]] = {"graftlm": partial(_graftlm, documents=documents)}
        engines["llguidance"] = suite.llguidance
        if find_spec("xgrammar"):
            engines["xgrammar"] = xgrammar
        seconds = {name: _compile_times(found, compile_schema) for name, compile_schema in engines.items()}
        results = {name: judge(compile_schema, found) for name, compile_schema in engines.items()}
        ours, theirs = results["graftlm"], results["llguidance"]
        for reason, count in ours.reasons().most_common(15):
            print(f"{count:5} refused: {reason}")
        for line in ours.let_through:
            print("accepted though invalid:", line)
        for name, result in results.items():
            times = seconds[name]
            shape = {"folder": folder.name, "schemas": result.num_schemas, "instances": result.num_instances}
            mine = name == "graftlm"
            rows += [
                Row("collections", f"{folder.name}: {name} takes", result.num_taken, "schemas",
                    theirs.num_taken if mine else None, shape=shape),
                Row("collections", f"{folder.name}: {name} right", result.num_right, "instances",
                    theirs.num_right if mine else None, shape=shape),
                Row("collections", f"{folder.name}: {name} valid but rejected", result.num_rejected, "instances",
                    shape=shape),
                Row("collections", f"{folder.name}: {name} invalid but accepted", len(result.let_through), "instances",
                    floor=0 if mine else None, at_most=True, shape=shape),
                Row("collections", f"{folder.name}: {name} compile p50", 1e3 * statistics.median(times), "ms",
                    floor=2 if mine else None, at_most=True, shape=shape),
                Row("collections", f"{folder.name}: {name} compile p99", 1e3 * times[int(0.99 * len(times))], "ms",
                    floor=100 if mine else None, at_most=True, shape=shape),
            ]  # fmt: skip
        times = _compile_times(found, partial(_graftlm, documents=documents, strict=True))
        rows += [
            Row("collections", f"{folder.name}: graftlm as it comes, compile p50", 1e3 * statistics.median(times),
                "ms"),
            Row("collections", f"{folder.name}: graftlm as it comes, compile p99", 1e3 * times[int(0.99 * len(times))],
                "ms"),
        ]  # fmt: skip
    return rows
