"""python -m bench.gpu.in_process --peers FOLDER --model FOLDER: the workloads as programs, GraftLM beside vLLM offline.

Each engine runs in a process of its own, which holds the model and the program; no server is between them. The engines
take turns at each workload, with the prefix cache emptied, on the same card. FOLDER/site_vllm is on the path of vLLM's
process alone. Without --peers, GraftLM runs alone. `--model 8b` writes random weights of the shape of Llama 3.1 8B.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from bench.gpu import vllm_hook
from bench.harness import ROOT, origin
from bench.workloads._suite import eight_billion, geometric_mean, names
from graftlm.ab.statistics import ratio
from graftlm.kernels.jit import python_process

READY_S, ROUND_S = 600, 300
MEMORY_SHARE = 0.5
"""The share that GraftLM takes of the memory that vLLM and the weights leave: 12 GB of KV on a card of 80 GB."""


def serve(engine: str, model: str, connection: Connection) -> None:
    """Run requested workloads until None arrives: name and whether to warm up -> figures."""
    from graftlm import CacheConfig, Runtime
    from graftlm.plugins.manager import load

    if engine == "graftlm":
        runtime = Runtime(model, cache=CacheConfig(memory_share=MEMORY_SHARE), quiet=True)
    else:
        load().add("bench-vllm", vllm_hook)
        runtime = Runtime(model, engine=vllm_hook.NAME, quiet=True)
    runtime.load()
    gc.collect()
    gc.freeze()
    connection.send(runtime.model_name)
    while (asked := connection.recv()) is not None:
        connection.send(_run(runtime, *asked))
    runtime.close()


def _run(runtime: Any, name: str, warm_up: bool) -> dict[str, Any]:
    """Run one round of a workload; return seconds, token counts, and the error if an object is not valid JSON."""
    workload = importlib.import_module(f"bench.workloads.{name}")
    inputs = workload.warm_up() if warm_up else workload.inputs()
    runtime.clear_cache()
    runtime.reset_stats()
    began = time.perf_counter()
    try:
        workload.run_native(runtime, inputs)
        error = ""
    except json.JSONDecodeError as found:  # all objects are written before the first is read: the time is whole
        error = f"no JSON ({found})"
    wall_s = time.perf_counter() - began
    stats = runtime.stats()
    counts = {key: getattr(stats, key) for key in ("requests", "prompt_tokens", "computed_tokens", "completion_tokens")}
    return {"wall_s": wall_s, "error": error, **counts}


@contextmanager
def _started(engine: str, model: str, peers: Path | None) -> Iterator[Connection]:
    ours, theirs = Pipe()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    if engine == "vllm":
        from bench.gpu.engine_vllm import ENVIRONMENT

        environment |= ENVIRONMENT | {
            "PYTHONPATH": os.pathsep.join([str(peers / "site_vllm" if peers else ""), str(ROOT)])
        }
    code = "import sys; from bench.gpu.in_process import attend; attend(*sys.argv[1:])"
    with ours, python_process.start(
        ["-c", code, engine, model, str(theirs.fileno())],
        env=environment, pass_fds=[theirs.fileno()], stdout=2, cwd=ROOT,
    ) as process:  # fmt: skip
        theirs.close()
        try:
            _answer(ours, engine, READY_S)
            yield ours
            ours.send(None)
            process.wait(60)
        finally:
            process.kill()


def attend(engine: str, model: str, descriptor: str) -> None:
    with Connection(int(descriptor)) as connection:
        serve(engine, model, connection)


def _answer(connection: Connection, engine: str, limit_s: float) -> Any:
    if not connection.poll(limit_s):
        raise TimeoutError(f"{engine} did not answer within {limit_s:.0f} s")
    try:
        return connection.recv()
    except EOFError:
        raise RuntimeError(f"the process of {engine} has ended; its output says why") from None


def compare(
    workloads: Sequence[str], engines: Sequence[str], model: str, peers: Path | None, rounds: int
) -> list[dict[str, Any]]:
    """-> rows, one a workload: wall times of each engine's rounds, in turn."""
    rows = []
    with ExitStack() as stack:
        open_engines = {name: stack.enter_context(_started(name, model, peers)) for name in engines}
        for workload in workloads:
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
            for i in range(-1, rounds):  # the first is to warm up: kernels for these shapes are compiled
                for name, connection in open_engines.items():
                    if i < 0:
                        connection.send((workload, True))
                        _answer(connection, name, ROUND_S)
                    connection.send((workload, False))
                    figures = _answer(connection, name, ROUND_S)
                    if i >= 0:
                        found[name].append(figures)
            rows.append({"workload": workload, "engines": found})
            print(_line(rows[-1]), flush=True)
    return rows


def _walls(row: dict[str, Any], engine: str) -> list[float]:
    return [one["wall_s"] for one in row["engines"][engine]]


def _line(row: dict[str, Any]) -> str:
    parts = [row["workload"].ljust(20)]
    for name, found in row["engines"].items():
        tokens = median(one["completion_tokens"] for one in found)
        failed = f", {found[-1]['error']}" if found[-1]["error"] else ""
        parts.append(f"{name} {median(_walls(row, name)):.3f} s, {tokens:,.0f} new tokens{failed}")
    if len(row["engines"]) == 2:
        parts.append(str(ratio(_walls(row, "vllm"), _walls(row, "graftlm"))))
    return "; ".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.in_process", description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", help=f"which of {', '.join(names())}; all if none is named")
    parser.add_argument("--peers", type=Path, help="folder with site_vllm")
    parser.add_argument("--model", required=True, help="a folder, or 8b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, dest="output", help="write the figures")
    given = parser.parse_args(arguments)
    if unknown := set(given.workloads) - set(names()):
        parser.error(f"no workload {sorted(unknown)[0]!r}; known: {', '.join(names())}")
    if given.peers is not None and not given.peers.joinpath("site_vllm").is_dir():
        parser.error(f"--peers {given.peers}: no site_vllm there")
    engines = ["graftlm"] if given.peers is None else ["vllm", "graftlm"]
    with tempfile.TemporaryDirectory() as folder:
        model = eight_billion(Path(folder)) if given.model == "8b" else given.model
        rows = compare(given.workloads or names(), engines, model, given.peers, given.rounds)
    if len(engines) == 2:
        values = [ratio(_walls(row, "vllm"), _walls(row, "graftlm")).value for row in rows]
        print(f"geometric mean {geometric_mean(values):.2f}x, smallest {min(values):.2f}x")
    if given.output:
        given.output.write_text(json.dumps(origin() | {"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
