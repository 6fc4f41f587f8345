"""Real engines in processes of their own; `idle` engines stand for an endpoint that answers after a while."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from graftlm.ab import Comparison, EngineResult, Round, compare, report
from graftlm.ab.compare import check
from graftlm.ab.measure.profile import Work
from graftlm.core.errors import ConfigError
from tests.core.remote.models import answers
from tests.core.remote.server import Fault, Server
from tests.models import byte_tokenizer, tiny_model

CONTINUE = '''"""Continues a text."""

def hf(model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    def answer(text):
        given = tokenizer(text, return_tensors="pt")
        new = loaded.generate(**given, max_new_tokens=4, do_sample=False)[0, given["input_ids"].shape[1]:]
        return tokenizer.decode(new, skip_special_tokens=True)
    return lambda texts: [answer(text) for text in texts]

def graftlm(model):
    from graftlm import Runtime

    runtime = Runtime(model)
    return lambda texts: [c.text for c in runtime.generate(list(texts), max_tokens=4, temperature=0)]

def biased(model):
    from graftlm import Runtime

    runtime = Runtime(model)
    return lambda texts: [
        c.text for c in runtime.generate(list(texts), max_tokens=4, temperature=0, logit_bias={100: 1e4})
    ]

def broken(model): raise OSError("no such device")
def missing(model): import a_package_that_nobody_has
def run(llm, inputs): return llm(inputs)
def inputs(): return ["The same forty characters at the beginning " + end for end in ("red", "two", "six")]
def warm_up(): return ["Something else"]
def right(text, answer): return text.endswith("red")
'''
DSPY_EVALUATE = """import dspy
def run(llm, inputs):
    devset = [dspy.Example(question=one, answer="").with_inputs("question") for one in inputs]
    evaluate = dspy.Evaluate(devset=devset, metric=lambda e, p: 1, num_threads=2, max_errors=MAX_ERRORS)
    with dspy.context(lm=llm):
        return [str(made) for _, made, _ in evaluate(dspy.Predict("question -> answer")).results]
def warm_up(): return []
inputs = list("abcdefgh"[:NUM_INPUTS])
"""
IDLE = """import itertools, time
times = itertools.count()
def low(model): return str.lower
def high(model): return str.upper
def slow(model): return lambda text: time.sleep(0.05) or text
def choosy(model):
    def answer(text):
        if text == "bad": raise ValueError(f"cannot read {text}")
        return text.lower()
    return answer
def moody(model): return lambda text: f"{text} {next(times)}"
def dying(model): import os; return lambda text: os._exit(7)
def run(llm, inputs): return [llm(text) for text in inputs]
def inputs(): return ["warm-up", "A", "bad", "c"]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipeline") / "goes_on.py"
    path.write_text(CONTINUE)
    return path


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipeline") / "idle.py"
    path.write_text(IDLE)
    return path


@pytest.fixture(scope="module")
def compared(path: Path, model: str) -> Comparison:
    return compare(path, ["hf", "graftlm", "broken", "missing", "biased"], model, rounds=3, minutes=0.1)


def quick(path: Path, *engines: str) -> Comparison:
    return compare(path, engines, rounds=2, minutes=0.01)


def test_both_engines_give_the_same_answers(compared: Comparison) -> None:
    hf, ours = compared.results[:2]
    assert (compared.num_equal(ours), compared.num_right(ours)) == (3, 1)
    assert hf.answers == ours.answers and hf.num_varying == ours.num_varying == 0


def test_the_prompts_are_the_same_and_fewer_tokens_are_computed_in_every_round(compared: Comparison) -> None:
    hf, ours = compared.results[:2]
    assert len(hf.rounds) == len(ours.rounds) >= 1
    assert {one.work.prompt_tokens for one in (*hf.rounds, *ours.rounds)} == {3 * 46}
    assert {one.work.computed_tokens for one in hf.rounds} == {138}
    assert {one.work.computed_tokens for one in ours.rounds} == {46 + 2 * 3}
    assert (hf.work.calls, ours.work.calls, hf.work.largest_batch, ours.work.largest_batch) == (3, 3, 1, 3)


def test_every_call_has_a_place_in_time(compared: Comparison) -> None:
    for result in compared.results[:2]:
        for one in result.rounds:
            assert len(one.spans) == 3
            assert all(0 <= begin <= end <= one.wall_s for begin, end in one.spans)


def test_a_closer_look_tells_first_tokens_phases_and_the_best_hit_rate(compared: Comparison) -> None:
    for result in compared.results[:2]:
        profile = result.profile
        assert profile is not None and len(profile.calls) == 3
        assert all(call.begin_s <= (call.first_s or 0) <= call.end_s <= profile.wall_s for call in profile.calls)
        assert profile.time_to_first_token_s and profile.time_between_tokens_s
        assert {"prefill", "decode"} <= profile.phases.keys()
        assert sum(profile.phases.values()) == pytest.approx(profile.wall_s, rel=0.05)
        assert result.best_hit_rate == pytest.approx(1 - (46 + 2 * 3) / 138)


def test_a_differing_answer_is_explained_by_the_first_token_that_differs(compared: Comparison) -> None:
    first = compared.results[4].divergences[0]
    assert (first.input, first.call, first.position) == (0, 0, 0)
    assert first.before == compared.inputs[0]
    (a, b), (c, d) = first.logprobs["hf"], first.logprobs["biased"]
    assert a > b and (a, b) == pytest.approx((c, d), abs=1e-3)  # both engines think the same of both tokens


def test_a_script_is_compared_by_what_it_prints(tmp_path: Path, model: str) -> None:
    script = tmp_path / "greets.py"
    script.write_text(
        "from langchain_openai import ChatOpenAI\nllm = ChatOpenAI(model='gpt-4o-mini', max_tokens=5)\n"
        "print([answer.content for answer in llm.batch(['Hello', 'Goodbye'])])\n"
    )
    comparison = compare(script, ["hf", "graftlm"], model, rounds=1, minutes=0.01, swap="ChatOpenAI")
    assert comparison.num_equal(comparison.results[1]) == 1
    assert [result.work.calls for result in comparison.results] == [2, 2]
    assert "Arguments of ChatOpenAI that no engine was given: model." in comparison.notes


def test_engines_may_be_loaded_one_at_a_time_and_it_is_said(idle: Path) -> None:
    comparison = compare(idle, ["low", "high"], rounds=2, minutes=0.02, one_at_a_time=True)
    assert [len(result.rounds) for result in comparison.results] == [3, 3]
    assert "Engines ran one after the other: rounds were not interleaved." in comparison.notes


def test_engines_have_no_thread_for_cores_that_others_use_and_it_is_said(
    idle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["graftlm.ab.compare"]
    monkeypatch.setattr(module, "num_cores", lambda: 4)
    monkeypatch.setattr(module, "idle_cores", lambda: 1)
    monkeypatch.setattr(module, "NARROWING_MINUTES", 1e-9)  # no round that only narrows an interval
    comparison = compare(idle, ["low", "high"], rounds=1)
    assert [len(result.rounds) for result in comparison.results] == [2, 2]
    assert comparison.threads == 1 and comparison.notes[0].startswith("Every engine had 1 thread, because other")
    assert compare(idle, ["low"], rounds=1, minutes=0.01, threads=2).threads == 2


def test_a_right_that_raises_is_named_with_the_answer(tmp_path: Path) -> None:
    path = tmp_path / "unjudged.py"
    path.write_text(
        "def low(model): return str.lower\ndef inputs(): return ['A', 'B']\n"
        "def right(one, answer): return answer.nothing\n"
        "def run(llm, inputs): return [llm(text) for text in inputs]\n"
    )
    said = quick(path, "low").results[0].error
    assert said is not None and "right() raised AttributeError" in said
    assert said.endswith("on the answer 'b'; let it take any answer")


def test_one_of_several_frameworks_is_chosen(tmp_path: Path) -> None:
    path = tmp_path / "both.py"
    path.write_text(
        "def low(model): return str.lower\ndef inputs(): return ['A', 'B']\n"
        "def run_dspy(llm, inputs): return ['dspy'] * len(inputs)\n"
        "def run_guidance(llm, inputs): return ['guidance'] * len(inputs)\n"
    )
    assert compare(path, ["low"], rounds=1, minutes=0.01, framework="guidance").results[0].answers == ["guidance"]
    with pytest.raises(ConfigError, match="is written in dspy, guidance, and no framework was named; choose one with"):
        quick(path, "low")


def test_an_engine_that_fails_is_reported_with_the_remedy_and_the_others_ran(compared: Comparison) -> None:
    assert compared.results[2].error == "OSError: no such device"
    missing = compared.results[3].error or ""
    assert missing.endswith("; pip install a-package-that-nobody-has")
    assert report.failures([compared])[0] == "goes_on on broken failed: OSError: no such device"


def test_a_report_has_page_figures_sheet_and_chart(compared: Comparison, tmp_path: Path) -> None:
    paths = report.write([compared], tmp_path / "out", "graftlm ab goes_on.py")
    assert [path.name for path in paths] == list(report.FILES)
    page, data, sheet, image = paths
    figures = json.loads(data.read_text())[0]["runs"][1]
    assert (figures["equal"], figures["computed_tokens"], len(figures["texts"])) == (3, 52, 3)
    assert "<svg" in page.read_text() and "graftlm ab goes_on.py" in page.read_text()
    assert "http" not in page.read_text().replace("http-equiv", "")  # nothing is loaded from elsewhere
    assert len(sheet.read_text().splitlines()) == 6
    assert image.read_bytes().startswith(b"\x89PNG")


def test_half_a_character_costs_no_report(tmp_path: Path) -> None:
    """After all rounds there was a UnicodeEncodeError and no report."""
    result = EngineResult("hf", [Round(1.0, ["\udcff"], None, Work())])
    paths = report.write([Comparison("city", "City", "m", ["\ud800"], [result])], tmp_path, "graftlm ab city.py", False)
    (found,) = json.loads(paths[1].read_text())
    assert (found["inputs"], found["runs"][0]["texts"]) == (["\ud800"], ["\udcff"])


def test_the_warm_up_input_is_not_measured(idle: Path) -> None:
    assert quick(idle, "low").inputs == ["A", "bad", "c"]


def test_different_answers_are_said(idle: Path) -> None:
    comparison = quick(idle, "low", "high")
    assert comparison.differences() == [
        "high answers 3 of 3 inputs differently.",
        "Calls could not be counted: low, high. An answer from a cache would not be seen.",
    ]
    assert report.remarks([comparison])[0] == "high answers 3 of 3 inputs differently."


def test_the_search_for_inputs_that_raise_ends_in_time(tmp_path: Path) -> None:
    """It ran each of many slow inputs alone, whatever --minutes said."""
    path = tmp_path / "slow_search.py"
    path.write_text(
        "import time\ndef inputs(): return list(range(100))\ndef warm_up(): return [0]\n"
        "def run(llm, inputs):\n    if 1 in inputs: raise ValueError('no')\n"
        "    time.sleep(0.1)\n    return list(inputs)\ndef low(model): return None\n"
    )
    started = time.monotonic()
    comparison = compare(path, ["low"], rounds=1, minutes=0.02)
    (result,) = comparison.results
    assert time.monotonic() - started < 60 and 0 < len(comparison.inputs) < 99
    assert list(result.left_out) == [1] and len(result.untried) == 99 - len(comparison.inputs)
    assert any("inputs were left out: the search for inputs that raise with low" in one for one in comparison.notes)
    assert "Left out: 1 of 100 inputs on which" in " ".join(comparison.differences())


def test_an_engine_loads_the_dtype_that_is_asked_for(tmp_path: Path, model: str) -> None:
    path = tmp_path / "typed.py"
    path.write_text(
        "from graftlm import Runtime\ndef graftlm(model): return Runtime(model)\n"
        "def run(llm, inputs): return [c.text for c in llm.generate(inputs, max_tokens=2)]\n"
        "def inputs(): return ['a', 'b']\n"
    )
    comparison = compare(path, ["graftlm"], model, rounds=1, minutes=0.01, dtype="bfloat16", is_watched=False)
    (result,) = comparison.results
    assert result.facts["dtype"] == "bfloat16" and result.profile is None
    assert "in bfloat16; " in report.setting([comparison]) and "torch " in (result.facts["versions"] or "")


def test_an_input_on_which_the_pipeline_raises_is_left_out_for_all(idle: Path) -> None:
    comparison = quick(idle, "low", "choosy")
    assert comparison.inputs == ["A", "c"]
    assert comparison.results[1].left_out == {1: "ValueError: cannot read bad ('bad')"}
    assert [result.answers for result in comparison.results] == [["a", "c"], ["a", "c"]]
    assert "Left out: 1 of 3 inputs on which the pipeline raised an error." in comparison.differences()


@pytest.mark.parametrize(("num_inputs", "max_errors"), [(4, 2), (2, 4)])
def test_the_cause_is_told_where_a_framework_hides_it(tmp_path: Path, num_inputs: int, max_errors: int) -> None:
    """DSPy gave up with 'Execution cancelled' and no more; or it went on and nobody said that answers were missing."""
    text = DSPY_EVALUATE.replace("NUM_INPUTS", str(num_inputs)).replace("MAX_ERRORS", str(max_errors))
    (tmp_path / "evaluated.py").write_text(text)
    refusal = Fault(status=400, body={"error": {"message": "no grammars here"}})
    with Server(answers({}), faults=[refusal] * 20) as server:
        comparison = compare(tmp_path / "evaluated.py", [f"openai:{server.url}"], "m", rounds=1, minutes=0.01)
    if num_inputs < max_errors:
        idle, said, *_ = comparison.differences()
        assert idle.startswith(f"openai:{server.url} was asked nothing in ")
        assert said.startswith(
            f"The pipeline kept errors with openai:{server.url} to itself: 2 requests were answered "
        )
    else:
        said = comparison.results[0].error or ""
        assert said.startswith("Exception: Execution cancelled")
    assert "no grammars here" in said


def test_inputs_that_each_process_draws_anew_are_an_error(tmp_path: Path) -> None:
    """Each engine was given inputs of its own, and the report showed those of the last one."""
    path = tmp_path / "drawn.py"
    path.write_text(
        IDLE.replace('return ["warm-up", "A", "bad", "c"]', "import os; return ['a', f'pid {os.getpid()}']")
    )
    with pytest.raises(ConfigError, match="gives other inputs in each process; let it give the same ones each time"):
        quick(path, "low", "high")
    path.write_text(IDLE.replace('["warm-up", "A", "bad", "c"]', 'list({"a", "b", "c", "d", "e", "f"})'))
    quick(path, "low", "high")  # sets have the same order in every process


def test_answers_that_vary_by_themselves_are_said(idle: Path) -> None:
    assert "moody answers 3 of 3 inputs differently each round." in quick(idle, "moody").differences()


def test_last_words_need_not_be_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "dies.py"
    path.write_text(IDLE.replace("import os; return", "import os; os.write(2, b'no \\xff'); return"))
    assert (quick(path, "dying").results[0].error or "").endswith("ended with status 7: no \ufffd")


def test_a_process_that_dies_is_a_failed_engine(idle: Path) -> None:
    assert "ended with status 7" in (quick(idle, "low", "dying").results[1].error or "")


def test_a_planted_slow_down_is_found(idle: Path) -> None:
    (finding,) = check(idle, "slow", "sprout", rounds=5, minutes=1, plants=["slow"])
    assert finding.found, finding


def test_a_planted_answer_and_a_planted_cached_call_are_found(path: Path, model: str) -> None:
    findings = check(path, "graftlm", model, rounds=1, minutes=0.02, plants=["changed answer", "cached call"])
    assert [(f.plant, f.found, f.evidence) for f in findings] == [
        ("changed answer", True, "1 of 3 answers differ"),
        ("cached call", True, "3 calls against 2"),
    ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def run(llm, inputs): return []", "gave 0 answers to 1 inputs"),
        ("def run(llm, inputs): return 'one text'", "returned a str; return a list with one answer per input"),
        ("def run(llm, inputs): return {'a': 1}", "returned a dict"),
        ("def inputs(): return []\ndef run(llm, inputs): return inputs", "is empty"),
        ("import a_package_that_nobody_has\ndef run(llm, inputs): ...", "cannot be imported.*; pip install a-package"),
    ],
)
def test_a_mistake_in_the_pipeline_file_is_an_error(tmp_path: Path, body: str, message: str) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(f"def low(model): return str.lower\n{body}\n")
    with pytest.raises(ConfigError, match=message):
        quick(path, "low")


@pytest.mark.parametrize(
    ("engines", "options", "message"),
    [
        ([], {}, "each once"),
        (["low", "low"], {}, "each once"),
        (["low"], {"rounds": 0}, "rounds is 0"),
        (["low"], {"minutes": -1}, "minutes is -1"),
        (["low"], {"threads": 0}, "threads is 0; it must be at least 1"),
        (["fast"], {}, "has no engine 'fast'; known: low, high"),
    ],
)
def test_wrong_arguments_are_errors(idle: Path, engines: list[str], options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compare(idle, engines, **options)  # type: ignore[arg-type]


def test_ctrl_c_leaves_a_partial_report_that_says_so(tmp_path: Path) -> None:
    path, out, calls = tmp_path / "slow.py", tmp_path / "out", tmp_path / "calls"
    path.write_text(
        f"import time\ndef answer(text):\n    open({str(calls)!r}, 'a').write(text)\n    time.sleep(0.1)\n"
        "    return text\ndef slow(model): return answer\n"
        "def run(llm, inputs): return [llm(text) for text in inputs]\ndef inputs(): return ['a', 'b']\n"
    )
    command = [sys.executable, "-m", "graftlm", "ab", str(path), "--engines", "slow", "--rounds", "1000"]
    process = subprocess.Popen(
        [*command, "--report", str(out), "--no-chart"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )
    worker = _child_of(process.pid)
    deadline = time.monotonic() + 60
    while not calls.exists() or calls.stat().st_size < 12:  # some rounds
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)  # at whatever moment it comes, a report is written
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 130
    assert said.lstrip().startswith("The run was interrupted: these are partial figures.")
    assert json.loads((out / "report.json").read_text())[0]["interrupted"] is True
    assert "these are partial figures" in (out / "report.html").read_text()
    assert not psutil.pid_exists(worker)


def test_an_engine_ends_with_a_comparison_that_was_killed(tmp_path: Path) -> None:
    """Its server stayed, with the memory of a card, where the comparison was ended by another signal than Ctrl-C's."""
    path = tmp_path / "long.py"
    path.write_text("import time\ndef slow(model): return time.sleep\ndef run(llm, inputs): llm(600)\n")
    process = subprocess.Popen([sys.executable, "-m", "graftlm", "ab", str(path), "--engines", "slow"])
    worker = psutil.Process(_child_of(process.pid))
    process.kill()
    process.wait()
    worker.wait(timeout=600)


def _child_of(pid: int) -> int:
    """The engine's process, once it is there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in psutil.Process(pid).children():
            if "graftlm.ab.measure.worker" in " ".join(child.cmdline()):
                return child.pid
        time.sleep(0.05)
    raise AssertionError("no engine was started")


def test_a_report_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match="cannot be written: .*; name another"):
        report.check_folder(blocked / "out", force=False, with_chart=False)


def test_a_report_folder_is_kept_unless_forced(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="holds files already; name another folder, or add --force"):
        report.check_folder(tmp_path, force=False, with_chart=True)
    report.check_folder(tmp_path, force=True, with_chart=True)
    assert (tmp_path / "notes").read_text() == "mine"
    with pytest.raises(ConfigError, match="is a file"):
        report.check_folder(tmp_path / "notes", force=True, with_chart=True)
