"""Messages between this process and those that draft for it: one queue of tasks for all, and answers from each.

Sockets that keep messages apart carry them, so that one is read by one call, which gives Python's lock away once.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress

_LONGEST_MESSAGE = 1 << 16
"""Bytes: what the kernel holds without pages that lie side by side. An answer of more comes in parts."""
_LONGEST_TASK = 1 << 14
"""Bytes of a task that lie in the queue; those of a longer one lie in a file, so that some do not fill the queue."""
_BUFFER_BYTES = 1 << 20
"""What sockets may hold, if the machine allows it."""

FOR_IMAGE = b"\1"
"""Ends a task whose grammar is for the vocabulary that the processes have."""
MAX_INCOMPLETE = 64
"""Drafts of one process with some of their forced texts: it works the others out when there is no task."""
READY = 0
"""Instead of the number of a task: the process is ready."""
FORCED_TEXTS = (1 << 64) - 1
"""Instead of the number of a task: pairs of a task that was answered and all forced texts of its automaton."""

_NUMBER = struct.Struct("<Q")
_HEAD = struct.Struct("<QQ")  # the number of the task, and the bytes of its answer


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends that send without waiting as much as the machine allows."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    return ends


class TaskQueue:
    """Tasks in the order in which they were put; each is taken by one of the processes that have `theirs`.

    The number of a task is above 0, and above those before.
    """

    def __init__(self) -> None:
        self._ours, self.theirs = socket_pair()

    def put(self, number: int, data: bytes) -> bool:
        """Whether the task fits into the queue now. OSError where this process has no descriptor for it."""
        message = _NUMBER.pack(number)
        try:
            if len(data) <= _LONGEST_TASK:
                self._ours.send(message + data, socket.MSG_DONTWAIT)
                return True
            with open(os.memfd_create("task"), "wb") as file:
                file.write(data)
                file.flush()
                socket.send_fds(self._ours, [message], [file.fileno()], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    @property
    def head(self) -> int | None:
        """The task that is taken next; None where all were taken."""
        with suppress(BlockingIOError):
            return int(_NUMBER.unpack(self.theirs.recv(_NUMBER.size, socket.MSG_PEEK | socket.MSG_DONTWAIT))[0])
        return None

    def close(self) -> None:
        self._ours.close()
        self.theirs.close()


def take(queue: socket.socket) -> tuple[int, bytes]:
    """In a process that has the queue's other end: wait for a task. EOFError where nobody can put one any more."""
    message, descriptors, _, _ = socket.recv_fds(queue, _NUMBER.size + _LONGEST_TASK, 1)
    if not message:
        raise EOFError
    (number,) = _NUMBER.unpack_from(message)
    if not descriptors:
        return number, message[_NUMBER.size :]
    with open(descriptors[0], "rb") as file:
        file.seek(0)
        return number, file.read()


def answer(end: socket.socket, number: int, data: bytes) -> None:
    """Send what was found for a task, or READY, or FORCED_TEXTS; waits while the socket is full."""
    message = _HEAD.pack(number, len(data)) + data
    for start in range(0, len(message), _LONGEST_MESSAGE):
        end.send(message[start : start + _LONGEST_MESSAGE])


class AnswerReader:
    """Reads the answers of one process."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._buffer = memoryview(bytearray(_LONGEST_MESSAGE))
        self._number = 0
        self._parts: list[bytes] = []
        self._num_missing = 0

    def read(self) -> tuple[int, bytes | memoryview] | None:
        """The number of a task, and what was found, which stays there until the next; None where more is to come.

        EOFError or OSError where the process has ended.
        """
        size = self._end.recv_into(self._buffer)
        if not size:
            raise EOFError
        if self._num_missing:
            self._parts.append(bytes(self._buffer[:size]))
            self._num_missing -= size
            return None if self._num_missing else (self._number, b"".join(self._parts))
        number, length = _HEAD.unpack_from(self._buffer)
        data = self._buffer[_HEAD.size : size]
        if length == len(data):
            return number, data
        self._number, self._parts, self._num_missing = number, [bytes(data)], length - len(data)
        return None
