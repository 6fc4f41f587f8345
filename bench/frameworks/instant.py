"""CPU time of a call to an engine that answers at once, beside each framework's own.

256 questions behind a system prompt of 2,190 words. The baseline is the same call of a stock class that answers at once
without reading its prompt: LangChain's FakeListChatModel, dspy.LM over an engine of one line, LlamaIndex's MockLLM.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

from bench.frameworks._instant import cpu_ms, instant_runtime
from bench.frameworks._ways import THREADS, WAYS, Answers, Work, in_threads
from bench.harness import Options, Row

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "grey", "geese")


def run(options: Options) -> Sequence[Row]:
    count = options.choose(64, 256)
    work = prompts(count)
    rows = []
    with instant_runtime(options.model or "sprout") as runtime:
        runtime.load()
        for name, way in WAYS.items():
            if name == "guidance":  # its engine follows every token
                continue
            ours, stock = cpu_ms(way(runtime, work), count), STOCK.get(name)
            floor = cpu_ms(stock(work), count) if stock is not None else None
            rows.append(Row("instant", f"{name}, a call", ours, "ms CPU", baseline=floor))
    return rows


def prompts(count: int) -> Work:
    """Return `count` questions behind one system prompt."""
    pick = random.Random(0)
    system = " ".join(pick.choices(WORDS, k=2190))
    return Work(system, [" ".join(pick.choices(WORDS, k=40)) for _ in range(count)], 16)


def _fake(work: Work) -> tuple[Any, list[Any]]:
    from langchain_core.language_models import FakeListChatModel
    from langchain_core.messages import HumanMessage, SystemMessage

    chats = [[SystemMessage(work.system), HumanMessage(question)] for question in work.questions]
    return FakeListChatModel(responses=["hello"]), chats


def _batch(work: Work) -> Answers:
    llm, chats = _fake(work)
    return lambda: llm.batch(chats)


def _abatch(work: Work) -> Answers:
    llm, chats = _fake(work)
    return lambda: asyncio.run(llm.abatch(chats))


def _chain(work: Work) -> Answers:
    from langchain_core.prompts import ChatPromptTemplate

    llm, _ = _fake(work)
    prompt = ChatPromptTemplate.from_messages([("system", "{system}"), ("human", "{question}")])
    chain = prompt.partial(system=work.system) | llm
    return lambda: chain.batch([{"question": question} for question in work.questions])


def _threads(work: Work) -> Answers:
    llm, chats = _fake(work)
    return lambda: in_threads(llm.invoke, chats)


def _dspy(work: Work) -> Answers:
    import dspy
    from dspy import lm15

    from bench.frameworks._dspy import quiet
    from graftlm.adapters.dspy.wire import SUPPORTED_PARAMS

    reply = "[[ ## answer ## ]]\nhello\n\n[[ ## completed ## ]]\n"

    class Engine:
        supports_function_calling = supports_reasoning = supports_response_schema = False
        supported_params = SUPPORTED_PARAMS

        def complete(self, request: Any) -> Any:
            usage = lm15.Usage(input_tokens=1, output_tokens=1)
            return lm15.Response(None, request.model, lm15.Message.assistant(reply), "stop", usage)

    lm = dspy.LM("local/instant", engine=Engine(), cache=False, temperature=0)
    predict = dspy.Predict(dspy.Signature("question -> answer", work.system))
    devset = [dspy.Example(question=question, answer="").with_inputs("question") for question in work.questions]

    def answer() -> Sequence[Any]:
        with dspy.context(lm=lm, adapter=dspy.ChatAdapter()), quiet():
            found = dspy.Evaluate(devset=devset, metric=lambda *_: True, num_threads=THREADS)(predict)
        return list(found.results)

    return answer


def _llama_index(work: Work) -> Answers:
    from llama_index.core.llms import ChatMessage, MockLLM

    llm = MockLLM(max_tokens=1)
    chats = [
        [ChatMessage(role="system", content=work.system), ChatMessage(role="user", content=question)]
        for question in work.questions
    ]

    async def gather() -> list[Any]:
        return await asyncio.gather(*[llm.achat(chat) for chat in chats])

    return lambda: asyncio.run(gather())


STOCK: dict[str, Callable[[Work], Answers]] = {
    "langchain-batch": _batch,
    "langchain-abatch": _abatch,
    "langchain-chain": _chain,
    "langchain-threads": _threads,
    "dspy": _dspy,
    "llama-index": _llama_index,
}
