"""Completions and counters as notebooks show them."""

from __future__ import annotations

from dataclasses import replace

from graftlm.core.metrics import Stats, TierStats
from graftlm.core.request import Completion, Usage

DONE = Completion("a <b> & c\nd", [1, 2], "stop", Usage(1200, 7, 2, 1))


def test_a_completion_shows_its_text_and_counts_escaped() -> None:
    shown = DONE._repr_html_()
    assert "a &lt;b&gt; &amp; c\nd" in shown
    assert "<b>" not in shown
    assert ">1,200</td>" in shown
    assert "thinking" not in shown
    assert "Hm." in replace(DONE, thinking="Hm.")._repr_html_()
    several = replace(DONE, completions=[DONE, replace(DONE, text="other")])._repr_html_()
    assert "answer 2" in several
    assert "other" in several


def test_stats_show_what_is_not_zero() -> None:
    shown = Stats(requests=3, cached_tokens=1, computed_tokens=1, tiers={"host": TierStats(tokens=64)})._repr_html_()
    assert "50.0 %" in shown
    assert "host tier, tokens" in shown
    assert "retracted" not in shown
