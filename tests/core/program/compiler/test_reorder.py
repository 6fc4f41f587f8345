from __future__ import annotations

import pickle
from typing import Any

import pytest

import graftlm as gl
from graftlm.core.errors import ConfigError
from graftlm.core.program.compiler.sharing import BlockOrder, hit_rate, line_of, messages_of, reference_in, suggest
from graftlm.core.program.state import ProgramState
from graftlm.testing import ScriptedModel
from tests.scripted import Scripted

RULES = "Answer each question with one word, and do not explain.\n"


@gl.program(temperature=0)
def ask(s: ProgramState, name: str, note: str = "") -> str:
    s += gl.user(gl.part(f"Of {name}{note}.\n") + gl.part(RULES) + "Q?")
    s += gl.assistant(gl.gen("answer", max_tokens=4))
    return str(s["answer"])


INPUTS = [{"name": name} for name in ("Ana", "Ben", "Cleo", "Dan")]


def test_suggest_shows_an_order_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    compiled = ask.compile(INPUTS, runtime=Scripted())
    said = capsys.readouterr().out
    assert compiled.report is not None and compiled.report.after > compiled.report.before + 0.3
    assert "sharing stops in the user message" in said and "--- before" in said
    assert compiled.run("Eva", runtime=Scripted()).text == ask.run("Eva", runtime=Scripted()).text


def test_parts_change_places_among_themselves() -> None:
    compiled = ask.compile(INPUTS, reorder="parts", runtime=Scripted())
    assert compiled.report is not None and compiled.report.applied
    for program in (compiled, pickle.loads(pickle.dumps(compiled)), compiled.bind(note="!")):
        assert RULES + "Of Eva" in program.run("Eva", runtime=Scripted()).text
    assert "Of Eva.\n" + RULES + "Q?" in ask.run("Eva", runtime=Scripted()).text


def test_a_reordered_program_hits_as_expected() -> None:
    with ScriptedModel(lambda prompt: "yes").runtime() as engine:
        compiled = ask.compile(INPUTS, reorder="parts", agreement=1.0, runtime=engine)
        assert compiled.report is not None and compiled.report.agreement == 1.0
        engine.clear_cache()
        engine.reset_stats()
        for item in INPUTS:
            compiled.run(**item, runtime=engine).wait()
        assert engine.stats().hit_rate == pytest.approx(compiled.report.after, abs=0.02)


def test_below_the_agreement_the_original_stays() -> None:
    backend = Scripted(lambda prompt: "a" if prompt.index("Of ") < prompt.index("Answer") else "b")
    compiled = ask.compile(INPUTS, reorder=lambda parts: [1, 0, 2], runtime=backend)
    assert compiled.report is not None
    assert (compiled.report.agreement, compiled.report.applied) == (0.0, False)
    assert compiled.run("Eva", runtime=backend)["answer"] == "a"
    free = ask.compile(INPUTS, reorder=lambda parts: [1, 0, 2], agreement=0, runtime=backend)
    assert free.run("Eva", runtime=backend)["answer"] == "b"


def test_parts_that_refer_to_each_other_are_refused_and_later_kept_in_order() -> None:
    with pytest.raises(ConfigError, match="input 1 refers to a part by its place, 'second document'"):
        ask.compile([*INPUTS[:1], {"name": "Ana", "note": ", see the second document"}], reorder="parts",
                    runtime=Scripted())  # fmt: skip
    compiled = ask.compile(INPUTS, reorder="parts", runtime=Scripted())
    assert "Of Eva, document 2.\n" + RULES in compiled.run("Eva", ", document 2", runtime=Scripted()).text


def test_a_prompt_that_depends_on_an_answer_is_traced_up_to_there() -> None:
    @gl.program
    def twice(s: ProgramState, name: str) -> None:
        s += gl.part(name + "\n") + gl.part(RULES) + gl.gen("x", max_tokens=2)
        s += s["x"] + gl.gen("y", max_tokens=2)

    compiled = twice.compile(INPUTS, reorder="parts", runtime=Scripted())
    assert "traced up to there" in str(compiled.report)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"reorder": "part"}, "reorder is 'part'; use 'suggest', 'parts' or a function"),
        ({"reorder": "parts", "agreement": 2}, "agreement is 2; it must lie between 0 and 1"),
        ({"reorder": lambda parts: [0, 0, 1]}, "is no order of 3 parts; return each index from 0 to 2 once"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ask.compile(INPUTS, runtime=Scripted(), **options)
    with pytest.raises(ConfigError, match="part is 3"):
        gl.part(3)  # type: ignore[arg-type]


def test_without_parts_there_is_nothing_to_apply() -> None:
    with pytest.raises(ConfigError, match="declares no two parts side by side"):
        gl.program(lambda s, x: s.user(x)).compile([{"x": "a"}], reorder="parts", runtime=Scripted())


def test_blocks_go_by_the_number_of_prompts_that_have_them() -> None:
    order = BlockOrder.learn([["q1", "doc B", "doc A", "all"], ["q2", "doc A", "doc B", "all"], ["q3", "doc A", "all"]])
    assert order.order(["q4", "doc A", "doc B", "all"]) == [1, 3, 2, 0]
    assert order.order(["q4", "doc B", "doc A", "all"]) == [2, 3, 1, 0]  # the same order of documents


def test_a_varying_block_of_the_system_message_moves_behind_the_examples(tmp_path: Any) -> None:
    source = tmp_path / "pipeline.py"
    source.write_text('PROMPT = (\n    "Today is {day}, a fine day."\n)\n')
    prompts = [
        messages_of([
            {"role": "system", "content": f"Today is {day}, a fine day.\n\nBe brief, and be exact."},
            {"role": "user", "content": "Example: 1 + 1"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": f"What is {day} + 1?"},
        ])
        for day in ("Monday", "Friday", "Sunday")
    ]  # fmt: skip
    backend = Scripted()
    encode = lambda messages: backend.processor.encode("".join(text for _, text in messages)).ids  # noqa: E731
    found = suggest(prompts, encode, [source], rate=100.0)
    assert found.after > found.before and found.seconds == found.saved_tokens / 100
    assert found.stop is not None and found.stop.place.endswith('pipeline.py:2: "Today is {day}, a fine day."')
    with pytest.raises(ConfigError, match="1 prompts show no sharing"):
        suggest(prompts[:1], encode)


def test_each_template_gets_its_suggestion_and_continued_prompts_are_left_out() -> None:
    with ScriptedModel(lambda prompt: "yes").runtime() as engine:
        with engine.record() as asked:
            for name in ("Ana", "Ben", "Cleo"):
                first = f"Of {name}.\n\n{RULES}\nAnswer:"
                engine.generate([first, f"Now {name} again?\n\nWrite a long and careful text about it.\n\nText:"])
                engine.generate(first + " yes\nWhy?")
        found = engine.explain(asked)
        again = engine.explain([request.prompt for request in asked])
    assert len(asked) == 9 and found.num_continued == 3
    assert [one.num_prompts for one in (found, *found.others)] == [3, 3]
    assert all(one.after > one.before + 0.3 and one.seconds for one in (found, *found.others))
    assert "template 2 of 2: 3 prompts" in str(found) and again.saved_tokens == found.saved_tokens


def test_references_hit_rates_and_lines() -> None:
    assert reference_in("see the second document") == "second document"
    assert reference_in("Answer the first question.") is None
    ids = [backend_ids(text) for text in ("abcd", "abce", "abce")]
    assert hit_rate(ids) == 6 / 12
    assert line_of(["nothing"], []) == ""


def backend_ids(text: str) -> Any:
    import numpy as np

    return np.array([ord(one) for one in text], np.int32)
