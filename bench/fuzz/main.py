"""python -m bench fuzz [TARGET ...] [--seconds N]: coverage-guided fuzzing of the readers of untrusted bytes.

Needs `pip install graftlm[fuzz]`. An input that fails is written to the working folder as crash-*. Inputs that reach
new code are kept in the cache folder, and tried first the next time.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from graftlm.kernels.jit import python_process

NAMES = ("schema", "regex", "lark", "body", "endpoint_stream", "gguf", "safetensors", "cache_file")
SLOWEST_S, MOST_MB, MOST_BYTES = 20, 3000, 2048
"""Limits of one input: seconds, memory of the process, length."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench fuzz")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--seconds", type=int, default=60, help="of each target")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.targets) - set(NAMES)):
        parser.error(f"no target {unknown[0]!r}; targets are {', '.join(NAMES)}")
    if given.one:
        _fuzz(given.targets[0], given.seconds)
    failed = []
    for name in given.targets or NAMES:
        command = ["-m", "bench", "fuzz", name, "--seconds", str(given.seconds), "--one"]
        failed += [name] if python_process.run(command).returncode else []
    print(f"failed: {', '.join(failed)}" if failed else "no target failed")
    return 1 if failed else 0


def _fuzz(name: str, seconds: int) -> None:
    """Fuzz one target and end the process: libFuzzer does not return."""
    import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]

    with atheris.instrument_imports(include=["graftlm"]):
        from bench.fuzz.targets import TARGETS
    target = TARGETS[name]
    kept = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "graftlm-fuzz" / name
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for i, seed in enumerate(target.seeds):
            (Path(folder) / f"seed{i}").write_bytes(seed)
        limits = (f"-max_total_time={seconds}", f"-timeout={SLOWEST_S}", f"-rss_limit_mb={MOST_MB}")
        options = ("fuzz", *limits, f"-max_len={MOST_BYTES}", "-print_final_stats=1", str(kept), folder)
        atheris.Setup(list(options), target.check)
        atheris.Fuzz()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
