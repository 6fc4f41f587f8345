"""What runs in the processes that draft grammars, and in the helper that forks them."""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import select
import signal
import socket
import threading
from collections import deque
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from io import BytesIO
from typing import Any

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.drafting.draft import Draft, automaton_grammar, draft
from graftlm.core.grammar.drafting.forks import Forks, follow
from graftlm.core.grammar.drafting.messages import FOR_IMAGE, FORCED_TEXTS, MAX_INCOMPLETE, READY, answer, take
from graftlm.core.grammar.engines.automaton import AutomatonGrammar
from graftlm.core.grammar.engines.forced_texts import ForcedTexts
from graftlm.core.grammar.spec import JsonSchema, Options, Spec
from graftlm.core.grammar.vocabulary import Vocabulary

_FIELDS: dict[str, Any] = {
    "name": {"type": "string", "minLength": 1, "maxLength": 40},
    "kind": {"enum": ["first", "second"]},
    "count": {"type": "integer", "minimum": 0, "maximum": 100},
    "price": {"type": "number"},
    "code": {"type": "string", "pattern": "^[a-z]{2,8}$"},
    "day": {"type": "string", "format": "date"},
    "at": {"type": "string", "format": "date-time"},
    "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    "inner": {"anyOf": [{"$ref": "#/$defs/inner"}, {"type": "null"}]},
    "ok": {"type": "boolean"},
}
_INNER: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
_ROUNDS = 8
"""After so many the drafts of a process take as long as later ones: 1.4 ms instead of 3."""


def serve(queue: int, descriptors: list[int], at_work: int, orders: int, owner: int | None, image: int | None) -> None:
    """Be the helper: get ready, fork a process for each descriptor, and end with the owner.

    queue        descriptor of the socket from which they take tasks
    descriptors  of the sockets over which they answer
    at_work      of a file in which each writes the number of its task, 0 while it has none: 8 bytes for each
    orders       of the socket over which the owner says which to end
    owner        of the owner's process
    image        of a file with the pickled VocabularyImage for which they draft, if there is one
    """
    from graftlm.core.grammar.automata import jit

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt of the terminal is for the process in front
    forks = Forks()
    order_socket = socket.socket(fileno=orders)
    follower = threading.Thread(target=follow, args=(order_socket, owner, forks), daemon=True)
    follower.start()
    vocabulary = None
    if image is not None:
        with open(image, "rb") as file:
            file.seek(0)
            vocabulary = pickle.load(file).vocabulary()
    jit.wait()
    for module in ("fixed_texts", "lark.lark"):
        import_module(f"graftlm.core.grammar.engines.{module}")
    _warm_up(vocabulary, 1)
    gc.collect()
    gc.freeze()  # so that no collection touches what the forks share
    numbers = memoryview(mmap.mmap(at_work, 8 * len(descriptors))).cast("Q")
    inherited = {*descriptors, *([] if owner is None else [owner])}

    def work(place: int, descriptor: int) -> None:
        order_socket.close()
        for other in inherited - {descriptor}:
            os.close(other)
        _work(socket.socket(fileno=queue), socket.socket(fileno=descriptor), numbers, place, vocabulary)

    for place, descriptor in enumerate(descriptors):
        forks.start(place, partial(work, place, descriptor))
    for descriptor in (queue, *descriptors):
        os.close(descriptor)
    follower.join()  # the forks end with this thread


def _usual(number: int) -> list[dict[str, Any]]:
    """Schemas with what most have, one for an automaton and one for a stack; others with each number."""
    closed = {f"{name}_{number}": field for name, field in _FIELDS.items()}
    return [
        {"type": "object", "properties": fields, "required": [*closed][: number + 1], "$defs": {"inner": _INNER}}
        for fields in (closed, {**closed, f"any_{number}": {}})
    ]


def _warm_up(vocabulary: Vocabulary | None, num_rounds: int) -> None:
    """Draft usual schemas: in the helper, so that all share what is kept of them, and in each process, which gets pages
    of its own where it writes, 400 with its first constraint and 5 to 10 with each later one.
    """
    for number in range(num_rounds):
        for schema in _usual(number):
            with suppress(GrammarError):  # the vocabulary cannot spell it
                _, grammar = _draft(JsonSchema(schema), Options(), vocabulary)
                if grammar is not None:
                    grammar.forced_texts()


def _work(
    queue: socket.socket, answers: socket.socket, numbers: memoryview, place: int, vocabulary: Vocabulary | None
) -> None:
    """Draft until there is nobody to do it for."""
    _warm_up(vocabulary, _ROUNDS)
    answer(answers, READY, b"")
    drafted: deque[tuple[int, AutomatonGrammar]] = deque(maxlen=MAX_INCOMPLETE)
    while True:
        _send_texts(queue, answers, drafted)
        number, data = take(queue)
        numbers[place] = number
        file = BytesIO(data)
        spec, options, for_image = pickle.load(file), pickle.load(file), file.read() == FOR_IMAGE
        found: Draft | GrammarError | None
        grammar = None
        try:
            found, grammar = _draft(spec, options, vocabulary if for_image else None)
        except GrammarError as error:
            found = error
        except Exception:  # too deep a recursion, too little memory: met again, and reported, where it was asked
            found = None
        answer(answers, number, pickle.dumps(found, pickle.HIGHEST_PROTOCOL))
        numbers[place] = 0
        if grammar is not None:
            drafted.append((number, grammar))


def _draft(spec: Spec, options: Options, vocabulary: Vocabulary | None) -> tuple[Draft, AutomatonGrammar | None]:
    """A draft with what is forced at its start, and its grammar, which can tell what else is, if it is an automaton."""
    found = draft(spec, options)
    grammar = None if vocabulary is None else automaton_grammar(found, vocabulary)
    return (found if grammar is None else replace(found, forced=grammar.forced_at_start())), grammar


def _send_texts(queue: socket.socket, answers: socket.socket, drafted: deque[tuple[int, AutomatonGrammar]]) -> None:
    """Work out and send all forced texts of what was `drafted`, until there is a task: that one is waited for."""
    found: list[tuple[int, ForcedTexts]] = []
    while drafted and not select.select([queue], [], [], 0)[0]:
        number, grammar = drafted.popleft()
        with suppress(Exception):  # they are worked out where they are asked for
            found.append((number, grammar.forced_texts()))
    if found:
        answer(answers, FORCED_TEXTS, pickle.dumps(found))
