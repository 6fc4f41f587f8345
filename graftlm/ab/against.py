"""Comparison of two reports: changes of an engine's ratio beyond both intervals."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graftlm.ab.statistics import Ratio
from graftlm.core.errors import ConfigError
from graftlm.text_files import read_text

COLUMNS = ("pipeline", "engine", "ratio before", "ratio now", "change", "equal before", "equal now", "computed before",
           "computed now")  # fmt: skip


@dataclass(frozen=True)
class Change:
    """One engine of one pipeline in both reports. Figures have the form of `report.figures`."""

    pipeline: str
    engine: str
    before: Mapping[str, Any]
    now: Mapping[str, Any]

    @property
    def verdict(self) -> str:
        """The change beyond both intervals: "faster", "slower" or "no change"; "unknown" without intervals."""
        old, new = ratio_of(self.before), ratio_of(self.now)
        if old is None or new is None or None in (old.low, old.high, new.low, new.high):
            return "unknown"
        assert old.low and old.high and new.low and new.high
        return "faster" if new.low > old.high else "slower" if new.high < old.low else "no change"

    def cells(self) -> tuple[str, ...]:
        """Return one row of text, under COLUMNS."""
        sides = (self.before, self.now)
        ratios = [str(found) if (found := ratio_of(side)) else "–" for side in sides]
        equal = [f"{side['equal']}/{side['answers']}" if side.get("equal") is not None else "–" for side in sides]
        tokens = [f"{side['computed_tokens']:,}" if side.get("computed_tokens") is not None else "–" for side in sides]
        return (self.pipeline, self.engine, *ratios, self.verdict, *equal, *tokens)


def ratio_of(figures: Mapping[str, Any]) -> Ratio | None:
    if figures.get("ratio") is None:
        return None
    return Ratio(figures["ratio"], figures.get("ratio_low"), figures.get("ratio_high"))


def read_report(folder: Path) -> list[dict[str, Any]]:
    """Return the figures of an earlier report. Raises: ConfigError if `folder` holds none."""
    path = folder / "report.json"
    try:
        found: list[dict[str, Any]] = json.loads(read_text(path))
        assert all("pipeline" in one and "runs" in one for one in found)
    except (OSError, ValueError, AssertionError, TypeError) as error:
        raise ConfigError(
            f"--against {str(folder)!r} has no report.json that can be read; give the folder of an earlier --report"
        ) from error
    return found


def changes(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> list[Change]:
    """Return the engines in both reports, without the baselines. Raises: ConfigError if there is none."""
    known = {(one["pipeline"], run["engine"]): run for one in before for run in one["runs"]}
    found = [
        Change(one["pipeline"], run["engine"], known[one["pipeline"], run["engine"]], run)
        for one in now
        for run in one["runs"][1:]
        if (one["pipeline"], run["engine"]) in known
    ]
    if not found:
        engines = ", ".join(f"{pipeline} on {engine}" for pipeline, engine in known)
        raise ConfigError(f"the earlier report has other pipelines or engines: {engines or 'none'}")
    return found
