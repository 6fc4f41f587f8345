"""Attributes of entities in the micro-world, with their sentences and questions.

An attribute has a label ("job"), field names that programs give it ("occupation"), a value type, a
pool of values, sentences that state it and questions that ask for it. No attribute hangs on one
phrasing: each has its own sentences and questions beside the ones common to all.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from bench.sprout.names import Names

Kind = Literal["person", "place", "company"]
ValueType = Literal["str", "int", "bool", "list"]


@dataclass(frozen=True)
class Attribute:
    """One property. `say` and `ask` are templates over {n} (the subject) and {v} (the value).

    `pool` holds the values of a closed class (it can then be asked for as a Literal); an open
    class draws from `make`. A bool has `say` for true and `deny` for false, and `claim` is the
    field's name in words.
    """

    key: str
    kind: Kind
    type: ValueType
    label: str
    fields: tuple[str, ...]
    say: tuple[str, ...]
    ask: tuple[str, ...]
    pool: tuple[str, ...] = ()
    make: Callable[[Names], Any] | None = None
    deny: tuple[str, ...] = ()

    def draw(self, names: Names, among: tuple[str, ...] = ()) -> Any:
        """Return a value: str, int, bool or list[str]; out of `among` where that is given."""
        if among:
            return names.rng.choice(among)
        if self.type == "bool":
            return names.rng.random() < 0.5
        if self.make is not None:
            return self.make(names)
        if self.type == "str" and names.rng.random() < 0.05:
            return names.word()  # what is read must be copied, known or not
        if self.type == "list":
            return names.rng.sample(self.pool, names.rng.choice((2, 2, 3, 3, 4)))
        return names.rng.choice(self.pool)

    def sentence(self, rng: random.Random, subject: str, value: Any) -> str:
        """State the fact in one of the attribute's ways."""
        if self.type == "bool":
            return rng.choice(self.say if value else self.deny).format(n=subject)
        spoken = spoken_list(value) if isinstance(value, list) else str(value)
        common = COMMON_SAY_MANY if isinstance(value, list) else COMMON_SAY
        ways = self.say if rng.random() < 0.8 else common
        return rng.choice(ways).format(n=subject, v=spoken, label=self.label, Label=self.label.capitalize())

    def question(self, rng: random.Random, subject: str) -> str:
        ways = self.ask if self.type == "bool" or rng.random() < 0.75 else COMMON_ASK
        return rng.choice(ways).format(n=subject, label=self.label, Label=self.label.capitalize())


def spoken_list(items: list[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def spoken(value: Any) -> str:
    """Return a value as it is written in a plain answer."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(value) if isinstance(value, list) else str(value)


COMMON_SAY = (
    "The {label} of {n} is {v}.",
    "{n}'s {label} is {v}.",
    "As for {n}, the {label} is {v}.",
    "{Label} of {n}: {v}.",
)
COMMON_SAY_MANY = ("The {label} of {n} are {v}.", "{Label} of {n}: {v}.")
COMMON_ASK = (
    "What is the {label} of {n}?",
    "What is {n}'s {label}?",
    "Tell me the {label} of {n}.",
    "Name the {label} of {n}.",
    "{n}: what is the {label}?",
    "Give the {label} of {n}.",
)


def between(low: int, high: int) -> Callable[[Names], int]:
    """Return a function that draws an integer from `low` to `high`, both included."""
    return lambda names: names.rng.randint(low, high)


def some_person(names: Names) -> str:
    """Draw the name of another person."""
    return names.person()
