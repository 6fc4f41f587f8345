"""Event streams: text leaves where the engine's events arrive, whatever the client and the writer do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from graftlm.adapters.server.http.responses import EventStream, OpenAIStream
from graftlm.adapters.server.http.wire import DONE, Envelope
from graftlm.adapters.server.intake import Answer
from graftlm.core.request import Chunk, Completion, Request, Usage

COMPLETION = Completion("", [], "stop", Usage())


class Plain(OpenAIStream):
    """Writes the text of each chunk; raises for a bad one."""

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        return {}

    def pieces(self, number: int, chunk: Chunk) -> Iterator[bytes]:
        if chunk.text == "bad":
            raise ValueError("a bad chunk")
        yield chunk.text.encode()

    def ended(self, number: int, completion: Completion) -> Iterator[bytes]:
        return iter(())


class Client:
    """Takes what is sent, as long as there is room for the piece."""

    def __init__(self, room: int = 1000) -> None:
        self.sent: list[bytes] = []
        self.room = room
        self.reads = asyncio.Event()

    async def send(self, message: Any) -> None:
        while len(self.sent) >= self.room:
            self.reads.clear()
            await self.reads.wait()
        if message["type"] == "http.response.body":
            self.sent.append(message["body"])

    async def read(self, room: int) -> None:
        self.room = room
        self.reads.set()
        await asyncio.sleep(0.01)

    async def receive(self) -> dict[str, Any]:
        await asyncio.get_running_loop().create_future()
        raise AssertionError


async def begun(client: Client) -> tuple[Answer, asyncio.Task[None]]:
    """A stream whose first piece is sent."""
    answer = Answer([Request("x", stream=True)])
    stream = EventStream(answer, Plain(Envelope("id", "m", "chunk")), frozenset())
    task = asyncio.create_task(stream({"graftlm.bare_send": client.send}, client.receive, client.send))
    tell(answer, Chunk("0", []))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert client.sent == [b"0"]
    return answer, task


def tell(answer: Answer, *events: Chunk | Completion) -> None:
    for event in events:
        answer.take(0, event)
    answer.pass_on()


async def test_text_is_sent_before_the_loop_turns_and_what_came_together_in_one_piece() -> None:
    client = Client()
    answer, task = await begun(client)
    tell(answer, Chunk("1", []))
    tell(answer, Chunk("2", []), Chunk("3", []))
    assert client.sent == [b"0", b"1", b"23"]
    tell(answer, Chunk("4", []), COMPLETION)
    await task
    assert client.sent == [b"0", b"1", b"23", b"4", DONE]


async def test_what_a_slow_client_kept_waiting_arrives_whole_and_in_order() -> None:
    client = Client(room=2)
    answer, task = await begun(client)
    for text in "123":
        tell(answer, Chunk(text, []))
        await asyncio.sleep(0)
    assert client.sent == [b"0", b"1"]
    await client.read(room=3)
    tell(answer, Chunk("4", []))  # while the task's own "3" waits
    assert client.sent == [b"0", b"1", b"2"]
    await client.read(room=1000)
    tell(answer, Chunk("5", []))
    assert client.sent == [b"0", b"1", b"2", b"3", b"4", b"5"]
    tell(answer, COMPLETION)
    await task
    assert client.sent[-1] == DONE


async def test_a_writer_that_raises_ends_its_own_stream_and_not_who_delivers() -> None:
    client = Client()
    answer, task = await begun(client)
    tell(answer, Chunk("bad", []))
    with pytest.raises(ValueError, match="a bad chunk"):
        await task
    assert answer.cancelled
