"""Pipelines in an unlucky order, as suggested and, for DSPy and LlamaIndex, applied: hit rate and time."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import dspy
from llama_index.core import PromptTemplate, get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode

import graftlm as gl
from bench.harness import Options, Row
from graftlm.ab.pipeline import suggest_for
from graftlm.adapters.dspy import GraftAdapter, GraftLM
from graftlm.adapters.llama_index import GraftLLM, RepeatingOrder

PEOPLE = [("Mara", "baker"), ("Tom", "pilot"), ("Ida", "farmer"), ("Ana", "nurse"), ("Ben", "cook"), ("Eva", "judge")]
FACTS = [f"{name} is a {job}, lives near the river and gets up early every day of the week." for name, job in PEOPLE]
EXAMPLES = "\n".join(f"Question: What is {name}? Answer: {job}" for name, job in PEOPLE * 6)
RULES = "\n".join(["Answer with one word.", "Do not explain anything.", "Use only what the context says."] * 4)
UNLUCKY = f"Query: {{query_str}}\n\n{RULES}\n\nContext:\n{{context_str}}\n\nAnswer: "
APPLIED = f"{RULES}\n\nContext:\n{{context_str}}\n\nQuery: {{query_str}}\n\nAnswer: "
MAX_TOKENS = 12


class Job(dspy.Signature):
    """Answer with one word."""

    question: str = dspy.InputField()
    examples: str = dspy.InputField()
    answer: str = dspy.OutputField()


def questions(count: int) -> list[str]:
    return [f"What is {PEOPLE[i % len(PEOPLE)][0]} number {i}?" for i in range(count)]


def ask_dspy(runtime: gl.Runtime, asked: list[str], *, applied: bool) -> None:
    examples = [{"question": question, "examples": EXAMPLES} for question in asked]
    adapter = GraftAdapter(order_fields_by=examples) if applied else GraftAdapter()
    lm = GraftLM(runtime=runtime, temperature=0, max_tokens=MAX_TOKENS, cache=False)
    with dspy.context(lm=lm, adapter=adapter):
        for question in asked:
            dspy.Predict(Job)(question=question, examples=EXAMPLES)


def ask_llama_index(runtime: gl.Runtime, asked: list[str], *, applied: bool) -> None:
    llm = GraftLLM(runtime=runtime, temperature=0, max_tokens=MAX_TOKENS)
    template = PromptTemplate(APPLIED if applied else UNLUCKY)
    made = get_response_synthesizer(llm=llm, text_qa_template=template, response_mode="compact")
    order = RepeatingOrder()
    for number, question in enumerate(asked):
        facts = FACTS[number % len(FACTS) :] + FACTS[: number % len(FACTS)]  # as retrieved: the most similar one first
        nodes = [NodeWithScore(node=TextNode(text=fact), score=1.0) for fact in facts]
        made.synthesize(question, order.postprocess_nodes(nodes) if applied else nodes)


def run(options: Options) -> Iterator[Row]:
    asked = questions(options.choose(12, 60))
    ways: dict[str, Callable[..., None]] = {"DSPy": ask_dspy, "LlamaIndex": ask_llama_index}
    with gl.Runtime("sprout", speculation="off") as runtime:
        runtime.load()
        for name, way in ways.items():
            rates, times = [], []
            for applied in (False, True):
                seconds = []
                for _ in range(options.repeats):
                    runtime.clear_cache()
                    runtime.reset_stats()
                    started = time.perf_counter()
                    way(runtime, asked, applied=applied)
                    seconds.append(time.perf_counter() - started)
                rates.append(runtime.stats().hit_rate * 100)
                times.append(min(seconds))
            before, after = rates
            yield Row("pipelines", f"{name}: hit rate, unlucky order", before, "%", floor=20, at_most=True)
            yield Row("pipelines", f"{name}: hit rate, suggestion applied", after, "%", before, floor=70)
            yield Row("pipelines", f"{name}: time", times[1], "s", times[0], ratio=times[0] / times[1], floor=2)
    yield from suggestions()


SOURCES = {
    "DSPy": """
import dspy
from bench.compiler.pipelines import EXAMPLES, questions
class Job(dspy.Signature):
    "Answer with one word."
    question: str = dspy.InputField()
    examples: str = dspy.InputField()
    answer: str = dspy.OutputField()
def inputs():
    return questions(8)
def run(llm, inputs):
    with dspy.context(lm=llm):
        return [dspy.Predict(Job)(question=question, examples=EXAMPLES).answer for question in inputs]
""",
    "LlamaIndex": """
from llama_index.core import PromptTemplate, get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from bench.compiler.pipelines import FACTS, RULES, questions
TEMPLATE = PromptTemplate("Query: {query_str}\\n\\n" + RULES + "\\n\\nContext:\\n{context_str}\\n\\nAnswer: ")
def inputs():
    return questions(8)
def run(llm, inputs):
    made = get_response_synthesizer(llm=llm, text_qa_template=TEMPLATE, response_mode="compact")
    nodes = [NodeWithScore(node=TextNode(text=fact), score=1.0) for fact in FACTS]
    return [str(made.synthesize(question, nodes)) for question in inputs]
""",
    "LangChain": """
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from bench.compiler.pipelines import EXAMPLES, RULES, questions
PROMPT = ChatPromptTemplate.from_messages([
    ("system", "It is {number} o'clock.\\n\\n" + RULES),
    ("human", "{question}\\n\\n" + EXAMPLES + "\\n\\nAnswer:"),
])
def inputs():
    return [{"number": i, "question": question} for i, question in enumerate(questions(8))]
def run(llm, inputs):
    return (PROMPT | llm | StrOutputParser()).batch(inputs)
""",
    "Guidance": """
from guidance import gen
from bench.compiler.pipelines import EXAMPLES, RULES, questions
def inputs():
    return questions(8)
def run(llm, inputs):
    found = []
    for question in inputs:
        lm = llm + f"Task: {question}\\n\\n{RULES}\\n\\n{EXAMPLES}\\n\\nAnswer:"
        lm += gen("answer", max_tokens=4, stop="\\n")
        lm += "\\nReason:" + gen("reason", max_tokens=4)
        found.append(lm["answer"])
    return found
""",
}
MARKS = {"DSPy": "question:", "LlamaIndex": "TEMPLATE", "LangChain": "It is {number}", "Guidance": "Task:"}


def suggestions() -> Iterator[Row]:
    """Yield the line and the hit rate that `graftlm ab --suggest` finds in a pipeline of each framework."""
    for name, source in SOURCES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "pipeline.py"
            path.write_text(source)
            found = suggest_for(path, "sprout")
        line = found.stop is not None and MARKS[name] in found.stop.place
        yield Row("pipelines", f"{name}: the suggestion names the line", float(line), "of 1", floor=1)
        yield Row("pipelines", f"{name}: expected hit rate", found.after * 100, "%", found.before * 100, floor=70)
