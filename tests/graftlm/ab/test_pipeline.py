"""What a pipeline file may hold and what is said where it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import graftlm
from graftlm.ab.pipeline import Pipeline
from graftlm.core.errors import ConfigError

GOOD = '''"""Shouts.

More about it.
"""
from pathlib import Path

def plain(model): return str.upper
def at(model, url): return lambda text: url + text
def run(llm, inputs): return [llm(text) for text in inputs]
def inputs(): return ["a", "b"]
def right(text, answer): return answer == text.upper()
def _helper(): pass
'''


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "shout.py"
    path.write_text(text)
    return path


def test_a_file_gives_title_inputs_and_engines(tmp_path: Path) -> None:
    pipeline = Pipeline.load(written(tmp_path, GOOD))
    assert (pipeline.name, pipeline.title) == ("shout", "Shouts.")
    assert (pipeline.held_out, pipeline.inputs) == (["a"], ["b"])
    assert list(pipeline.constructors) == ["plain", "at"]


def test_a_file_finds_the_modules_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those of the current folder were found."""
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "texts_beside_it.py").write_text("A = 'a'\n")
    text = GOOD.replace('["a", "b"]', '[A, "b"]').replace("from pathlib", "from texts_beside_it import A\nfrom pathlib")
    assert Pipeline.load(written(tmp_path, text)).held_out == ["a"]


def test_a_file_stands_in_for_no_package_without_an_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's `llama_index.py` was found in place of the package that it imports."""
    installed, files = tmp_path / "installed", tmp_path / "files"
    (installed / "namespace_of_some").mkdir(parents=True)
    (installed / "namespace_of_some/texts.py").write_text("A = 'a'\n")
    files.mkdir()
    monkeypatch.setattr("sys.path", [*sys.path, str(installed)])
    text = GOOD.replace('["a", "b"]', '[A, "b"]').replace(
        "from pathlib", "from namespace_of_some.texts import A\nfrom pathlib"
    )
    path = written(files, text).rename(files / "namespace_of_some.py")
    assert Pipeline.load(path).held_out == ["a"]


@pytest.mark.parametrize("framework", ["langchain", "dspy", "llama_index", "guidance"])
def test_a_pipeline_of_the_demo_can_be_loaded(framework: str) -> None:
    path = Path(graftlm.__file__).parent / "demo/pipelines" / f"{framework}.py"
    loading = f"from pathlib import Path; from graftlm.ab.pipeline import Pipeline; Pipeline.load(Path({str(path)!r}))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", loading], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_the_file_catches_is_noted(tmp_path: Path) -> None:
    text = GOOD.replace(
        "return [llm(text) for text in inputs]",
        """
    try:
        return [llm(text) for text in inputs]
    except TypeError:
        return [""] * len(inputs)""",
    )
    pipeline = Pipeline.load(written(tmp_path, text))
    assert pipeline.answer(len, ["a"]) == [1] and pipeline.caught.told() == []
    assert pipeline.answer(None, ["a"]) == [""]
    assert pipeline.caught.told() == ["TypeError: 'NoneType' object is not callable"]


def test_a_run_may_change_its_inputs(tmp_path: Path) -> None:
    """A chat history grew from round to round."""
    text = GOOD.replace("return [llm(text) for text in inputs]", "return [one.pop() for one in inputs]")
    pipeline, given = Pipeline.load(written(tmp_path, text)), [["a"], ["b"]]
    assert pipeline.answer(None, given) == ["a", "b"] and given == [["a"], ["b"]]
    case = object()
    text = GOOD.replace("return [llm(text) for text in inputs]", "return inputs")
    assert Pipeline.load(written(tmp_path, text)).answer(None, [{"cases": (case,)}]) == [{"cases": (case,)}]


@pytest.mark.parametrize("answer", ["(c for c in text)", "iter(text)"])
def test_an_answer_that_is_still_to_come_is_refused(tmp_path: Path, answer: str) -> None:
    """Its calls were made after the round, if at all, and all such answers were equal."""
    pipeline = Pipeline.load(written(tmp_path, GOOD.replace("[llm(text) for", f"[{answer} for")))
    with pytest.raises(ConfigError, match="answer 0 of run.. of pipeline 'shout' is a .*whose calls are still to come"):
        pipeline.answer(None, ["a"])


def test_inputs_may_be_a_list(tmp_path: Path) -> None:
    pipeline = Pipeline.load(written(tmp_path, GOOD.replace('def inputs(): return ["a", "b"]', 'inputs = ["a", "b"]')))
    assert (pipeline.held_out, pipeline.inputs) == (["a"], ["b"])


def test_inputs_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"inputs of pipeline .* is of type str; define a function inputs\(\)"):
        Pipeline.load(written(tmp_path, GOOD.replace('def inputs(): return ["a", "b"]', 'inputs = "ab"')))


def test_an_asynchronous_run_keeps_its_event_loop_over_all_rounds(tmp_path: Path) -> None:
    text = GOOD.replace("def run(llm, inputs): return", "import asyncio\nasync def run(llm, inputs): return")
    text = text.replace("llm(text) for", "(llm(text), id(asyncio.get_running_loop())) for")
    pipeline = Pipeline.load(written(tmp_path, text))
    first, second = (pipeline.answer(str.upper, ["a"]) for _ in range(2))
    assert first == second and first[0][0] == "A"


def test_an_engine_takes_the_text_after_the_colon(tmp_path: Path) -> None:
    engine = Pipeline.load(written(tmp_path, GOOD)).engine("at:http://here/")
    assert engine.label == "at:http://here/"
    assert engine.open("any")("a") == "http://here/a"


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("fast", "has no engine 'fast'; known: plain, at"),
        ("plain:x", "engine 'plain:x'.*too many"),
        ("at", "engine 'at'.*missing.*follows a colon, at:ARGUMENT"),
    ],
)
def test_an_engine_that_does_not_fit_is_an_error(tmp_path: Path, engine: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Pipeline.load(written(tmp_path, GOOD)).engine(engine)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def hf(model): ...", r"no run\(llm, inputs\)"),
        ("def run(llm, inputs): ...", "engine function such as graftlm"),
        ("def hf(model): ...\ndef run(llm, inputs): ...\ndef inputs(): return []", "is empty"),
    ],
)
def test_a_file_that_is_no_pipeline_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Pipeline.load(written(tmp_path, text))


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.py' cannot be read"):
        Pipeline.load(tmp_path / "nowhere.py")


def test_a_file_named_like_a_package_does_not_hide_it(tmp_path: Path) -> None:
    path = tmp_path / "json.py"
    path.write_text("import json\ndef hf(model): return json.dumps\ndef run(llm, inputs): return [llm(1)]\n")
    assert Pipeline.load(path).engine("hf").open("any")(1) == "1"


def test_a_script_without_swap_is_not_run_and_the_option_is_named(tmp_path: Path) -> None:
    """It used to be imported, which ran it, or failed with the package that --swap would have replaced."""
    (tmp_path / "script.py").write_text("import a_package_that_nobody_has")
    with pytest.raises(ConfigError, match="defines no run.*--swap ChatOpenAI"):
        Pipeline.load(tmp_path / "script.py")


@pytest.mark.parametrize(
    "text", ["from json import dumps as run", "run = print", "async def run_dspy(llm, inputs): ..."]
)
def test_run_may_be_defined_in_any_way(tmp_path: Path, text: str) -> None:
    (tmp_path / "pipeline.py").write_text(f"{text}\nraise RuntimeError('it was imported')")
    with pytest.raises(RuntimeError, match="it was imported"):
        Pipeline.load(tmp_path / "pipeline.py")
