"""Tree of thought: a question, levels of branches that plan, work and reflect, and the leaves' vote.

One tree of 3 levels with 3 branches (39 calls), one of 4 levels with 2 branches (30 calls), as in SGLang's benchmarks.
Branches are numbered, so that they differ under greedy decoding.
"""

import random
from collections import Counter

import graftlm as gl
from bench.workloads import _world as world

SHAPES = {"39": (3, 3), "30": (4, 2)}
ASKS = ("Plan {i}: which sentence helps? {q}", "Way {i}: quote the sentence. {q}", "Check {i}: is it so? {q}", "{q}")
max_tokens = 16


def inputs():
    rng, found = random.Random(5), []
    for made, shape in zip(world.worlds(50, 2, num_entities=5), SHAPES):
        fact = world.facts(made, 1)[0]
        found.append({"text": made.passage().text, "question": world.question(fact, rng), "answer": fact.answer,
                      "shape": shape})  # fmt: skip
    return found


def warm_up():
    return [{"text": "Ada is a baker.", "question": "What is Ada?", "answer": "baker", "shape": "30"}]


def _asks(shape, question):
    levels, width = SHAPES[shape]
    return [[ask.format(i=i + 1, q=question) for i in range(width)] for ask in (*ASKS[: levels - 1], ASKS[3])]


def _vote(answers):
    return Counter(answers).most_common(1)[0][0]


@gl.program(temperature=0)
def _think(s, text, question, shape):
    s += gl.user(text)
    states = [s]
    for asks in _asks(shape, question):
        states = [branch for state in states for branch in state.fork(len(asks))]
        for i, state in enumerate(states):
            state += gl.user(asks[i % len(asks)]) + gl.assistant(gl.gen("said", max_tokens=16))
    s.set("vote", _vote([state["said"] for state in states]))


def run_native(llm, inputs):
    states = _think.batch([{k: one[k] for k in ("text", "question", "shape")} for one in inputs], runtime=llm)
    return [state["vote"] for state in states]


def run_langchain(llm, inputs):
    """Run each level as one batch."""
    answers = []
    for one in inputs:
        chats = [[("human", one["text"])]]
        for asks in _asks(one["shape"], one["question"]):
            chats = [[*chat, ("human", ask)] for chat in chats for ask in asks]
            chats = [[*chat, ("ai", said.content)] for chat, said in zip(chats, llm.batch(chats))]
        answers.append(_vote([chat[-1][1] for chat in chats]))
    return answers


def right(item, answer):
    return answer.strip() == item["answer"]
