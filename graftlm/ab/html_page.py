"""The report as one self-contained HTML page: no script, no network, readable on a phone and in print."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from typing import Any

from graftlm.ab.comparison import Comparison, EngineResult
from graftlm.ab.svg import intervals, phases, timeline

STYLE = """
:root { color-scheme: light dark; --line: #8884; --mark: #1668a7; --pale: #9cc7e6; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, p, li, dt, dd, summary { overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.warning { border-left: 4px solid #c47f00; padding: .3rem .8rem; }
.same { border-left: 4px solid #2a8a4a; padding: .3rem .8rem; } ul.warning, ul.same { padding-left: 1.8rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
th { font-weight: 600; white-space: normal; vertical-align: bottom; }
.figures { font-size: .85rem; } .figures th, .figures td { padding: .25rem .5rem; }
.details { font-size: .85rem; } .details th { overflow-wrap: anywhere; }
.details td:nth-child(2), .details th:nth-child(2) { text-align: right; }
.subtitle { margin-top: -.6rem; } dl { display: grid; grid-template-columns: fit-content(12rem) 1fr; gap: .1rem 1rem; }
dt { font-weight: 600; } dd { margin: 0; } summary { cursor: pointer; }
.answers td, .answers th { text-align: left; white-space: pre-wrap; vertical-align: top; min-width: 12rem; }
svg { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
.option { white-space: nowrap; }
.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; font-size: .85rem; }
.legend span { display: inline-block; width: .8rem; height: .8rem; margin-right: .4rem; vertical-align: -1px; }
code, pre { font: 14px/1.4 ui-monospace, monospace; overflow-wrap: anywhere; white-space: pre-wrap; }
@media (prefers-color-scheme: dark) { :root { --mark: #6db3e8; --pale: #2f5f80; } }
@media (max-width: 40rem) {
  .answers, .answers tbody, .answers tr, .answers td { display: block; min-width: 0; }
  .answers tr:first-child { display: none; }
  .answers td { border: 0; padding: .2rem 0; overflow-wrap: anywhere; }
  .answers td::before { content: attr(data-of) ": "; font-weight: 600; }
  .answers tr { border-bottom: 1px solid var(--line); padding: .5rem 0; }
  .figures, .figures tbody, .figures tr { display: block; } .figures tr:first-child { display: none; }
  .figures tr { border-bottom: 1px solid var(--line); padding: .5rem 0; }
  .figures td { display: flex; justify-content: space-between; gap: 1rem; border: 0; padding: .1rem 0; }
  .figures td { white-space: normal; overflow-wrap: anywhere; } .figures td::before { white-space: nowrap; }
  .figures td::before { content: attr(data-of); } .figures td:nth-child(2) { font-weight: 600; }
  svg text { font-size: 26px; }
}
@media print {
  @page { margin: 14mm; }
  body { max-width: none; margin: 0; padding: 0; font-size: 11px; } h1 { font-size: 17px; } h2 { margin-top: 1.2rem; }
  .scroll { overflow: visible; } th, td { padding: .15rem .3rem; } .figures, .details, .legend { font-size: 9.5px; }
  code, pre { font-size: 11px; }
  h2, p.lead { break-after: avoid; } tr { break-inside: avoid; } svg { max-height: 90mm; width: auto; max-width: 100%; }
  svg, .legend { break-inside: avoid; } rect, circle, .legend span { print-color-adjust: exact; }
}
"""

Rows = Sequence[tuple[str, ...]]
MAX_ANSWERS_SHOWN = 200
_SPENT_NOTE = (
    '<p class="lead">Both charts show a further round, traced call by call. It enters no time and no ratio.</p>'
)
_CALLS_NOTE = '<p class="lead">A bar is a call of the further round, dark until its first token.</p>'
_OPTION = re.compile(r"--[a-z][a-z-]*")


def render(
    tables: Sequence[tuple[Comparison, Rows]],
    columns: Sequence[str],
    remarks: Sequence[str],
    command: str,
    *,
    details: tuple[Sequence[str], Rows] = ((), ()),
    against: tuple[Sequence[str], Rows] = ((), ()),
) -> str:
    """Return the page.

    tables   each comparison with the rows of its table, under `columns`
    remarks  the ways in which the engines did not do the same work
    command  the command line that repeats the comparison
    details  columns and rows of the second table, times and memory
    against  columns and rows of the comparison with an earlier report
    """
    comparisons = [comparison for comparison, _ in tables]
    same = "same" if not any(c.differences() or c.notes for c in comparisons) else "warning"
    sections = [
        f"<h1>{escape(' '.join(summary(c, named=len(comparisons) > 1) for c in comparisons))}</h1>",
        *(f'<p class="subtitle">{escape(c.name)}: {escape(c.title)}</p>' for c in comparisons),
        f'<ul class="{same}">' + "".join(f"<li>{_remark(one)}</li>" for one in remarks) + "</ul>",
        _table(columns, [row for _, rows in tables for row in rows]),
        *map(_setting, comparisons[:1]),
    ]
    if against[1]:
        sections += ["<h2>Beside the earlier report</h2>", _table(*against)]
    for comparison in comparisons:
        named = escape(f" — {comparison.name}" if len(comparisons) > 1 else "")
        spent = phases(comparison)
        sections += [f"<h2>Speed-up over {escape(comparison.baseline.engine)}{named}</h2>", intervals(comparison)]
        sections += [f"<h2>What the time was spent on{named}</h2>{_SPENT_NOTE}{spent}"] * bool(spent)
        sections += [f"<h2>Model calls over time{named}</h2>{_CALLS_NOTE}", timeline(comparison)]
        sections += [_answers(comparison, result) for result in comparison.results[1:]]
        equal = list(filter(None, (_equal_answers(comparison, result) for result in comparison.results[1:])))
        sections += [f"<h2>Equal answers{named}</h2>"] * bool(equal) + equal
        sections += [_errors(comparison)]
    if details[1]:
        sections += ["<h2>Times, tokens and memory</h2>", _table(*_turned(*details)).replace("figures", "details", 1)]
    sections += [
        "<h2>How to repeat it</h2>",
        f"<pre>{escape(command)}</pre>",
        "<p>Times and ratios are medians over the same interleaved rounds. The 95 % intervals allow for the spread of "
        "the rounds, for differences between runs, and for other programs that took the engines' cores. Every engine "
        "ran in a process of its own with the same number of threads, after a warm-up, with the frameworks' response "
        "caches off.</p>",
    ]
    title = escape(comparisons[0].title) if comparisons else "A/B"
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n{chr(10).join(filter(None, sections))}\n</html>\n"
    )


def summary(comparison: Comparison, *, named: bool = False) -> str:
    """Return one sentence: the speed-up, and the number of equal answers; `named` puts the pipeline's name first."""
    said = []
    for result in comparison.results[1:]:
        found = comparison.ratio(result)
        if found is None:
            base = comparison.baseline
            why = f"nothing beside it: {base.engine} failed" if result.rounds and not base.rounds else (
                "no ratio" if result.rounds else "no result")  # fmt: skip
            said.append(f"{result.engine} has {why}")
            continue
        low, high = found.low, found.high
        if low is None or high is None:
            speed = f"{found.value:.1f} times as fast as {comparison.baseline.engine} (too few rounds for an interval)"
        elif low <= 1 <= high:
            speed = f"neither faster nor slower than {comparison.baseline.engine} beyond the interval ({found})"
        else:
            speed = f"{found.value:.1f} times as fast as {comparison.baseline.engine} ({low:.2f} to {high:.2f})"
        equal = f"{comparison.num_equal(result)} of {len(comparison.inputs)}"
        said.append(f"{result.engine} is {speed} and gives {equal} equal answers")
    name = f"{comparison.name}: " if named else ""
    return f"{name}{'; '.join(said) or comparison.baseline.engine + ' alone was measured'}."


def _remark(text: str) -> str:
    """Return a remark whose options are not broken between lines."""
    return _OPTION.sub(lambda option: f'<span class="option">{option[0]}</span>', escape(text))


def _setting(comparison: Comparison) -> str:
    """List what was measured on what: model, date, machine, and dtype and packages of each engine."""
    threads = f"{comparison.threads} thread{'' if comparison.threads == 1 else 's'} an engine"
    lines = {
        "Model": comparison.model,
        "Date": comparison.date,
        "Machine": ", ".join(filter(None, [comparison.machine, threads])),
    }
    for result in comparison.results:
        facts = result.facts
        where = " on ".join(filter(None, (facts.get("dtype"), facts.get("device"))))
        lines[result.engine] = "; ".join(filter(None, (where, facts.get("versions"))))
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in lines.items() if value)
    return f"<h2>What was measured</h2><dl>{rows}</dl>"


def _turned(columns: Sequence[str], rows: Rows) -> tuple[list[str], list[tuple[str, ...]]]:
    """Exchange rows and columns of the table of details, which has more figures than engines."""
    first, *others = zip(columns, *rows, strict=True)
    names = [" ".join(one) for one in zip(first[1:], others[0][1:], strict=True)] if others else list(first[1:])
    return ["figure", *names], others[1:]


def _equal_answers(comparison: Comparison, result: EngineResult) -> str:
    """List the inputs that both engines answer equally, behind a click."""
    differing = comparison.differing(result)
    if differing is None:
        return ""
    equal = [i for i in range(len(comparison.inputs)) if i not in set(differing)]
    rows = "".join(
        f'<tr><td data-of="input">{escape(comparison.inputs[i])}</td>'
        f'<td data-of="answer">{_text(result.answers[i])}</td></tr>'
        for i in equal[:MAX_ANSWERS_SHOWN]
    )
    head = f"{len(equal)} of {comparison.baseline.engine} and {result.engine}"
    more = len(equal) - MAX_ANSWERS_SHOWN
    note = f"<p>{more} more are in report.json.</p>" if more > 0 else ""
    return (
        f'<details><summary>{escape(head)}</summary><div class="scroll"><table class="answers">'
        f"<tr><th>input</th><th>answer</th></tr>{rows}</table></div>{note}</details>"
        if equal
        else ""
    )


def _table(columns: Sequence[str], rows: Rows) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>"
        + "".join(f'<td data-of="{escape(c)}">{escape(cell)}</td>' for c, cell in zip(columns, row, strict=True))
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table class="figures"><tr>{head}</tr>{body}</table></div>'


def _answers(comparison: Comparison, result: EngineResult) -> str:
    differing = comparison.differing(result)
    if not differing:
        return ""
    baseline = comparison.baseline
    explained = {one.input: str(one) for one in result.divergences}
    cells = [
        (comparison.inputs[i], _text(baseline.answers[i]), _text(result.answers[i]), explained.get(i, ""))
        for i in differing[:MAX_ANSWERS_SHOWN]
    ]
    rows = "".join(
        f'<tr><td data-of="input">{escape(given)}</td><td data-of="{escape(baseline.engine)}">{ours}</td>'
        f'<td data-of="{escape(result.engine)}">{theirs}'
        + (f"<br><small>First difference: {escape(why)}</small>" if why else "")
        + "</td></tr>"
        for given, ours, theirs, why in cells
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
