"""A server that answers every request at once with the same text, in a process of its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from graftlm.kernels.jit import python_process

BODY = (
    b'{"id":"1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"x",'
    b'"finish_reason":"stop","logprobs":null}],"usage":{"prompt_tokens":2,"completion_tokens":1,"total_tokens":3}}'
)
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY)


class Instant(asyncio.Protocol):
    """One connection. With `wait_s` answers come that much later."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if end and len(body) >= int(length or 0):
            self._received = b""
            asyncio.get_running_loop().call_later(self._wait_s, self._transport.write, ANSWER)


async def main(wait_s: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Instant(wait_s), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)  # until the parent process closes the pipe


@contextmanager
def instant_server(wait_s: float = 0.0) -> Iterator[str]:
    """Run such a server during the block; yield its URL."""
    command = ["-m", "bench.remote._instant", str(wait_s)]
    with python_process.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}/v1"
        finally:
            process.stdin.close()


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1])))
