"""Few-shot multiple choice (MMLU): per subject one block of five solved questions, then questions of one token each."""

import random

import graftlm as gl
from bench.workloads import _world as world

LETTERS = "ABCD"
max_tokens = 2


def _block(made, fact, rng):
    answers = world.options(fact, rng)
    lines = "\n".join(f"{letter}. {answer}" for letter, answer in zip(LETTERS, answers))
    text = f"{made.passage([fact, *world.facts(made, 3)]).text}\n{world.question(fact, rng)}\n{lines}\nAnswer:"
    return text, LETTERS[answers.index(fact.answer)]


def inputs():
    """8 questions on each of 6 subjects; the examples come first in the prompt and are the same for a subject."""
    found, rng = [], random.Random(1)
    for subject, name in enumerate(("people", "places", "history", "reading", "a short text", "general knowledge")):
        made = world.worlds(10 + subject, 5 + 8)
        blocks = [_block(one, world.facts(one, 1)[0], rng) for one in made]
        shots = "".join(f"{text} {letter}\n\n" for text, letter in blocks[:5])
        head = f"The following are multiple choice questions (with answers) about {name}.\n\n{shots}"
        found += [{"examples": head, "question": text, "answer": letter} for text, letter in blocks[5:]]
    rng.shuffle(found)
    return found[: world.count(48, 6)]


def warm_up():
    return [{"examples": "A. one\nB. two\n", "question": "Which is first?\nAnswer:", "answer": "A"}]


@gl.program(temperature=0)
def _choose(s, examples, question):
    s += examples + question + gl.gen("letter", max_tokens=2)


def run_native(llm, inputs):
    states = _choose.batch([{key: one[key] for key in ("examples", "question")} for one in inputs], runtime=llm)
    return [state["letter"].strip() for state in states]


def run_langchain(llm, inputs):
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate

    chain = ChatPromptTemplate.from_template("{examples}{question}") | llm | StrOutputParser()
    return [text.strip() for text in chain.batch(inputs)]


def run_guidance(llm, inputs):
    from guidance import select

    asked = [llm + one["examples"] + one["question"] + " " + select(list(LETTERS), name="letter") for one in inputs]
    return [lm["letter"] for lm in asked]


def right(item, answer):
    return answer == item["answer"]
