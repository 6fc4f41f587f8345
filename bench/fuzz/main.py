"""python -m bench fuzz [TARGET ...] [--seconds N]: coverage-guided fuzzing of the readers of untrusted bytes.

Needs `pip install graftlm[fuzz]`. An input that fails is written to the working folder as crash-*. Inputs that reach
new code are kept in the cache folder, and tried first the next time, after those of bench/fuzz/corpus/. `--keep`
writes the shortest of them to bench/fuzz/corpus/ afterwards.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.fuzz.mutation import json_mutator

NAMES = ("schema", "regex", "lark", "body", "endpoint_stream", "gguf", "safetensors", "cache_file", "tier_file")
SLOWEST_S, HANGS_S, MOST_MB, MOST_BYTES = 20, 600, 3000, 2048
"""Limits of one input: seconds of processor time, seconds by the clock, memory of the process, length."""
PROCESS_S = 300
"""Seconds of one process: with mutations in Python, atheris 3 keeps about 2 KB of each input for ever."""
CORPUS = Path(__file__).with_name("corpus")
KEPT_BYTES = 40_000
"""Size of one file of the corpus, at most; the shortest inputs stay."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench fuzz")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--seconds", type=int, default=60, help="of each target")
    parser.add_argument("--keep", action="store_true", help="write the shortest inputs to bench/fuzz/corpus/")
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.targets) - set(NAMES)):
        parser.error(f"no target {unknown[0]!r}; targets are {', '.join(NAMES)}")
    failed = []
    for name in given.targets or NAMES:
        print(f"{name}:", flush=True)
        if not _fuzz_in_processes(name, given.seconds):
            failed.append(name)
        elif given.keep:
            _write_corpus(name)
    print(f"failed: {', '.join(failed)}" if failed else "no target failed")
    return 1 if failed else 0


def _fuzz_in_processes(name: str, seconds: float) -> bool:
    """Fuzz a target in one process after the other, each from the inputs of those before. -> False if one failed"""
    from graftlm.kernels.jit import python_process

    end_s = time.monotonic() + seconds
    while (left_s := end_s - time.monotonic()) > 0:
        command = ["-m", "bench.fuzz.main", name, f"-max_total_time={min(PROCESS_S, math.ceil(left_s))}"]
        if python_process.run([*command, "-print_final_stats=1"]).returncode:
            return False
    return True


def corpus(name: str) -> list[bytes]:
    """Return the inputs of a target in bench/fuzz/corpus/: a JSON text of one input a line, its bytes as Latin-1."""
    path = CORPUS / f"{name}.txt"
    return [json.loads(line).encode("latin-1") for line in path.read_text().splitlines()] if path.exists() else []


def _write_corpus(name: str) -> None:
    found = sorted({*corpus(name), *(path.read_bytes() for path in _kept(name).iterdir())}, key=lambda x: (len(x), x))
    lines, size = [], 0
    for data in found:
        line = json.dumps(data.decode("latin-1"))
        size += len(line) + 1
        if size > KEPT_BYTES:
            break
        lines.append(line)
    CORPUS.mkdir(exist_ok=True)
    (CORPUS / f"{name}.txt").write_text("".join(f"{line}\n" for line in sorted(lines)))
    print(f"{name}: {len(lines)} of {len(found)} inputs kept")


def _kept(name: str) -> Path:
    """Return the folder of inputs that reached new code, of a target."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "graftlm-fuzz" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _fuzz(name: str, options: Sequence[str]) -> None:
    """Fuzz one target and end the process: libFuzzer does not return. options: of libFuzzer"""
    import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]

    with atheris.instrument_imports(include=["graftlm"]):
        from bench.fuzz.targets import TARGETS
    target = TARGETS[name]
    check = _bounded(target.check)
    for seed in target.seeds:
        check(seed)  # opens what is opened once: its time is no input's
    more: dict[str, Any] = {}
    if target.is_json:
        examples = [json.loads(seed) for seed in target.seeds]
        more["custom_mutator"] = json_mutator(examples, lambda data, most: bytes(atheris.Mutate(data, most)))
    with tempfile.TemporaryDirectory() as folder:
        seeds, words = Path(folder) / "seeds", Path(folder) / "words"
        seeds.mkdir()
        for i, seed in enumerate((*target.seeds, *corpus(name))):
            (seeds / f"seed{i}").write_bytes(seed)
        words.write_text("".join('"' + "".join(f"\\x{byte:02x}" for byte in w.encode()) + '"\n' for w in target.words))
        own = [f"-timeout={HANGS_S}", f"-rss_limit_mb={MOST_MB}", f"-max_len={MOST_BYTES}"]
        own += [f"-dict={words}"] if target.words else []
        atheris.Setup(["fuzz", *own, *options, str(_kept(name)), str(seeds)], check, **more)
        atheris.Fuzz()


def _bounded(check: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """Return a check that fails if it takes more than SLOWEST_S of processor time."""

    def bounded(data: bytes) -> None:
        began_s = time.process_time()
        check(data)
        took_s = time.process_time() - began_s
        assert took_s < SLOWEST_S, f"an input of {len(data)} bytes took {took_s:.0f} s"

    return bounded


if __name__ == "__main__":
    _fuzz(sys.argv[1], sys.argv[2:])
