"""Programs that are neither planned nor compiled, beside a copy of the package without plans and orders of parts.

The copy lacks every `if` on `pacing` and `part_order` in core/program. Both run in turn, each in its own process, on an
engine that answers at once: CPU time of forks, texts, calls and reads.
"""

from __future__ import annotations

import ast
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.harness import ROOT, Options, Row

HOOKS = {"pacing", "part_order", "_part_order", "_plan"}
PROGRAM = """
import sys, time, graftlm as gl
import graftlm.core.program.run as run
from bench.frameworks._instant import instant_runtime
assert run.__file__.startswith(sys.argv[1]), run.__file__

@gl.program(temperature=0)
def ask(s, number):
    s += f"Number {number}."
    branches = s.fork(4)
    for i, branch in enumerate(branches):
        branch += f" Question {i}:" + gl.gen("answer", max_tokens=4)
        branch += " And then?" + gl.gen("more", max_tokens=4)
    s += " ".join(branch["more"] for branch in branches)

with instant_runtime() as runtime:
    runtime.load()
    for line in sys.stdin:
        started = time.process_time()
        for number in range(int(line)):
            ask.run(number, runtime=runtime).text
        print((time.process_time() - started) / int(line) * 1e3, flush=True)
"""


class _Without(ast.NodeTransformer):
    """Removes the tests for plans and orders: `X.pacing is not None` is False."""

    def __init__(self) -> None:
        self.removed = 0

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        if isinstance(node.test, ast.Constant) and node.test.value is False:
            return node.orelse or ast.Pass()
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        hook = isinstance(node.left, ast.Attribute) and node.left.attr in HOOKS
        if hook and isinstance(node.ops[0], ast.IsNot):
            self.removed += 1
            return ast.Constant(False)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        false = any(isinstance(one, ast.Constant) and one.value is False for one in node.values)
        return ast.Constant(False) if false and isinstance(node.op, ast.And) else node


def copy_without(folder: Path) -> int:
    """Make a package `graftlm` in `folder` without the hooks of plans; return the number of removed tests."""
    package, removed = (ROOT / "graftlm").resolve(), 0
    inside = {package: folder / "graftlm", package / "core": folder / "graftlm/core"}
    for source, target in inside.items():
        target.mkdir()
        for one in source.iterdir():
            if one.name not in ("core", "program"):
                (target / one.name).symlink_to(one.resolve())
    source, target = package / "core/program", folder / "graftlm/core/program"
    target.mkdir()
    for one in source.iterdir():
        if one.suffix != ".py":
            (target / one.name).symlink_to(one.resolve())
            continue
        without = _Without()
        tree = without.visit(ast.parse(one.read_text()))
        (target / one.name).write_text(ast.unparse(ast.fix_missing_locations(tree)))
        removed += without.removed
    (folder / "bench").symlink_to(ROOT / "bench")
    return removed


class Worker:
    """A process that runs programs of the package in `tree`."""

    def __init__(self, tree: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(tree)}
        command = [sys.executable, "-c", PROGRAM, str(tree)]
        self._process = subprocess.Popen(
            command, cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def cpu_ms(self, count: int) -> float:
        """Return the CPU milliseconds of each of `count` programs."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def run(options: Options) -> Iterator[Row]:
    count, pairs = 30, options.choose(20, 200)
    with tempfile.TemporaryDirectory() as folder:
        removed = copy_without(Path(folder))
        if not removed:
            raise SystemExit("core/program has no test for plans or orders; this case measures nothing")
        workers = Worker(ROOT), Worker(Path(folder))
        for worker in workers:
            worker.cpu_ms(count)
        times = [[worker.cpu_ms(count) for worker in workers] for _ in range(pairs)]
        for worker in workers:
            worker.close()
    ours, without = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(a / b for a, b in times)
    yield Row("cost", f"a program of 8 calls, {removed} tests for plans and orders", ours, "ms CPU", without,
              ratio=ratio, floor=1.02, at_most=True)  # fmt: skip
