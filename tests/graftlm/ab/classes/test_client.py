"""How a framework's classes are imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from graftlm.ab.classes.client import load
from graftlm.ab.engines import pip_command


def test_a_missing_part_of_a_namespace_is_told_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_index").mkdir()  # as llama-index-core alone leaves it: nothing under llama_index.llms
    for name in [name for name in sys.modules if name.partition(".")[0] == "llama_index"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ModuleNotFoundError) as missing:
        load("llama_index.llms.openai_like")
    assert pip_command(missing.value) == "pip install llama-index-llms-openai-like"


def test_what_a_module_misses_itself_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_another.py").write_text("import not_installed_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError) as missing:
        load("needs_another")
    assert missing.value.name == "not_installed_here"
