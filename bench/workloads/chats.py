"""Conversations of four turns at once, with short answers (8 tokens) and long ones (64 tokens, whatever they say)."""

import random

import graftlm as gl
from bench.workloads import _world as world

TURNS = 4
max_tokens = 64


def inputs():
    """Half of the sessions answer briefly, half at length. A turn tells about people and asks about one of them."""
    rng, found = random.Random(9), []
    for session in range(world.count(8)):
        turns, answers = [], []
        for made in world.worlds(900 + session, TURNS, num_entities=4):
            fact = world.facts(made, 1)[0]
            turns.append(f"{made.passage().text}\n\n{world.question(fact, rng)}")
            answers.append(fact.answer)
        found.append({"turns": turns, "answer": answers, "long": session % 2 == 1})
    return found


def warm_up():
    return [{"turns": ["Ada is a baker.\n\nWhat is Ada?"], "answer": ["baker"], "long": False}]


@gl.program(temperature=0)
def _talk(s, turns, long):
    for i, turn in enumerate(turns):
        s += gl.user(turn)
        s += gl.assistant(gl.gen(f"said {i}", max_tokens=64 if long else 8, ignore_eos=long))


def run_native(llm, inputs):
    states = _talk.batch([{key: one[key] for key in ("turns", "long")} for one in inputs], runtime=llm)
    return [[state[f"said {i}"] for i in range(len(one["turns"]))] for one, state in zip(inputs, states)]


def run_langchain(llm, inputs):
    """Run one turn of all sessions as one batch; the model ends its answers."""
    chats = [[] for _ in inputs]
    for number in range(max(len(one["turns"]) for one in inputs)):
        chats = [[*chat, ("human", one["turns"][number])] for chat, one in zip(chats, inputs)]
        chats = [[*chat, ("ai", said.content)] for chat, said in zip(chats, llm.batch(chats))]
    return [[text for role, text in chat if role == "ai"] for chat in chats]


def right(item, answer):
    """Return True if an answer is right; a long answer continues after it."""
    return all(said.strip().startswith(true) for said, true in zip(answer, item["answer"]))
