from __future__ import annotations

from pathlib import Path

import pytest

from graftlm.ab.pipeline import suggest_for
from graftlm.core.errors import ConfigError

SOURCE = """
import graftlm as gl
RULES = "Answer with one word.\\n\\nDo not explain anything, and be exact.\\n\\n"
def inputs():
    return NAMES
def warm_up():
    return []
def run(llm, inputs):
    return [c.text for c in llm.generate([f"Of whom: {name}\\n\\n{RULES}Answer:" for name in inputs], max_tokens=1)]
"""


def pipeline(folder: Path, names: list[str]) -> Path:
    path = folder / "pipeline.py"
    path.write_text(SOURCE.replace("NAMES", repr(names)))
    return path


def test_a_pipeline_is_told_where_its_prompts_stop_sharing_and_which_line_to_change(tmp_path: Path) -> None:
    found = suggest_for(pipeline(tmp_path, ["Mara", "Tom", "Ida", "Eva"]), "sprout")
    assert found.before < 0.2 and found.after > 0.5
    assert found.saved_tokens > 0 and found.seconds is not None
    assert found.stop is not None and "pipeline.py:9: return [c.text" in found.stop.place


def test_a_pipeline_of_one_call_shows_no_sharing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="made 1 model calls; give it at least two inputs"):
        suggest_for(pipeline(tmp_path, ["Mara"]), "sprout")
