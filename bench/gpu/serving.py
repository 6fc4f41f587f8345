"""python -m bench.gpu.serving --peers FOLDER: `graftlm serve` beside `vllm serve` on one GPU.

Both serve the same folder of random bfloat16 weights. 256 clients at a time send a text of 512 tokens and stream 128
back; vLLM's own load generator, `vllm bench serve`, is these clients for both servers. FOLDER/site_vllm is on the path
of vLLM's processes alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.gpu.engine_vllm import ENVIRONMENT
from bench.gpu.model import random_weights, write
from bench.harness import ROOT
from graftlm.kernels.jit import python_process

NAME = "served"
MAX_LEN = 16_384
READY_S = 400.0
FIGURES = {
    "output_throughput": "tokens/s",
    "median_ttft_ms": "first token p50, ms",
    "p99_ttft_ms": "first token p99, ms",
    "median_itl_ms": "between tokens p50, ms",
    "p99_itl_ms": "between tokens p99, ms",
    "completed": "requests answered",
}


def servers(model: Path, port: int, options: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the command of each server, after the interpreter. options: NAME=VALUE, of GraftLM's runtime"""
    common = [str(model), "--port", str(port), "--served-model-name", NAME]
    limits = ["--max-model-len", str(MAX_LEN), "--max-num-seqs", "256", "--gpu-memory-utilization", "0.85"]
    own = [part for option in (f"max_model_len={MAX_LEN}", *options) for part in ("--option", option)]
    return {
        "graftlm": ["-m", "graftlm", "serve", *common, *own],
        "vllm": ["-m", "vllm.entrypoints.cli.main", "serve", *common, "--dtype", "bfloat16", *limits],
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def serving(command: Sequence[str], environment: dict[str, str], log: Path, url: str) -> Iterator[float]:
    """Run a server at `url` while the block runs. -> seconds from its start until it was ready

    Raises RuntimeError, with the end of its log, if it ends or is not ready after READY_S seconds.
    """
    import httpx

    began = time.monotonic()
    with log.open("wb") as output:
        process = python_process.start(
            command, env=environment, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        )
    try:
        while True:
            try:
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            if process.poll() is not None or time.monotonic() - began > READY_S:
                raise RuntimeError(f"{command[1]} is not ready: {log.read_text()[-3000:]}")
            time.sleep(0.2)
        yield time.monotonic() - began
    finally:
        with suppress(ProcessLookupError):  # it has ended, and with it all that it started
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def load(url: str, given: argparse.Namespace, environment: dict[str, str], seed: int, count: int) -> dict[str, Any]:
    """Send `count` requests by the load generator. -> its result: throughput in tokens/s, latencies in ms

    Raises RuntimeError, with the end of its output, if it writes no result.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "backend": "openai", "base-url": url, "endpoint": "/v1/completions", "model": NAME,
            "tokenizer": given.model,
            "dataset-name": "random", "random-input-len": given.input, "random-output-len": given.output_tokens,
            "num-prompts": count, "max-concurrency": given.clients, "seed": seed, "temperature": 0,
            "percentile-metrics": "ttft,tpot,itl", "metric-percentiles": "50,99",
            "result-dir": folder, "result-filename": "result.json",
        }  # fmt: skip
        command = ["-m", "vllm.entrypoints.cli.main", "bench", "serve"]
        command += [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        command += ["--ignore-eos", "--save-result", "--disable-tqdm"]
        done = python_process.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        result = Path(folder) / "result.json"
        if not result.exists():
            raise RuntimeError(
                f"the load generator ended with {done.returncode}: {(done.stdout + done.stderr)[-3000:]}"
            )
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def measure(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Start one server, load it, and end it. -> the figures of its best round"""
    peers = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([str(given.peers / "site_vllm"), str(ROOT)])}
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = peers if name == "vllm" else dict(os.environ)
    log = given.logs / f"{name}.log"
    with serving(servers(given.model, port, given.option)[name], environment, log, url) as ready_s:
        load(url, given, peers, 1, given.clients)
        rounds = [load(url, given, peers, seed, given.requests) for seed in range(2, 2 + given.rounds)]
    for found in rounds:
        print(name, {told: found[key] for key, told in FIGURES.items()}, flush=True)
    best = max(rounds, key=lambda found: float(found["output_throughput"]))
    figures = {told: round(float(best[key]), 2) for key, told in FIGURES.items()}
    failed = re.findall(r"^.*(?:ERROR|Traceback).*$", log.read_text(errors="replace"), re.MULTILINE)
    return figures | {"ready_s": round(ready_s, 1), "errors": failed[:5]}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.serving", description=__doc__)
    parser.add_argument("--peers", type=Path, required=True, help="folder with site_vllm")
    parser.add_argument("--model", type=Path, default=ROOT / "out" / "gpu" / "llama8b", help="folder; made if missing")
    parser.add_argument("--servers", default="graftlm,vllm", help="with commas")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--requests", type=int, default=1024, help="in a round")
    parser.add_argument("--input", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE, of GraftLM's runtime")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()), help="where the servers' logs go")
    parser.add_argument("--json", type=Path, dest="output", help="write the figures to this file")
    parser.add_argument("--weights", action="store_true", help="only make the model's folder")
    given = parser.parse_args(arguments)
    if not given.peers.joinpath("site_vllm").is_dir():
        parser.error(f"--peers {given.peers}: no site_vllm there")
    if given.weights:
        random_weights(str(write(given.model)))[0].save_pretrained(given.model)
        return 0
    if not list(given.model.glob("*.safetensors")):
        made = ["-m", "bench.gpu.serving", "--weights", "--peers", str(given.peers)]
        python_process.run([*made, "--model", str(given.model)], cwd=ROOT, check=True)
    found: dict[str, Any] = {}
    for name in given.servers.split(","):
        try:
            found[name] = measure(name, given)
        except RuntimeError as error:
            found[name] = {"failed": str(error)}
        print(name, found[name], flush=True)
        if given.output:
            given.output.write_text(json.dumps(found, indent=1) + "\n")
    return int("failed" in found.get("graftlm", {}))


if __name__ == "__main__":
    raise SystemExit(main())
