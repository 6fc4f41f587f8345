"""Bodies: the bytes of requests to validated objects, within a budget of memory and of the event loop's time.

Small bodies are parsed on the loop. A large one is read at a limited rate, since each piece costs time of the loop, and
parsed on a thread. Its values are counted while it arrives, so that one with too many is refused before it is stored or
becomes Python objects: parsing holds the GIL.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError

from graftlm.adapters.server.access import MAX_SHOWN, current
from graftlm.adapters.server.http.errors import ApiError, invalid_body
from graftlm.core.kv.memory import trim_heap

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from graftlm.adapters.server.settings import Limits, ServerSettings

AnyBody = TypeVar("AnyBody", bound=BaseModel)

SMALL_BYTES = 64 << 10
"""Bodies up to this size are handled on the event loop: parsing takes at most 2 ms."""

DROPPED_BYTES_S = 32 << 20
"""Bytes a second that are read of the rest of a refused request, to be dropped: as fast as a client sends them, they
would take a core."""

NUM_CONVERTERS = 2

TRIM_AFTER_S = 1.0
"""Seconds after a large body until the memory that it took is returned to the system."""

SHARE = 0.75
"""Part of the memory for arriving bodies that the bodies of one caller may fill."""

_PIECE = 1 << 20  # bytes that are counted at once, and read before the rate is limited


class Bodies:
    """Reads the bodies of all requests.

    num_held    bytes of the bodies that are arriving or being parsed
    converters  threads that convert large bodies to requests; few, since each has a heap of its own
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._parsers = ThreadPoolExecutor(1, "graftlm body")
        self.converters = ThreadPoolExecutor(NUM_CONVERTERS, "graftlm convert")
        self._trims = False
        self.num_held = 0
        self._callers: dict[str, _Caller] = {}  # those whose bodies are arriving

    async def read(self, http: HttpRequest, kind: type[AnyBody]) -> AnyBody:
        """Return the validated body. Raises ApiError that names the field at fault."""
        given = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if given != "application/json":  # a page of another origin can send every other type without a preflight
            message = f"the body is {given or 'without a content-type'}; send content-type: application/json"
            raise ApiError(415, message, code="unsupported_media_type")
        limit = self._settings.max_body_bytes
        length = http.headers.get("content-length", "0")
        if length.isdigit() and int(length) > limit:
            raise _too_large(limit)
        caller = self._callers.setdefault(current().caller, _Caller())
        caller.num_bodies += 1
        raw = bytearray()
        texts = LongTexts(self._settings.limits, kind)
        counts = JsonCounts(self._settings.limits)
        num_read, refused = 0, None
        waits = _waits_for_its_answer(http)
        try:
            self._check_held(caller, int(length) if length.isdigit() else 0)
            async for piece in http.stream():
                num_read += len(piece)
                if num_read > limit:
                    raise _too_large(limit)
                if refused is not None:  # a client whose connection ends before it has sent all reads no answer
                    await asyncio.sleep(len(piece) / DROPPED_BYTES_S)
                    continue
                raw += piece
                self._hold(caller, len(piece))
                if len(raw) > SMALL_BYTES:
                    self._check_held(caller, len(raw), held=True)
                    refused = texts.check(raw)
                if refused is None and len(raw) - counts.num_bounded >= _PIECE and counts.may_exceed(raw):
                    refused = await asyncio.get_running_loop().run_in_executor(self._parsers, counts.check, raw)
                if refused is not None:
                    if waits:
                        raise refused
                    self._hold(caller, -len(raw))
                    raw.clear()
                if len(raw) > _PIECE:
                    await asyncio.sleep(caller.pause_s(len(piece), self._settings.limits.body_bytes_s))
            current().num_bytes = num_read
            if refused is not None:
                raise refused
            return await self._parse(raw, kind, counts)
        finally:
            self._hold(caller, -len(raw))
            caller.num_bodies -= 1
            if not caller.num_bodies:
                self._callers.pop(current().caller, None)
            if num_read > _PIECE and not self._trims:
                self._trims = True
                asyncio.get_running_loop().call_later(TRIM_AFTER_S, self._trim)

    def _trim(self) -> None:
        """Return the memory of large bodies that have ended to the system, from the heap of each thread."""
        self._trims = False
        for pool in (self._parsers, *[self.converters] * NUM_CONVERTERS):
            pool.submit(trim_heap)

    def _hold(self, caller: _Caller, num_bytes: int) -> None:
        self.num_held += num_bytes
        caller.num_held += num_bytes

    def _check_held(self, caller: _Caller, num_bytes: int, *, held: bool = False) -> None:
        """Raise ApiError if a large body does not fit into the memory for arriving bodies, or a caller's share of it.

        num_bytes  of the body, as stated or so far
        held       whether they are counted already
        """
        if num_bytes <= SMALL_BYTES:
            return
        more = 0 if held else num_bytes
        least = self._settings.max_body_bytes  # one body always fits
        most = max(self._settings.limits.held_body_bytes, least)
        for number, bound in ((self.num_held, most), (caller.num_held, max(int(SHARE * most), least))):
            if number + more > bound:
                message = "the bodies that are arriving fill the server's memory for them; try again later"
                raise ApiError(429, message, kind="rate_limit_error", code="too_many_bodies", retry_after=1)

    async def _parse(self, raw: bytearray, kind: type[AnyBody], counts: JsonCounts) -> AnyBody:
        try:
            if len(raw) <= SMALL_BYTES:
                return self._validate(raw, kind)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._parsers, self._parse_large, raw, kind, counts)
        except ValidationError as error:
            raise invalid_body(error, kind.model_fields) from None

    def _parse_large(self, raw: bytearray, kind: type[AnyBody], counts: JsonCounts) -> AnyBody:
        refused = counts.check(raw) if counts.may_exceed(raw) else None
        if refused is not None:
            raise refused
        return self._validate(raw, kind)

    def _validate(self, raw: bytearray, kind: type[AnyBody]) -> AnyBody:
        try:
            return kind.model_validate_json(raw)
        except ValidationError as error:
            unknown = unknown_fields(error) if self._settings.ignore_unknown else []
            if not unknown:
                raise
            body = json.loads(raw)
            found = [path for path in unknown if _remove(body, path)]
            current().ignored = tuple(".".join(map(str, path))[:MAX_SHOWN] for path in found[:MAX_IGNORED])
            return kind.model_validate(body)


class _Caller:
    """The bodies of one caller that are arriving."""

    def __init__(self) -> None:
        self.num_bodies = self.num_held = 0
        self._read_until_s = 0.0

    def pause_s(self, num_bytes: int, bytes_s: float) -> float:
        """Count bytes that were read; return the seconds until more may be read."""
        now = time.monotonic()
        self._read_until_s = max(self._read_until_s, now) + num_bytes / bytes_s
        return self._read_until_s - now


_ABSENT = object()

MAX_IGNORED = 20
"""Ignored fields that the header lists."""


def unknown_fields(error: ValidationError) -> list[tuple[Any, ...]]:
    """Return the paths of unknown fields."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    return [one["loc"] for one in errors if one["type"] == "extra_forbidden"]


def _remove(body: Any, path: Sequence[Any]) -> bool:
    """Remove a member from a JSON value; return False if it is not there."""
    for part in path[:-1]:
        inside = isinstance(body, dict) and part in body or isinstance(body, list) and isinstance(part, int)
        if not inside:
            return False
        body = body[part]
    return isinstance(body, dict) and body.pop(path[-1], _ABSENT) is not _ABSENT


class LongTexts:
    """Finds texts that are longer than their limit while a body arrives, so that it is neither stored nor parsed.

    Sound, not complete: each refused body would be refused after parsing, where those that pass are checked.

    kind  of the body; its TEXT_LIMITS name further fields, each with a field of Limits
    """

    def __init__(self, limits: Limits, kind: type[BaseModel]) -> None:
        known = {"cache_salt": limits.salt_chars, "stop": limits.stop_chars}
        known |= dict.fromkeys(_CONSTRAINTS, limits.constraint_chars)
        known |= {name: getattr(limits, limit) for name, limit in getattr(kind, "TEXT_LIMITS", {}).items()}
        self._limits = {f'"{name}"'.encode(): most for name, most in known.items() if name in kind.model_fields}
        self._num_read = 0
        self._found: dict[tuple[bytes, int], bool] = {}  # names, where their texts begin, whether they are members

    def check(self, raw: bytearray) -> ApiError | None:
        """Read the bytes that are new since the last call; return the error of a text that is too long."""
        start, self._num_read = max(0, self._num_read - _MOST_NAME), len(raw)
        for name in self._limits:
            at = raw.find(name, start, _MOST_BEFORE)
            while at >= 0 and len(self._found) < _MOST_FOUND:
                begins = _BEGIN.match(raw, at + len(name))
                if begins is not None and (name, begins.end()) not in self._found:
                    self._found[name, begins.end()] = _is_member(raw, at)
                at = raw.find(name, at + len(name), _MOST_BEFORE)
        for (name, at), is_member in self._found.items():
            if is_member and (error := self._check_one(name, raw, at)) is not None:
                return error
        return None

    def _check_one(self, name: bytes, raw: bytearray, begin: int) -> ApiError | None:
        limit = self._limits[name]
        most = begin + 12 * limit + 12  # a character takes at most 12 bytes: two escapes
        end = raw.find(b'"', begin, most)
        text = bytes(raw[begin : most if end < 0 else end])
        num_bytes = 12 if b"\\" in text else 1 if text.isascii() else 4
        if len(text) // num_bytes <= limit:
            return None
        field = name.decode().strip('"')
        message = f"{field} has more than {limit:,} characters; send fewer"
        return ApiError(400, message, param=field, code="invalid_value")


_CONSTRAINTS = ("regex", "ebnf", "guided_regex", "guided_grammar")
_BEGIN = re.compile(rb'\s{0,32}:\s{0,32}"')
_MOST_NAME = 128  # bytes of a name, the colon and blanks around it
_MOST_BEFORE, _MOST_FOUND = 256 << 10, 8
"""Bytes before a text, and number of texts, that are checked on the event loop, in at most 10 ms a body."""


def _is_member(raw: bytearray, at: int) -> bool:
    """Return True if the name at this place is a member of the body's object, not of one inside it or in a text."""
    before = bytes(raw[:at])
    if b"\\" in before:
        before = before.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    codes = np.frombuffer(before, np.uint8)
    outside = np.cumsum(codes == ord('"'), dtype=np.uint8) & 1 == 0
    opened = np.count_nonzero(outside & ((codes == ord("{")) | (codes == ord("["))))
    closed = np.count_nonzero(outside & ((codes == ord("}")) | (codes == ord("]"))))
    return bool(len(codes)) and bool(outside[-1]) and opened - closed == 1


class JsonCounts:
    """The members of all objects, and all values, of a JSON text that may still arrive. Counts 200 MB a second.

    num_bounded  bytes of the text of which an upper bound is known
    num_read     bytes of the text that are counted

    A text that is no JSON gives some counts as well; the parser refuses it.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.num_members = self.num_values = self.num_read = 0
        self.num_bounded = self._most_members = self._most_values = 0
        self._inside = False  # a string

    def may_exceed(self, raw: bytes | bytearray) -> bool:
        """Return False if the text has too few colons, commas and brackets for a limit. Reads 3 GB a second."""
        codes = np.frombuffer(memoryview(raw)[self.num_bounded :], np.uint8)
        self.num_bounded = len(raw)
        self._most_members += int(np.count_nonzero(codes == ord(":")))
        self._most_values += sum(int(np.count_nonzero(codes == ord(mark))) for mark in ",[{")
        return self._most_members > self._limits.json_members or self._most_values > self._limits.json_values

    def check(self, raw: bytes | bytearray) -> ApiError | None:
        """Count the bytes that are new since the last call; return the error of too many members or values, soon."""
        while self.num_read < len(raw):
            self._count(raw, self.num_read, min(len(raw), self.num_read + _PIECE))
            for number, most, noun in (
                (self.num_members, self._limits.json_members, "members of objects"),
                (self.num_values, self._limits.json_values, "values"),
            ):
                if number > most:
                    message = f"the body has more than {most:,} {noun}; send fewer"
                    return ApiError(400, message, code="body_too_complex")
        return None

    def _count(self, raw: bytes | bytearray, start: int, stop: int) -> None:
        self.num_read = stop
        piece = bytes(memoryview(raw)[start:stop])
        if b"\\" in piece or (start and raw[start - 1 : start] == b"\\"):
            piece = _without_escapes(raw, start, stop)
        codes = np.frombuffer(piece, np.uint8)
        quotes = np.cumsum(codes == ord('"'), dtype=np.uint8)
        outside = ((quotes + self._inside) & 1) == 0
        self._inside = bool((int(quotes[-1]) + self._inside) & 1)
        self.num_members += int(np.count_nonzero(outside & (codes == ord(":"))))
        begins = (codes == ord(",")) | (codes == ord("[")) | (codes == ord("{"))
        self.num_values += int(np.count_nonzero(outside & begins))


def _waits_for_its_answer(http: HttpRequest) -> bool:
    """Return True if the connection stays open behind an answer, so that the rest of the body can be dropped there."""
    given = http.headers.get("connection", "").lower()
    return http.scope.get("http_version") != "1.0" and "close" not in given


def _without_escapes(raw: bytes | bytearray, start: int, stop: int) -> bytes:
    """Return a piece of a JSON text with each escape sequence blanked; those that cross its ends as well."""
    first = start
    while first and raw[first - 1 : first] == b"\\":
        first -= 1
    blanked = bytes(raw[first:stop]).replace(b"\\\\", b"__").replace(b'\\"', b"__")
    return blanked[start - first :]


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is longer than {limit:,} bytes; send less", code="body_too_large")
