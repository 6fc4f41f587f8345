"""python -m bench gpu: GraftLM beside vLLM, SGLang and plain transformers on one GPU, each in a process of its own.

The peers come as unpacked folders: FOLDER/site_vllm and FOLDER/site_sglang are put on the Python path of their process,
alone. One that is not there is said to be missing; so is one that fails, with the end of its log.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.gpu import report
from bench.gpu.limits import Decoder, Rates, limits
from bench.gpu.measure import ENGINES, TINY, TINY_VOCABULARY
from bench.gpu.model import write
from bench.gpu.workloads import Sizes
from bench.harness import ROOT, origin
from graftlm.kernels.jit import python_process

PEERS = {"vllm": "site_vllm", "sglang": "site_sglang"}
ROUNDS = {"hf": 1, "hf_batching": 1}
"""Rounds of slow engines: they take minutes, and their figures are far from the rest."""


def main(arguments: Sequence[str]) -> int:
    """Run the engines that are asked for and print one table; exit status 1 if GraftLM itself failed.

    Without any engine the table is that of the files named by --add, which needs no GPU.
    """
    parser = argparse.ArgumentParser(prog="python -m bench gpu", description=__doc__)
    parser.add_argument("--engines", default=",".join(ENGINES), help=f"with commas; default {','.join(ENGINES)}")
    parser.add_argument("--only", help="sections or figures with commas: a,b,e or a64,start,strict; default all")
    parser.add_argument("--peers", type=Path, help="folder with site_vllm and site_sglang")
    parser.add_argument(
        "--model", help="folder with config.json and tokenizer; default: llama8b_dummy beside the peers"
    )
    parser.add_argument("--add", type=Path, nargs="*", default=[], help="JSON files of earlier runs on the same card")
    parser.add_argument("--json", type=Path, dest="output", help="write the raw figures to this file")
    parser.add_argument("--markdown", action="store_true", help="print the table as docs/gpu-figures.md has it")
    parser.add_argument("--logs", type=Path, help="keep each engine's output in this folder")
    parser.add_argument("--minutes", type=float, default=8, help="for one engine, after which it is ended (default 8)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and small workloads, on any device")
    given = parser.parse_args(arguments)
    engines = [name for name in given.engines.split(",") if name]
    if unknown := [name for name in engines if name not in ENGINES]:
        parser.error(f"no engine {unknown[0]!r}; known: {', '.join(ENGINES)}")
    if given.peers is not None and not given.peers.is_dir():
        parser.error(f"--peers {given.peers}: no such folder")
    if engines and not given.tiny and (reason := no_gpu()):
        parser.error(reason)
    console = Console(width=None if sys.stdout.isatty() else 150)
    found: dict[str, Any] = {"engines": {}}
    for path in given.add:
        earlier = json.loads(path.read_text())
        found["engines"] |= earlier["engines"]
        kept = ("rates", "limits", "gpu", *(() if engines else ("commit", "at", "machine")))
        found |= {key: earlier[key] for key in kept if key in earlier}
    model = None if given.tiny or not engines else given.model or model_folder(given.peers)
    sizes = Sizes().divided(TINY, TINY_VOCABULARY) if given.tiny else Sizes()
    if model is not None:
        with console.status("how fast this card reads and multiplies"):
            rates = measured_rates()
        found["rates"] = asdict(rates)
        found["limits"] = limits(Decoder.read(model), rates, sizes)
    for name in engines:
        with console.status(f"{name}"):
            found["engines"][name] = run(name, given, model)
    found["engines"] = {name: found["engines"][name] for name in ENGINES if name in found["engines"]}
    about = origin()
    about["machine"] = {key: about["machine"][key] for key in ("python", "processor", "cores", "memory_gib")}
    whole = about | {"gpu": gpu(), "caveat": report.CAVEAT, "sizes": asdict(sizes)} | found
    if given.output:
        given.output.write_text(json.dumps(whole, indent=1) + "\n")
    if given.markdown:
        print("\n".join(report.markdown(whole)))
    else:
        report.show(whole, console)
    own = found["engines"].get("graftlm", {})
    return int("graftlm" in engines and ("start" in own.get("errors", {}) or not own.get("figures")))


def no_gpu() -> str | None:
    """Return the reason why this machine cannot measure, with the remedy; None if it has a GPU."""
    import torch

    if torch.cuda.is_available():
        return None
    built = "torch sees no CUDA device" if torch.version.cuda else "this torch was built without CUDA"
    return f"{built}; run this on a machine with an NVIDIA GPU and its driver, or try it out with --tiny"


def model_folder(peers: Path | None) -> str:
    """Return the model that came with the peers, else one made here, once."""
    if peers is not None and (peers / "llama8b_dummy" / "config.json").is_file():
        return os.fspath(peers / "llama8b_dummy")
    return os.fspath(write(ROOT / "out" / "gpu" / "llama8b"))


def measured_rates() -> Rates:
    output = python_process.run(
        ["-m", "bench.gpu.limits"], cwd=ROOT, text=True, check=True, stdout=subprocess.PIPE
    ).stdout
    return Rates(**json.loads(output.splitlines()[-1]))


def run(name: str, given: argparse.Namespace, model: str | None) -> dict[str, Any]:
    """Run one engine's process and return its figures, or the reason why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        environment = dict(os.environ)
        missing = place(name, given.peers, environment, scratch)
        if missing:
            return {"engine": name, "figures": {}, "errors": {"start": missing}}
        out = scratch / "figures.json"
        log = (given.logs or scratch) / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = ["-m", "bench.gpu.measure", name, "--out", str(out)]
        command += ["--rounds", str(ROUNDS.get(name, Sizes().rounds))]
        command += ["--tiny"] if given.tiny else ["--model", str(model)]
        command += ["--only", given.only] if given.only else []
        began = time.perf_counter()
        reason = None
        with log.open("w") as stream:
            try:
                done = python_process.run(
                    command, cwd=ROOT, env=environment, stdout=stream, stderr=stream, timeout=60 * given.minutes
                )
                reason = f"ended with status {done.returncode}" if done.returncode else None
            except subprocess.TimeoutExpired:
                reason = f"was ended after {given.minutes:g} minutes"
        found: dict[str, Any] = {"engine": name, "figures": {}, "errors": {}}
        if out.is_file():
            found = json.loads(out.read_text())
        if reason is not None:
            found["errors"].setdefault("start" if not found["figures"] else "end", reason)
            found["log"] = log.read_text(errors="replace").splitlines()[-20:]
        found["wall_s"] = time.perf_counter() - began
        return found


def place(name: str, peers: Path | None, environment: dict[str, str], scratch: Path) -> str | None:
    """Set the import path of the engine's process; return the reason if the engine is missing, else None.

    A peer sees its own tree and `bench`, and nothing else of this repository: it has folders whose names are those of
    other people's packages.
    """
    if name not in PEERS:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
        return None
    if peers is None:
        return "not measured: give its unpacked folder with --peers"
    site = (peers / PEERS[name]).resolve()
    if not site.is_dir():
        return f"not measured: there is no {PEERS[name]} in the folder of --peers"
    own = scratch / "path"
    own.mkdir()
    (own / "bench").symlink_to(ROOT / "bench")
    environment["PYTHONPATH"] = os.pathsep.join([str(site), str(own)])
    environment["PYTHONSAFEPATH"] = "1"  # the working folder stays off the path
    return None


def gpu() -> dict[str, str]:
    """Return the card, its driver and the versions of torch and CUDA."""
    import importlib.metadata as metadata

    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        name, memory, driver = subprocess.check_output(query, text=True).splitlines()[0].split(", ")
    except (OSError, subprocess.CalledProcessError, ValueError):
        return {}
    versions = {package: metadata.version(package) for package in ("torch", "triton", "transformers")}
    return {"name": name, "memory": memory, "driver": driver, **versions}
