"""pytest plugin: the fixture `ab`, which compares engines on a pipeline of the user's own project.

    def test_the_city_pipeline_gains(ab):
        comparison = ab("pipelines/city.py", engines=("hf", "graftlm"))
        assert_same_answers(comparison)
        assert_faster(comparison, by=1.5)

A comparison is run once per session for equal arguments; its table is part of the output of a failing test.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from graftlm.ab.comparison import Comparison


@pytest.fixture(scope="session")
def ab(pytestconfig: pytest.Config) -> Callable[..., Comparison]:
    """Return `graftlm.ab.compare` with paths relative to pytest's root directory, cached for equal arguments."""
    from graftlm.ab import compare, report

    known: dict[tuple[Any, ...], Comparison] = {}

    def compared(pipeline: str | Path, engines: tuple[str, ...] = ("hf", "graftlm"), **options: Any) -> Comparison:
        path = pytestconfig.rootpath / pipeline
        key = (path, tuple(engines), repr(sorted(options.items())))
        if key not in known:
            known[key] = compare(path, engines, **options)
        report.print_table([known[key]])
        return known[key]

    return compared
