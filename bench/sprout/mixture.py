"""The task families, how often each is drawn, and the case streams of a split."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

from bench.sprout import (
    tasks_chat,
    tasks_dspy,
    tasks_langchain,
    tasks_lists,
    tasks_llama_index,
    tasks_programs,
    tasks_tools,
)
from bench.sprout.document import Document
from bench.sprout.maker import Maker
from bench.sprout.names import Split
from bench.sprout.wires import Wires

Task = Callable[[Maker], Document]

MIXTURE: tuple[tuple[Task, float], ...] = (
    (tasks_chat.passage_question, 16.0),
    (tasks_chat.passage_in_system, 4.0),
    (tasks_chat.long_passage, 1.0),
    (tasks_chat.running_text, 4.0),
    (tasks_chat.recall, 5.0),
    (tasks_chat.small_talk, 2.0),
    (tasks_lists.listing, 12.0),
    (tasks_chat.claim, 4.0),
    (tasks_chat.json_object, 5.0),
    (tasks_chat.format_instructions, 1.5),
    (tasks_chat.repeat, 2.0),
    (tasks_dspy.chat_adapter, 5.0),
    (tasks_dspy.json_adapter, 3.0),
    (tasks_dspy.chain_of_thought, 5.0),
    (tasks_dspy.react, 1.8),
    (tasks_langchain.retrieval, 4.0),
    (tasks_langchain.few_shot, 3.0),
    (tasks_langchain.extraction, 4.0),
    (tasks_langchain.people, 2.0),
    (tasks_tools.record_tool, 2.0),
    (tasks_tools.tools, 7.0),
    (tasks_tools.agent, 2.0),
    (tasks_langchain.map_reduce, 4.0),
    (tasks_llama_index.question_answering, 3.0),
    (tasks_llama_index.chat_engine, 0.7),
    (tasks_llama_index.refine, 3.0),
    (tasks_llama_index.tree_summarize, 3.0),
    (tasks_llama_index.rerank, 5.0),
    (tasks_llama_index.selector, 4.0),
    (tasks_programs.interleaved, 4.0),
    (tasks_programs.form, 2.0),
    (tasks_programs.program_turns, 2.0),
    (tasks_programs.multiple_choice, 6.0),
    (tasks_programs.arithmetic, 5.0),
    (tasks_programs.judge, 5.0),
    (tasks_chat.far_passage, 0.0),  # the second stage's
)
_TASKS = [task for task, _ in MIXTURE]

# the rows of the report, in order; "small talk" and "copying" are lessons, not families under test
FAMILIES = (
    "passage questions",
    "long passages",
    "3,000 tokens back",
    "running text",
    "chat recall",
    "lists and summaries",
    "claims",
    "JSON on request",
    "DSPy ChatAdapter",
    "DSPy JSONAdapter",
    "DSPy ChainOfThought",
    "DSPy ReAct",
    "LangChain chat",
    "LangChain few-shot",
    "LangChain extraction",
    "tool calls",
    "tool results",
    "map-reduce",
    "LlamaIndex QA",
    "LlamaIndex refine",
    "LlamaIndex tree-summarize",
    "LlamaIndex rerank",
    "LlamaIndex selectors",
    "interleaved programs",
    "multiple choice",
    "arithmetic",
    "judging",
)


def documents(seed: str, split: Split, wires: Wires, far: float = 0.0) -> Iterator[Document]:
    """Yield an endless stream of documents drawn from the mixture; the same seed gives the same stream.

    `far` is the weight of passages that fill the context, beside the mixture's own weights.
    """
    weights = list(itertools.accumulate(weight if weight else far for _, weight in MIXTURE))
    rng = random.Random(f"{split} {seed}")
    make = Maker(rng, split, wires)
    while True:
        yield rng.choices(_TASKS, cum_weights=weights)[0](make)


def cases(family: str, count: int, wires: Wires, *, split: Split = "test", seed: int = 0) -> list[Document]:
    """Return `count` cases of one family, drawn from its tasks in the mixture's proportions."""
    rng = random.Random(f"{split} {family} {seed}")
    make = Maker(rng, split, wires)
    sources = [(task, weight) for task, weight in MIXTURE if family in families_of(task, wires)]
    found: list[Document] = []
    while len(found) < count:
        document = rng.choices([t for t, _ in sources], weights=[w or 1.0 for _, w in sources])[0](make)
        if document.family == family:
            found.append(document)
    return found


_FAMILIES_OF: dict[Task, frozenset[str]] = {}


def families_of(task: Task, wires: Wires) -> frozenset[str]:
    """Return the families a task's documents carry, found by drawing some."""
    if task not in _FAMILIES_OF:
        make = Maker(random.Random(0), "train", wires)
        _FAMILIES_OF[task] = frozenset(task(make).family for _ in range(30))
    return _FAMILIES_OF[task]
