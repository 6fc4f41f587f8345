"""ReplicaEngine: one engine over several replicas: routing by prefix, streams, and retries when a replica dies."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import numpy as np

from graftlm.core.cluster.replica import Event, Key
from graftlm.core.cluster.router import Router
from graftlm.core.errors import EngineError, ModelError, RequestCancelled, RequestTimeout
from graftlm.core.metrics import Counters, Stats
from graftlm.core.request import Begun, Chunk, Completion, OpenRequest, Request, Submission

ATTEMPTS = 2
"""Replicas that try a request: a request that ends two replicas is assumed to be the cause."""

RESTARTS = 3
"""Restarts in a row, per configured replica, after which no replica is started: unless one has answered a request
meanwhile, the next one would fail as well."""

RESTART_PAUSE_S = 0.5
"""Seconds before a restart, times the failed restarts beyond the first of each replica."""

DEFAULT_STEP_TOKENS = 2048

_SUMS = (
    *("slots_total", "slots_free", "slots_cached", "slots_in_use", "running", "waiting"),
    *("images_encoded", "image_bytes"),
)
"""Numbers of a replica's statistics that are its own, and counted with it."""

log = logging.getLogger("graftlm.engine")


class Delivery:
    """The delivered parts of a request's answers, from which another replica continues them."""

    def __init__(self) -> None:
        self._answers: dict[int, Begun] = {}

    def deliver(self, chunk: Chunk) -> bool:
        """Note a chunk; return False for the end of an answer whose end is delivered already."""
        begun = self._answers.setdefault(chunk.index, Begun())
        if begun.finish_reason is not None:
            return False
        begun.add(chunk)
        return True

    def begun(self, num_answers: int) -> tuple[Begun, ...]:
        """Return the parts in the order of the answers; () if nothing is delivered."""
        return tuple(self._answers.get(i) or Begun() for i in range(num_answers)) if self._answers else ()


class Tally:
    """The counters of all replicas since the last reset, those of dead ones too: no sum is below an earlier one.

    Thread-safe. A dead replica counts as when its counters were last read.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[int, Stats] = {}

    def read(self, number: int, stats: Stats) -> None:
        """Note the counters of a replica, unless a later reading has come first."""
        with self._lock:
            last = self._last.get(number)
            if last is None or stats.steps >= last.steps:
                self._last[number] = stats

    def add_to(self, total: Stats) -> None:
        """Add the counters of all replicas; `largest_batch` is the maximum."""
        with self._lock:
            readings = list(self._last.values())
        for stats in readings:
            largest = max(total.largest_batch, stats.largest_batch)
            for each in fields(Counters):
                setattr(total, each.name, getattr(total, each.name) + getattr(stats, each.name))
            total.largest_batch = largest

    def reset(self) -> None:
        with self._lock:
            self._last.clear()


class Member(Protocol):
    """The client side of a replica. Calls return at once, except `stats` and `call`."""

    def add(self, requests: list[tuple[Key, Request]]) -> None: ...
    def cancel(self, keys: list[Key]) -> None: ...
    def stats(self) -> Stats: ...
    def call(self, method: str, *arguments: Any) -> None: ...
    def kill(self) -> None: ...


class Cluster(Protocol):
    """A starter of replicas. `heard` receives a replica's events on a separate thread; an error means that it died."""

    def start(self, heard: Callable[[list[Event] | BaseException], None]) -> tuple[Member, dict[str, str]]: ...
    def close(self) -> None: ...


@dataclass(eq=False)
class Open:
    """An open request and its attempts."""

    submission: Submission
    request: Request
    ids: np.ndarray
    attempt: int = 0
    replica: int | None = None
    delivery: Delivery = field(default_factory=Delivery)

    @property
    def key(self) -> Key:
        return self.submission.id, self.attempt

    def with_remaining_timeout(self) -> Request:
        """Return the request with its remaining timeout; raise RequestTimeout if that has passed."""
        timeout = self.request.sampling.timeout
        if timeout is None:
            return self.request
        left = timeout - (time.monotonic() - self.submission.arrived_s)
        if left <= 0:
            raise RequestTimeout(f"the request did not finish within its {timeout} s timeout")
        return replace(self.request, sampling=replace(self.request.sampling, timeout=left))


class ReplicaEngine:
    """`graftlm.core.engine_protocol.Engine` over the replicas of a cluster.

    A request whose replica dies runs on another one. An answer that is partly delivered continues from its prompt and
    the delivered tokens, under the seed that this engine sets; replicas that round differently continue it as well.
    """

    def __init__(
        self,
        cluster: Cluster,
        num_replicas: int,
        *,
        wake: Callable[[], None] = lambda: None,
        seed: int | None = None,
        step_tokens: int | None = None,
        finished: Callable[[Request, Completion], None] = lambda request, completion: None,
    ) -> None:
        tokens = step_tokens or DEFAULT_STEP_TOKENS
        self.members: dict[int, Member] = {}
        self.deaths = self.restarts = 0
        self._cluster = cluster
        self._wake = wake
        self._finished = finished
        self._seeds = random.Random(seed)
        self._tally = Tally()
        self._router = Router(slack=2 * tokens)
        self._most_open = 4 * tokens  # prompt tokens per replica; further requests wait unrouted
        self._open: dict[int, Open] = {}
        self._queue: deque[Open] = deque()
        self._arrived: deque[tuple[int, list[Event] | BaseException | tuple[Member, dict[str, str]]]] = deque()
        self._pins: dict[int, tuple[int, int]] = {}
        self._next = 0
        self._facts: dict[str, str] = {}
        self._num_replicas = num_replicas
        self._starting = 0  # replicas that are starting
        self._in_vain = 0  # restarts since a replica last answered a request
        self._closed = False
        self._cause: BaseException | None = None
        self._start_all(num_replicas)

    # -- graftlm.core.engine_protocol.Engine -----------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not self._open and not self._arrived

    def add(self, submissions: Sequence[Submission]) -> None:
        """Queue requests, sorted by their token ids, so that equal prefixes are adjacent."""
        new = []
        for submission in submissions:
            assert submission.prompt is not None
            sampling = submission.request.sampling
            if sampling.seed is None:
                sampling = replace(sampling, seed=self._seeds.getrandbits(63))
            prompt = submission.prompt
            request = replace(submission.request, prompt=prompt, tools=None, on_chunk=None, sampling=sampling)
            new.append(Open(submission, request, prompt.ids))
        self._open.update((one.submission.id, one) for one in new)
        self._queue.extend(sorted(new, key=lambda one: one.ids.tobytes()) if len(new) > 1 else new)

    def step(self) -> bool:
        """Process events and send requests; return False if there was nothing to do.

        Raises EngineError once no replica is left and no restart is allowed.
        """
        progressed = bool(self._arrived)
        self._take_arrived()
        if not self.members and not self._starting:
            raise _caused("no replica is left", self._cause)
        return self._send() or progressed

    def _take_arrived(self) -> None:
        while self._arrived:
            number, news = self._arrived.popleft()
            if isinstance(news, BaseException):
                self._died(number, news)
            elif isinstance(news, tuple):
                self._joined(number, *news)
            else:
                for event in news:
                    self._happened(event)

    def cancel(self, submission_id: int) -> None:
        one = self._open.get(submission_id)
        if one is not None:
            self._drop(one, RequestCancelled("the request was cancelled"))

    def fail_all(self, error: BaseException) -> None:
        for one in list(self._open.values()):
            self._end(one, error)

    def stats(self) -> Stats:
        """Return the sum over the replicas: counters of all, `_SUMS` of the live ones."""
        total, now = Stats(), time.monotonic()
        for number, member in list(self.members.items()):
            try:
                stats = member.stats()
            except Exception:
                continue  # the replica has died; its listener reports that
            self._tally.read(number, stats)
            for name in _SUMS:
                setattr(total, name, getattr(total, name) + getattr(stats, name))
            total.weights, total.kv, total.no_images = stats.weights, stats.kv, stats.no_images
        self._tally.add_to(total)
        total.waiting += len(self._queue)
        total.replicas, total.restarts = len(self.members), self.restarts
        total.open = [
            OpenRequest(one.submission.request.id, len(one.ids), None, 0, now - one.submission.arrived_s)
            for one in list(self._open.values())
        ]
        return total

    def reset_stats(self) -> None:
        for member in self.members.values():
            member.call("reset_stats")
        self._tally.reset()

    def clear_cache(self) -> None:
        self._router.forget_prefixes()
        for member in self.members.values():
            member.call("clear_cache")

    def unpin(self, pin: int) -> None:
        number, there = self._pins.pop(pin, (-1, 0))
        if number in self.members:
            self.members[number].call("unpin", there)

    def close(self) -> None:
        self._closed = True
        for member in self.members.values():
            member.kill()
        self._cluster.close()

    # -- replicas come and go --------------------------------------------------------------------------------------

    def _start_all(self, num_replicas: int) -> None:
        """Start all replicas concurrently; raise the error of one that failed to start."""
        numbers = range(num_replicas)
        threads = [threading.Thread(target=self._start, args=(number,), daemon=True) for number in numbers]
        self._next = self._starting = num_replicas
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        failed = [news for _, news in self._arrived if isinstance(news, BaseException)]
        try:
            if failed:
                raise failed[0]
            self._take_arrived()
            if self._cause is not None:
                raise self._cause
        except BaseException:
            self._closed = True
            for _, news in self._arrived:
                if isinstance(news, tuple):
                    news[0].kill()
            self.close()
            raise

    def _start(self, number: int, pause_s: float = 0.0) -> None:
        """Start a replica on a new thread, since that takes as long as loading the model."""

        def hear(news: list[Event] | BaseException | tuple[Member, dict[str, str]]) -> None:
            self._arrived.append((number, news))
            self._wake()

        time.sleep(pause_s)
        try:
            started = self._cluster.start(hear)
        except BaseException as error:
            hear(error)
        else:
            hear(started)

    def _joined(self, number: int, member: Member, facts: dict[str, str]) -> None:
        self._starting -= 1
        if self._closed:
            member.kill()
            return
        first = self._facts or facts
        wrong = next((name for name in ("versions", "fingerprint") if facts.get(name) != first.get(name)), None)
        if wrong is not None:
            member.kill()
            self._cause = ModelError(
                f"replicas differ in their {wrong}: {first[wrong]} on {first['node']}, {facts[wrong]} on "
                f"{facts['node']}; install the same packages and put the same model on every node"
            )
            return
        self._facts = first
        self.members[number] = member
        self._router.add(number)

    def _died(self, number: int, error: BaseException) -> None:
        """Requeue a dead replica's requests and start a replacement."""
        member = self.members.pop(number, None)
        self._router.forget(number)
        self._pins = {pin: there for pin, there in self._pins.items() if there[0] != number}
        self._cause = error
        if member is None:
            self._starting -= 1
        else:
            self.deaths += 1
            member.kill()
        for one in [one for one in self._open.values() if one.replica == number]:
            one.replica = None
            if one.attempt + 1 >= ATTEMPTS:
                self._end(one, _caused(f"the request ended {ATTEMPTS} replicas", self._cause))
                continue
            one.attempt += 1
            one.request = replace(one.request, begun=one.delivery.begun(one.request.sampling.n))
            self._queue.appendleft(one)
        if not self._closed and self._in_vain < RESTARTS * self._num_replicas:
            self._next, self._starting = self._next + 1, self._starting + 1
            self.restarts, self._in_vain = self.restarts + 1, self._in_vain + 1
            pause_s = RESTART_PAUSE_S * max(0, self._in_vain - self._num_replicas)
            log.warning("a replica has ended (%s); another one is started in %g s", error, pause_s)
            threading.Thread(target=self._start, args=(self._next - 1, pause_s), daemon=True).start()

    # -- requests --------------------------------------------------------------------------------------------------

    def _send(self) -> bool:
        """Send the requests that fit, one message per replica; end requests that no replica can take."""
        batches: dict[int, list[tuple[Key, Request]]] = {}
        kept: deque[Open] = deque()
        for one in self._queue:
            if one.submission.id not in self._open:
                continue  # cancelled meanwhile
            try:
                request = one.with_remaining_timeout()
            except RequestTimeout as error:
                self._end(one, error)
                continue
            if not self.members:
                kept.append(one)
                continue
            number = self._router.choose(one.ids, request.namespace)
            if self._router.load[number] and self._router.load[number] + len(one.ids) > self._most_open:
                kept.append(one)
                continue
            self._router.sent(number, one.ids, request.namespace)
            one.replica = number
            batches.setdefault(number, []).append((one.key, request))
        self._queue = kept
        for number, requests in batches.items():
            self._send_to(number, requests)
        return bool(batches)

    def _send_to(self, number: int, requests: list[tuple[Key, Request]]) -> None:
        """Send requests to a replica in one message; if that fails, individually, and end those that fail."""
        try:
            self.members[number].add(requests)
        except BaseException as error:
            if len(requests) > 1:
                for request in requests:
                    self._send_to(number, [request])
                return
            failure = EngineError(
                f"the request cannot be sent to a replica: {type(error).__name__}: {error}; its constraint and its "
                "options must survive pickle"
            )
            failure.__cause__ = error
            self._end(self._open[requests[0][0][0]], failure)

    def _happened(self, event: Event) -> None:
        number, attempt = event.key
        one = self._open.get(number)
        if one is None or one.attempt != attempt or event.value is None:
            return  # it was cancelled, or runs on another replica
        if isinstance(event.value, Chunk):
            if one.delivery.deliver(event.value):
                try:
                    one.submission.listener.on_chunk(event.value)
                except BaseException as error:
                    self._drop(one, error)
            return
        if isinstance(event.value, Completion):
            self._in_vain = 0
            completion = replace(event.value, request_id=one.submission.request.id)
            if completion.pin is not None and one.replica is not None:
                self._pins[number] = one.replica, completion.pin
                completion = replace(completion, pin=number)
            self._end(one, completion)
        else:
            self._end(one, event.value)

    def _end(self, one: Open, how: Completion | BaseException) -> None:
        self._open.pop(one.submission.id, None)
        if one.replica is not None:
            self._router.ended(one.replica, len(one.ids))
        request, listener = one.submission.request, one.submission.listener
        try:
            if isinstance(how, Completion):
                listener.on_finish(how)
            else:
                listener.on_error(how)
        except BaseException:
            log.exception("the listener of request %d raised at its end", request.id)
        if isinstance(how, Completion):
            self._finished(request, how)

    def _drop(self, one: Open, error: BaseException) -> None:
        """End a request and cancel it on its replica."""
        if one.replica is not None and one.replica in self.members:
            self.members[one.replica].cancel([one.key])
        self._end(one, error)


def _caused(message: str, cause: BaseException | None) -> EngineError:
    error = EngineError(f"{message}: {cause}" if cause is not None else message)
    error.__cause__ = cause
    return error
