"""The attributes of a place or of a company."""

from __future__ import annotations

from bench.sprout.attribute import Attribute, between, some_person
from bench.sprout.names import Names
from bench.sprout.pools import (
    CLIMATES,
    LANDMARKS,
    PRODUCTS,
    SECTORS,
)

PLACES: tuple[Attribute, ...] = (
    Attribute(
        "population",
        "place",
        "int",
        "population",
        ("population", "inhabitants", "num_inhabitants"),
        (
            "{n} has {v} inhabitants.",
            "{v} people live in {n}.",
            "{n} is home to {v} people.",
            "{n} counts {v} citizens.",
        ),
        ("How many people live in {n}?", "How many inhabitants does {n} have?", "How many citizens does {n} count?"),
        make=lambda names: (
            names.rng.randint(1, 99) * 10 ** names.rng.choice((2, 3, 4))
            if names.rng.random() < 0.5
            else names.rng.randint(200, 99999)
        ),
    ),
    Attribute(
        "river",
        "place",
        "str",
        "river",
        ("river", "river_name"),
        (
            "{n} lies on the river {v}.",
            "The river {v} flows through {n}.",
            "{n} was built along the {v}.",
            "Boats reach {n} on the {v}.",
        ),
        ("On which river does {n} lie?", "Which river flows through {n}?", "Which river runs past {n}?"),
        make=Names.invented,
    ),
    Attribute(
        "mayor",
        "place",
        "str",
        "mayor",
        ("mayor", "mayor_name", "head_of_town"),
        (
            "{n} is governed by mayor {v}.",
            "{v} is the mayor of {n}.",
            "{n} elected {v} as mayor.",
            "Mayor {v} runs {n}.",
        ),
        ("Who is the mayor of {n}?", "Who governs {n}?", "Who runs {n}?", "Who was elected mayor of {n}?"),
        make=some_person,
    ),
    Attribute(
        "founded",
        "place",
        "int",
        "founding year",
        ("founded", "founding_year", "year_founded", "established"),
        (
            "{n} was founded in {v}.",
            "{n} goes back to {v}.",
            "{n} has existed since {v}.",
            "The first stone of {n} was laid in {v}.",
        ),
        ("When was {n} founded?", "In which year was {n} founded?", "Since when has {n} existed?"),
        make=between(1000, 2010),
    ),
    Attribute(
        "product",
        "place",
        "str",
        "main product",
        ("product", "main_product", "export"),
        (
            "{n} is famous for its {v}.",
            "{n} exports {v}.",
            "{n} lives on the trade in {v}.",
            "Everybody in {n} makes {v}.",
        ),
        ("What is {n} famous for?", "What does {n} export?", "Which product comes from {n}?", "What is made in {n}?"),
        pool=PRODUCTS,
    ),
    Attribute(
        "climate",
        "place",
        "str",
        "climate",
        ("climate", "weather", "conditions"),
        ("The weather in {n} is {v}.", "{n} is known for {v} weather.", "It is usually {v} in {n}."),
        ("How is the weather in {n}?", "What is the weather like in {n}?", "What is the weather in {n}?"),
        pool=CLIMATES,
    ),
    Attribute(
        "landmark",
        "place",
        "str",
        "landmark",
        ("landmark", "sight", "attraction"),
        (
            "Visitors of {n} come to see the {v}.",
            "{n} is proud of its {v}.",
            "The best sight in {n} is the {v}.",
            "{n} has a large {v}.",
        ),
        ("What do visitors of {n} come to see?", "Which sight does {n} have?", "What is {n} proud of?"),
        pool=LANDMARKS,
    ),
    Attribute(
        "airport",
        "place",
        "bool",
        "has an airport",
        ("has_airport", "airport"),
        ("{n} has an airport.", "Planes land in {n}.", "There is an airport in {n}."),
        ("Does {n} have an airport?", "Is there an airport in {n}?"),
        deny=("{n} has no airport.", "There is no airport in {n}.", "Planes do not land in {n}."),
    ),
)

COMPANIES: tuple[Attribute, ...] = (
    Attribute(
        "founder",
        "company",
        "str",
        "founder",
        ("founder", "founded_by", "founder_name"),
        ("{n} was started by {v}.", "{v} is the founder of {n}.", "{v} set up {n}.", "{n} was founded by {v}."),
        ("Who founded {n}?", "Who started {n}?", "Who set up {n}?", "Who is the founder of {n}?"),
        make=some_person,
    ),
    Attribute(
        "office",
        "company",
        "str",
        "head office",
        ("head_office", "headquarters", "office", "based_in"),
        (
            "{n} has its head office in {v}.",
            "{n} is based in {v}.",
            "The headquarters of {n} are in {v}.",
            "{n} operates from {v}.",
        ),
        (
            "Where is {n} based?",
            "Where is the head office of {n}?",
            "In which city is {n} based?",
            "Where are the headquarters of {n}?",
        ),
        make=Names.place,
    ),
    Attribute(
        "employees",
        "company",
        "int",
        "number of employees",
        ("employees", "num_employees", "staff", "headcount"),
        ("{n} employs {v} people.", "{n} has {v} employees.", "{v} people work for {n}.", "{n} has a staff of {v}."),
        ("How many people work for {n}?", "How many employees does {n} have?", "How many people does {n} employ?"),
        make=between(3, 9800),
    ),
    Attribute(
        "sector",
        "company",
        "str",
        "sector",
        ("sector", "industry", "business", "category"),
        ("{n} is active in {v}.", "{n} makes its money in {v}.", "{n} belongs to the {v} sector."),
        ("In which sector is {n} active?", "In which industry is {n}?", "Which sector does {n} belong to?"),
        pool=SECTORS,
    ),
    Attribute(
        "makes",
        "company",
        "str",
        "product line",
        ("product_line", "makes", "product"),
        ("{n} produces {v}.", "{n} is a maker of {v}.", "{n} ships {v} all over the world."),
        ("What does {n} produce?", "What does {n} make?", "Which goods does {n} ship?"),
        pool=PRODUCTS,
    ),
    Attribute(
        "listed",
        "company",
        "bool",
        "publicly listed",
        ("publicly_listed", "is_public", "listed"),
        ("{n} is publicly listed.", "The shares of {n} are traded on the stock exchange.", "{n} is a public company."),
        ("Is {n} publicly listed?", "Is {n} a public company?"),
        deny=("{n} is privately held.", "{n} is not publicly listed.", "{n} is a private company."),
    ),
)
