"""LlamaIndex: a query engine over a document, the questions asked concurrently."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_index.core import Document, SummaryIndex
from llama_index.core.llms import LLM

INPUTS = json.loads((Path(__file__).parents[1] / "inputs.json").read_text())["llama_index"]
max_tokens = 24


def run(llm: LLM, inputs: Sequence[dict[str, str]]) -> list[str]:
    documents = {text: Document(text=text) for text in {item["passage"] for item in inputs}}
    engines = {text: SummaryIndex.from_documents([d]).as_query_engine(llm=llm) for text, d in documents.items()}

    async def ask_all() -> list[str]:
        answers = await asyncio.gather(*(engines[item["passage"]].aquery(item["question"]) for item in inputs))
        return [str(answer) for answer in answers]

    return asyncio.run(ask_all())


def inputs() -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = INPUTS[:10]
    return items


def warm_up() -> list[dict[str, Any]]:
    return [{"passage": "The job of Ada Holt is baker.", "question": "What is the job of Ada Holt?", "answer": "baker"}]


def right(item: dict[str, str], answer: str) -> bool:
    return answer.strip() == item["answer"]
