"""A comparison as a table, JSON, markdown and a chart."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from graftlm.ab.compare import Comparison, EngineRun
from graftlm.core.errors import ConfigError

COLUMNS = (
    "pipeline",
    "engine",
    "answers right",
    "answers equal",
    "wall time",
    "ratio",
    "prompt tokens",
    "tokens computed",
    "hit rate",
    "largest batch",
)


def figures(comparison: Comparison, run: EngineRun) -> dict[str, Any]:
    """The figures of one engine, as JSON takes them. Times in seconds, None where a figure does not exist."""
    return {
        "engine": run.engine,
        "answers": comparison.num_inputs,
        "right": comparison.num_right(run),
        "equal": comparison.num_equal(run),
        "wall_s": round(run.wall_s, 4),
        "speedup": comparison.speedup(run),
        "calls": run.work.calls,
        "prompt_tokens": run.work.prompt_tokens,
        "computed_tokens": run.work.computed_tokens,
        "hit_rate": round(run.work.hit_rate, 4),
        "largest_batch": run.work.largest_batch,
        "error": run.error,
    }


def to_json(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Every figure and every answer."""
    return [
        {
            "pipeline": c.pipeline.name,
            "title": c.pipeline.title,
            "model": c.model,
            "runs": [figures(c, run) | {"texts": [str(answer) for answer in run.answers]} for run in c.runs],
        }
        for c in comparisons
    ]


def rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """One row of text per engine, under COLUMNS."""
    return [(comparison.pipeline.name, *_cells(figures(comparison, run))) for run in comparison.runs]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if row["error"]:
        return (row["engine"], "failed", *["–"] * (len(COLUMNS) - 3))

    def share(count: int | None) -> str:
        return "–" if count is None else f"{count}/{row['answers']}"

    return (
        row["engine"],
        share(row["right"]),
        share(row["equal"]),
        f"{row['wall_s']:.2f} s",
        "–" if row["speedup"] is None else f"{row['speedup']:.1f}x",
        f"{row['prompt_tokens']:,}",
        f"{row['computed_tokens']:,}",
        f"{row['hit_rate']:.0%}",
        str(row["largest_batch"]),
    )


def table(comparisons: Sequence[Comparison], title: str) -> Table:
    """All comparisons as one table for the terminal."""
    drawn = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(COLUMNS):
        drawn.add_column(column.replace(" ", "\n"), justify="left" if i < 2 else "right", no_wrap=True)
    for comparison in comparisons:
        for row in rows(comparison):
            drawn.add_row(*row)
        drawn.add_section()
    return drawn


def failures(comparisons: Sequence[Comparison]) -> list[str]:
    """One line for each engine that failed."""
    return [
        f"{c.pipeline.name} on {run.engine} failed: {run.error}" for c in comparisons for run in c.runs if run.error
    ]


def markdown(comparisons: Sequence[Comparison]) -> str:
    """The same table, and under it every input on which an engine's answer differs from the baseline's."""
    lines = [" | ".join(("", *COLUMNS, "")).strip(), "|" + "---|" * len(COLUMNS)]
    lines += [" | ".join(("", *row, "")).strip() for c in comparisons for row in rows(c)]
    lines += [f"\n{line}" for line in failures(comparisons)]
    for c in comparisons:
        for run in c.runs[1:]:
            if run.error is None and c.baseline.error is None:
                pairs = zip(c.baseline.answers, run.answers, strict=True)
                differing = [(i, a, b) for i, (a, b) in enumerate(pairs) if a != b]
                if differing:
                    lines += ["", f"## {c.pipeline.name}: {run.engine} answers otherwise than {c.baseline.engine}", ""]
                    lines += [f"- input {i}: `{a}` became `{b}`" for i, a, b in differing]
    return "\n".join(lines) + "\n"


def chart(comparisons: Sequence[Comparison], path: Path) -> None:
    """Bars of wall time and of prompt tokens computed, by pipeline and engine, as a PNG.

    Raises: ConfigError if matplotlib is not installed.
    """
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError as error:
        raise ConfigError(
            "the chart needs matplotlib: pip install matplotlib, or leave it out with --no-chart"
        ) from error
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")

    figure, (wall, computed) = pyplot.subplots(1, 2, figsize=(9, 1.2 + 0.9 * len(comparisons)), layout="constrained")
    engines = list(dict.fromkeys(run.engine for c in comparisons for run in c.runs))
    height = 0.8 / len(engines)
    values: dict[str, Callable[[EngineRun], float]] = {
        "wall time, s": lambda run: run.wall_s,
        "prompt tokens computed": lambda run: run.work.computed_tokens,
    }
    for axis, (title, value) in zip((wall, computed), values.items(), strict=True):
        for i, engine in enumerate(engines):
            found = [(y, run) for y, c in enumerate(comparisons) for run in c.runs if run.engine == engine]
            axis.barh([y + i * height for y, _ in found], [value(run) for _, run in found], height, label=engine)
        axis.set_yticks([y + 0.4 - height / 2 for y in range(len(comparisons))], [c.pipeline.name for c in comparisons])
        axis.invert_yaxis()
        axis.set_title(title, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    wall.legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def write(comparisons: Sequence[Comparison], folder: Path, with_chart: bool = True) -> list[Path]:
    """Write report.json, report.md and, if asked for, chart.png into `folder`; it is made if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "report.json", folder / "report.md"]
    paths[0].write_text(json.dumps(to_json(comparisons), indent=2, ensure_ascii=False) + "\n")
    paths[1].write_text(markdown(comparisons))
    if with_chart:
        paths.append(folder / "chart.png")
        chart(comparisons, paths[-1])
    return paths
