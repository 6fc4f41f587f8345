"""A comparison as a terminal table, JSON, CSV, PNG and one HTML page."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from graftlm.ab import against, html_page
from graftlm.ab.against import Change
from graftlm.ab.comparison import Comparison, EngineResult
from graftlm.ab.cost import cost_of
from graftlm.ab.profile import Call
from graftlm.core.errors import ConfigError

COLUMNS = (
    "pipeline",
    "engine",
    "answers right",
    "answers equal",
    "wall time",
    "ratio",
    "interval (95 %)",
    "prompt tokens",
    "tokens computed",
    "hit rate",
    "largest batch",
)
FILES = ("report.html", "report.json", "report.csv", "chart.png")


def figures(comparison: Comparison, result: EngineResult) -> dict[str, Any]:
    """The figures of one engine, as JSON takes them. Times are seconds; None where a figure does not exist."""
    row: dict[str, Any] = {"engine": result.engine, "error": result.error, "answers": len(comparison.inputs)}
    if not result.rounds:
        return row
    found, work = comparison.ratio(result), result.work
    normalised = comparison.differing(result, normalised=True)
    return row | {
        "right": comparison.num_right(result),
        "equal": comparison.num_equal(result),
        "equal_normalised": None if normalised is None else len(comparison.inputs) - len(normalised),
        "varying": result.num_varying,
        "rounds": len(result.rounds),
        "wall_s": round(result.wall_s, 4),
        "ratio": None if found is None else found.value,
        "ratio_low": None if found is None else found.low,
        "ratio_high": None if found is None else found.high,
        "calls_per_s": None if work.calls is None else work.calls / result.wall_s,
        **dataclasses.asdict(work),
        "hit_rate": work.hit_rate,
        "best_hit_rate": result.best_hit_rate,
        "cpu_s": round(result.cpu_s, 4),
        "other_cores": round(median(one.other_cores for one in result.rounds), 2),
        "energy_j": result.rounds[-1].energy_j,
        "cost": cost_of(result.engine, comparison.model, work, comparison.prices),
        **_times(result),
        "peak_bytes": max(one.peak_bytes for one in result.rounds),
        "peak_gpu_bytes": max(one.peak_gpu_bytes for one in result.rounds) or None,
    }


def _times(result: EngineResult) -> dict[str, Any]:
    """What the closer look at the calls gave; seconds."""
    profile = result.profile
    if profile is None:
        return {}
    under_way = sum(call.end_s - call.begin_s for call in profile.calls) / profile.wall_s
    return {
        "time_to_first_token_s": profile.time_to_first_token_s,
        "time_between_tokens_s": profile.time_between_tokens_s,
        "mean_calls_under_way": under_way,
        "mean_batch": profile.mean_batch,
        "phases_s": profile.phases,
    }


DETAILS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "engine": ("engine", str),
    "requests/s": ("calls_per_s", "{:.1f}".format),
    "first token": ("time_to_first_token_s", "{:.3f} s".format),
    "between tokens": ("time_between_tokens_s", lambda value: f"{1000 * value:.1f} ms"),
    "calls": ("calls", "{:,}".format),
    "mean under way": ("mean_calls_under_way", "{:.1f}".format),
    "mean batch": ("mean_batch", "{:.1f}".format),
    "completion tokens": ("completion_tokens", "{:,}".format),
    "best hit rate": ("best_hit_rate", "{:.0%}".format),
    "CPU time": ("cpu_s", "{:.2f} s".format),
    "cores of others": ("other_cores", "{:.1f}".format),
    "peak memory": ("peak_bytes", lambda value: f"{value / 2**20:,.0f} MiB"),
    "GPU memory": ("peak_gpu_bytes", lambda value: f"{value / 2**20:,.0f} MiB"),
    "GPU energy": ("energy_j", "{:,.0f} J".format),
    "cost": ("cost", "{:.6f}".format),
}
"""The second table of the page: a column's figure and how it is written. Columns that no engine has are left out."""


def details(comparisons: Sequence[Comparison]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Columns and rows of the second table."""
    found = [(c.name, figures(c, result)) for c in comparisons for result in c.results if result.rounds]
    columns = [name for name, (key, _) in DETAILS.items() if any(row.get(key) is not None for _, row in found)]

    def cell(row: Mapping[str, Any], column: str) -> str:
        key, written = DETAILS[column]
        return "–" if row.get(key) is None else written(row[key])

    return ["pipeline", *columns], [(name, *(cell(row, column) for column in columns)) for name, row in found]


def to_json(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Every figure, every answer and every round."""
    return [
        {
            "pipeline": c.name,
            "title": c.title,
            "model": c.model,
            "differences": c.differences(),
            "notes": c.notes,
            "threads": c.threads,
            "interrupted": c.interrupted,
            "inputs": c.inputs,
            "runs": [
                figures(c, result)
                | {
                    "texts": result.answers if result.rounds else [],
                    "wall_s_of_rounds": [one.wall_s for one in result.rounds],
                    "lost_of_rounds": [round(one.lost, 3) for one in result.rounds],
                    "left_out": result.left_out,
                    "calls_of_one_round": [_call(call) for call in result.profile.calls] if result.profile else [],
                    "first_differences": [dataclasses.asdict(one) for one in result.divergences],
                }
                for result in c.results
            ],
        }
        for c in comparisons
    ]


def _call(call: Call) -> dict[str, Any]:
    found = dataclasses.asdict(call)
    return {key: value for key, value in found.items() if key not in ("prompt_ids", "token_ids")}


def cells(comparison: Comparison, result: EngineResult) -> tuple[str, ...]:
    """One row of text, under COLUMNS."""
    row = figures(comparison, result)
    if not result.rounds:
        return (comparison.name, result.engine, "failed" if result.error else "–", *["–"] * (len(COLUMNS) - 3))

    def number(value: int | None) -> str:
        return "–" if value is None else f"{value:,}"

    def share(count: int | None) -> str:
        return "–" if count is None else f"{count}/{row['answers']}"

    is_baseline = result is comparison.baseline
    interval = "–" if row["ratio_low"] is None or is_baseline else f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}"
    return (
        comparison.name,
        result.engine,
        share(row["right"]),
        share(row["equal"]),
        f"{row['wall_s']:.2f} s",
        "–" if row["ratio"] is None else f"{row['ratio']:.1f}x",
        interval,
        number(row["prompt_tokens"]),
        number(row["computed_tokens"]),
        "–" if row["hit_rate"] is None else f"{row['hit_rate']:.0%}",
        number(row["largest_batch"]),
    )


def headline(comparisons: Sequence[Comparison]) -> str:
    """The first line of every table: each way in which the engines did not do the same work."""
    names = len(comparisons) > 1
    found = [f"{c.name}: {said}" if names else said for c in comparisons for said in (*c.differences(), *c.notes)]
    return " ".join(found) or "Same calls, same prompts, same answers."


def table(comparisons: Sequence[Comparison], title: str) -> Table:
    """All comparisons as one table for the terminal; the differences stand in its first line."""
    drawn = Table(title=f"{headline(comparisons)}\n{title}", box=SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for i, column in enumerate(COLUMNS):
        drawn.add_column(column.replace(" ", "\n", 1), justify="left" if i < 2 else "right", no_wrap=True)
    for comparison in comparisons:
        for result in comparison.results:
            drawn.add_row(*cells(comparison, result))
        drawn.add_section()
    return drawn


def print_table(comparisons: Sequence[Comparison], title: str = "") -> None:
    """Print to a terminal as wide as that is, elsewhere as wide as the table needs."""
    width = None if sys.stdout.isatty() else 140
    Console(width=width).print(table(comparisons, title or " ".join(c.title for c in comparisons)))


def failures(comparisons: Sequence[Comparison]) -> list[str]:
    """One line for each engine that failed and each input that was left out."""
    lines = []
    for c in comparisons:
        for result in c.results:
            lines += [f"{c.name} on {result.engine} failed: {result.error}"] * bool(result.error)
            lines += [
                f"{c.name} on {result.engine}: measured input {i} raised {text}" for i, text in result.left_out.items()
            ]
    return lines


def can_draw() -> bool:
    """Whether matplotlib is installed, which draws chart.png."""
    return importlib.util.find_spec("matplotlib") is not None


def check_folder(folder: Path, *, force: bool, with_chart: bool) -> None:
    """Check, before anything is run, that a report can be written.

    Raises: ConfigError if the folder exists and is not empty (unless `force`), cannot be written to, or if the chart
    is wanted and matplotlib is not installed.
    """
    if with_chart and not can_draw():
        raise ConfigError("chart.png needs matplotlib: pip install matplotlib, or leave it out with --no-chart")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--report {str(folder)!r} is a file; give the name of a folder")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise ConfigError(f"--report {str(folder)!r} holds files already; name another folder, or add --force")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--report {str(folder)!r} cannot be written: {error.strerror}; name another") from error


def write(
    comparisons: Sequence[Comparison],
    folder: Path,
    command: str,
    with_chart: bool = True,
    changed: Sequence[Change] = (),
) -> list[Path]:
    """Write report.html, report.json, report.csv and, if asked for, chart.png; returns their paths.

    command  how the comparison can be repeated
    changed  the comparison with an earlier report, for the page
    """
    folder.mkdir(parents=True, exist_ok=True)
    page, data, sheet, image = (folder / name for name in FILES)
    # A half of a character, which UTF-8 has not, is written as JSON writes it, "\\ud800".
    data.write_text(json.dumps(to_json(comparisons), indent=2, ensure_ascii=False) + "\n", "utf-8", "backslashreplace")
    rows = [{"pipeline": c.name} | _flat(figures(c, result)) for c in comparisons for result in c.results]
    with sheet.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    tables = [(c, [cells(c, result) for result in c.results]) for c in comparisons]
    sides = (against.COLUMNS, [one.cells() for one in changed])
    page.write_text(
        html_page.render(tables, COLUMNS, headline(comparisons), command, details=details(comparisons), against=sides),
        "utf-8",
        "backslashreplace",
    )
    if not with_chart:
        return [page, data, sheet]
    chart(comparisons, image)
    return [page, data, sheet, image]


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    phases = row.pop("phases_s", {})
    return row | {f"{name} (s)": seconds for name, seconds in phases.items()}


def print_changes(changed: Sequence[Change]) -> None:
    """The comparison with an earlier report as a table."""
    drawn = Table(title="Beside the earlier report", box=SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for i, column in enumerate(against.COLUMNS):
        drawn.add_column(column.replace(" ", "\n", 1), justify="left" if i < 2 else "right", no_wrap=True)
    for one in changed:
        drawn.add_row(*one.cells())
    Console(width=None if sys.stdout.isatty() else 140).print(drawn)


def chart(comparisons: Sequence[Comparison], path: Path) -> None:
    """Draw each engine's ratio with its interval, and the prompt tokens that it computed, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = [
        (f"{c.name}: {r.engine}" if len(comparisons) > 1 else r.engine, c, r) for c in comparisons for r in c.results
    ]
    bars = [bar for bar in bars if bar[2].rounds]
    size = (9, 1.2 + 0.4 * max(len(bars), 1))
    figure, (ratios, computed) = pyplot.subplots(1, 2, figsize=size, layout="constrained", sharey=True)
    for y, (_, comparison, result) in enumerate(bars):
        found = comparison.ratio(result)
        if found is not None:
            low, high = found.low or found.value, found.high or found.value
            ratios.plot([low, high], [y, y], color="tab:blue", linewidth=2)
            ratios.plot([found.value], [y], "o", color="tab:blue")
        computed.barh([y], [result.work.computed_tokens or 0], 0.6, color="tab:blue")
    ratios.axvline(1, color="grey", linewidth=0.8)
    ratios.set_yticks(range(len(bars)), [label for label, _, _ in bars])
    ratios.invert_yaxis()
    ratios.set_title("speed-up over the baseline, 95 % interval", loc="left")
    computed.set_title("prompt tokens computed", loc="left")
    for axis in (ratios, computed):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
