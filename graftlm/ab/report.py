"""A comparison as a terminal table, JSON, CSV, PNG and one HTML page."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from graftlm.ab import against, html_page
from graftlm.ab.comparison import Comparison, EngineResult
from graftlm.ab.cost import cost_of
from graftlm.core.errors import ConfigError

COLUMNS = ("pipeline", "engine", "answers right", "answers equal", "wall time", "ratio", "interval (95 %)",
           "prompt tokens", "tokens computed", "hit rate", "largest batch")  # fmt: skip
FILES = ("report.html", "report.json", "report.csv", "chart.png")
NONE = "–"


def figures(comparison: Comparison, result: EngineResult) -> dict[str, Any]:
    """Return the figures of one engine as JSON values. Times are in seconds; None where a figure does not exist."""
    row: dict[str, Any] = {"engine": result.engine, "error": result.error, "answers": len(comparison.inputs)}
    if not result.rounds:
        return row
    found, work, profile = comparison.ratio(result), result.work, result.profile
    normalised = comparison.differing(result, normalised=True)
    wall_s = comparison.median_of(result, "wall_s")
    row |= {
        "right": comparison.num_right(result),
        "equal": comparison.num_equal(result),
        "equal_normalised": None if normalised is None else len(comparison.inputs) - len(normalised),
        "varying": result.num_varying,
        "dtype": result.facts.get("dtype"),
        "device": result.facts.get("device"),
        "rounds": len(result.rounds),
        "rounds_counted": len(comparison.kept()),
        "wall_s": round(wall_s, 4),
        "ratio": None if found is None else found.value,
        "ratio_low": None if found is None else found.low,
        "ratio_high": None if found is None else found.high,
        "calls_per_s": None if work.calls is None else work.calls / wall_s,
        **dataclasses.asdict(work),
        "hit_rate": work.hit_rate,
        "best_hit_rate": result.best_hit_rate,
        "cpu_s": round(comparison.median_of(result, "cpu_s"), 4),
        "other_cores": round(comparison.median_of(result, "other_cores"), 2),
        "energy_j": result.rounds[-1].energy_j,
        "cost": cost_of(result.engine, comparison.model, work, comparison.prices),
        "peak_bytes": max(one.peak_bytes for one in result.rounds),
        "peak_gpu_bytes": max(one.peak_gpu_bytes for one in result.rounds) or None,
    }
    if profile is not None:
        row |= {
            "time_to_first_token_s": profile.time_to_first_token_s,
            "time_between_tokens_s": profile.time_between_tokens_s,
            "mean_calls_under_way": profile.mean_under_way,
            "mean_batch": profile.mean_batch,
            "phases_s": profile.phases,
        }
    return row


def _mebibytes(value: float) -> str:
    return f"{value / 2**20:,.0f} MiB"


DETAILS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "engine": ("engine", str),
    "dtype": ("dtype", str),
    "device": ("device", str),
    "requests/s": ("calls_per_s", "{:.1f}".format),
    "first token": ("time_to_first_token_s", "{:.3f} s".format),
    "between tokens": ("time_between_tokens_s", lambda value: f"{1000 * value:.1f} ms"),
    "calls": ("calls", "{:,}".format),
    "mean under way": ("mean_calls_under_way", "{:.1f}".format),
    "mean batch": ("mean_batch", "{:.1f}".format),
    "completion tokens": ("completion_tokens", "{:,}".format),
    "pictures": ("pictures", "{:,}".format),
    "best hit rate": ("best_hit_rate", "{:.0%}".format),
    "CPU time": ("cpu_s", "{:.2f} s".format),
    "cores of others": ("other_cores", "{:.1f}".format),
    "peak memory": ("peak_bytes", _mebibytes),
    "GPU memory": ("peak_gpu_bytes", _mebibytes),
    "GPU energy": ("energy_j", "{:,.0f} J".format),
    "cost": ("cost", "{:.6f}".format),
}
"""The second table of the page: figure and format of each column. Columns that no engine has are omitted."""


def details(comparisons: Sequence[Comparison]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return columns and rows of the second table."""
    found = [(c.name, figures(c, result)) for c in comparisons for result in c.results if result.rounds]
    columns = {name: one for name, one in DETAILS.items() if any(row.get(one[0]) is not None for _, row in found)}
    rows = [
        (name, *(NONE if row.get(key) is None else written(row[key]) for key, written in columns.values()))
        for name, row in found
    ]
    return ["pipeline", *columns], rows


def to_json(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Return every figure, every answer and every round."""
    return [
        {
            "pipeline": c.name,
            "title": c.title,
            "model": c.model,
            "differences": c.differences(),
            "notes": c.notes,
            "threads": c.threads,
            "date": c.date,
            "machine": c.machine,
            "versions": {result.engine: result.facts.get("versions") for result in c.results},
            "interrupted": c.interrupted,
            "inputs": c.inputs,
            "runs": [
                figures(c, result)
                | {
                    "texts": result.answers if result.rounds else [],
                    "wall_s_of_rounds": [one.wall_s for one in result.rounds],
                    "lost_of_rounds": [round(one.lost, 3) for one in result.rounds],
                    "left_out": result.left_out,
                    "calls_of_one_round": [
                        {key: value for key, value in vars(call).items() if not key.endswith("_ids")}
                        for call in (result.profile.calls if result.profile else [])
                    ],
                    "first_differences": [dataclasses.asdict(one) for one in result.divergences],
                }
                for result in c.results
            ],
        }
        for c in comparisons
    ]


def cells(comparison: Comparison, result: EngineResult) -> tuple[str, ...]:
    """Return one row of text, under COLUMNS."""
    row = figures(comparison, result)
    if not result.rounds:
        return (comparison.name, result.engine, "failed" if result.error else NONE, *[NONE] * (len(COLUMNS) - 3))

    def cell(key: str, written: str) -> str:
        return NONE if row[key] is None else written.format(**row)

    is_baseline = result is comparison.baseline
    return (
        comparison.name,
        result.engine,
        cell("right", "{right:,}/{answers}"),
        cell("equal", "{equal:,}/{answers}"),
        cell("wall_s", "{wall_s:.2f} s"),
        cell("ratio", "{ratio:.1f}x"),
        NONE if is_baseline else cell("ratio_low", "{ratio_low:.2f} to {ratio_high:.2f}"),
        cell("prompt_tokens", "{prompt_tokens:,}"),
        cell("computed_tokens", "{computed_tokens:,}"),
        cell("hit_rate", "{hit_rate:.0%}"),
        cell("largest_batch", "{largest_batch:,}"),
    )


def remarks(comparisons: Sequence[Comparison]) -> list[str]:
    """Return each way in which the engines did not do the same work, and what else misleads."""
    found: dict[str, list[str]] = {}
    for c in comparisons:
        for said in (*c.differences(), *c.notes):
            found.setdefault(said, []).append(c.name)
    names = len(comparisons) > 1
    named = (f"{', '.join(of)}: {said}" if names and len(of) < len(comparisons) else said for said, of in found.items())
    return list(named) or ["Same calls, same prompts, same answers."]


def setting(comparisons: Sequence[Comparison]) -> str:
    """Return model, dtype, machine, threads and date of the comparisons, as far as they are known, in one line."""
    first = comparisons[0]
    dtypes = dict.fromkeys(r.facts.get("dtype") for c in comparisons for r in c.results if r.facts.get("dtype"))
    threads = f"{first.threads} thread{'' if first.threads == 1 else 's'} an engine"
    return "; ".join(filter(None, [" in ".join([first.model, "/".join(map(str, dtypes))] if dtypes else [first.model]),
                                   first.machine, threads, first.date]))  # fmt: skip


def table(title: str, columns: Sequence[str], sections: Sequence[Sequence[Sequence[str]]]) -> Table:
    """Return a table for the terminal."""
    drawn = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for i, column in enumerate(columns):
        drawn.add_column(column.replace(" ", "\n", 1), justify="left" if i < 2 else "right", no_wrap=True)
    for rows in sections:
        for row in rows:
            drawn.add_row(*row)
        drawn.add_section()
    return drawn


def _print(drawn: Table | str) -> None:
    """Print to a terminal as wide as it is, elsewhere as wide as a table needs."""
    Console(width=None if sys.stdout.isatty() else 140, highlight=False, markup=False).print(drawn)


def print_table(comparisons: Sequence[Comparison], title: str = "") -> None:
    """Print the results, all comparisons as one table, and the remarks on them."""
    title = title or " ".join(c.title for c in comparisons)
    sections = [[cells(c, result) for result in c.results] for c in comparisons]
    partial = ["The run was interrupted: these are partial figures."] * any(c.interrupted for c in comparisons)
    found = "\n".join([*partial, *(html_page.summary(c, named=len(comparisons) > 1) for c in comparisons)])
    _print(table(f"{found}\n\n{title}\n{setting(comparisons)}", COLUMNS, sections))
    _print("\n".join(f"- {one}" for one in remarks(comparisons)))


def print_changes(changed: Sequence[against.Change]) -> None:
    """Print the comparison with an earlier report."""
    _print(table("Beside the earlier report", against.COLUMNS, [[one.cells() for one in changed]]))


def failures(comparisons: Sequence[Comparison]) -> list[str]:
    """Return one line for each engine that failed and each input that was left out."""
    lines = []
    for c in comparisons:
        for result in c.results:
            lines += [f"{c.name} on {result.engine} failed: {result.error}"] * bool(result.error)
            lines += [
                f"{c.name} on {result.engine}: measured input {i} raised {text}" for i, text in result.left_out.items()
            ]
    return lines


def can_draw() -> bool:
    """Return True if matplotlib is installed, which draws chart.png."""
    return importlib.util.find_spec("matplotlib") is not None


def check_folder(folder: Path, *, force: bool, with_chart: bool) -> None:
    """Check, before the first round, that a report can be written.

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
    changed: Sequence[against.Change] = (),
) -> list[Path]:
    """Write report.html, report.json, report.csv and, if asked for, chart.png; return their paths.

    command  the command line that repeats the comparison
    changed  the comparison with an earlier report, for the page
    """
    folder.mkdir(parents=True, exist_ok=True)
    page, data, sheet, image = (folder / name for name in FILES)
    # A lone surrogate, which UTF-8 does not have, is written as in JSON: "\\ud800".
    data.write_text(json.dumps(to_json(comparisons), indent=2, ensure_ascii=False) + "\n", "utf-8", "backslashreplace")
    rows = [{"pipeline": c.name} | figures(c, result) for c in comparisons for result in c.results]
    for row in rows:
        row |= {f"{name} (s)": seconds for name, seconds in row.pop("phases_s", {}).items()}
    with sheet.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    tables = [(c, [cells(c, result) for result in c.results]) for c in comparisons]
    sides = (against.COLUMNS, [one.cells() for one in changed])
    page.write_text(
        html_page.render(tables, COLUMNS, remarks(comparisons), command, details=details(comparisons), against=sides),
        "utf-8",
        "backslashreplace",
    )
    if with_chart:
        chart(comparisons, image)
    return [page, data, sheet, *[image] * with_chart]


def chart(comparisons: Sequence[Comparison], path: Path) -> None:
    """Draw each engine's ratio with its interval, and its computed prompt tokens, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = [
        (f"{c.name}: {r.engine}" if len(comparisons) > 1 else r.engine, c, r)
        for c in comparisons
        for r in c.results
        if r.rounds
    ]
    size = (9, 1.2 + 0.4 * max(len(bars), 1))
    figure, (ratios, computed) = pyplot.subplots(1, 2, figsize=size, layout="constrained", sharey=True)
    for y, (_, comparison, result) in enumerate(bars):
        found = comparison.ratio(result)
        if found is not None:
            ratios.plot([found.low or found.value, found.high or found.value], [y, y], color="tab:blue", linewidth=2)
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
