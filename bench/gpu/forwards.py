"""python -m bench.gpu.forwards: whole forwards of a source tree, or of two side by side, on one GPU.

Decode steps as the CUDA graphs that the engine replays for them, and cold prefills, each again and again until clock
and power are steady. The model has the shape of Llama 3.1 8B; weights, tokens and cached K and V are random. With
--against two trees take turns, each time in a process of its own. This file and the model are the same for both: only
the modules of graftlm come from the tree.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shlex
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu.one_tree import MAX_CONTEXT, STEP_TOKENS, TINY, Run, Step, measure_here

SHAPES = "1,16,64,256,p1,p16"
LIMIT_S = 300
"""Timeout of one process, in seconds."""

CARD = {"MHz": ("mhz", "{:,.0f}"), "W": ("watts", "{:.0f}"), "J a step": ("joules", "{:.3f}")}
"""Columns of what the card did: the figure, and how it is shown."""


def check_out(ref: str, repository: Path, into: Path) -> tuple[Path, str]:
    """Return a tree's folder and name: `ref` itself if it is a folder, else that commit, extracted to `into`.

    Nothing in the repository changes. Raises ValueError if `ref` is neither.
    """
    folder = Path(ref).resolve()
    if (folder / "graftlm" / "__init__.py").is_file():
        return folder, folder.name

    def git(*arguments: str) -> bytes:
        return subprocess.run(["git", *arguments], cwd=repository, capture_output=True).stdout

    commit = git("rev-parse", "--verify", "--quiet", "--short", "--end-of-options", ref + "^{commit}").decode().strip()
    if not commit:
        raise ValueError(f"{ref} is neither a commit of this repository nor a folder with graftlm in it")
    with tarfile.open(fileobj=io.BytesIO(git("archive", "--format=tar", commit))) as archive:
        archive.extractall(into, filter="data")
    return into, ref if ref.startswith(commit) else f"{ref} ({commit})"


def measure_tree(folder: Path, options: Sequence[str], scratch: Path) -> Run:
    """Run `measure_here` in a new process with the graftlm of `folder`, and everything else of this repository.

    A process that fails or takes graftlm from elsewhere has an error "start", the end of its "log" and no figures.
    """
    from bench.harness import ROOT

    beside, out = scratch / "path", scratch / "run.json"
    out.unlink(missing_ok=True)
    beside.mkdir(exist_ok=True)
    for name in ("bench", "tests"):
        if not (beside / name).exists():
            (beside / name).symlink_to(ROOT / name)
    path = filter(None, [os.fspath(beside), os.fspath(folder), os.environ.get("PYTHONPATH")])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "bench.gpu.forwards", *options, "--out", os.fspath(out)]
    with tempfile.TemporaryFile("w+") as log:
        try:
            done = subprocess.run(command, cwd=scratch, env=environment, stdout=log, stderr=log, timeout=LIMIT_S)
            reason = f"the process ended with status {done.returncode}"
        except subprocess.TimeoutExpired:
            reason = f"the process was ended after {LIMIT_S} s"
        if out.is_file():
            found: Run = json.loads(out.read_text())
            if (code := found.pop("code")) == os.fspath(folder):
                return found
            reason = f"graftlm came from {code} instead of {folder}"
        log.seek(0)
        return {"figures": {}, "errors": {"start": reason}, "log": log.read().splitlines()[-20:]}


def compare_logits(runs: Sequence[Run], baseline: Run) -> None:
    """Store in each run the distance of its logits from those of `baseline`, and free the logits.

    to_baseline  relative distance of a sample of the logits
    same_best    part of the rows in which the same token is the likeliest
    """
    expected = {name: (np.array(its["sample"]), np.array(its["best"])) for name, its in baseline["figures"].items()}
    for run in runs:
        for name, figures in run["figures"].items():
            sample, best = np.array(figures.pop("sample")), np.array(figures.pop("best"))
            if name in expected:
                other, other_best = expected[name]
                figures["to_baseline"] = float(np.linalg.norm(sample - other) / np.linalg.norm(other))
                figures["same_best"] = float((best == other_best).mean())


def every(tree: dict[str, Any], step: Step, key: str) -> list[float]:
    """Return a figure's values over all runs of a tree that have it."""
    values = [run["figures"].get(step.name, {}).get(key) for run in tree["runs"]]
    return [value for value in values if value is not None]


def rows(steps: Sequence[Step], trees: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """Return the cells of the table, medians over runs. A ratio is a tree's speed relative to the last one."""
    for step in steps:
        baseline = every(trees[-1], step, "ms")
        for tree in trees:
            ms = every(tree, step, "ms")
            ratio = statistics.median(baseline) / statistics.median(ms) if ms and baseline else None
            cells = [step.what, step.unit] if tree is trees[0] else ["", ""]
            cells += [tree["name"], step.shown(statistics.median(ms)) if ms else ""]
            cells += ["" if ratio is None or tree is trees[-1] else f"{ratio:.3f}x", " ".join(map(step.shown, ms))]
            for key, form in CARD.values():
                values = every(tree, step, key)
                cells.append(form.format(statistics.median(values)) if values else "")
            yield cells


def notes(steps: Sequence[Step], trees: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Return lines about the largest distance of each tree's logits, and about failed or missing steps."""
    for tree in trees:
        for step in steps:
            eager, other, same = (every(tree, step, key) for key in ("to_eager", "to_baseline", "same_best"))
            said = [f"{max(eager):.0e} from the step without graphs"] if eager else []
            if other and (tree is not trees[-1] or max(other)):
                said.append(f"{max(other):.0e} from {trees[-1]['name']}, {min(same):.0%} the same token")
            said += ["no graphs"] if step.past and 0 in every(tree, step, "num_graphs") else []
            if said:
                yield f"{tree['name']}, {step.what}: logits {', '.join(said)}"
        for run in tree["runs"]:
            yield from (f"{tree['name']}, {name}: {reason}" for name, reason in run["errors"].items())
            yield from (f"    {line}" for line in run.get("log", []))
    for problem in {run.get("card") for tree in trees for run in tree["runs"]} - {None}:
        yield f"clock, power and energy are not known: {problem}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table of all steps and trees; exit status 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.forwards", description=__doc__)
    parser.add_argument("--against", metavar="REF", help="a commit, or the folder of a tree, to time beside this tree")
    parser.add_argument("--rounds", type=int, default=2, help="processes for each tree, in turns (default 2)")
    parser.add_argument("--only", default=SHAPES, help=f"rows of decode, and of prefill after a p; default {SHAPES}")
    parser.add_argument("--context", type=int, default=576, help="tokens of a decode row with its new one (576)")
    parser.add_argument("--json", type=Path, dest="output", help="write the raw figures to this file")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short times, on any device")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)  # folder of the figures of a process for one tree
    given = parser.parse_args(arguments)
    if given.rounds < 1:
        parser.error(f"--rounds is {given.rounds}; it must be at least 1")
    if not 2 * TINY <= given.context <= MAX_CONTEXT:
        parser.error(f"--context is {given.context}; it must lie in {2 * TINY} to {MAX_CONTEXT:,}")
    scale = TINY if given.tiny else 1
    try:
        steps = [Step.of(name, given.context // scale, STEP_TOKENS // scale) for name in given.only.split(",")]
    except ValueError as error:
        parser.error(f"--only: {error}")
    if given.out is not None:
        given.out.write_text(json.dumps(measure_here(steps, given.tiny)))
        return 0
    from rich.console import Console
    from rich.table import Table

    from bench.gpu.compare import gpu, no_gpu
    from bench.harness import ROOT, origin

    if not given.tiny and (reason := no_gpu()):
        parser.error(reason)
    console = Console(width=None if sys.stdout.isatty() else 150)
    options = ["--only", given.only, "--context", str(given.context), *(["--tiny"] * given.tiny)]
    trees: list[dict[str, Any]] = [{"name": "this tree", "runs": []}]
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary).resolve()
        folders = [ROOT.resolve()]
        if given.against is not None:
            try:
                folder, name = check_out(given.against, ROOT, scratch / "tree")
            except ValueError as error:
                parser.error(f"--against: {error}")
            folders.append(folder)
            trees.append({"name": name, "runs": []})
        for index in range(given.rounds):
            for folder, tree in zip(folders, trees, strict=True):
                with console.status(f"{tree['name']}, {index + 1} of {given.rounds}"):
                    tree["runs"].append(measure_tree(folder, options, scratch))
    runs = [run for tree in trees for run in tree["runs"]]
    compare_logits(runs, max(trees[-1]["runs"], key=lambda run: len(run["figures"])))
    command = ["python", "-m", "bench.gpu.forwards", *(sys.argv[1:] if arguments is None else arguments)]
    about = origin() | {"command": shlex.join(command)}
    about["machine"] = {key: about["machine"][key] for key in ("python", "processor", "cores", "memory_gib")}
    whole = about | {"gpu": gpu(), "context": given.context, "trees": trees}
    if given.output:
        given.output.write_text(json.dumps(whole, indent=1) + "\n")
    table = Table(title=whole["gpu"].get("name", "no GPU: a trial run, its times mean nothing"))
    for heading in ("step", "unit", "tree", "median", "times as fast", "each run", *CARD):
        table.add_column(heading, justify="left" if heading in ("step", "unit", "tree") else "right")
    for cells in rows(steps, trees):
        table.add_row(*cells)
    console.print(table)
    for line in notes(steps, trees):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return int(any(run["errors"] for run in runs))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # nothing is torn down: the card is free when the process is gone
