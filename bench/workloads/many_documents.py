"""Questions over many documents: ten of them in one prompt, several questions on the same ones."""

import random

import graftlm as gl
from bench.workloads import _world as world

DOCUMENTS, QUESTIONS = 10, 4
max_tokens = 16


def inputs():
    rng, found = random.Random(12), []
    for number in range(world.count(5)):
        made = world.worlds(120 + number, DOCUMENTS, num_entities=3)
        documents = [one.passage().text for one in made]
        for one in rng.sample(made, QUESTIONS):
            fact = world.facts(one, 1)[0]
            found.append({"documents": documents, "question": world.question(fact, rng), "answer": fact.answer})
    rng.shuffle(found)
    return found


def warm_up():
    return [{"documents": ["Ada is a baker."], "question": "What is Ada?", "answer": "baker"}]


@gl.program(temperature=0)
def _answer(s, documents, question):
    s += gl.user("\n\n".join(documents) + f"\n\n{question}") + gl.assistant(gl.gen("answer", max_tokens=16))


def run_native(llm, inputs):
    states = _answer.batch([{key: one[key] for key in ("documents", "question")} for one in inputs], runtime=llm)
    return [state["answer"].strip() for state in states]


async def run_llama_index(llm, inputs):
    import asyncio

    from llama_index.core import Document, SummaryIndex

    engines = {}
    for one in inputs:
        key = one["documents"][0]
        if key not in engines:
            engines[key] = SummaryIndex.from_documents([Document(text=t) for t in one["documents"]]).as_query_engine(
                llm=llm
            )

    asked = (engines[one["documents"][0]].aquery(one["question"]) for one in inputs)
    return [str(answer).strip() for answer in await asyncio.gather(*asked)]


def run_langchain(llm, inputs):
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate

    chain = ChatPromptTemplate.from_template("{text}\n\n{question}") | llm | StrOutputParser()
    asked = [{"text": "\n\n".join(one["documents"]), "question": one["question"]} for one in inputs]
    return [answer.strip() for answer in chain.batch(asked)]


def right(item, answer):
    return answer == item["answer"]
