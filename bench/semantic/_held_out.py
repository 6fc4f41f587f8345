"""Questions of topics that the rule of the semantic cache was not made with: cooking, code, sport, money, health, law.

Wordings of one question, then questions that look like it and have another answer: another name, number or word, the
opposite, a "not", and the same words in another order.
"""

from __future__ import annotations

HELD_OUT = (
    (
        (
            "How do I convert {n} {unit} to {other_unit}?",
            "Please tell me how to convert {n} {unit} to {other_unit}.",
            "How can I convert {n} {unit} to {other_unit}?",
            "What are {n} {unit} in {other_unit}?",
        ),
        (
            "How do I convert {n} {other_unit} to {unit}?",
            "How do I convert {m} {unit} to {other_unit}?",
            "Why do I convert {n} {unit} to {other_unit}?",
            "How do I not convert {n} {unit} to {other_unit}?",
            "How do I convert {n} {unit} to {third_unit}?",
        ),
    ),
    (
        (
            "Did {name} beat {other_name} in {year}?",
            "In {year}, did {name} beat {other_name}?",
            "Was it {name} who beat {other_name} in {year}?",
            "Has {name} won against {other_name} in {year}?",
        ),
        (
            "Did {other_name} beat {name} in {year}?",
            "Did {name} beat {other_name} before {year}?",
            "Didn't {name} beat {other_name} in {year}?",
            "Did {name} meet {other_name} in {year}?",
            "Did {name} beat {other_name} in {other_year}?",
        ),
    ),
    (
        (
            "Can I take {drug} with {other_drug} after {n} hours?",
            "May I take {drug} with {other_drug} after {n} hours?",
            "Could you say if I can take {drug} with {other_drug} after {n} hours?",
            "Is it safe to take {drug} together with {other_drug} after {n} hours?",
        ),
        (
            "Can I take {drug} without {other_drug} after {n} hours?",
            "Can I take {drug} with {other_drug} within {n} hours?",
            "Can I take {drug} with {other_drug} after {n} days?",
            "Must I take {drug} with {other_drug} after {n} hours?",
            "Can I take {drug} with {other_drug} before {n} hours?",
        ),
    ),
    (
        (
            "How do I sort a list of {n} {thing} by {key} in {language}?",
            "In {language}, how do I sort a list of {n} {thing} by {key}?",
            "Show how to sort a list of {n} {thing} by {key} in {language}.",
            "What is the way to order {n} {thing} by {key} in {language}?",
        ),
        (
            "How do I sort a list of {n} {key} by {thing} in {language}?",
            "How do I sort a list of {n} {thing} by {key} in {other_language}?",
            "How do I shuffle a list of {n} {thing} by {key} in {language}?",
            "When do I sort a list of {n} {thing} by {key} in {language}?",
            "How do I sort a set of {n} {thing} by {key} in {language}?",
        ),
    ),
    (
        (
            "Is {food} healthier than {other_food} at age {n}?",
            "At age {n}, is {food} healthier than {other_food}?",
            "Would {food} be healthier than {other_food} at age {n}?",
            "Is it true that {food} is better for you than {other_food} at age {n}?",
        ),
        (
            "Is {other_food} healthier than {food} at age {n}?",
            "Is {food} cheaper than {other_food} at age {n}?",
            "Is {food} as healthy as {other_food} at age {n}?",
            "Is {food} healthier than {other_food} at age {m}?",
            "Is {food} never healthier than {other_food} at age {n}?",
        ),
    ),
    (
        (
            "Does {name} owe {other_name} {n} dollars?",
            "Tell me if {name} does owe {other_name} {n} dollars.",
            "Does {name} really owe {other_name} {n} dollars?",
            "Are {n} dollars owed to {other_name} by {name}?",
        ),
        (
            "Does {other_name} owe {name} {n} dollars?",
            "Does {name} owe {other_name} {n} euros?",
            "Why does {name} owe {other_name} {n} dollars?",
            "Did {name} owe {other_name} {n} dollars?",
            "Does {name} owe {other_name} {m} dollars?",
        ),
    ),
    (
        (
            "How many trains go from {place} to {other_place} on day {n}?",
            "How many trains are there from {place} to {other_place} on day {n}?",
            "What is the number of trains from {place} to {other_place} on day {n}?",
            "On day {n}, how many trains go from {place} to {other_place}?",
        ),
        (
            "How many trains go from {other_place} to {place} on day {n}?",
            "How many trains go from {place} to {other_place} until day {n}?",
            "How long do trains go from {place} to {other_place} on day {n}?",
            "Which trains go from {place} to {other_place} on day {n}?",
            "How many trains go from {place} to {other_place} on day {m}?",
        ),
    ),
    (
        (
            "What should I do if {name} breaks a contract of {n} months?",
            "What can I do if {name} breaks a contract of {n} months?",
            "If {name} breaks a contract of {n} months, what should I do?",
            "{name} breaks a contract of {n} months. What should I do?",
        ),
        (
            "What should {name} do if I break a contract of {n} months?",
            "What should I do if {name} signs a contract of {n} months?",
            "What should I do unless {name} breaks a contract of {n} months?",
            "When should I do it if {name} breaks a contract of {n} months?",
            "What should I do if {name} breaks a contract of {n} years?",
        ),
    ),
)

WORDS = {
    "unit": ("cups", "grams", "litres", "spoons", "ounces", "pounds"),
    "drug": ("aspirin", "ibuprofen", "codeine", "melatonin", "zinc", "iron"),
    "thing": ("users", "orders", "files", "songs", "players", "invoices"),
    "key": ("dates", "names", "prices", "sizes", "scores", "countries"),
    "language": ("Python", "Rust", "Java", "Go", "Kotlin", "Ruby"),
    "food": ("rice", "bread", "pasta", "fish", "tofu", "cheese"),
    "year": ("1987", "1994", "2003", "2011", "2016", "2022"),
}
