from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from graftlm.ab import Comparison, EngineResult, Round, assert_faster, assert_same_answers
from graftlm.ab.measure.profile import Call, Profile, Work
from graftlm.core.errors import ConfigError


def measured(engine: str, walls: list[float], answers: list[Any], calls: int = 2, prompt: int = 20) -> EngineResult:
    work = Work(calls=calls, prompt_tokens=prompt)
    return EngineResult(engine, [Round(wall, answers, None, work) for wall in walls])


def compared(*results: EngineResult) -> Comparison:
    return Comparison("city", "Which city?", "sprout", ["one", "two"], list(results))


HF = measured("hf", [2.0, 2.1, 2.0], ["a", "b"])


def test_the_same_work_has_no_differences() -> None:
    assert compared(HF, measured("graftlm", [1.0, 1.0, 1.0], ["a", "b"])).differences() == []


def test_a_notebook_shows_the_result_and_its_picture() -> None:
    shown = compared(HF, measured("graft<lm>", [1.0, 1.0, 1.0], ["a", "b"]))._repr_html_()
    assert "graft&lt;lm&gt; is 2.0 times as fast as hf" in shown
    assert "<svg" in shown


def test_every_difference_is_said() -> None:
    other = measured("graftlm", [1.0, 1.0, 1.0], ["a", "c"], calls=1, prompt=11)
    assert compared(HF, other).differences() == [
        "graftlm answers 1 of 2 inputs differently.",
        "calls differ: 2 with hf, 1 with graftlm.",
        "prompt tokens differ: 20 with hf, 11 with graftlm.",
    ]


def test_true_is_another_answer_than_one() -> None:
    assert compared(measured("hf", [1.0], [True, 1]), measured("graftlm", [1.0], [1, 1.0])).differences() == [
        "graftlm answers 1 of 2 inputs differently."
    ]


def test_answers_that_cannot_be_compared_are_said() -> None:
    hf, ours = measured("hf", [1.0], ["<Box object>", "b"]), measured("graftlm", [1.0], ["<Box object>", "b"])
    ours.rounds = [replace(ours.rounds[0], unread=["Box"])]
    assert compared(hf, ours).differences() == [
        "Answers hold objects without a text, of which only the type was compared: Box."
    ]


def test_calls_that_cannot_be_counted_are_said_to_be_unknown() -> None:
    unknown = EngineResult("openai", [Round(1.0, ["a", "b"], None, Work())])
    assert compared(HF, unknown).differences() == [
        "Calls could not be counted: openai. An answer from a cache would not be seen."
    ]


def test_an_engine_that_answers_differently_each_round_is_said_to() -> None:
    varying = measured("graftlm", [1.0, 1.0], ["a", "b"])
    varying.rounds[1].answers[:] = ["a", "b"]
    varying.rounds[1] = Round(1.0, ["a", "z"], None, Work(calls=2, prompt_tokens=20))
    assert compared(varying).differences() == ["graftlm answers 1 of 2 inputs differently each round."]


def test_rounds_in_which_no_model_was_asked_have_no_ratio() -> None:
    """Answers from a cache of the pipeline's own: two memories were compared, and nothing was said."""
    comparison = compared(measured("hf", [1.0] * 4, ["a", "b"], calls=0), measured("graftlm", [0.1] * 4, ["a", "b"]))
    assert comparison.differences()[0] == (
        "hf was asked nothing in 4 of 4 rounds: the pipeline remembered answers, met errors, or asked another model. "
        "There is no ratio."
    )
    assert comparison.ratio(comparison.results[1]) is None
    with pytest.raises(AssertionError, match="graftlm has no ratio over hf; .* hf was asked nothing"):
        assert_faster(comparison)


@pytest.mark.parametrize(
    ("num_failed", "num_refused", "calls", "has_ratio"),
    [(1, 0, 2, False), (0, 1, 1, False), (0, 1, 2, True)],  # the last: sent again, and answered
)
def test_calls_that_one_engine_fails_leave_no_ratio(
    num_failed: int, num_refused: int, calls: int, has_ratio: bool
) -> None:
    """A pipeline that goes on after errors was ten times as fast on a server that refused everything."""
    ours = measured("graftlm", [0.1] * 3, ["a", "b"], calls=calls)
    ours.rounds = [replace(one, num_failed=num_failed, num_refused=num_refused) for one in ours.rounds]
    comparison = compared(HF, ours)
    assert (comparison.ratio(ours) is not None) == has_ratio
    said = "Of hf and graftlm, one failed calls that the other answered. There is no ratio."
    assert (said in comparison.differences()) != has_ratio


def test_prompts_of_the_same_length_that_vary_are_said() -> None:
    """A clock in the prompt: calls, tokens and answers were equal, and so were the prompts, it was said."""
    clock = measured("hf", [1.0, 1.0], ["a", "b"])
    clock.rounds = [replace(one, prompts=number) for number, one in enumerate(clock.rounds)]
    assert compared(clock).differences() == ["hf: prompts vary between rounds."]
    one, other = measured("hf", [1.0], ["a", "b"]), measured("graftlm", [1.0], ["a", "b"])
    one.profile, other.profile = (Profile(1.0, [], {}, prompts=number) for number in (1, 2))
    assert compared(one, other).differences() == ["prompts differ between hf and graftlm."]


def test_calls_that_outlive_their_round_are_said() -> None:
    early = measured("hf", [1.0, 1.0], ["a", "b"])
    early.rounds[1] = replace(early.rounds[1], unfinished=2)
    assert compared(early).differences() == ["hf: model calls had not ended when run() returned in 1 of 2 rounds."]


def test_errors_that_the_pipeline_catches_on_one_engine_are_said() -> None:
    hf, ours = measured("hf", [1.0], ["a", "b"]), measured("graftlm", [1.0], ["a", "b"])
    ours.rounds = [replace(ours.rounds[0], caught=["ConfigError: no such option."])]
    assert compared(hf, ours).differences() == [
        "errors that the pipeline caught differ: 0 with hf, 1 with graftlm, the first ConfigError: no such option."
    ]


def test_time_in_which_no_model_is_asked_is_said_where_it_is_most() -> None:
    slept, quick = measured("hf", [1.0], ["a", "b"]), measured("graftlm", [1.0], ["a", "b"])
    slept.profile = Profile(2.0, [Call(0.0, 0.1), Call(0.5, 0.8)], {})
    quick.profile = Profile(0.05, [Call(0.0, 0.01)], {})  # too short to tell
    assert compared(slept, quick).differences() == ["For 80% of hf's time no model call was under way."]


def loaded(engine: str, rounds: list[tuple[float, float]]) -> EngineResult:
    """Rounds of so many seconds, in which the engine's threads lacked a core for such a share of the time."""
    work = Work(calls=2, prompt_tokens=20)
    return EngineResult(
        engine, [Round(s, ["a", "b"], None, work, other_cores=2 * lost, lost=lost) for s, lost in rounds]
    )


def test_the_first_round_is_part_of_no_ratio_where_three_others_are() -> None:
    comparison = compared(measured("hf", [9.0, 2.0, 2.0, 2.0], ["a", "b"]), measured("graftlm", [1.0] * 4, ["a", "b"]))
    found = comparison.ratio(comparison.results[1])
    assert found is not None and found.high == pytest.approx(2.2, abs=0.1)
    short = compared(measured("hf", [8.0, 2.0, 2.0], ["a", "b"]), measured("graftlm", [1.0] * 3, ["a", "b"]))
    assert len(short.counted(short.results[1]).pairs) == 3


def test_times_and_ratios_are_of_the_same_rounds() -> None:
    ours = measured("graftlm", [1.0, 4.0, 1.0, 1.0, 1.0], ["a", "b"])
    comparison = compared(measured("hf", [9.0, 2.0, 2.0, 2.0], ["a", "b"]), ours)
    assert comparison.kept() == [1, 2, 3]
    assert comparison.median_of(comparison.baseline, "wall_s") / comparison.median_of(ours, "wall_s") == 2.0
    assert comparison.ratio(ours).value == pytest.approx(2.0)  # type: ignore[union-attr]


def test_rounds_beside_other_programs_are_left_out_where_three_others_are() -> None:
    ours = loaded("graftlm", [(1.0, 0.0), (1.0, 0.0), (5.0, 0.5), (1.0, 0.0), (1.0, 0.05)])
    comparison = compared(measured("hf", [2.0] * 5, ["a", "b"]), ours)
    assert str(comparison.ratio(ours)) == "2.00x (1.81 to 2.21)"
    assert comparison.load() == [
        "1 of 5 rounds are part of no time and no ratio, because other programs took the engines' cores."
    ]


def test_a_ratio_beside_other_programs_is_said_to_be_one_and_has_a_wider_interval() -> None:
    busy = [(2.0, 0.5)] * 4
    comparison = compared(loaded("hf", busy), loaded("graftlm", busy))
    found = comparison.ratio(comparison.results[1])
    assert found is not None and found.high is not None and found.high > 1.4
    comparison.results.append(loaded("vllm", busy))
    said, meaning = comparison.load()  # one for all engines
    with pytest.raises(AssertionError, match="The machine was busy"):
        assert_faster(comparison)
    assert said.startswith("The machine was busy: other programs used 1.0 of its ") and said.endswith("of the time.")
    assert meaning.startswith("The ratio is one beside such a load")
    assert "had none for 50% of the time" in said and "fewer --threads" in meaning


def test_there_is_no_ratio_where_threads_that_wait_for_each_other_lack_cores() -> None:
    comparison = compared(loaded("hf", [(30.0, 0.5)] * 4), loaded("graftlm", [(0.5, 0.5)] * 4))
    comparison.threads = 2  # a stock engine was 15 times as slow as alone, and the ratio 60 in place of 4
    assert comparison.ratio(comparison.results[1]) is None
    said = comparison.load()[1]
    assert said.startswith("There is no ratio: threads that wait for each other") and said.endswith("--threads 1.")
    with pytest.raises(AssertionError, match="graftlm has no ratio over hf.*End those programs"):
        assert_faster(comparison)
    short = compared(loaded("hf", [(0.06, 0.3)] * 4), loaded("graftlm", [(0.03, 0.3)] * 4))
    short.threads = 2  # too short for the clocks: these 0.3 may be none
    found = short.ratio(short.results[1])
    assert found is not None and found.value == pytest.approx(2.0)


def test_an_interval_beside_other_programs_is_wider_where_engines_have_several_threads() -> None:
    comparison = compared(loaded("hf", [(4.0, 0.15)] * 4), loaded("graftlm", [(1.0, 0.15)] * 4))
    widths = []
    for comparison.threads in (1, 2):
        found = comparison.ratio(comparison.results[1])
        assert found is not None
        widths.append(found.width)
    assert widths == pytest.approx([0.26, 1.84], abs=0.05)


def test_short_rounds_are_judged_together_because_clocks_are_coarse() -> None:
    noisy = [(0.05, lost) for lost in (0.4, -0.4, 0.4, -0.4, 0.4, -0.4)]
    comparison = compared(loaded("hf", noisy), loaded("graftlm", noisy))
    counted = comparison.counted(comparison.results[1])
    assert (len(counted.pairs), counted.num_left_out, counted.lost) == (5, 0, 0.0)
    assert comparison.load() == []


def test_white_space_and_case_are_ignored_where_answers_are_normalised() -> None:
    comparison = compared(HF, measured("graftlm", [1.0], [" A\n", "b"]))
    assert comparison.differing(comparison.results[1]) == [0]
    assert comparison.differing(comparison.results[1], normalised=True) == []


def test_failed_and_interrupted_runs_are_said_first() -> None:
    comparison = compared(HF, EngineResult("vllm", error="no such package"))
    comparison.interrupted = True
    assert comparison.differences() == ["The run was interrupted: these are partial figures.", "vllm failed."]
    assert (comparison.ratio(comparison.results[1]), comparison.num_equal(comparison.results[1])) == (None, None)


def test_assert_faster_wants_the_whole_interval_above() -> None:
    comparison = compared(HF, measured("graftlm", [1.0, 1.0, 1.0], ["a", "b"]))
    assert_faster(comparison, by=1.5)
    with pytest.raises(AssertionError, match=r"graftlm is 2\.00x .* must lie above 3\.00x"):
        assert_faster(comparison, by=3)
    with pytest.raises(AssertionError, match="must lie above"):
        assert_faster(compared(HF, measured("graftlm", [1.0], ["a", "b"])), by=1.5)  # one round: no interval


def test_assert_same_answers_shows_the_first_that_differs() -> None:
    comparison = compared(HF, measured("graftlm", [1.0], ["a", "c"]))
    assert_same_answers(comparison, share=0.5)
    with pytest.raises(AssertionError, match="1 of 2 answers of hf.* On 'two': 'b' became 'c'"):
        assert_same_answers(comparison)


def test_an_engine_that_was_not_measured_fails_an_assertion_with_its_reason() -> None:
    with pytest.raises(AssertionError, match="vllm was not measured: no such package"):
        assert_faster(compared(HF, EngineResult("vllm", error="no such package")))
    with pytest.raises(ConfigError, match="compared: hf"):
        assert_faster(compared(HF), "sglang")
