"""Delivery: the delivered part of an answer, so that a second attempt continues where the first ended."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from graftlm.core.errors import EngineError
from graftlm.core.request import Chunk


@dataclass
class _Written:
    """Delivered text and tokens of one of n answers, and the lengths that the current attempt has repeated."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    num_text: int = 0
    num_ids: int = 0


class Delivery:
    """A filter of a repeated answer's chunks: drops the part that was delivered before."""

    def __init__(self) -> None:
        self._answers: dict[int, _Written] = {}

    def again(self) -> None:
        """Restart the answer."""
        for written in self._answers.values():
            written.num_text = written.num_ids = 0

    def rest(self, chunk: Chunk) -> Chunk | None:
        """Return the new part of a chunk, or None; raise EngineError if the answer differs from the first attempt's."""
        written = self._answers.setdefault(chunk.index, _Written())
        known_ids, known_text = written.ids[written.num_ids :], written.text[written.num_text :]
        num_ids, num_text = min(len(known_ids), len(chunk.token_ids)), min(len(known_text), len(chunk.text))
        if chunk.token_ids[:num_ids] != known_ids[:num_ids] or chunk.text[:num_text] != known_text[:num_text]:
            raise EngineError(
                "a replica died within this stream, and the answer of the next one differs from what was delivered"
            )
        written.ids += chunk.token_ids[num_ids:]
        written.text += chunk.text[num_text:]
        written.num_ids += len(chunk.token_ids)
        written.num_text += len(chunk.text)
        if not num_ids and not num_text:
            return chunk
        logprobs = None if chunk.logprobs is None else chunk.logprobs[num_ids:]
        new = replace(chunk, text=chunk.text[num_text:], token_ids=chunk.token_ids[num_ids:], logprobs=logprobs)
        return new if new.text or new.finish_reason is not None else None
