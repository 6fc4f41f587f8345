"""python docs/site/sentences.py [LIMIT]: print the words of a sentence, on average and in the longest, by page.

Tables, code and headings do not count. With a limit, the sentences above it are printed and the status is 1 if a page's
average is above it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LIMIT = 25
"""Limit of the mean number of words."""
_SKIPPED = re.compile(r"^(```|~~~).*?^\1\s*$|^---\n.*?^---\n|^\|.*?$|^#.*?$|<!--.*?-->|^:::.*?$|^    .*?$|<[^>\n]+>",
                      re.MULTILINE | re.DOTALL)  # fmt: skip
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_CODE = re.compile(r"`[^`]*`")
_END = re.compile(r"(?<=[.!?:;])[\s)*\"]+(?=[A-Z`*\[\"(]|$)|\n\s*\n|\n\s*[-*] |\n\s*\d+\. ")


def sentences(text: str) -> list[str]:
    """Return the sentences of a page's prose. A colon or semicolon before a small letter does not end one."""
    prose = _CODE.sub("`code`", _LINK.sub(r"\1", _SKIPPED.sub("\n\n", text)))
    found = (" ".join(one.split()) for one in _END.split(prose) if one)
    return [one for one in found if len(re.findall(r"\w+", one)) > 1]


def length(sentence: str) -> int:
    """Count the words."""
    return len(re.findall(r"[\w'’-]+", sentence))


def mean_length(text: str) -> float:
    """Return the mean number of words of a page's sentences; 0 for a page without any."""
    found = [length(one) for one in sentences(text)]
    return sum(found) / len(found) if found else 0.0


def main() -> int:
    limit = int(sys.argv[1]) if len(sys.argv) > 1 else None
    total, worst = [], 0.0
    for page in PAGES:
        text = page.read_text()
        lengths = [length(one) for one in sentences(text)]
        total += lengths
        worst = max(worst, mean_length(text))
        print(f"{mean_length(text):5.1f} {max(lengths, default=0):4d} {page.relative_to(ROOT)}")
        for one in sentences(text) if limit is not None else ():
            if length(one) > limit:  # type: ignore[operator]
                print(f"      {length(one)}: {one}")
    print(f"{sum(total) / len(total):5.1f} {max(total):4d} all pages")
    return int(limit is not None and worst > limit)


if __name__ == "__main__":
    raise SystemExit(main())
