"""DraftingProcess: one of the processes that draft grammars, as it is seen from where the drafts are used."""

from __future__ import annotations

import pickle
import socket
from contextlib import suppress

from graftlm.core.grammar.drafting.messages import MAX_INCOMPLETE, AnswerReader
from graftlm.core.grammar.engines.forced_texts import ForcedTexts


class DraftingProcess:
    """The end over which a process answers, and what it has not answered yet.

    place            its place in the file of tasks at work
    number, since_s  the task that it was last seen at, 0 for none, and when it was first seen so
    """

    def __init__(self, place: int, end: socket.socket) -> None:
        self.place = place
        self.end = end
        self.reader = AnswerReader(end)
        self.number = 0
        self.since_s = 0.0
        self._incomplete: dict[int, ForcedTexts] = {}

    def expect_texts(self, number: int, texts: ForcedTexts) -> None:
        """Keep `texts` until the process adds more: not for ever, since it gives up the oldest where it never rests."""
        self._incomplete[number] = texts
        if len(self._incomplete) > MAX_INCOMPLETE:
            del self._incomplete[next(iter(self._incomplete))]

    def add_texts(self, data: bytes | memoryview) -> None:
        """Add forced texts to those of drafts, where they are used already."""
        found: list[tuple[int, ForcedTexts]] = []
        with suppress(Exception):  # it wrote what cannot be read
            found = pickle.loads(data)
        for number, texts in found:
            begun = self._incomplete.pop(number, None)
            if begun is not None:
                begun.replace(texts)
