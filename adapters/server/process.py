"""The process of `graftlm serve`: a socket, a runtime that loads in a thread, and a shutdown that drains requests."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import fields
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from graftlm.adapters.server.access import LineFormatter
from graftlm.adapters.server.app import Server
from graftlm.adapters.server.embeddings.model import EmbeddingModel
from graftlm.adapters.server.http.connection import Connection, Connections
from graftlm.adapters.server.settings import Limits, ServerSettings
from graftlm.core.config import CacheConfig, SchedulerConfig, reject_unknown
from graftlm.core.constraint import prepare_llguidance
from graftlm.core.errors import ConfigError, GraftError
from graftlm.core.media.limits import MediaLimits
from graftlm.core.runtime import Runtime
from graftlm.core.serving.telemetry import export_spans

log = logging.getLogger("graftlm.server")

TURN_S = 0.001
"""Seconds for which a thread keeps Python's lock while the event loop or the engine waits for it; Python's own are 5
times as long."""

OTHER_FILES = 512
"""Open files that are no connections: weights, libraries, replicas and endpoints."""

CLOSE_S = 5.0
"""Seconds that connections have to close after every request has ended."""


def read_options(given: Iterable[str]) -> dict[str, Any]:
    """Parse options of a runtime from NAME=VALUE; `cache.max_tokens=4096` sets a field of `cache`."""
    options: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {"cache": {}, "schedule": {}, "media": {}}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"option {text!r} has no value; give NAME=VALUE, as dtype=bfloat16")
        try:
            read = json.loads({"True": "true", "False": "false", "None": "null"}.get(value, value))
        except ValueError:
            read = value
        whole, dot, field = name.strip().replace("-", "_").partition(".")
        if dot and whole not in parts:
            raise ConfigError(f"option {name!r} is unknown; only cache, schedule and media have fields")
        (parts[whole] if dot else options)[field if dot else whole] = read
    for name, kind in (("cache", CacheConfig), ("schedule", SchedulerConfig), ("media", MediaLimits)):
        if parts[name]:
            try:
                options[name] = kind(**parts[name])
            except TypeError as error:
                raise ConfigError(f"options of {name} are {', '.join(parts[name])}: {error}") from error
    return options


def raise_file_limit() -> int:
    """Raise the process's limit of open files as far as it may, and return the limit."""
    most = 1 << 16  # more cost memory for each process that is started
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return most
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return most if soft == resource.RLIM_INFINITY else soft
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def read_limits(given: Iterable[str]) -> Limits:
    """Parse limits of a server from NAME=VALUE."""
    values: dict[str, float] = {}
    for text in given:
        name, _, value = text.partition("=")
        name = name.strip().replace("-", "_")
        reject_unknown([name], [each.name for each in fields(Limits)], "limit")
        try:
            values[name] = json.loads(value)
        except ValueError:
            raise ConfigError(f"limit {name} is {value!r}; give a number, as --limit header_s=20") from None
    return Limits(**values)  # type: ignore[arg-type]


def serve(model: str, settings: ServerSettings, options: dict[str, Any], *, embedding_model: str | None = None) -> None:
    """Serve `model` until SIGTERM or SIGINT. Raises ConfigError or ModelError if it cannot start.

    embedding_model  the folder of an embedding model to serve beside it, or NAME=FOLDER
    """
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    export_spans()
    runtime = Runtime(model, **options)
    embeds = None if embedding_model is None else EmbeddingModel(embedding_model)
    listener = listen(settings.host, settings.port)
    try:
        process = Process(Server(runtime, settings, embedding_model=embeds), listener)
        process.run()
    finally:
        listener.close()
        if runtime._thread.loading:
            logging.shutdown()
            os._exit(0)  # a running load cannot be interrupted, and no state is lost
        runtime.close()
    if process.failure is not None:
        raise process.failure


def load(runtime: Runtime) -> None:
    """Load the model, and run slow work of later requests now, as the process serves only one model.

    It loads llguidance's tokenizer, renders a message, and excludes all current objects from Python's garbage
    collector. A thread that parses a body or compiles a constraint passes Python's lock on after TURN_S.
    """
    sys.setswitchinterval(TURN_S)
    preparing = threading.Thread(target=_prepare, args=(runtime,), name="graftlm first use", daemon=True)
    preparing.start()
    runtime.load()
    preparing.join()
    with suppress(GraftError):  # a template may refuse the message
        if runtime.base_url is None:  # after the load: no two threads may import transformers at once
            runtime.tokenizer.render([{"role": "user", "content": "a"}])
    gc.collect()
    gc.freeze()


def _prepare(runtime: Runtime) -> None:
    with suppress(GraftError):  # the load raises the error as well
        if runtime.base_url is None:
            prepare_llguidance(runtime.tokenizer)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address. Raises ConfigError if it is in use."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"host {host!r} is no address of this machine: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(f"port {port} of {host} cannot be used: {error.strerror}; choose another --port") from error
    listener.set_inheritable(False)
    return listener


class Process(uvicorn.Server):
    """A Uvicorn server that answers `/health` while the model loads, and drains on the first signal.

    failure  the error of the load, if it ended the server.
    """

    def __init__(self, server: Server, listener: socket.socket) -> None:
        connections = Connections(server.settings.limits, max(64, raise_file_limit() - OTHER_FILES))
        config = uvicorn.Config(
            server,
            http=partial(Connection, connections),  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            ws="none",
            backlog=2048,
            timeout_keep_alive=65,
            timeout_graceful_shutdown=int(CLOSE_S),
            ssl_certfile=server.settings.ssl_certfile,
            ssl_keyfile=server.settings.ssl_keyfile,
        )
        super().__init__(config)
        server.sends_outside_tasks = True
        self._server = server
        self._listener = listener
        self._drains: Callable[[], object] | None = None
        self.failure: BaseException | None = None

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        super().run([self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        loop = asyncio.get_running_loop()
        self._drains = lambda: loop.call_soon_threadsafe(lambda: setattr(self, "_drain", loop.create_task(self._end())))
        host, port = self._listener.getsockname()[:2]
        scheme, shown = "https" if self.config.is_ssl else "http", f"[{host}]" if ":" in host else host
        log.info("%s at %s://%s:%d/v1", self._server.runtime.model_name, scheme, shown, port)
        log.info("loading; until the model is ready, requests have status 503")
        threading.Thread(target=self._load, name="graftlm load", daemon=True).start()

    def _load(self) -> None:
        started = time.monotonic()
        try:
            load(self._server.runtime)
            from graftlm.core.grammar.cache import share_process  # the load has imported it on another thread

            engine = self._server.runtime._thread
            share_process(self._server.settings.limits.waiting_constraints, lambda: engine.runs)
        except BaseException as error:
            if not self._server.draining:
                self.failure = error
            self.should_exit = True
            return
        log.info("ready after %.1f s", time.monotonic() - started)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain requests on the first signal, end at once on the second."""
        if not self._server.draining and self._drains is not None:
            self._server.draining = True
            self._drains()
        else:
            self.should_exit = self.force_exit = True

    async def _end(self) -> None:
        server = self._server
        log.info("shutting down; %d requests have %g s to finish", server.num_open, server.settings.drain_timeout_s)
        end_s = time.monotonic() + server.settings.drain_timeout_s
        while server.num_open and time.monotonic() < end_s and not self.force_exit:
            await asyncio.sleep(0.02)
        if not server.runtime._thread.loading:
            await asyncio.to_thread(server.runtime.close)  # requests that still run end with an error
        self.should_exit = True
