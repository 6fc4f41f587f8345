"""Primitives: common programs of gen, fork and join (vote, best of n, beam search, chain of thought, map)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from graftlm.core.errors import ConfigError
from graftlm.core.program.expression import Expression, Gen, Select, gen as new_gen
from graftlm.core.program.program import Program
from graftlm.core.program.state import ForkGroup, ProgramState

Score = Callable[[Any], float] | Program
"""A number for a value, the larger the better: a function, or a program whose function returns the number."""

Ask = Gen | Select
Prompt = Expression | str


def vote(n: int, ask: Ask | None = None, *, by: Callable[[Any], Any] | None = None) -> Program:
    """Return a program that asks `n` times in branches and appends the most frequent value.

    ask  the `gen` or `select` of each branch; None is `gl.gen("answer")`. With temperature 0 all branches agree
    by   maps a value to the one that is counted, such as `str.strip`

    Variables: that of `ask` (the chosen value), `values` (all, in order) and `votes` (counted value -> number).
    Ties go to the value that came first.
    """
    return _bound(_vote, n=_at_least("n", n), ask=_asked(ask, "answer"), by=by)


def best_of(n: int, score: Score, ask: Ask | None = None) -> Program:
    """Return a program that asks `n` times in branches and appends the value with the highest score.

    Variables: that of `ask` (the chosen value), `values` and `scores`, both in the order of the branches.
    """
    return _bound(_best_of, n=_at_least("n", n), score=_scored(score), ask=_asked(ask, "answer"))


def beam(width: int, depth: int, score: Score, ask: Ask | None = None, *, branch: int | None = None) -> Program:
    """Return a program that searches `depth` levels of steps and appends the best sequence of steps.

    At each level every kept state is forked into `branch` states (None: `width`), each of which asks for a step. The
    `width` states whose texts have the highest scores are kept. `score` gets the steps so far, as one text.

    Variables: that of `ask` (the list of steps) and `score`.
    """
    branch = width if branch is None else branch
    numbers = {name: _at_least(name, value) for name, value in (("width", width), ("depth", depth), ("branch", branch))}
    return _bound(_beam, **numbers, score=_scored(score), ask=_asked(ask, "step"))


def chain_of_thought(
    ask: Ask | None = None,
    *,
    thought: Gen | None = None,
    before: str = "\nLet's think step by step.",
    after: str = "\nAnswer:",
) -> Program:
    """Return a program that lets the model reason before it asks.

    It appends `before`, `thought` (None: `gl.gen("thought", stop=after)`), `after` and `ask`. Variables: those of both.
    """
    if thought is None:
        stop = after.strip()
        thought = new_gen("thought", stop=stop) if stop else new_gen("thought")
    return _bound(_chain_of_thought, ask=_asked(ask, "answer"), thought=thought, before=before, after=after)


def map(items: Sequence[Any] | None = None, step: Callable[[ProgramState, Any], Any] | None = None) -> Program:
    """Return a program with one branch for each item; the branches share the prompt and run concurrently.

    items  given here, or when the program is run
    step   appends to a branch: `step(branch, item)`; None appends the item's text and `gl.gen("value")`

    Variables: each variable of the branches, as a list in the order of the items.
    """
    if items is None:
        return _bound(_map, step=step)
    return _bound(_map, items=_items(items), step=step)


# -- the programs --------------------------------------------------------------------------------------------------


def _vote(
    s: ProgramState, prompt: Prompt = "", *, n: int, ask: Ask, by: Callable[[Any], Any] | None = None
) -> dict[Any, int]:
    values = _ask_in_branches(s, prompt, n, ask)
    counted = [by(value) if by is not None else value for value in values]
    votes = Counter(counted)
    chosen = max(range(n), key=lambda i: votes[counted[i]])  # the first of the most frequent
    _choose(s, ask, values, chosen)
    s.set("votes", dict(votes))
    return dict(votes)


def _best_of(s: ProgramState, prompt: Prompt = "", *, n: int, score: Score, ask: Ask) -> list[float]:
    values = _ask_in_branches(s, prompt, n, ask)
    scores = _scores(score, values)
    _choose(s, ask, values, scores.index(max(scores)))
    s.set("scores", scores)
    return scores


def _beam(
    s: ProgramState, prompt: Prompt = "", *, width: int, depth: int, branch: int, score: Score, ask: Ask
) -> list[Any]:
    s += prompt
    kept: list[tuple[ProgramState, list[Any]]] = [(s, [])]
    best = 0.0
    for _ in range(depth):
        forks = [(child, steps) for state, steps in kept for child in state.fork(branch)]
        for child, _steps in forks:
            child += ask
        grown = [(child, [*steps, child[_name(ask)]]) for child, steps in forks]
        scores = _scores(score, ["".join(str(step) for step in steps) for _, steps in grown])
        order = sorted(range(len(grown)), key=lambda i: -scores[i])[:width]
        kept, best = [grown[i] for i in order], scores[order[0]]
    steps = kept[0][1]
    s += "".join(str(step) for step in steps)
    s.set(_name(ask), steps)
    s.set("score", best)
    return steps


def _chain_of_thought(s: ProgramState, prompt: Prompt = "", *, ask: Ask, thought: Gen, before: str, after: str) -> None:
    s += prompt
    s += before
    s += thought
    s += after
    s += ask


def _map(
    s: ProgramState,
    prompt: Prompt = "",
    items: Sequence[Any] | None = None,
    *,
    step: Callable[[ProgramState, Any], Any] | None = None,
) -> None:
    s += prompt
    if items is None:
        raise ConfigError("map has no items; give gl.map(items), or items= when it is run")
    if not _items(items):
        return
    branches = s.fork(len(items))
    for branch, item in zip(branches, items, strict=True):
        if step is not None:
            step(branch, item)
        else:
            branch += str(item) + new_gen("value")
    branches.join()


# -- shared --------------------------------------------------------------------------------------------------------


def _ask_in_branches(s: ProgramState, prompt: Prompt, n: int, ask: Ask) -> list[Any]:
    s += prompt
    branches: ForkGroup = s.fork(n)
    branches += ask
    values: list[Any] = branches[_name(ask)]
    return values


def _choose(s: ProgramState, ask: Ask, values: list[Any], chosen: int) -> None:
    s += str(values[chosen])
    s.set(_name(ask), values[chosen])
    s.set("values", values)


def _scores(score: Score, values: Sequence[Any]) -> list[float]:
    if not isinstance(score, Program):
        return [float(score(value)) for value in values]
    return [float(state.result) for state in [score.run(value) for value in values]]  # all at once


def _name(ask: Ask) -> str:
    assert ask.name is not None
    return ask.name


def _asked(ask: Ask | None, name: str) -> Ask:
    if ask is None:
        return new_gen(name)
    if not isinstance(ask, Gen | Select):
        raise ConfigError(f"{ask!r} asks for nothing; give gl.gen(name, ...) or gl.select(name, choices)")
    if ask.name is None:
        raise ConfigError(f"the gen has no name; give it one, such as gl.gen({name!r})")
    return ask


def _scored(score: Any) -> Score:
    if not callable(score):
        raise ConfigError(f"score is {score!r}; give a function of a value, or a program that returns a number")
    return score  # type: ignore[no-any-return]


def _at_least(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number, at least 1")
    return value


def _items(items: Any) -> Sequence[Any]:
    if isinstance(items, str) or not isinstance(items, Sequence):
        raise ConfigError(f"items is {items!r}; give a list")
    return items


def _bound(function: Callable[..., Any], **arguments: Any) -> Program:
    return _ORIGINS[function].bind(**arguments)


_ORIGINS = {function: Program(function) for function in (_vote, _best_of, _beam, _chain_of_thought, _map)}
