"""Ways to hand the same prompts to a runtime: as text, as messages, and through each framework's own calls.

Each way is a function of a runtime and a Work; it returns a function that submits all prompts and waits. A
framework is imported when one of its ways is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

Answers = Callable[[], Sequence[Any]]
THREADS = 64


@dataclass(frozen=True)
class Work:
    """Questions behind one system prompt, greedy, `max_tokens` new tokens each."""

    system: str
    questions: Sequence[str]
    max_tokens: int

    @property
    def options(self) -> dict[str, Any]:
        return {"temperature": 0.0, "max_tokens": self.max_tokens, "ignore_eos": True}


def text(runtime: Any, work: Work) -> Answers:
    prompts = [f"{work.system}\n\n{question}\n\n" for question in work.questions]
    return lambda: [done.text for done in runtime.generate(prompts, **work.options)]


def ids_in_threads(runtime: Any, work: Work) -> Answers:
    """Submit token ids from 64 threads, without a framework."""
    prompts = [runtime.processor.encode(f"{work.system}\n\n{question}\n\n") for question in work.questions]
    return lambda: in_threads(lambda ids: runtime.generate(ids, **work.options), prompts)


def messages(runtime: Any, work: Work) -> Answers:
    chats = [
        [{"role": "system", "content": work.system}, {"role": "user", "content": question}]
        for question in work.questions
    ]
    return lambda: [done.text for done in runtime.generate(chats, **work.options)]


def _langchain(runtime: Any, work: Work) -> tuple[Any, list[Any]]:
    from langchain_core.messages import HumanMessage, SystemMessage

    from graftlm.adapters.langchain import ChatGraftLM

    llm = ChatGraftLM(runtime=runtime, temperature=0, max_tokens=work.max_tokens, model_kwargs={"ignore_eos": True})
    return llm, [[SystemMessage(work.system), HumanMessage(question)] for question in work.questions]


def langchain_batch(runtime: Any, work: Work) -> Answers:
    llm, chats = _langchain(runtime, work)
    return lambda: llm.batch(chats)


def langchain_abatch(runtime: Any, work: Work) -> Answers:
    llm, chats = _langchain(runtime, work)
    return lambda: asyncio.run(llm.abatch(chats))


def langchain_chain(runtime: Any, work: Work) -> Answers:
    from langchain_core.prompts import ChatPromptTemplate

    llm, _ = _langchain(runtime, work)
    prompt = ChatPromptTemplate.from_messages([("system", "{system}"), ("human", "{question}")])
    chain = prompt.partial(system=work.system) | llm
    inputs = [{"question": question} for question in work.questions]
    return lambda: chain.batch(inputs)


def langchain_threads(runtime: Any, work: Work, threads: int = THREADS) -> Answers:
    llm, chats = _langchain(runtime, work)
    return lambda: in_threads(llm.invoke, chats, threads)


def dspy_evaluate(runtime: Any, work: Work) -> Answers:
    """Evaluate with GraftAdapter; instructions hold the system prompt; its headers take 32 tokens."""
    import dspy

    from bench.frameworks._dspy import quiet
    from graftlm.adapters.dspy import GraftAdapter, GraftLM

    lm = GraftLM(runtime=runtime, cache=False, temperature=0, max_tokens=work.max_tokens + 32)
    predict = dspy.Predict(dspy.Signature("question -> answer", work.system))
    devset = [dspy.Example(question=question, answer="").with_inputs("question") for question in work.questions]
    adapter = GraftAdapter()

    def answer() -> Sequence[Any]:
        with dspy.context(lm=lm, adapter=adapter), quiet():
            evaluate = dspy.Evaluate(devset=devset, metric=lambda *_: True, num_threads=THREADS, max_errors=10**6)
            return [made.get("answer") for _, made, _ in evaluate(predict).results]

    return answer


def llama_index_async(runtime: Any, work: Work) -> Answers:
    from llama_index.core.llms import ChatMessage

    from graftlm.adapters.llama_index import GraftLLM

    settings = {"context_window": runtime.max_model_len, "is_chat_model": True}
    more = {"ignore_eos": True}
    llm = GraftLLM(runtime=runtime, temperature=0, max_tokens=work.max_tokens, additional_kwargs=more, **settings)
    chats = [
        [ChatMessage(role="system", content=work.system), ChatMessage(role="user", content=question)]
        for question in work.questions
    ]

    async def gather() -> list[Any]:
        return await asyncio.gather(*[llm.achat(chat) for chat in chats])

    return lambda: asyncio.run(gather())


def guidance_threads(runtime: Any, work: Work) -> Answers:
    """Run one program for every fourth question, in 16 threads."""
    from guidance import gen

    from graftlm.adapters.guidance import GraftModel

    base = GraftModel(runtime=runtime, echo=False)

    def program(question: str) -> str:
        lm = base + f"{work.system}\n\n" + f"{question}\n\n" + gen("answer", max_tokens=work.max_tokens)
        return str(lm["answer"])

    questions = work.questions[::4]
    return lambda: in_threads(program, questions, 16)


def in_threads(call: Callable[[Any], Any], inputs: Sequence[Any], threads: int = THREADS) -> list[Any]:
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(call, inputs))


WAYS: dict[str, Callable[[Any, Work], Answers]] = {
    "ids-threads": ids_in_threads,
    "text": text,
    "messages": messages,
    "langchain-batch": langchain_batch,
    "langchain-abatch": langchain_abatch,
    "langchain-chain": langchain_chain,
    "langchain-threads": langchain_threads,
    "langchain-256-threads": partial(langchain_threads, threads=256),
    "dspy": dspy_evaluate,
    "llama-index": llama_index_async,
    "guidance": guidance_threads,
}
