"""The page at `/`: load, latencies, errors, hit rate over time and the open requests; and `/stats`, its data."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

import graftlm
from graftlm.adapters.server.endpoints.body import Fields
from graftlm.adapters.server.metrics import device_memory

if TYPE_CHECKING:
    from graftlm.adapters.server.app import Server

EVERY_S = 2.0
NUM_SAMPLES = 300
LISTED = 50  # limit of the open requests in `/stats`


class History:
    """Samples of the engine's counters, every two seconds, for ten minutes."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._samples: deque[dict[str, float]] = deque(maxlen=NUM_SAMPLES)
        self._last: tuple[int, ...] = (0, 0, 0, 0, 0)

    async def keep(self) -> None:
        """Take samples until cancelled."""
        while True:
            await asyncio.to_thread(self.sample)
            await asyncio.sleep(EVERY_S)

    def sample(self) -> None:
        """Add one sample: hit rate of the prompts since the last one, rates per second, number of sequences."""
        stats = self._server.runtime.stats()
        responses = self._server.metrics.responses()
        now = (stats.cached_tokens, stats.prompt_tokens, stats.completion_tokens, *responses.values())
        cached, prompts, written, errors, too_many = (max(0, a - b) for a, b in zip(now, self._last, strict=True))
        self._last = now
        self._samples.append(
            {
                "time": round(time.time(), 1),
                "hit_rate": cached / prompts if prompts else -1.0,
                "tokens_per_s": written / EVERY_S,
                "running": stats.running,
                "waiting": stats.waiting,
                "errors_per_s": errors / EVERY_S,
                "too_many_per_s": too_many / EVERY_S,
            }
        )

    def stats(self) -> dict[str, Any]:
        """Return all values that the page shows."""
        server, stats = self._server, self._server.runtime.stats()
        counts = {k: v for k, v in asdict(stats).items() if k != "open"}
        ids = server.intake.request_ids() if server.intake is not None else {}
        opened = [{**asdict(one), "request_id": ids.get(one.id)} for one in stats.open[:LISTED]]
        named = {"model": server.model_names[0], "max_model_len": server.runtime.max_model_len}
        state = server.unavailable() or "ready"
        return {
            **named,
            "version": graftlm.__version__,
            "state": state,
            "hit_rate": stats.hit_rate,
            "first_token_s": server.metrics.first_token_s(),
            "responses": server.metrics.responses(),
            "memory_bytes": resident_bytes(),
            "device_memory": [{"device": name, "used": used, "total": top} for name, used, top in device_memory()],
            "device": getattr(server.runtime.config, "device", ""),
            "counters": counts,
            "open": opened,
            "history": list(self._samples),
        }


def resident_bytes() -> int:
    """Return the process's resident memory in bytes; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class CancelBody(Fields):
    """The body of `/stats/cancel`: the id in the log, the header and the page."""

    request_id: str


@cache
def page_html() -> str:
    """Return the page: one file that loads no other resource."""
    return Path(__file__).with_name("page.html").read_text()


def page_routes(server: Server, history: History) -> list[Route]:
    """Return the routes of the page and its data."""

    async def page(http: HttpRequest) -> Response:
        return HTMLResponse(page_html())

    async def stats(http: HttpRequest) -> Response:
        return JSONResponse(await asyncio.to_thread(history.stats))

    async def cancel(http: HttpRequest) -> Response:
        body = await server.read(http, CancelBody)
        assert server.intake is not None
        return JSONResponse({"cancelled": server.intake.cancel(body.request_id)})

    return [Route("/", page), Route("/stats", stats), Route("/stats/cancel", cancel, methods=["POST"])]
