"""Guidance: a form filled in line by line, text and `gen` interleaved; the people come in any order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from guidance import gen, models

INPUTS = json.loads((Path(__file__).parents[1] / "inputs.json").read_text())["guidance"]


def run(llm: models.Model, inputs: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    forms = []
    for item in inputs:
        lm = llm + f"{item['passage']}\n\n{item['name']}\n"
        names = {label: label.lower().replace(" ", "_") for label in item["answer"]}
        for label, name in names.items():
            lm += f"{label}: " + gen(name, stop="\n", max_tokens=12) + "\n"
        forms.append({label: lm[name] for label, name in names.items()})
    return forms


def inputs() -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = INPUTS[:10]
    return items


def warm_up() -> list[dict[str, Any]]:
    return [{"passage": "The job of Ada Holt is baker.", "name": "Ada Holt", "answer": {"Job": "baker"}}]


def right(item: dict[str, Any], answer: dict[str, str]) -> bool:
    return answer == item["answer"]
