"""Two sets of questions; the rule of the semantic cache was made before the last one was written, and not changed.

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

LAST = (
    (
        (
            "Which documents do I need to renew a passport in {place} within {n} weeks?",
            "What documents are needed to renew a passport in {place} within {n} weeks?",
            "To renew a passport in {place} within {n} weeks, which documents do I need?",
            "Could you list the documents I need to renew a passport in {place} within {n} weeks?",
        ),
        (
            "Which documents do I need to cancel a passport in {place} within {n} weeks?",
            "Which documents do I need to renew a visa in {place} within {n} weeks?",
            "Which documents do I need to renew a passport outside {place} within {n} weeks?",
            "Which documents do I no longer need to renew a passport in {place} within {n} weeks?",
            "Which documents do I need to renew a passport in {place} after {n} weeks?",
        ),
    ),
    (
        (
            "My {item} stopped charging after {n} weeks, what can I do?",
            "After {n} weeks my {item} no longer charges. What can I do?",
            "What can I do about a {item} that stopped charging after {n} weeks?",
            "What can I do? My {item} stopped charging after {n} weeks.",
        ),
        (
            "My {item} started charging after {n} weeks, what can I do?",
            "My {other_item} stopped charging after {n} weeks, what can I do?",
            "My {item} stopped charging after {n} weeks, who can do it?",
            "My {item} stopped ringing after {n} weeks, what can I do?",
            "My {item} stopped charging before {n} weeks, what can I do?",
        ),
    ),
    (
        (
            "Summarise the report of {name} in {n} sentences.",
            "Give me a summary of the report of {name} in {n} sentences.",
            "Please summarise the report of {name} in {n} sentences.",
            "Sum up the report of {name} in {n} sentences.",
        ),
        (
            "Summarise the report for {name} in {n} sentences.",
            "Summarise the report of {other_name} in {n} sentences.",
            "Summarise the report of {name} in {n} paragraphs.",
            "Translate the report of {name} in {n} sentences.",
            "Summarise the report of {name} in at least {n} sentences.",
        ),
    ),
    (
        (
            "Is {place} larger than {other_place} in map {n}?",
            "Is the area of {place} larger than that of {other_place} in map {n}?",
            "In map {n}, is {place} larger than {other_place}?",
            "Tell me whether {place} is larger than {other_place} in map {n}.",
        ),
        (
            "Is {other_place} larger than {place} in map {n}?",
            "Is {place} smaller than {other_place} in map {n}?",
            "Is {place} not larger than {other_place} in map {n}?",
            "Is {place} the largest in map {n}?",
            "How much larger is {place} than {other_place} in map {n}?",
        ),
    ),
    (
        (
            "Remind {name} to call {other_name} at {n} o'clock.",
            "Please remind {name} to call {other_name} at {n} o'clock.",
            "At {n} o'clock, remind {name} to call {other_name}.",
            "Send {name} a reminder to call {other_name} at {n} o'clock.",
        ),
        (
            "Remind {other_name} to call {name} at {n} o'clock.",
            "Remind {name} not to call {other_name} at {n} o'clock.",
            "Remind {name} to call {other_name} at {m} o'clock.",
            "Remind {name} that {other_name} called at {n} o'clock.",
            "Remind {name} to email {other_name} at {n} o'clock.",
        ),
    ),
    (
        (
            "How much interest does a loan of {n} dollars earn the bank in {place}?",
            "How much interest does the bank in {place} earn on a loan of {n} dollars?",
            "What interest does a loan of {n} dollars earn the bank in {place}?",
            "Please tell me how much interest a loan of {n} dollars earns the bank in {place}.",
        ),
        (
            "How much interest does a loan of {n} dollars cost the bank in {place}?",
            "How much interest does a loan of {n} euros earn the bank in {place}?",
            "How much interest does a loan of {n} dollars earn the customer in {place}?",
            "How often does a loan of {n} dollars earn the bank in {place} interest?",
            "How little interest does a loan of {n} dollars earn the bank in {place}?",
        ),
    ),
    (
        (
            "Who won the match between {place} and {other_place} on day {n}?",
            "Which team won the match between {place} and {other_place} on day {n}?",
            "Who was the winner of the match between {place} and {other_place} on day {n}?",
            "On day {n}, who won the match between {place} and {other_place}?",
        ),
        (
            "Who lost the match between {place} and {other_place} on day {n}?",
            "Who refereed the match between {place} and {other_place} on day {n}?",
            "Who won the match between {place} and {other_place} on day {m}?",
            "When was the match between {place} and {other_place} on day {n}?",
            "Who will win the match between {place} and {other_place} on day {n}?",
        ),
    ),
    (
        (
            "Does the {item} come with a warranty of {n} months?",
            "Is there a warranty of {n} months on the {item}?",
            "Does the {item} have a warranty of {n} months?",
            "Does a warranty of {n} months come with the {item}?",
        ),
        (
            "Does the {item} come without a warranty of {n} months?",
            "Does the {other_item} come with a warranty of {n} months?",
            "Does the {item} come with a warranty of {n} years?",
            "Does the {item} come with a warranty of {m} months?",
            "Did the {item} come with a warranty of {n} months?",
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
