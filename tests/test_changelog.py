"""CHANGELOG.md has the form of Keep a Changelog and stays short enough to read."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CHANGELOG.md").read_text()
SECTIONS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
MAX_COLUMNS = 110
MAX_LINES = 60
# Measurements, commit hashes and machines belong in bench/notes/.
UNWANTED = re.compile(
    r"\d ?(?:%|x|ms|us|s|GB|MB|tokens/s)(?!\w)|\b(?=[a-f]*\d)[0-9a-f]{7,40}\b|\b[AHBL]\d00\b|EPYC|Xeon"
)


@dataclass(frozen=True)
class Version:
    heading: str
    lines: list[str]

    @property
    def name(self) -> str:
        return self.heading.partition("]")[0].lstrip("[")

    @property
    def sections(self) -> list[str]:
        return [line.removeprefix("### ") for line in self.lines if line.startswith("### ")]


VERSIONS = [
    Version(heading, body.splitlines())
    for heading, _, body in (part.partition("\n") for part in TEXT.split("\n## ")[1:])
]


def test_unreleased_changes_come_first_then_the_package_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [version.name for version in VERSIONS[:2]] == ["Unreleased", project["version"]]


def test_each_release_has_a_number_and_a_date() -> None:
    wrong = [v.heading for v in VERSIONS[1:] if not re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}", v.heading)]
    assert wrong == []


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
def test_sections_are_known_and_in_order(version: Version) -> None:
    assert version.sections == [section for section in SECTIONS if section in version.sections]


def test_the_first_release_only_adds() -> None:
    assert VERSIONS[-1].sections == ["Added"]


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
def test_a_version_has_at_most_60_lines(version: Version) -> None:
    assert len([line for line in version.lines if line.strip()]) <= MAX_LINES


def test_each_change_is_one_line_of_at_most_110_characters() -> None:
    assert [line for line in TEXT.splitlines() if len(line) > MAX_COLUMNS] == []
    assert [line for line in TEXT.splitlines() if line.startswith(" ")] == []


def test_no_change_gives_a_measurement_a_commit_or_a_machine() -> None:
    changes = [line for line in TEXT.splitlines() if line.startswith("- ")]
    assert changes
    assert [line for line in changes if UNWANTED.search(line)] == []
