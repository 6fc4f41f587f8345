"""HTML of results in notebooks: blocks of text and tables of two columns, every value escaped.

Notebooks call it once for each result that a cell ends with; nothing else does.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any


def block(title: str, text: str) -> str:
    """Return a titled text, its line breaks kept."""
    style = (
        "white-space:pre-wrap;overflow-wrap:anywhere;border-left:3px solid #2f7d4f;padding-left:.75em;margin:.25em 0"
    )
    return f'<div style="opacity:.7">{escape(title)}</div><pre style="{style}">{escape(text)}</pre>'


def table(values: Mapping[str, Any]) -> str:
    """Return a table with a row for each value."""
    rows = "".join(
        f'<tr><td style="text-align:left">{escape(str(name))}</td>'
        f'<td style="text-align:right;font-variant-numeric:tabular-nums">{escape(_shown(value))}</td></tr>'
        for name, value in values.items()
    )
    return f"<table>{rows}</table>"


def _shown(value: Any) -> str:
    """Return a number in groups of three digits, seconds with three decimals, other values as they are."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
