"""An LLM as judge: a text, six dimensions judged in branches of their own, then a grade from all of them."""

import random

import graftlm as gl
from bench.sprout.tasks_programs import DIMENSIONS, GRADES
from bench.workloads import _world as world

max_tokens = 4


def inputs():
    rng, found = random.Random(7), []
    for made in world.worlds(70, world.count(10), num_entities=5):
        dimensions = rng.sample(DIMENSIONS, 6)
        rating = {dimension: rng.randint(1, 5) for dimension in dimensions}
        said = " ".join(f"The {d} is {rng.choice(GRADES[r])}." for d, r in rating.items())
        found.append({"article": made.passage().text, "review": said, "answer": rating})
    return found


def warm_up():
    return [{"article": "A text.", "review": "The style is good. The plot is weak.", "answer": {"style": 4, "plot": 2}}]


def _grade(ratings):
    lowest = min(ratings)
    return "A" if lowest >= 4 else "B" if lowest == 3 else "C"


def _opening(article, review):
    return f"{article}\n\nReview: {review}"


@gl.program(temperature=0)
def _judge(s, article, review, dimensions):
    s += gl.system("You judge essays.")
    s += gl.user(_opening(article, review))
    parts = s.fork(len(dimensions))
    for part, dimension in zip(parts, dimensions):
        part += gl.user(f"Rate the {dimension} from 1 to 5.") + gl.assistant(gl.gen("rating", max_tokens=4))
    ratings = [part["rating"].strip() for part in parts]
    s += gl.user(f"Ratings: {', '.join(ratings)}\nGrade the essay with A, B or C.")
    s += gl.assistant(gl.gen("grade", max_tokens=6))
    s.set("ratings", ratings)


def run_native(llm, inputs):
    asked = [{"article": o["article"], "review": o["review"], "dimensions": list(o["answer"])} for o in inputs]
    return [{"ratings": s["ratings"], "grade": s["grade"].strip()} for s in _judge.batch(asked, runtime=llm)]


def run_langchain(llm, inputs):
    chats = [[("system", "You judge essays."), ("human", _opening(o["article"], o["review"]))] for o in inputs]
    asked = [[*c, ("human", f"Rate the {d} from 1 to 5.")] for c, o in zip(chats, inputs) for d in o["answer"]]
    said = iter([answer.content.strip() for answer in llm.batch(asked)])
    ratings = [[next(said) for _ in o["answer"]] for o in inputs]
    last = [
        [*c, ("human", f"Ratings: {', '.join(r)}\nGrade the essay with A, B or C.")] for c, r in zip(chats, ratings)
    ]
    grades = [answer.content.strip() for answer in llm.batch(last)]
    return [{"ratings": r, "grade": grade} for r, grade in zip(ratings, grades)]


def right(item, answer):
    expected = [str(rating) for rating in item["answer"].values()]
    return answer["ratings"] == expected and answer["grade"].endswith(_grade(item["answer"].values()))
