"""Make the object code of the package: python -m graftlm.kernels.cpu.compiled.ahead_of_time [all | native] [--folder F]

native  for processors like this machine's, and the attention of the embedded model only: seconds. Loops of other models
        are compiled at their first use.
all     for each kind of processor (object_code.py), the attention of many models and the quantised weights of common
        files: minutes, for a wheel to publish

Compilation uses one process a core and copies loops that the cache folder has. Any machine can make the code of all
kinds.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from graftlm.kernels.cpu.compiled import loop_cache, object_code
from graftlm.kernels.cpu.compiled.loop_cache import LoopShapes
from graftlm.kernels.cpu.compiled.object_code import TARGETS, MachineCode, Target, Wanted
from graftlm.kernels.cpu.element_format import ElementFormat
from graftlm.kernels.jit import python_process

SHAPES = (
    *((group, 64) for group in (1, 2, 3, 4, 7, 8)),
    *((group, 128) for group in (1, 2, 3, 4, 6, 7, 8)),
    *((group, 256) for group in (2, 4)),
    (1, 80),
    (1, 96),
)
"""Attention shapes of many models: (query heads per KV head, dimensions of a head)."""

EMBEDDED = ((1, 64),)
"""The attention shape of the embedded model."""


def wanted_loops(shapes: Sequence[tuple[int, int]]) -> list[Wanted]:
    """Every loop of models with these attention shapes, in each format, once."""
    every = (
        wanted
        for element in ElementFormat
        for group, dim in shapes
        for wanted in loop_cache.loops_of(LoopShapes(group, dim, element, capped=False))
    )
    return list(dict.fromkeys(every))


def make(folder: Path, targets: Sequence[Target], wanted: Sequence[Wanted]) -> list[Path]:
    """Compile `wanted` for each of `targets`. -> the archives in `folder`

    Raises CalledProcessError if a loop cannot be compiled.
    """
    num_processes = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(num_processes) as processes:
        parts: list[tuple[Target, list[Wanted], Path]] = []
        for target in targets:
            here = Path(temporary) / target.name
            here.mkdir()
            loops = [one for one in wanted if target.has(one)]
            parts += [(target, part, here) for i in range(num_processes) if (part := loops[i::num_processes])]
        list(processes.map(lambda part: _compile_in_a_process(*part), parts))
        made = []
        for target in targets:
            for package in dict.fromkeys(map(object_code.package_of, wanted)):
                names = {object_code.loop_name(one) for one in wanted if object_code.package_of(one) == package}
                paths = [path for path in (Path(temporary) / target.name).glob("*.o") if path.stem in names]
                if paths:
                    made.append(folder / object_code.archive_path(target, package).name)
                    object_code.write_archive(made[-1], {path.stem: _read(path) for path in paths}, package)
    return made


def native_targets() -> list[Target]:
    """Return the kinds with the fastest code for this machine: the newest complete kind, and newer partial ones."""
    fitting = [target for target in TARGETS if target.fits()]
    newest = max((i for i, target in enumerate(fitting) if target.only is None), default=0)
    return fitting[newest:]


def _compile_in_a_process(target: Target, wanted: list[Wanted], folder: Path) -> None:
    """Compile in a separate process, because numba compiles for one processor in the life of a process."""
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": target.cpu,
        "NUMBA_CPU_FEATURES": ",".join(f"+{feature}" for feature in target.features),
    }
    module = __spec__.name if __spec__ is not None else __name__
    code = f"from {module} import compile_into; compile_into({str(folder)!r}, {target.triple!r}, {wanted!r})"
    process = python_process.start(("-c", code), env=environment)
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, process.args)


def compile_into(folder: str, triple: str, wanted: list[Wanted]) -> None:
    """Compile loops for `triple` and the processor that the environment names, a file each."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    for name in ("get_process_triple", "get_default_triple"):  # numba reads both
        setattr(llvm, name, lambda: triple)
    for one in wanted:
        symbol, code, needs = loop_cache.kept(*one) or loop_cache.compile_one(*one)
        path = Path(folder, f"{object_code.loop_name(one)}.o")
        path.with_suffix(".names").write_text("\n".join([symbol, *needs]))
        path.write_bytes(code)


def _read(path: Path) -> MachineCode:
    symbol, *needs = path.with_suffix(".names").read_text().split("\n")
    return MachineCode(symbol, path.read_bytes(), tuple(needs))


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name if __spec__ else __name__}")
    parser.add_argument("kinds", nargs="?", choices=("all", "native"), default="native", help="kinds of processors")
    parser.add_argument("--folder", type=Path, default=object_code.FOLDER, help="where the archives go")
    parser.add_argument("--package", action="append", default=[], help="a module whose function `wanted` lists loops")
    options = parser.parse_args()
    every = options.kinds == "all"
    targets, shapes = (list(TARGETS), SHAPES) if every else (native_targets(), EMBEDDED)
    wanted = wanted_loops(shapes) + (loop_cache.quantised_loops() if every else [])
    for name in options.package:
        wanted += importlib.import_module(name).wanted()
    for path in make(options.folder, targets, wanted):
        print(path)


if __name__ == "__main__":
    main()
