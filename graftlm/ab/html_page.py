"""The report as one self-contained HTML page: no script, no network, readable on a phone and in print."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from graftlm.ab.comparison import Comparison, EngineResult

STYLE = """
:root { color-scheme: light dark; --line: #8884; --mark: #1668a7; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.warning { border-left: 4px solid #c47f00; padding: .3rem .8rem; }
.same { border-left: 4px solid #2a8a4a; padding: .3rem .8rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; } th { font-weight: 600; }
.answers td { text-align: left; white-space: pre-wrap; vertical-align: top; min-width: 12rem; }
svg { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
code, pre { font: 14px/1.4 ui-monospace, monospace; overflow-wrap: anywhere; white-space: pre-wrap; }
@media (prefers-color-scheme: dark) { :root { --mark: #6db3e8; } }
@media print { body { max-width: none; margin: 0; } }
"""

Rows = Sequence[tuple[str, ...]]
MAX_ANSWERS_SHOWN = 200


def render(tables: Sequence[tuple[Comparison, Rows]], columns: Sequence[str], headline: str, command: str) -> str:
    """The page.

    tables   each comparison with the rows of its table, under `columns`
    command  how the comparison can be repeated
    """
    comparisons = [comparison for comparison, _ in tables]
    same = "same" if not any(c.differences() or c.notes for c in comparisons) else "warning"
    sections = [
        f"<h1>{escape(' '.join(map(summary, comparisons)))}</h1>",
        f'<p class="{same}">{escape(headline)}</p>',
        _table(columns, [row for _, rows in tables for row in rows]),
    ]
    for comparison in comparisons:
        named = f" — {comparison.name}" if len(comparisons) > 1 else ""
        sections += [
            f"<h2>Speed-up over {escape(comparison.baseline.engine)}{escape(named)}</h2>",
            intervals(comparison),
        ]
        sections += [f"<h2>Model calls over time{escape(named)}</h2>", timeline(comparison)]
        sections += [_answers(comparison, result) for result in comparison.results[1:]]
        sections += [_errors(comparison)]
    sections += [
        "<h2>How to repeat it</h2>",
        f"<pre>{escape(command)}</pre>",
        "<p>Ratios are medians over interleaved rounds; intervals are 95 % bootstrap intervals over the rounds. "
        "Every engine ran in a process of its own with the same number of threads, after a warm-up, with the "
        "frameworks' response caches off.</p>",
    ]
    title = escape(comparisons[0].title) if comparisons else "A/B"
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n{chr(10).join(filter(None, sections))}\n</html>\n"
    )


def summary(comparison: Comparison) -> str:
    """One sentence: how much faster, and whether the answers are the same."""
    said = []
    for result in comparison.results[1:]:
        found = comparison.ratio(result)
        if found is None:
            said.append(f"{result.engine} has no result")
            continue
        low, high = found.low, found.high
        if low is None or high is None:
            speed = f"{found.value:.1f} times as fast as {comparison.baseline.engine} in one round, without an interval"
        elif low <= 1 <= high:
            speed = f"neither faster nor slower than {comparison.baseline.engine} beyond the interval ({found})"
        else:
            speed = f"{found.value:.1f} times as fast as {comparison.baseline.engine} ({low:.2f} to {high:.2f})"
        equal = f"{comparison.num_equal(result)} of {len(comparison.inputs)}"
        said.append(f"{result.engine} is {speed} and gives {equal} same answers")
    return f"{comparison.title.rstrip('.')}: {'; '.join(said) or comparison.baseline.engine + ' alone was measured'}."


def _table(columns: Sequence[str], rows: Rows) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def intervals(comparison: Comparison) -> str:
    """Each engine's ratio as a point on its interval."""
    found = [(result.engine, ratio) for result in comparison.results[1:] if (ratio := comparison.ratio(result))]
    if not found:
        return "<p>No engine has a ratio.</p>"
    top = 1.08 * max([1.0, *(ratio.high or ratio.value for _, ratio in found)])

    def x(value: float) -> float:
        return 150 + 620 * value / top

    height = 30 + 28 * len(found)
    parts = [f'<line x1="{x(1):.1f}" x2="{x(1):.1f}" y1="0" y2="{height - 22}" stroke="var(--line)"/>']
    parts.append(f'<text x="{x(1):.1f}" y="{height - 6}" text-anchor="middle">1x</text>')
    for i, (engine, ratio) in enumerate(found):
        y = 16 + 28 * i
        low, high = ratio.low or ratio.value, ratio.high or ratio.value
        parts.append(f'<text x="0" y="{y + 4}">{escape(engine[:22])}</text>')
        parts.append(
            f'<line x1="{x(low):.1f}" x2="{x(high):.1f}" y1="{y}" y2="{y}" stroke="var(--mark)" stroke-width="3"/>'
        )
        parts.append(f'<circle cx="{x(ratio.value):.1f}" cy="{y}" r="5" fill="var(--mark)"/>')
        parts.append(f'<text x="{x(high) + 8:.1f}" y="{y + 4}">{ratio.value:.2f}x</text>')
    return f'<svg viewBox="0 0 830 {height}" role="img" aria-label="ratios">{"".join(parts)}</svg>'


def timeline(comparison: Comparison) -> str:
    """The model calls of each engine's first round, as bars on one time axis."""
    shown = [(r.engine, r.rounds[0]) for r in comparison.results if r.rounds and r.rounds[0].spans]
    if not shown:
        return "<p>These engines do not report single calls.</p>"
    longest = max(one.wall_s for _, one in shown)
    parts, y = [], 0.0
    for engine, one in shown:
        parts.append(f'<text x="0" y="{y + 14:.1f}">{escape(engine[:22])}, {one.wall_s:.2f} s</text>')
        y += 22
        thickness = max(1.5, min(8.0, 120 / len(one.spans)))
        for begin, end in one.spans:
            left, width = 800 * begin / longest, max(800 * (end - begin) / longest, 1.0)
            bar = f'<rect x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{thickness:.1f}" fill="var(--mark)"/>'
            parts.append(bar)
            y += thickness + 0.5
        y += 12
    return f'<svg viewBox="0 0 830 {y:.0f}" role="img" aria-label="calls over time">{"".join(parts)}</svg>'


def _answers(comparison: Comparison, result: EngineResult) -> str:
    differing = comparison.differing(result)
    if not differing:
        return ""
    baseline = comparison.baseline
    rows = "".join(
        f"<tr><td>{escape(comparison.inputs[i])}</td><td>{_text(baseline.answers[i])}</td>"
        f"<td>{_text(result.answers[i])}</td></tr>"
        for i in differing[:MAX_ANSWERS_SHOWN]
    )
    more = len(differing) - MAX_ANSWERS_SHOWN
    note = f"<p>{more} more are in report.json.</p>" if more > 0 else ""
    head = f"<tr><th>input</th><th>{escape(baseline.engine)}</th><th>{escape(result.engine)}</th></tr>"
    title = f"{comparison.name}: where {result.engine} answers differently"
    return f'<h2>{escape(title)}</h2><div class="scroll"><table class="answers">{head}{rows}</table></div>{note}'


def _errors(comparison: Comparison) -> str:
    lines = [f"{result.engine} failed: {result.error}" for result in comparison.results if result.error]
    for result in comparison.results:
        lines += [f"input {i} raised with {result.engine}: {text}" for i, text in result.left_out.items()]
    return "<h2>Errors</h2><ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _text(answer: Any) -> str:
    return escape(answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, indent=1))
