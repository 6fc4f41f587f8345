"""Retrieval (DSPy): three passages found by their words, then a signature with context, question and answer."""

import random

import graftlm as gl
from bench.workloads import _world as world

PASSAGES = 3
max_tokens = 48


def _library():
    """Build one passage per person of some worlds."""
    return [(made, " ".join(made.passage(plain=True).about(entity))) for made in world.worlds(100, 12)
            for entity in made.entities]  # fmt: skip


def _search(library, question):
    asked = set(question.rstrip("?").split())
    ranked = sorted(library, key=lambda one: (-len(asked & set(one.replace(".", "").split())), one))
    return ranked[:PASSAGES]


def inputs():
    rng, library = random.Random(10), [text for _, text in _library() if text]
    found = []
    for made in world.worlds(100, 12):
        for fact in world.facts(made, 4):
            asked = world.question(fact, rng)
            found.append({"context": _search(library, asked), "question": asked, "answer": fact.answer})
    found = [one for one in found if any(one["answer"] in text for text in one["context"])]
    rng.shuffle(found)
    return found[: world.count(32, 4)]


def warm_up():
    return [{"context": ["Ada Holt is a baker."], "question": "What is the job of Ada Holt?", "answer": "baker"}]


def run_dspy(llm, inputs):
    import dspy

    class Answer(dspy.Signature):
        """Answer from the passage."""

        context: list[str] = dspy.InputField()
        question: str = dspy.InputField()
        answer: str = dspy.OutputField()

    devset = [dspy.Example(**one).with_inputs("context", "question") for one in inputs]
    metric = lambda example, made: made.answer == example.answer  # noqa: E731
    # One call per question, whatever its text: where DSPy reads no answer in it, as with random weights, it would ask
    # again in JSON, and give up after ten.
    adapter = dspy.ChatAdapter(use_json_adapter_fallback=False)
    evaluate = dspy.Evaluate(devset=devset, metric=metric, num_threads=16, max_errors=len(inputs) + 1)
    with dspy.context(lm=llm, adapter=adapter):
        result = evaluate(dspy.Predict(Answer))
    return [getattr(made, "answer", "").strip() for _, made, _ in result.results]


@gl.program(temperature=0)
def _answer(s, context, question):
    s += gl.system("Answer the question using only the given text.")
    s += gl.user("\n".join(context) + "\n\n" + question) + gl.assistant(gl.gen("answer", max_tokens=16))


def run_native(llm, inputs):
    states = _answer.batch([{key: one[key] for key in ("context", "question")} for one in inputs], runtime=llm)
    return [state["answer"].strip() for state in states]


def right(item, answer):
    return answer == item["answer"]
