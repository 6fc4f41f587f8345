"""Attacks on `graftlm serve` beside a steady client: its p50 in milliseconds, and the server's memory.

Text goes to sprout, pictures to a random vision model.

Each attack runs in a process of its own, again and again, while this process asks small questions one after the other.
The attacker has the lowest priority, as it would run on another machine. What it costs nevertheless is the control: the
same attack on a sink, a process that reads requests and does nothing with them, beside the same client of the server.
The floor is of the ratio to the control; the control's own baseline is the p50 without any attack, before and after.
"""

from __future__ import annotations

import base64
import http.client
import io
import itertools
import json
import os
import re
import socket
import socketserver
import statistics
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.harness import Options, Row
from graftlm.kernels.jit import python_process
from graftlm.testing.random_vision import save_vision_model

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
MESSAGE = {"role": "user", "content": "a"}
MORE_MB = 200  # with torchvision, whose part of transformers copies pictures, one of 33 million pixels takes more
CHATS = "/v1/chat/completions"


def run(options: Options) -> Iterator[Row]:
    seconds = options.choose(2, 10)
    with TemporaryDirectory() as folder:
        yield from _served("sprout", Path(folder) / "log", TEXTS, seconds)
        model = save_vision_model("qwen2_5_vl", Path(folder) / "model")
        yield from _served(str(model), Path(folder) / "pictures.log", PICTURES, seconds)


def _served(model: str, log: Path, attacks: Iterable[str], seconds: float) -> Iterator[Row]:
    command = ("-m", "graftlm", "serve", model, "--port", "0")
    sink = ("-m", "bench.hostile.attacks", SINK)
    with (
        log.open("wb") as file,
        python_process.start(command, stdout=file, stderr=file) as server,
        python_process.start(sink, stdout=subprocess.PIPE) as control,
    ):
        try:
            assert control.stdout is not None
            ports = _port(log), int(control.stdout.readline())
            took_ms(ports[0], seconds)
            for name in attacks:
                yield from _attacked(name, ports, server.pid, seconds)
        finally:
            server.terminate()
            control.terminate()


def _attacked(name: str, ports: tuple[int, int], pid: int, seconds: float) -> Iterator[Row]:
    """Measure one attack. ports: of the server and the sink"""
    port, sink = ports
    idle = took_ms(port, seconds)
    control, _ = _beside(name, sink, port, seconds)
    before_mb = _memory_mb(pid)
    _forget_peak(pid)
    during, count = _beside(name, port, port, seconds)
    more_mb, peak_mb = _memory_mb(pid) - before_mb, _memory_mb(pid, "VmHWM") - before_mb
    idle += took_ms(port, seconds)
    p50, base, unhurt = (statistics.median(took) for took in (during, control, idle))
    what, shape = f"{name}: p50 of a steady client", {"attacks": count}
    yield Row("attacks", what, p50, "ms", baseline=base, ratio=p50 / base, floor=1.2, at_most=True, shape=shape)
    yield Row("attacks", f"{name}: control, on a sink", base, "ms", baseline=unhurt, ratio=base / unhurt)
    yield Row("attacks", f"{name}: slowest answer", max(during), "ms", baseline=max(control))
    yield Row("attacks", f"{name}: attacks that the server ended", count, "attacks", floor=1)
    yield Row("attacks", f"{name}: memory above", more_mb, "MB", floor=MORE_MB, at_most=True)
    yield Row("attacks", f"{name}: peak memory above", peak_mb, "MB", floor=MORE_MB, at_most=True)


def _beside(name: str, attacked: int, port: int, seconds: float) -> tuple[list[float], int]:
    """Attack one port while a steady client asks another; return its times and the number of attacks."""
    command = ("-m", "bench.hostile.attacks", name, str(attacked), str(seconds + 1))
    with python_process.start(command, stdout=subprocess.PIPE) as attacker:
        assert attacker.stdout is not None
        attacker.stdout.readline()  # it has prepared its bytes
        time.sleep(0.5)
        took = took_ms(port, seconds)
        return took, int(attacker.stdout.readline())


def _port(log: Path) -> int:
    """Return the server's port once it answers."""
    while True:
        found = re.search(r"at http://127\.0\.0\.1:(\d+)/v1", log.read_text())
        if found and "ready after" in log.read_text():
            return int(found.group(1))
        time.sleep(0.1)


def _memory_mb(pid: int, name: str = "VmRSS") -> float:
    """Return resident memory; `VmHWM` is its peak."""
    found = re.search(rf"{name}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found.group(1)) / 1024


def _forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def took_ms(port: int, seconds: float) -> list[float]:
    """Return the times of small requests, one after the other. Raises for a status other than 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body, headers = json.dumps(CHAT), {"content-type": "application/json"}
    took, end_s = [], time.monotonic() + seconds
    while time.monotonic() < end_s:
        began_s = time.monotonic()
        connection.request("POST", CHATS, body, headers)
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise RuntimeError(f"the steady client got status {answer.status}")
        took.append(1e3 * (time.monotonic() - began_s))
        time.sleep(0.005)
    return took


# -- the attacker's process -----------------------------------------------------------------------------------------


def _raw(data: bytes, *, waits_s: float = 0.0) -> Callable[[int], None]:
    """Send bytes on a connection of their own and leave it open for a time."""

    def attack(port: int) -> None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(data)
            time.sleep(waits_s)

    return attack


def _half_sent(port: int) -> None:
    connections = []
    with suppress(OSError):
        for _ in range(900):
            connections.append(socket.create_connection(("127.0.0.1", port), timeout=5))
            connections[-1].sendall(HEAD)
    time.sleep(2)
    for connection in connections:
        connection.close()


def _post(body: Any, path: str = CHATS) -> Callable[[int], None]:
    content = json.dumps(body).encode()

    def attack(port: int) -> None:
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("POST", path, content, {"content-type": "application/json"})
            connection.getresponse().read()
            connection.close()

    return attack


def _schemas(port: int) -> None:
    """Send a new large schema and close the connection."""
    mark = time.monotonic_ns()
    names = {f"p{mark}_{i}": {"type": "string", "pattern": f"^[a-z]{{{i % 9},40}}x$"} for i in range(2000)}
    body = json.dumps({**CHAT, "guided_json": {"type": "object", "properties": names}}).encode()
    _raw(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body, waits_s=0.2)(port)


def _pictures(make: Callable[[int], str]) -> Callable[[], Callable[[int], None]]:
    """Send a picture, another one each time. make: its URL by a number"""

    def prepare() -> Callable[[int], None]:
        numbers = itertools.count()

        def attack(port: int) -> None:
            part = {"type": "image_url", "image_url": {"url": make(next(numbers))}}
            _post({**CHAT, "messages": [{"role": "user", "content": [part]}]})(port)

        return attack

    return prepare


def _url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def _encoded(width: int, height: int, shade: int = 0, *, turned: bool = False) -> bytes:
    """Encode one colour. turned: with an alpha channel, lying on its side by its EXIF"""
    from PIL import Image

    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6 if turned else 1
    picture = Image.new("RGB", (width, height), (shade % 256, shade // 256 % 256, 9))
    (picture.convert("RGBA") if turned else picture).save(file, "PNG", exif=exif)
    return file.getvalue()


def _truncated(number: int) -> str:
    data = _encoded(640, 480, number)
    return _url(data[: 40 + number * 7919 % (len(data) - 60)])


def _stated(number: int) -> str:
    """A PNG that states a larger size than it has."""
    data = _encoded(8, 8)
    head = data[12:16] + struct.pack(">II", 30_000, 30_000 + number) + data[24:29]
    return _url(data[:12] + head + struct.pack(">I", zlib.crc32(head)) + data[33:])


_INSIDE = (
    "http://127.0.0.1:22/",
    "https://169.254.169.254/latest",
    "https://localhost/",
    "file:///etc/passwd",
    "/dev/zero",
)

PICTURES = {
    "truncated pictures": _pictures(_truncated),
    "pictures of 900 million pixels": _pictures(_stated),
    "pictures of 33 million pixels": _pictures(lambda number: _url(_encoded(5700, 5800, number))),
    "turned pictures with alpha": _pictures(lambda number: _url(_encoded(5700, 5800, number, turned=True))),
    "paths and addresses inside": _pictures(lambda number: _INSIDE[number % len(_INSIDE)]),
    "20 MB that are no picture": _pictures(lambda number: _url(b"%d" % number + b"\0" * 19_000_000)),
}
TEXTS: dict[str, Callable[[], Callable[[int], None]]] = {
    "a header without an end": lambda: _raw(HEAD + b"x: " + b"a" * (50 << 20)),
    "100,000 headers": lambda: _raw(HEAD + b"".join(b"x-%d: b\r\n" % i for i in range(100_000))),
    "900 half-sent heads": lambda: _half_sent,
    "half-sent bodies of 30 MB": lambda: _raw(HEAD + b"content-length: 31000000\r\n\r\n" + b" " * 30_000_000),
    "a stop string of 150,000 characters": lambda: _post({**CHAT, "stop": "a" * 150_000}),
    "a prompt of 3 MB": lambda: _post({**CHAT, "messages": [{"role": "user", "content": "word " * 600_000}]}),
    "10 MB to tokenise": lambda: _post({"prompt": "the sea is blue " * 625_000}, "/tokenize"),
    "logit_bias beyond the model": lambda: _post({**CHAT, "logit_bias": {str(2**63 - 1): 1}}),
    "5,000 prompts times 8": lambda: _post({"prompt": ["a"] * 5000, "n": 8}, "/v1/completions"),
    "300,000 messages": lambda: _post({**CHAT, "messages": [MESSAGE] * 300_000}),
    "1,500,000 keys": lambda: _post({**CHAT, "metadata": {f"k{i}": "" for i in range(1_500_000)}}),
    "a cache_salt of 8 MB": lambda: _post({**CHAT, "cache_salt": "s" * (8 << 20)}),
    "a regex of 8 MB": lambda: _post({**CHAT, "regex": "a" * (8 << 20)}),
    "schemas whose clients have gone": lambda: _schemas,
}
ATTACKS = {**TEXTS, **PICTURES}
"""Attacks by name; each value prepares one, to be run many times."""


def _attack(name: str, port: int, seconds: float) -> None:
    """Run an attack again and again, at most 20 times a second, and print the number of attacks."""
    os.nice(19)
    attack = ATTACKS[name]()
    print("prepared", flush=True)
    count, end_s = 0, time.monotonic() + seconds
    while time.monotonic() < end_s:
        attack(port)
        count += 1
        time.sleep(0.05)
    print(count, flush=True)


SINK = "sink"


class _SinkServer(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 1024


class _Sink(socketserver.BaseRequestHandler):
    """Reads a request, 64 KiB of its headers at most, and refuses it."""

    def handle(self) -> None:
        with suppress(OSError):
            self._read()
            self.request.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")

    def _read(self) -> None:
        head = b""
        while b"\r\n\r\n" not in head and len(head) < 64 << 10 and (piece := self.request.recv(1 << 16)):
            head += piece
        before, end, body = head.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", before.lower())
        missing = int(length.group(1)) - len(body) if end and length else 0
        while missing > 0 and (piece := self.request.recv(1 << 18)):
            missing -= len(piece)


def _run_sink() -> None:
    os.nice(19)
    with _SinkServer(("127.0.0.1", 0), _Sink) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()


if __name__ == "__main__":
    if sys.argv[1] == SINK:
        _run_sink()
    else:
        _attack(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
