"""Every example in README.md and docs/ runs.

The ```python blocks of a page run from top to bottom in one namespace, in an empty folder; `await` may stand at the
top level. A block that cannot run here is preceded by a line `<!-- skip: the reason -->`.
"""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import inspect
import re
import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from graftlm.adapters.server import metrics
from graftlm.core.config import CacheConfig, EngineConfig, SchedulerConfig

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
BLOCK = re.compile(r"^(?:<!-- skip:?(?P<reason>[^\n]*?)-->\n+)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    code: str
    skip: str | None

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        yield Block(page, line, match["code"], match["reason"] and match["reason"].strip())


def run_page(page: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    with asyncio.Runner() as loop:
        for block in blocks(page):
            if block.skip is None:
                # Empty lines before the code make a traceback point into the page.
                padded = "\n" * (block.line - 1) + block.code
                result = eval(compile(padded, str(page), "exec", flags=FLAGS, dont_inherit=True), names)
                if inspect.iscoroutine(result):
                    loop.run(result)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.filterwarnings("ignore")  # the frameworks' own warnings are not what a page is about
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(page)


def test_each_skipped_example_gives_its_reason() -> None:
    assert [block.place for page in PAGES for block in blocks(page) if block.skip == ""] == []


def test_each_page_is_reached_from_the_index() -> None:
    index = (ROOT / "docs/index.md").read_text()
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]} - {"index.md"}
    assert {page for page in pages if f"({page})" not in index} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short_on_average(page: Path) -> None:
    script = runpy.run_path(str(ROOT / "docs/site/sentences.py"))
    assert script["mean_length"](page.read_text()) <= script["LIMIT"]


@pytest.mark.parametrize("options", [EngineConfig, CacheConfig, SchedulerConfig])
def test_every_option_of_a_runtime_is_in_the_table(options: type) -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/options.md").read_text(), re.MULTILINE)
    assert {field.name for field in dataclasses.fields(options)} - set(rows) == set()


def test_every_gauge_and_counter_of_the_server_is_in_the_table() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    assert [name for name in (*metrics._GAUGES, *metrics._COUNTERS) if f"`{name}`" not in page] == []
