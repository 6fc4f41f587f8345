"""Many programs at the same time, on threads and on an event loop: each as alone, and bills that add up exactly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import pytest

import graftlm as gl
from graftlm.core.program.state import ProgramState
from graftlm.core.remote.ledger.usage import RemoteUsage
from tests.core.remote.models import answers, continues
from tests.core.remote.server import Fault, Server

NUM = 64
SOON = {"retry-after-ms": "1"}
FAULTS = [Fault(429, headers=SOON), None, None, Fault(500, headers=SOON), None, None, None, None, None]


@gl.program(temperature=0, num_api_spec_tokens=48)
def plain(s: ProgramState, i: int) -> None:
    s += f"{i} Name: " + gl.gen("name", stop="\n") + "\nAge: " + gl.gen("age", dtype=int, max_tokens=6)
    left, right = s.fork(2)
    left += "\nCity: " + gl.gen("city", stop="\n")
    right += "\nAnd: " + gl.gen("other", stop="\n")
    s["left"] = left["city"]
    s["right"] = right["other"]


@gl.program(temperature=0, num_api_spec_tokens=48)
def chat(s: ProgramState, i: int) -> None:
    s += gl.user(f"person {i:02}")
    with s.assistant():
        s += "Name: " + gl.gen("name", stop="\n") + "\nAge: " + gl.gen("age", dtype=int, max_tokens=6)
        s += "\nCity: " + gl.gen("city", stop="\n") + "\n"


DOCUMENTS = [f"{i} Name: N{i}\nAge: {i + 20}\nCity: Town {i}\nEnd" for i in range(NUM)]
SAID = answers({f"person {i:02}": f"Name: N{i}\nAge: {i + 20}\nCity: Town {i}\n" for i in range(NUM)})
MODELS = {
    "text": (plain, continues(*DOCUMENTS)),
    "chat": (chat, SAID),
}


def on_threads(program: Any, rt: gl.Runtime) -> list[ProgramState]:
    def run(i: int) -> ProgramState:
        state = program.run(i=i, runtime=rt)
        state.wait()
        return state

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(run, range(NUM)))


def streamed(program: Any, rt: gl.Runtime) -> list[ProgramState]:
    def run(i: int) -> ProgramState:
        stream = program.stream(i=i, runtime=rt)
        list(stream)
        stream.state.wait()
        return stream.state

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(run, range(NUM)))


def on_a_loop(program: Any, rt: gl.Runtime) -> list[ProgramState]:
    async def run() -> list[ProgramState]:
        return await asyncio.gather(*(program.arun(i=i, runtime=rt) for i in range(NUM)))

    return asyncio.run(run())


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("way", [on_threads, on_a_loop, streamed])
def test_64_programs_give_what_each_gives_alone_and_their_bills_add_up(
    kind: str, way: Callable[[Any, gl.Runtime], list[ProgramState]]
) -> None:
    program, model = MODELS[kind]
    with Server(model) as server, gl.Runtime("m", base_url=server.url) as rt:
        alone = [dict(program.run(i=i, runtime=rt).variables) for i in range(NUM)]
        assert [one["age"] for one in alone] == [i + 20 for i in range(NUM)]
    faults = list(islice(cycle(FAULTS), 120))
    with (
        Server(model, faults=faults, seconds_per_call=0.002, constraints=()) as server,
        gl.Runtime("m", base_url=server.url, max_in_flight=16, max_retries=6) as rt,
    ):
        states = way(program, rt)
        assert [dict(state.variables) for state in states] == alone
        bills = sum((state.usage for state in states), start=RemoteUsage())
        open_yet = {"spec_tokens_used": 0, "spec_tokens_wasted": 0}  # where a program might still go on
        assert replace(bills, **open_yet) == replace(rt.usage, **open_yet)
        calls, num_prompt, num_completion = server.totals()
        assert bills.api_calls + bills.retries + bills.probe_calls == calls
        assert bills.retries == sum(fault is not None for fault in faults[:calls])
        assert (bills.prompt_tokens, bills.completion_tokens) == (num_prompt, num_completion)
        saved = {"text": 2 * NUM, "chat": 2 * NUM}[kind]
        assert (bills.calls_saved, bills.estimated) == (saved, 0)
