"""Engines on one pipeline: answers, counts, failures, reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graftlm.ab import report
from graftlm.ab.compare import Comparison, compare
from graftlm.ab.pipeline import Pipeline
from graftlm.core.errors import ConfigError
from tests.models import byte_tokenizer, tiny_model

PIPELINE = '''"""Goes on with a text."""
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from graftlm import Runtime

def hf(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    def answer(texts):
        out = []
        for text in texts:
            given = tokenizer(text, return_tensors="pt")
            new = loaded.generate(**given, max_new_tokens=4, do_sample=False)[0, given["input_ids"].shape[1]:]
            out.append(tokenizer.decode(new, skip_special_tokens=True))
        return out
    return answer

def graftlm(model):
    runtime = Runtime(model)
    return lambda texts: [c.text for c in runtime.generate(list(texts), max_tokens=4, temperature=0)]

def broken(model): raise OSError("no such device")
def short(model): return lambda texts: []
def run(llm, inputs): return llm(inputs)
def inputs(): return ["The same forty characters at the beginning " + end for end in ("one", "two", "six")]
def right(text, answer): return text.endswith("one")
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    path = tmp_path_factory.mktemp("pipeline") / "goes_on.py"
    path.write_text(PIPELINE)
    return Pipeline.load(path)


@pytest.fixture(scope="module")
def compared(pipeline: Pipeline, model: str) -> Comparison:
    return compare(pipeline, ["hf", "graftlm", "broken"], model)


def test_both_engines_give_the_same_answers(compared: Comparison) -> None:
    hf, ours, _ = compared.runs
    assert (compared.num_equal(ours), compared.num_right(ours)) == (3, 1)
    assert hf.answers == ours.answers


def test_the_prompts_are_the_same_and_fewer_tokens_are_computed(compared: Comparison) -> None:
    hf, ours, _ = compared.runs
    assert hf.work.prompt_tokens == ours.work.prompt_tokens == 3 * 46
    assert (hf.work.computed_tokens, ours.work.computed_tokens) == (138, 46 + 2 * 3)
    assert (hf.work.calls, ours.work.calls) == (3, 3)
    assert (hf.work.largest_batch, ours.work.largest_batch) == (1, 3)


def test_an_engine_that_fails_is_reported_and_the_others_ran(compared: Comparison) -> None:
    broken = compared.runs[2]
    assert broken.error == "OSError: no such device"
    assert (compared.num_equal(broken), compared.num_right(broken), compared.speedup(broken)) == (None, None, None)


def test_a_report_has_figures_answers_table_and_chart(compared: Comparison, tmp_path: Path) -> None:
    paths = report.write([compared], tmp_path / "out")
    assert [path.name for path in paths] == ["report.json", "report.md", "chart.png"]
    figures = json.loads(paths[0].read_text())[0]["runs"][1]
    assert (figures["equal"], figures["computed_tokens"], len(figures["texts"])) == (3, 52, 3)
    assert "| goes_on | graftlm | 1/3 | 3/3 |" in paths[1].read_text()
    assert "goes_on on broken failed: OSError: no such device" in paths[1].read_text()
    assert paths[2].read_bytes().startswith(b"\x89PNG")


def test_too_few_answers_are_an_error_of_the_pipeline(pipeline: Pipeline, model: str) -> None:
    with pytest.raises(ConfigError, match="gave 0 answers to 1 inputs"):
        compare(pipeline, ["short"], model)


@pytest.mark.parametrize("engines", [[], ["hf", "hf"]])
def test_no_engine_or_one_twice_is_an_error(pipeline: Pipeline, model: str, engines: list[str]) -> None:
    with pytest.raises(ConfigError, match="each once"):
        compare(pipeline, engines, model)
