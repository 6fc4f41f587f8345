"""What runs in the processes that draft grammars, and in the helper that forks them."""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import signal
import socket
from io import BytesIO

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.drafting.draft import Draft, draft
from graftlm.core.grammar.drafting.messages import answer, take
from graftlm.core.grammar.spec import JsonSchema, Options


def serve(queue: int, descriptors: list[int], at_work: int) -> None:
    """Be the helper: get ready, fork a process for each descriptor, and end with the last of them.

    queue        descriptor of the socket from which they take tasks
    descriptors  of the sockets over which they answer
    at_work      of a file in which each writes the number of its task, 0 while it has none: 8 bytes for each
    """
    from graftlm.core.grammar.automata import jit

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt of the terminal is for the process in front
    jit.wait()
    for payload in ({"type": "integer"}, {}):
        draft(JsonSchema({"type": "object", "properties": {"a": payload, "b": {"type": "string"}}}), Options())
    gc.collect()
    gc.freeze()  # so that no collection touches what the forks share
    numbers = memoryview(mmap.mmap(at_work, 8 * len(descriptors))).cast("Q")
    for place, descriptor in enumerate(descriptors):
        if os.fork() == 0:
            try:
                for other in descriptors:
                    if other != descriptor:
                        os.close(other)
                _work(socket.socket(fileno=queue), socket.socket(fileno=descriptor), numbers, place)
            finally:
                os._exit(0)
    for descriptor in (queue, *descriptors):
        os.close(descriptor)
    try:
        while True:
            os.wait()
    except ChildProcessError:
        return


def _work(queue: socket.socket, answers: socket.socket, numbers: memoryview, place: int) -> None:
    """Draft until there is nobody to do it for."""
    answer(answers, 0, b"")
    while True:
        number, data = take(queue)
        numbers[place] = number
        file = BytesIO(data)
        spec, options = pickle.load(file), pickle.load(file)
        found: Draft | GrammarError | None
        try:
            found = draft(spec, options)
        except GrammarError as error:
            found = error
        except Exception:  # too deep a recursion, too little memory: met again, and reported, where it was asked
            found = None
        answer(answers, number, pickle.dumps(found))
        numbers[place] = 0
