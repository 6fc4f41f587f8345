"""Each field of a sequence's state is written by one module, and none is `Any`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from graftlm.core.sequence import HeldSlots, Output, Progress, Readout, Sequence

CORE = Path(__file__).parents[2] / "core"
PARTS = {"progress": Progress, "kv": HeldSlots, "output": Output, "readout": Readout}
SEQUENCES = {"sequence", "parent", "child", "victim", "leader", "chooser", "member", "s"}
FIELDS = {f.name for f in fields(Sequence)}
MUTATORS = {"append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse"}
OWNERS = {
    "progress": "scheduling/scheduler.py",
    "kv": "kv/prefix_cache.py",
    "output": "scheduling/output_writer.py",
    "readout": "sampling/step_sampler.py",
    "tokens": "scheduling/output_writer.py",
    "bounds": "scheduling/request_tracker.py",
    "group": "sequence.py",
    "slot_map": "execution/step_plan.py",
    "draft": "scheduling/speculation.py",
    "counted": "scheduling/request_tracker.py",
}


def written(function: ast.AST) -> Iterator[str]:
    """Fields of sequences that a function assigns to or changes in place: "tokens", "progress.status", ..."""
    aliases = {name: part for node in ast.walk(function) for name, part in _aliases(node)}

    def field(node: ast.expr) -> str | None:
        if isinstance(node, ast.Subscript):
            return field(node.value)
        if not isinstance(node, ast.Attribute):
            return None
        owner = node.value
        if isinstance(owner, ast.Name) and owner.id in aliases:
            return f"{aliases[owner.id]}.{node.attr}"
        if isinstance(owner, ast.Attribute) and owner.attr in PARTS and _is_sequence(owner.value):
            return f"{owner.attr}.{node.attr}"
        return node.attr if _is_sequence(owner) else None

    for node in ast.walk(function):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield field(node) or ""
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            yield field(node.func.value) or ""


def _aliases(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Local names of a part: `kv = sequence.kv`, alone or in a tuple."""
    if not isinstance(node, ast.Assign):
        return
    for target in node.targets:
        both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
        pairs = zip(target.elts, node.value.elts, strict=False) if both else [(target, node.value)]  # type: ignore[attr-defined]
        for name, value in pairs:
            is_part = isinstance(value, ast.Attribute) and value.attr in PARTS and _is_sequence(value.value)
            if isinstance(name, ast.Name) and is_part:
                yield name.id, value.attr


def _is_sequence(node: ast.expr) -> bool:
    named = isinstance(node, ast.Name) and node.id in SEQUENCES
    return named or (isinstance(node, ast.Attribute) and node.attr == "sequence")


def writers() -> dict[str, set[str]]:
    """For each field, the modules of core/ that write it."""
    found: dict[str, set[str]] = {}
    for path in CORE.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                for name in written(function):
                    if name.partition(".")[0] in FIELDS:
                        found.setdefault(name, set()).add(str(path.relative_to(CORE)))
    return found


def test_each_field_is_written_by_its_owner_alone() -> None:
    found = writers()
    # a field without an owner is set when the sequence is made, and stays
    assert found == {name: {OWNERS.get(name.partition(".")[0], "nobody")} for name in found}


def test_what_is_never_written_is_no_state() -> None:
    never = {f"{part}.{f.name}" for part, cls in PARTS.items() for f in fields(cls)} - set(writers())
    assert never == set()


def test_no_field_is_any() -> None:
    classes = [Sequence, *PARTS.values()]
    assert [f.name for cls in classes for f in fields(cls) if "Any" in str(f.type)] == []


def test_the_walk_sees_assignments_aliases_and_changes_in_place() -> None:
    code = """
def f(sequence, row):
    sequence.tokens.append(1)
    kv, n = sequence.kv, 2
    kv.own[-1] = n
    row.sequence.progress.num_computed += 1
    sequence.output.logprobs.extend([])
    other.status = 1
"""
    found = set(written(ast.parse(code))) - {""}
    assert found == {"tokens", "kv.own", "progress.num_computed", "output.logprobs"}
