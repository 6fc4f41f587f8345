"""Measurements with their baseline beside them: paired runs, medians, a table, JSON with its provenance."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from graftlm.machine import describe

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Options:
    """Options of every case. `quick` selects the smallest run that shows the effect."""

    quick: bool = False
    repeats: int = 3
    model: str | None = None
    folders: tuple[Path, ...] = ()
    sample: int | None = None
    count: int | None = None
    batch: int | None = None

    def choose(self, quick: Any, full: Any) -> Any:
        return quick if self.quick else full


@dataclass(frozen=True)
class Row:
    """One figure.

    value     in `unit`; the median where there were several samples, whose extremes are `low` and `high`
    baseline  the baseline's figure, measured in the same run; None if there is none
    floor     the least (or, if `at_most`, the greatest) value that is good enough; of `ratio` where that is given
    """

    case: str
    what: str
    value: float
    unit: str
    baseline: float | None = None
    ratio: float | None = None
    floor: float | None = None
    at_most: bool = False
    low: float | None = None
    high: float | None = None
    shape: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reached(self) -> bool | None:
        """Return True if the floor is reached; None without a floor."""
        if self.floor is None:
            return None
        figure = self.value if self.ratio is None else self.ratio
        return figure <= self.floor if self.at_most else figure >= self.floor


Case = Callable[[Options], Iterable[Row]]
"""A case: returns its rows, or yields each row as soon as it is measured."""


@dataclass(frozen=True)
class Timing:
    """Wall times of several runs of one thing, in seconds."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


def timed(function: Callable[[], Any], name: str | None = None) -> float:
    """Return the seconds of one call; with a `name`, stderr shows them."""
    started = time.perf_counter()
    function()
    seconds = time.perf_counter() - started
    if name is not None:
        print(f"  {name}: {seconds:.2f} s", file=sys.stderr, flush=True)
    return seconds


def paired(functions: Mapping[str, Callable[[], Any]], repeats: int, warm: bool = True) -> dict[str, Timing]:
    """Time `functions` in turn, `repeats` times over, so that a change of the machine's load meets all of them.

    With `warm`, each is run once before, untimed.
    """
    if warm:
        for function in functions.values():
            function()
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            samples[name].append(timed(function, name))
    return {name: Timing(tuple(times)) for name, times in samples.items()}


def rate_row(case: str, what: str, unit: str, amount: float, ours: Timing, theirs: Timing, **rest: Any) -> Row:
    """Return a rate, `amount` per second, beside the baseline's; the ratio is the median over paired runs."""
    rates = sorted(amount / s for s in ours.samples)
    ratio = statistics.median(b / a for a, b in zip(ours.samples, theirs.samples, strict=True))
    return Row(
        case,
        what,
        amount / ours.median,
        unit,
        baseline=amount / theirs.median,
        ratio=ratio,
        low=rates[0],
        high=rates[-1],
        **rest,
    )


def origin() -> dict[str, Any]:
    """Command, commit, time and machine of this run. A copy without its history takes the commit from $COMMIT."""

    def git(*arguments: str) -> str:
        try:
            return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        except FileNotFoundError:
            return ""

    commit = git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    return {
        "command": shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
        "commit": commit or os.environ.get("COMMIT", "unknown"),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe(),
    }


def cases(package: str) -> dict[str, str]:
    """Return the cases of a folder of bench/ by name: the modules that have a `run(options)`."""
    folder = ROOT / "bench" / package
    return {
        m.name: f"bench.{package}.{m.name}" for m in pkgutil.iter_modules([str(folder)]) if not m.name.startswith("_")
    }


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def table(rows: Sequence[Row], title: str) -> Table:
    drawn = Table("case", "what", title=title)
    for column in ("value", "unit", "baseline", "ratio", "floor", "reached"):
        drawn.add_column(column, justify="left" if column == "unit" else "right")
    for row in rows:
        spread = f" ({_number(row.low)}–{_number(row.high)})" if row.low != row.high and row.low is not None else ""
        reached = {None: "", True: "[green]yes[/green]", False: "[red]no[/red]"}[row.reached]
        floor = "" if row.floor is None else f"{'≤' if row.at_most else '≥'} {row.floor:g}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
        drawn.add_row(
            row.case, row.what, _number(row.value) + spread, row.unit, _number(row.baseline), ratio, floor, reached
        )
    return drawn


def line(row: Row) -> str:
    """Return a row as one line, printed before the table is complete."""
    baseline = "" if row.baseline is None else f" (baseline {_number(row.baseline)})"
    ratio = "" if row.ratio is None else f", {row.ratio:.2f}x"
    return f"{row.case}: {row.what}: {_number(row.value)} {row.unit}{baseline}{ratio}"


def main(package: str, arguments: Sequence[str]) -> int:
    """Run the cases of one folder; exit status 1 if a floor is missed. `langchain` stands for all `langchain_...`."""
    known = cases(package)
    parser = argparse.ArgumentParser(prog=f"python -m bench {package}", description=f"Cases: {', '.join(known)}.")
    parser.add_argument("cases", nargs="*", metavar="case", help="which cases; all if none is named")
    parser.add_argument("--quick", action="store_true", help="the smallest run that still shows the effect")
    parser.add_argument("--repeats", type=int, default=3, help="paired runs of each timing (default 3)")
    parser.add_argument("--model", help="a Hugging Face name or local path in place of the case's own models")
    parser.add_argument("--folder", type=Path, action="append", default=[], help="data of the case `collections`")
    parser.add_argument("--sample", type=int, help="take about so many files of each folder")
    parser.add_argument("--count", type=int, help="how many texts the case `generations` writes")
    parser.add_argument("--batch", type=int, help="the one batch size that the case `decode` measures")
    parser.add_argument("--json", type=Path, dest="output", help="write figures, commit and machine to this file")
    given = parser.parse_args(arguments)
    chosen: list[str] = []
    for case in given.cases:
        named = [name for name in known if name == case] or [name for name in known if name.startswith(f"{case}_")]
        if not named:
            parser.error(f"no case {case!r}; known: {', '.join(known)}")
        chosen += named
    options = Options(
        given.quick, given.repeats, given.model, tuple(given.folder), given.sample, given.count, given.batch
    )
    console = Console(width=None if sys.stdout.isatty() else 150)
    progress = Console(stderr=True, soft_wrap=True)
    rows: list[Row] = []
    for name in chosen or known:
        case: Case = importlib.import_module(known[name]).run
        with progress.status(f"{package} {name}"):
            for row in case(options):
                rows.append(row)
                progress.print(line(row), highlight=False, markup=False)
    console.print(table(rows, f"{package}, {origin()['commit']}"))
    if given.output:
        figures = [asdict(row) | {"reached": row.reached} for row in rows]
        given.output.write_text(json.dumps(origin() | {"rows": figures}, indent=2) + "\n")
    return int(any(row.reached is False for row in rows))
