"""Word problems in steps (GSM8K): five solved examples that never change, then a question and its solution."""

import random

import graftlm as gl
from bench.sprout.maker import Maker
from bench.sprout.tasks_programs import story
from bench.workloads import _world as world

max_tokens = 64


def _solved():
    make = Maker(random.Random(11), "test", None)
    return [story(make) for _ in range(5 + 24)]


SHOTS = "".join(f"Question: {q}\nAnswer: {steps}\nThe answer is {result}\n\n" for q, steps, result in _solved()[:5])


def inputs():
    return [{"question": q, "answer": str(result)} for q, _, result in _solved()[5 : 5 + world.count(24, 3)]]


def warm_up():
    return [{"question": "Ada has 2 apples. Ada buys 1 more. How many apples does Ada have now?", "answer": "3"}]


@gl.program(temperature=0)
def _solve(s, question):
    s += SHOTS + f"Question: {question}\nAnswer:" + gl.gen("solution", max_tokens=64, stop="Question:")


def _result(text):
    return text.rpartition("The answer is")[2].strip().rstrip(".").split("\n")[0]


def run_native(llm, inputs):
    states = _solve.batch([{"question": one["question"]} for one in inputs], runtime=llm)
    return [_result(state["solution"]) for state in states]


def run_langchain(llm, inputs):
    from langchain_core.prompts import ChatPromptTemplate

    shots = [message for q, steps, result in _solved()[:5]
             for message in (("human", q), ("ai", f"{steps} The answer is {result}."))]  # fmt: skip
    chain = ChatPromptTemplate.from_messages([*shots, ("human", "{question}")]) | llm
    return [_result(said.content) for said in chain.batch([{"question": one["question"]} for one in inputs])]


def run_guidance(llm, inputs):
    from guidance import gen

    base = llm + SHOTS
    asked = [
        base + f"Question: {o['question']}\nAnswer:" + gen("text", max_tokens=64, stop="Question:") for o in inputs
    ]
    return [_result(lm["text"]) for lm in asked]


def right(item, answer):
    return answer == item["answer"]
