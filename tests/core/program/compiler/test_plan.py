from __future__ import annotations

import threading

import pytest

import graftlm as gl
from graftlm.core.errors import ConfigError
from graftlm.core.program.compiler.plan import Budget, CallTree, Open, PlannedCall, course, usable_tokens
from graftlm.core.program.interpreter import interpreter
from graftlm.core.program.state import ProgramState
from graftlm.testing import ScriptedModel
from tests.scripted import Scripted


@gl.program(temperature=0, ignore_eos=True)
def think(s: ProgramState, question: str) -> list[str]:
    s += question
    states = [s]
    for level in range(3):
        states = [branch for state in states for branch in state.fork(3)]
        for i, branch in enumerate(states):
            branch += f" {level}.{i % 3}:" + gl.gen(f"t{level}", max_tokens=8)
    return [state["t2"] for state in states]


@gl.program(temperature=0)
def judged(s: ProgramState) -> None:
    s += "Rate:" + gl.gen("rating", dtype=int, max_tokens=4)
    s += f" It is {s['rating']}." + gl.select("grade", ["A", "B"])


def runtime(**options: object) -> gl.Runtime:
    return ScriptedModel(lambda prompt: f"{len(prompt):>8}").runtime(**options)


def test_a_plan_knows_fan_out_peak_and_steps_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Scripted()
    plan = think.plan([{"question": "Why?"}], runtime=backend)
    assert backend.requests == []  # no model call
    assert (len(plan.calls), plan.tree.fan_out, plan.tree.depth) == (3 + 9 + 27, 3, 3)
    assert plan.breadth_first.steps == 3 * (1 + 8)
    assert plan.depth_first.peak_tokens < plan.breadth_first.peak_tokens / 5
    assert "39 calls, 3 after one another, at most 3 from one" in capsys.readouterr().out


def test_the_order_depends_on_the_pool() -> None:
    plan = think.plan([{"question": "Why?"}], runtime=Scripted(), pool=100_000)
    assert plan.order == "breadth first"
    small = think.plan([{"question": "Why?"}], runtime=Scripted(), pool=plan.breadth_first.peak_tokens // 4)
    assert small.order == "depth first"
    assert small.peak_tokens <= usable_tokens(plan.breadth_first.peak_tokens // 4)
    assert small.steps > plan.steps


def test_a_tree_in_a_quarter_of_the_pool_computes_nothing_twice() -> None:
    with runtime() as roomy:
        plan = think.plan([{"question": "Why?"}], runtime=roomy)
        expected = think.run("Why?", runtime=roomy).result
        endless = roomy.stats().computed_tokens
    pool = gl.CacheConfig(max_tokens=plan.breadth_first.peak_tokens // 4)
    with runtime(cache=pool) as tight:
        planned = think.plan([{"question": "Why?"}], runtime=tight)
        assert planned.order == "depth first"
        assert planned.program.run("Why?", runtime=tight).result == expected
        stats = tight.stats()
        assert stats.computed_tokens <= 1.02 * endless
        assert stats.retracted == 0
        tight.clear_cache()
        tight.reset_stats()
        assert think.run("Why?", runtime=tight).result == expected
        assert tight.stats().computed_tokens > stats.computed_tokens  # breadth first, as without a plan


def test_branches_that_are_done_give_their_kv_back() -> None:
    with runtime() as engine:
        think.plan([{"question": "Why?"}], runtime=engine).program.run("Why?", runtime=engine).wait()
        ended = threading.Event()
        interpreter().post(lambda: engine._thread.post(lambda _: ended.set()))  # behind the tasks that drop KV
        assert ended.wait(120)
        cached = engine.stats().slots_cached
        think.run("Why?", runtime=engine).wait()
        assert cached < engine.stats().slots_cached / 2


def test_planned_batches_streams_and_failures_end() -> None:
    with runtime(cache=gl.CacheConfig(max_tokens=300)) as engine:
        planned = think.plan([{"question": "Why?"}], runtime=engine).program
        states = planned.batch([{"question": "Why?"}, {"question": "How?"}, {}], runtime=engine)
        assert [type(state.error) for state in states] == [type(None), type(None), ConfigError]
        assert sum(chunk.finish_reason is not None for chunk in planned.stream("Why?", runtime=engine)) == 39
        cancelled = planned.run("Why?", runtime=engine)
        cancelled.cancel()
        assert cancelled.wait(120)
        assert planned.run("Why?", runtime=engine).error is None


def test_a_plan_names_what_depends_on_answers() -> None:
    plan = judged.plan([{}], runtime=Scripted())
    assert [key for key in plan.tree.calls] == [((), 0), ((), 1)]
    assert "1 call after the program reads state['rating']: prompts and forks there may depend" in str(plan)


def test_code_that_fails_on_a_stand_in_is_traced_up_to_there() -> None:
    @gl.program
    def looks_up(s: ProgramState) -> None:
        s += "Which?" + gl.gen("which", max_tokens=2)
        s += {"x": "!"}[s["which"]] + gl.gen("more")

    plan = looks_up.plan([{}], runtime=Scripted())
    assert len(plan.calls) == 1
    assert "input 0 is traced up to call 1: its code raised KeyError" in str(plan)


def test_nested_programs_are_part_of_the_plan() -> None:
    @gl.program
    def inner(s: ProgramState, word: str) -> None:
        s += word + gl.gen("x", max_tokens=3)

    @gl.program
    def outer(s: ProgramState) -> None:
        states = [inner.run(word) for word in ("a", "b")]
        s += "".join(state["x"] for state in states) + gl.gen("y", max_tokens=3)

    assert len(outer.plan([{}], runtime=Scripted()).calls) == 3


@pytest.mark.parametrize(
    ("inputs", "pool", "reason"),
    [([], None, "the sample of inputs is empty"), (["x"], None, "an input is 'x'"), ([{}], 0, "pool is 0")],
)
def test_wrong_inputs_are_named(inputs: list[object], pool: int | None, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        judged.plan(inputs, runtime=Scripted(), pool=pool)  # type: ignore[arg-type]


def test_a_call_starts_only_if_all_open_ones_can_still_end() -> None:
    budget = Budget(pool=100)
    first, second = Open((0,), 40, 90), Open((1,), 40, 40)
    budget.add(first)
    budget.add(second)
    assert budget.may_start(first)
    budget.start(first)
    assert not budget.may_start(second)  # 20 would be left, and the first still needs 50
    budget.live -= 30
    assert budget.may_start(second)


def test_a_chain_needs_its_sum_in_any_order() -> None:
    calls = [PlannedCall(((), i), 10, 5, ((), i - 1) if i else None) for i in range(3)]
    assert course(CallTree(calls), None) == course(CallTree(calls), 30)
    assert course(CallTree(calls), 30).peak_tokens == 30
