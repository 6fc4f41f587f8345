"""What runs in the processes that draft grammars, and in the helper that forks them."""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import signal
import socket
import threading
from contextlib import suppress
from functools import partial
from importlib import import_module
from io import BytesIO
from typing import Any

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.drafting.draft import Draft, draft
from graftlm.core.grammar.drafting.forks import Forks, follow
from graftlm.core.grammar.drafting.messages import FOR_IMAGE, answer, take
from graftlm.core.grammar.spec import JsonSchema, Options
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
_USUAL: tuple[dict[str, Any], ...] = tuple(
    {"type": "object", "properties": fields, "required": ["name"], "$defs": {"inner": _INNER}}
    for fields in (_FIELDS, {**_FIELDS, "any": {}})
)
"""What most schemas have, once as an automaton and once with a stack."""


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
    _warm_up(vocabulary)
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


def _warm_up(vocabulary: Vocabulary | None) -> None:
    """Draft what most schemas have: in the helper, so that all share it, and in each process, which gets pages of its
    own where it writes: the first constraints of one took twice as long as later ones.
    """
    for schema in _USUAL:
        with suppress(GrammarError):  # the vocabulary cannot spell it
            draft(JsonSchema(schema), Options(), vocabulary)


def _work(
    queue: socket.socket, answers: socket.socket, numbers: memoryview, place: int, vocabulary: Vocabulary | None
) -> None:
    """Draft until there is nobody to do it for."""
    _warm_up(vocabulary)
    answer(answers, 0, b"")
    while True:
        number, data = take(queue)
        numbers[place] = number
        file = BytesIO(data)
        spec, options, for_image = pickle.load(file), pickle.load(file), file.read() == FOR_IMAGE
        found: Draft | GrammarError | None
        try:
            found = draft(spec, options, vocabulary if for_image else None)
        except GrammarError as error:
            found = error
        except Exception:  # too deep a recursion, too little memory: met again, and reported, where it was asked
            found = None
        answer(answers, number, pickle.dumps(found))
        numbers[place] = 0
