"""LangChain: find a fact after four examples; a prompt, a model and a parser, all texts in one `batch`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

INPUTS = json.loads((Path(__file__).parents[1] / "inputs.json").read_text())["langchain"]
max_tokens = 24


def run(llm: BaseChatModel, inputs: Sequence[dict[str, str]]) -> list[str]:
    shots = [
        message
        for shot in INPUTS["examples"]
        for message in (("human", f"{shot['passage']}\n{shot['name']}"), ("ai", shot["answer"]))
    ]
    system = ("system", f"Find the {INPUTS['attribute']}.")
    prompt = ChatPromptTemplate.from_messages([system, *shots, ("human", "{passage}\n{name}")])
    chain = prompt | llm | StrOutputParser()
    return chain.batch([{"passage": item["passage"], "name": item["name"]} for item in inputs])


def inputs() -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = INPUTS["items"][:6]
    return items


def warm_up() -> list[dict[str, Any]]:
    return [{"passage": "The job of Ada Holt is baker.", "name": "Ada Holt", "answer": "baker"}]


def right(item: dict[str, str], answer: str) -> bool:
    return answer.strip() == item["answer"]
