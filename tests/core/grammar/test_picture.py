"""Pictures of automata."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.picture import MAX_STATES, draw
from graftlm.core.grammar.regex.parser import parse


def drawn(pattern: str) -> list[str]:
    """All texts of the picture."""
    picture = draw(Dfa.compile(parse(pattern)))
    assert picture is not None
    root = ElementTree.fromstring(picture)
    return [(element.text or "") for element in root.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("red|green", ["0", "1", "green | red"]),
        ("[a-z_]x*", ["0", "1", "_ a–z", "x"]),
        ("<&>(é|€)*", ["0", "1", "<&>", "non-ASCII"]),
        ("a{2,3}", ["0", "1", "2", "aa", "a"]),
    ],
)
def test_forced_runs_classes_and_other_characters_are_one_edge_each(pattern: str, texts: list[str]) -> None:
    assert drawn(pattern) == texts


def test_a_large_automaton_is_not_drawn() -> None:
    assert draw(Dfa.compile(parse(f"[ab]{{{MAX_STATES - 2}}}"))) is not None
    assert draw(Dfa.compile(parse(f"[ab]{{{MAX_STATES}}}"))) is None
