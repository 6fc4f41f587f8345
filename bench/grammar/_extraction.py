"""Short texts about people, with ten fields to extract from each: the input of the end-to-end cases."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema

from bench.sprout.attributes import BY_KIND
from bench.sprout.world import make_world

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "home_city": {"type": "string", "maxLength": 60},
        "occupation": {"type": "string", "maxLength": 60},
        "favorite_color": {"type": "string", "maxLength": 20},
        "hired_year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "height_cm": {"type": "integer", "minimum": 0, "maximum": 260},
        "number_of_children": {"type": "integer", "minimum": 0, "maximum": 20},
        "experience_level": {"enum": ["beginner", "intermediate", "advanced"]},
        "is_married": {"type": "boolean"},
    },
    "additionalProperties": False,
}
PERSON["required"] = list(PERSON["properties"])
MAX_TOKENS = 200

_FACTS = ("age", "city", "job", "color", "year", "height", "children", "level", "married")


def prompts(num_people: int, seed: int = 0) -> list[str]:
    """Return one prompt per person, each with its own text; no name was in the training data."""
    rng = random.Random(seed)
    attributes = [attribute for attribute in BY_KIND["person"] if attribute.key in _FACTS]
    asked = []
    for _ in range(num_people):
        world = make_world(rng, "test", num_entities=1, kind="person", attributes=attributes, num_facts=len(_FACTS))
        (person,) = world.entities
        asked.append(f"{world.passage(plain=True).text}\n\n{person.name} as JSON: ")
    return asked


def num_valid(texts: Sequence[str]) -> int:
    """Return the number of `texts` that are valid JSON of the schema, by jsonschema."""
    validator = jsonschema.Draft202012Validator(PERSON)
    count = 0
    for text in texts:
        try:
            count += validator.is_valid(json.loads(text))
        except ValueError:
            continue
    return count
