"""The drawings of the HTML page: ratios with their intervals, calls over time, and the time of each phase."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from graftlm.ab.comparison import Comparison, EngineResult
from graftlm.ab.measure.profile import Call

WIDTH = 830
MAX_CALLS = 400
PHASES = {
    "prefill": "#1668a7",
    "decode": "#58a3d8",
    "grammar": "#8a5fb0",
    "waiting and the rest of calls": "#c9a227",
    "framework, between calls": "#8a8a8a",
}
"""The colour of each phase."""


def intervals(comparison: Comparison) -> str:
    """Draw each engine's ratio as a point on its interval."""
    found = [(result.engine, ratio) for result in comparison.results[1:] if (ratio := comparison.ratio(result))]
    if not found:
        return "<p>No engine has a ratio.</p>"
    top = 1.08 * max([1.0, *(ratio.high or ratio.value for _, ratio in found)])

    def x(value: float) -> float:
        return 20 + 780 * value / top

    height = 36 + 50 * len(found)
    parts = [part for value in sorted({1.0, *ticks(top)}) if value == 1 or abs(x(value) - x(1)) > 40
             for part in _tick(x(value), 30, height - 24, f"{value:g}x")]  # fmt: skip
    for i, (engine, ratio) in enumerate(found):
        y = 42 + 50 * i
        low, high = ratio.low or ratio.value, ratio.high or ratio.value
        parts.append(_text(0, y - 16, f"{engine}: {ratio}"))
        parts.append(
            f'<line x1="{x(low):.1f}" x2="{x(high):.1f}" y1="{y}" y2="{y}" stroke="var(--mark)" stroke-width="3"/>'
        )
        parts.append(f'<circle cx="{x(ratio.value):.1f}" cy="{y}" r="5" fill="var(--mark)"/>')
    return _drawing(parts, height, "ratios with their intervals")


def timeline(comparison: Comparison) -> str:
    """Draw the model calls of each engine on one time axis, in two colours: before and after the first token."""
    shown = [(result.engine, wall_s, calls) for result in comparison.results if (wall_s := _wall(result))
             for calls in [_calls(result)] if calls]  # fmt: skip
    if not shown:
        return "<p>These engines do not report single calls.</p>"
    longest = max(wall_s for _, wall_s, _ in shown)
    parts, y = [], 0.0
    for engine, wall_s, calls in shown:
        more = f", the first {MAX_CALLS} of {len(calls)} calls" if len(calls) > MAX_CALLS else ""
        parts.append(_text(0, y + 24, f"{engine}, {len(calls)} calls, {wall_s:.2f} s{more}"))
        y += 34
        thickness = max(1.5, min(8.0, 160 / len(calls[:MAX_CALLS])))
        for call in calls[:MAX_CALLS]:
            first = call.end_s if call.first_s is None else call.first_s
            for begin, end, colour in ((call.begin_s, first, "var(--mark)"), (first, call.end_s, "var(--pale)")):
                if end > begin:
                    left, width = 800 * begin / longest, max(800 * (end - begin) / longest, 1.0)
                    parts.append(f'<rect x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{thickness:.1f}" '
                                 f'fill="{colour}"/>')  # fmt: skip
            y += thickness + 0.5
        y += 12
    return _drawing([*_time_axis(longest, y), *parts], y + 22, "calls over time")


def phases(comparison: Comparison) -> str:
    """Draw the time of each phase, as one bar per engine."""
    shown = [(result.engine, result.profile) for result in comparison.results if result.profile]
    if not shown:
        return ""
    longest = max(profile.wall_s for _, profile in shown)
    parts, y = [], 0.0
    for engine, profile in shown:
        parts.append(_text(0, y + 24, f"{engine}, {profile.wall_s:.2f} s"))
        left = 0.0
        for name, seconds in profile.phases.items():
            width = 800 * seconds / longest
            fill, title = PHASES.get(name, "#999"), f"<title>{escape(name)}: {seconds:.2f} s</title>"
            place = f'x="{left:.1f}" y="{y + 34:.1f}" width="{width:.1f}" height="14"'
            parts.append(f'<rect {place} fill="{fill}">{title}</rect>')
            left += width
        y += 58
    legend = "".join(
        f'<li><span style="background:{colour}"></span>{escape(name)}</li>'
        for name, colour in PHASES.items()
        if any(name in profile.phases for _, profile in shown)
    )
    return (
        _drawing([*_time_axis(longest, y), *parts], y + 22, "what the time was spent on")
        + f'<ul class="legend">{legend}</ul>'
    )


def ticks(end: float) -> list[float]:
    """Return four to nine round numbers from 0 to `end`, in steps of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(end / 4))
    step = next(power * factor for factor in (5, 2, 1) if end / (power * factor) >= 4)
    return [round(step * i, 9) for i in range(int(end / step) + 1)]


def _tick(x: float, top: float, bottom: float, label: str) -> list[str]:
    return [
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}" stroke="var(--line)"/>',
        f'<text x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="{"start" if x < 15 else "middle"}">{label}</text>',
    ]


def _time_axis(longest_s: float, height: float) -> list[str]:
    """Draw lines of a time axis, whose 800 units are `longest_s` seconds."""
    return [part for value in ticks(longest_s) for part in _tick(800 * value / longest_s, 28, height, f"{value:g} s")]


def _wall(result: EngineResult) -> float:
    return result.profile.wall_s if result.profile else result.rounds[0].wall_s if result.rounds else 0.0


def _calls(result: EngineResult) -> Sequence[Call]:
    if result.profile:
        return result.profile.calls
    return [Call(begin, end) for begin, end in result.rounds[0].spans] if result.rounds else []


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _drawing(parts: Sequence[str], height: float, label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
