"""DSPy's modules and optimisers, unchanged, over `GraftLM` and `GraftAdapter`; small enough to run in seconds."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import dspy
import pytest

import graftlm
from graftlm.adapters.dspy import GraftAdapter, GraftLM
from graftlm.core.runtime import Runtime
from graftlm.testing import ScriptedModel
from tests.models import byte_tokenizer, tiny_model

CONTEXT = 16384
SPROUT = Path(graftlm.__file__).parent / "sprout" / "config.json"


class Sort(dspy.Signature):
    """Sort the ticket."""

    ticket: str = dspy.InputField()
    label: Literal["bug", "feature"] = dspy.OutputField()


@pytest.fixture(scope="module")
def random_runtime() -> Iterator[Runtime]:
    model = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=CONTEXT)
    with Runtime(model, tokenizer=byte_tokenizer(), max_model_len=CONTEXT) as one:
        yield one


@pytest.fixture(scope="module")
def runtime(random_runtime: Runtime) -> Iterator[Runtime]:
    """The embedded model, or in a checkout without its weights a random one."""
    if not SPROUT.exists():
        yield random_runtime
        return
    with Runtime("sprout") as one:
        yield one


@pytest.fixture
def lm(runtime: Runtime) -> Iterator[GraftLM]:
    with in_context(runtime) as one:
        yield one


@contextmanager
def in_context(runtime: Runtime) -> Iterator[GraftLM]:
    one = GraftLM(runtime=runtime, temperature=1.0, max_tokens=120, cache=False)
    with (
        dspy.context(lm=one, adapter=GraftAdapter(), num_threads=8, disable_progress_bar=True),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # what optimisers say about small data is not at issue
        yield one


@pytest.fixture
def train() -> list[dspy.Example]:
    """Labels that nothing in a ticket tells, so no program is right about all of them but by luck."""
    labels = ["bug", "feature", "feature", "bug", "feature", "bug"]
    return [dspy.Example(ticket=f"ticket {i}", label=label).with_inputs("ticket") for i, label in enumerate(labels)]


def right(example: dspy.Example, made: Any, trace: Any = None, *_: Any) -> bool:
    return bool(example.label == made.label)


def always(example: dspy.Example, made: Any, trace: Any = None, *_: Any) -> float:
    return 1.0


def test_chain_of_thought(lm: GraftLM) -> None:
    answer = dspy.ChainOfThought(Sort)(ticket="x")
    assert answer.label in ("bug", "feature") and isinstance(answer.reasoning, str)


def test_parallel_and_evaluate(lm: GraftLM, train: list[dspy.Example]) -> None:
    predict = dspy.Predict(Sort)
    answers = dspy.Parallel(num_threads=8, disable_progress_bar=True)([(predict, e.inputs()) for e in train])
    assert {answer.label for answer in answers} <= {"bug", "feature"}
    assert 0 <= dspy.Evaluate(devset=train, metric=right, num_threads=8)(predict).score <= 100


def test_best_of_n_takes_the_best_reward(lm: GraftLM) -> None:
    seen: list[float] = []

    def reward(arguments: Any, made: Any) -> float:
        seen.append(float(len(made.note)))
        return seen[-1]

    best = dspy.BestOfN(dspy.Predict("ticket -> note"), N=3, reward_fn=reward, threshold=1e9)(ticket="x")
    assert len(seen) == 3 and len(best.note) == max(seen)


def test_refine_gives_advice_between_its_tries(lm: GraftLM) -> None:
    refine = dspy.Refine(dspy.Predict(Sort), N=2, reward_fn=lambda a, p: 0.0, threshold=1.0)
    assert refine(ticket="x").label in ("bug", "feature")


def test_multi_chain_comparison(runtime: Runtime, lm: GraftLM) -> None:
    before = runtime.stats().requests
    chains = dspy.ChainOfThought(Sort, n=3)(ticket="x").completions
    assert runtime.stats().requests - before == 1
    compare = dspy.MultiChainComparison(Sort, M=3)
    assert compare([chains[i] for i in range(3)], ticket="x").label in ("bug", "feature")


def test_react_uses_its_tools_and_ends(lm: GraftLM) -> None:
    calls: list[str] = []

    def look_up(name: Literal["alpha", "beta"]) -> str:
        """Look a name up."""
        calls.append(name)
        return f"{name} is known"

    answer = dspy.ReAct("question -> answer", tools=[look_up], max_iters=3)(question="x")
    names = [value for key, value in answer.trajectory.items() if key.startswith("tool_name")]
    assert set(names) <= {"look_up", "finish"} and isinstance(answer.answer, str)


@pytest.mark.parametrize("adapter", [dspy.JSONAdapter(), GraftAdapter()], ids=["json", "graft"])
def test_react_gets_every_field_of_a_step_from_a_model_that_writes_at_random(
    random_runtime: Runtime, adapter: dspy.Adapter
) -> None:
    """JSONAdapter sends no schema here, as the tools' arguments are an open dict; {} used to be an answer."""

    def look_up(name: str = "") -> str:
        """Look a name up."""
        return "known"

    with in_context(random_runtime), dspy.context(adapter=adapter):
        act = dspy.ReAct("question -> answer", tools=[look_up], max_iters=3)
        step = act.react(question="x", trajectory="")
        assert step.next_tool_name in ("look_up", "finish") and isinstance(step.next_tool_args, dict)
        assert isinstance(act(question="x").answer, str)


@pytest.mark.parametrize("adapter", [dspy.XMLAdapter(), GraftAdapter()], ids=["xml", "graft"])
def test_a_field_is_streamed_through_streamify(adapter: dspy.Adapter) -> None:
    answers = {
        "XMLAdapter": "<answer>\nshe is a baker\n</answer>",
        "ChatAdapter": "[[ ## answer ## ]]\nshe is a baker\n\n[[ ## completed ## ]]",
    }
    answer = answers[type(adapter).__name__]
    model = ScriptedModel(lambda prompt: answer)
    with model.runtime() as runtime, in_context(runtime), dspy.context(adapter=adapter):
        listener = dspy.streaming.StreamListener(signature_field_name="answer")
        program = dspy.streamify(dspy.Predict("question -> answer"), stream_listeners=[listener], async_streaming=False)
        *chunks, last = program(question="What is Mara?")
    assert "".join(chunk.chunk for chunk in chunks).strip() == last.answer.strip() == "she is a baker"


def test_refine_and_best_of_n_are_one_batch_with_n(random_runtime: Runtime) -> None:
    """What docs/dspy.md advises where no reward stops early: the whole N at once, one prompt computed once."""
    with in_context(random_runtime):
        before = random_runtime.stats()
        made = dspy.Predict("ticket -> note", n=5)(ticket="x").completions
        after = random_runtime.stats()
    assert len(made) == 5 and after.requests - before.requests == 1
    assert after.prompt_tokens - before.prompt_tokens < 2 * after.computed_tokens


def test_react_truncates_its_trajectory_when_the_context_is_full(random_runtime: Runtime) -> None:
    def long_text() -> str:
        """Give a long text."""
        return "word " * 1400

    class Act(dspy.ReAct):
        kept: list[int] = []

        def truncate_trajectory(self, trajectory: dict[str, Any]) -> dict[str, Any]:
            shorter: dict[str, Any] = super().truncate_trajectory(trajectory)
            self.kept.append(len(shorter))
            return shorter

    act = Act("question -> answer", tools=[long_text], max_iters=4)
    trajectory = {f"{key}_{i}": value for i in range(3) for key, value in _step(long_text()).items()}
    with in_context(random_runtime):
        answer = act._call_with_potential_trajectory_truncation(act.extract, trajectory, question="x")
    assert isinstance(answer.answer, str) and act.kept


def _step(text: str) -> dict[str, Any]:
    return {"thought": "t", "tool_name": "long_text", "tool_args": {}, "observation": text}


def test_retrieval_then_generation(lm: GraftLM) -> None:
    class Rag(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.answer = dspy.ChainOfThought("context, question -> answer")

        def forward(self, question: str) -> Any:
            passages = ["the first passage", "the second passage"]
            return self.answer(context=passages, question=question)

    assert isinstance(Rag()(question="x").answer, str)


def test_bootstrap_few_shot(lm: GraftLM, train: list[dspy.Example]) -> None:
    compiled = dspy.BootstrapFewShot(metric=always, max_bootstrapped_demos=2).compile(
        dspy.Predict(Sort), trainset=train
    )
    assert len(compiled.demos) >= 2 and compiled(ticket="x").label in ("bug", "feature")


def test_bootstrap_with_random_search(lm: GraftLM, train: list[dspy.Example]) -> None:
    search = dspy.BootstrapFewShotWithRandomSearch(
        metric=right, max_bootstrapped_demos=1, max_labeled_demos=1, num_candidate_programs=1, num_threads=8
    )
    assert search.compile(dspy.Predict(Sort), trainset=train)(ticket="x").label in ("bug", "feature")


def test_mipro(lm: GraftLM, train: list[dspy.Example]) -> None:
    optimiser = dspy.MIPROv2(
        metric=right,
        auto=None,
        num_candidates=2,
        max_bootstrapped_demos=1,
        max_labeled_demos=1,
        num_threads=8,
        verbose=False,
    )
    compiled = optimiser.compile(
        dspy.Predict(Sort),
        trainset=train,
        valset=train,
        num_trials=2,
        minibatch=False,
        program_aware_proposer=False,
        data_aware_proposer=False,
    )
    assert compiled(ticket="x").label in ("bug", "feature")


def test_simba(lm: GraftLM, train: list[dspy.Example]) -> None:
    optimiser = dspy.SIMBA(metric=right, bsize=4, num_candidates=2, max_steps=1, max_demos=1, num_threads=8)
    assert optimiser.compile(dspy.Predict(Sort), trainset=train, seed=1)(ticket="x").label in ("bug", "feature")


def test_gepa(lm: GraftLM, train: list[dspy.Example]) -> None:
    def metric(gold: Any, made: Any, trace: Any = None, name: Any = None, partial: Any = None) -> Any:
        return dspy.Prediction(score=float(gold.label == made.label), feedback="look again")

    optimiser = dspy.GEPA(metric=metric, max_metric_calls=24, num_threads=8, reflection_lm=lm)
    compiled = optimiser.compile(dspy.Predict(Sort), trainset=train[:3], valset=train[3:])
    assert compiled(ticket="x").label in ("bug", "feature")


def test_a_program_is_saved_with_its_engine_and_loaded_where_it_is_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_model("llama", max_position_embeddings=4096).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    program = dspy.Predict("question -> answer")
    program.lm = GraftLM(str(folder), temperature=0.0, max_tokens=80, cache=False)
    program.save(tmp_path / "program.json")
    again = dspy.Predict("question -> answer")
    with pytest.raises(ValueError, match="allow_unsafe_lm_state"):
        again.load(tmp_path / "program.json")
    again.load(tmp_path / "program.json", allow_unsafe_lm_state=True)
    assert again.lm.runtime is program.lm.runtime and again.lm.model == program.lm.model
    with dspy.context(adapter=GraftAdapter()):
        assert again(question="x").answer == program(question="x").answer
    program.lm.runtime.close()
