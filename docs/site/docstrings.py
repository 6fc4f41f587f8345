"""An extension of griffe: the columns of a docstring, a name and what it means, become a table of the page."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

from griffe import Extension, Object

_ROW = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*|`[^`]+`)  +(\S.*)$")


class Columns(Extension):
    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of each object that is documented."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Return a docstring with its columns as tables of markdown; everything else stays."""
    rows: list[tuple[bool, str, str]] = []
    for line in text.splitlines():
        found = _ROW.match(line)
        if found:
            rows.append((True, found[1], found[2]))
        elif rows and rows[-1][0] and line.startswith("   "):  # a row goes on in its column
            rows[-1] = (True, rows[-1][1], f"{rows[-1][2]} {line.strip()}")
        else:
            rows.append((False, line, ""))
    parts: list[str] = []
    for is_row, group in groupby(rows, lambda row: row[0]):
        if is_row:
            cells = [f"| `{name.strip('`')}` | {meaning.replace('|', chr(92) + '|')} |" for _, name, meaning in group]
            parts += ["", "| name | meaning |", "|---|---|", *cells, ""]
        else:
            parts += [line for _, line, _ in group]
    return "\n".join(parts)
