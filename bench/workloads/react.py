"""A ReAct agent's trace: solved examples, then steps of thought, action and observation, one after another.

As in SGLang's benchmark what the model writes in a step is thrown away and the recorded step is appended, so that every
engine sees the same trace; the last call answers the question.
"""

import random

import graftlm as gl
from bench.workloads import _world as world

SYSTEM = "Answer the question in steps of Thought, Action and Observation. The only action is Search[name].\n\n"


def _trace(made, rng):
    fact, *others = world.facts(made, 4)
    question = world.question(fact, rng)
    steps = [
        f"\nThought: I need to find out about {one.subject.name}.\nAction: Search[{one.subject.name}]"
        f"\nObservation: {made.passage([one], plain=True).text}"
        for one in [*others, fact]
    ]
    return {"question": question, "steps": steps, "answer": fact.answer}


def _traces():
    rng = random.Random(3)
    return [_trace(made, rng) for made in world.worlds(30, 6 + 8)]


EXAMPLES = SYSTEM + "".join(
    f"Question: {one['question']}{''.join(one['steps'])}\nAnswer: {one['answer']}\n\n" for one in _traces()[:6]
)


def inputs():
    return _traces()[6 : 6 + world.count(8)]


def warm_up():
    return [{"question": "Who?", "steps": ["\nThought: I look.\nObservation: Ada."], "answer": "Ada"}]


def _last(question):
    return f"\n\nQuestion: {question}\nAnswer:"


@gl.program(temperature=0)
def _act(s, question, steps):
    s += EXAMPLES + f"Question: {question}"
    for step in steps:
        (thought,) = s.fork(1)
        thought += gl.gen("step", max_tokens=24, stop="Observation")
        thought["step"]
        s += step
    s += _last(question) + gl.gen("answer", max_tokens=12, stop="\n")


def run_native(llm, inputs):
    states = _act.batch([{key: one[key] for key in ("question", "steps")} for one in inputs], runtime=llm)
    return [state["answer"].strip() for state in states]


max_tokens = 24


def run_langchain(llm, inputs):
    """Each step is a call for all questions at once, as an agent's executor in a batch would make it."""
    prompts, bound = (
        [EXAMPLES + f"Question: {one['question']}" for one in inputs],
        llm.bind(stop=["Observation", "\n\n"]),
    )
    for number in range(max(len(one["steps"]) for one in inputs)):
        bound.batch(prompts)
        prompts = [p + "".join(one["steps"][number : number + 1]) for p, one in zip(prompts, inputs)]
    said = bound.batch([p + _last(one["question"]) for p, one in zip(prompts, inputs)])
    return [answer.content.strip() for answer in said]


def right(item, answer):
    return answer.rstrip(".") == item["answer"]
