"""Object code of the CPU loops, and the archives of it that come with the package for common kinds of processors.

    kernels/cpu/objects/x86-64-v3.zip   one archive for each kind, made by kernels/cpu/compiled/ahead_of_time.py
    kernels/cpu/objects/x86-64-v3-grammar.zip   the same with the loops of a package, graftlm.core.grammar
      sources           a digest of the sources that it was made from
      norm-0.names      the loop's symbol, and the names it refers to
      norm-0.o          relocatable object code

Object code refers to functions of C by name and does not use layouts of Python or numba, hence does not depend on their
versions. It is valid if the processor has every instruction of its kind and the loops' sources are unchanged.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import os
import platform
import sys
import zipfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from graftlm.kernels.cpu.element_format import ElementFormat
from graftlm.kernels.cpu.panel_kind import Arithmetic

FOLDER = Path(__file__).parents[1] / "objects"
"""The archives; a clone has none before they are made."""

SOURCES = "sources"


class MachineCode(NamedTuple):
    """Relocatable object code.

    symbol  the name of its function `void (call *)`
    needs   names to which it refers
    """

    symbol: str
    code: bytes
    needs: tuple[str, ...] = ()


Wanted = tuple[str, tuple[int, ...]]
"""A loop and its compile-time arguments."""


class Target(NamedTuple):
    """A kind of processor with object code.

    name      of the archive
    machine   the result of platform.machine(), on Linux
    cpu       LLVM's name of the processor
    features  required instructions, by LLVM's names
    only      tests whether a loop differs from that of the preceding kind in TARGETS; None: all loops do
    """

    name: str
    machine: str
    cpu: str
    features: tuple[str, ...]
    only: Callable[[Wanted], bool] | None = None

    def has(self, wanted: Wanted) -> bool:
        """Return True if a loop belongs to the archive: the instructions suffice for it, and `only` admits it."""
        name, arguments = wanted
        if name == "quantised_panel":
            alternatives = Arithmetic(arguments[0]).features(arguments[1])
            if not any(needed.issubset(self.features) for needed in alternatives):
                return False
        return self.only is None or self.only(wanted)

    @property
    def triple(self) -> str:
        return f"{self.machine}-unknown-linux-gnu"

    def fits(self) -> bool:
        """Return True if this process can run the kind's code."""
        if not sys.platform.startswith("linux") or platform.machine() != self.machine:
            return False
        return processor()[1].issuperset(self.features)


def _multiplies_bfloat16(wanted: Wanted) -> bool:
    """Return True if a loop multiplies bfloat16 on processors that support it."""
    name, arguments = wanted
    if name == "quantised_panel":
        return arguments[0] == Arithmetic.DOTS
    place = {"matmul": 0, "prefill_attention": 3}.get(name)
    return place is not None and arguments[place] == ElementFormat.BFLOAT16


def _multiplies_codes(wanted: Wanted) -> bool:
    """Return True if a loop multiplies codes by AMX tiles on processors that have them."""
    return wanted[0] == "quantised_panel" and wanted[1][0] == Arithmetic.DOTS


def _multiplies_int8(wanted: Wanted) -> bool:
    """Return True if a loop multiplies int8 by the instructions of processors that have them."""
    return wanted[0] == "quantised_panel" and wanted[1][0] == Arithmetic.INT8


_V3 = ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "popcnt", "sse4.2")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
TARGETS = (
    Target("x86-64-v3", "x86_64", "x86-64-v3", _V3),
    Target("x86-64-v4", "x86_64", "x86-64-v4", _V4),
    Target("x86-64-v4-vnni", "x86_64", "x86-64-v4", (*_V4, "avx512vnni"), _multiplies_int8),
    Target("x86-64-v4-bf16", "x86_64", "x86-64-v4", (*_V4, "avx512bf16"), _multiplies_bfloat16),
    Target("x86-64-v4-amx", "x86_64", "x86-64-v4", (*_V4, "avx512bf16", "amx-tile", "amx-bf16"), _multiplies_codes),
    Target("aarch64", "aarch64", "generic", ("neon",)),
)
"""The kinds, for each machine from the oldest to the newest: a newer processor runs the code of all older kinds."""


_packages: dict[str, tuple[Path, ...]] = {}


def register(package: str, paths: Sequence[Path]) -> None:
    """Add the loops of a Python package: its loops are named by module and function, and have archives of their own.

    paths  the files that their object code is made from
    """
    _packages[package] = tuple(paths)


def package_of(wanted: Wanted) -> str:
    """Return the registered package of a loop; "" for the CPU kernels. Imports the module of a package's loop."""
    module, _, _ = wanted[0].rpartition(".")
    if module:
        importlib.import_module(module)
    return next((package for package in _packages if module.startswith(f"{package}.")), "")


def archive_path(target: Target, package: str = "") -> Path:
    """Return the path of the archive of a kind of processor."""
    name = package.rpartition(".")[2]
    return FOLDER / f"{target.name}{'-' if name else ''}{name}.zip"


def loop_name(wanted: Wanted) -> str:
    """Return a loop's name in files."""
    name, arguments = wanted
    return "-".join([name, *(str(int(value)) for value in arguments)])


@functools.cache
def sources(package: str = "") -> str:
    """Return a digest of the files that object code is made from: the loops, and the code that they are called with."""
    cpu, digest = Path(__file__).parents[1], hashlib.sha256()
    shared = (cpu / name for name in ("__init__.py", "calls.py", "element_format.py", "panel_kind.py"))
    own = (*sorted(cpu.glob("loops/*.py")), *shared)
    for path in (*_packages[package], cpu / "compiled/array_functions.py") if package else own:
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def processor() -> tuple[str, frozenset[str]]:
    """LLVM's name of the processor that loops are compiled for, and its features.

    The default is this machine; NUMBA_CPU_NAME and NUMBA_CPU_FEATURES name another processor.
    """
    name, chosen = os.environ.get("NUMBA_CPU_NAME"), os.environ.get("NUMBA_CPU_FEATURES")
    if name is not None and chosen is not None:
        return name, frozenset(part[1:] for part in chosen.split(",") if part.startswith("+"))
    import llvmlite.binding as llvm

    features: frozenset[str] = frozenset()
    with suppress(RuntimeError):  # not known for this kind of processor
        features = frozenset(feature for feature, has in llvm.get_host_cpu_features().items() if has)
    if "amx-tile" in features and not _may_use_tiles():
        features = frozenset(feature for feature in features if not feature.startswith("amx-"))
    return name or llvm.get_host_cpu_name() or platform.processor(), features


def _may_use_tiles() -> bool:
    """Ask Linux for this process's use of AMX tiles. -> whether it may"""
    if not sys.platform.startswith("linux"):
        return False
    arch_prctl, request, tile_data = 158, 0x1023, 18  # ARCH_REQ_XCOMP_PERM, of the tiles' state
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) == 0)


def packaged(wanted: Wanted) -> MachineCode | None:
    """Return a loop's object code from the package; None if there is none for this processor, or it is damaged."""
    name, package = loop_name(wanted), package_of(wanted)
    for path in _archives(package):
        if name in _names(path, package):
            with suppress(OSError, KeyError, zipfile.BadZipFile, zlib.error), zipfile.ZipFile(path) as archive:
                symbol, *needs = archive.read(f"{name}.names").decode().split("\n")
                return MachineCode(symbol, archive.read(f"{name}.o"), tuple(needs))
    return None


def is_packaged(wanted: Wanted) -> bool:
    """Return True if the package has this loop for this processor."""
    package = package_of(wanted)
    return any(loop_name(wanted) in _names(path, package) for path in _archives(package))


def why_none() -> str | None:
    """Why the package has no object code that this process can use; None if it has some."""
    fitting = _archives()
    if any(_names(path) for path in fitting):
        return None
    if fitting:
        return "that in the package is damaged, or was made from other sources"
    others = ", ".join(sorted(path.stem for path in FOLDER.glob("*.zip")))
    return f"the package has it for {others}" if others else "the package has none"


def write_archive(path: Path, loops: dict[str, MachineCode], package: str = "") -> None:
    """Write the archive of one kind of processor, in one piece; the same loops always give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    building = path.with_name(f".{path.name}-{os.getpid()}")
    with zipfile.ZipFile(building, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        parts = {SOURCES: sources(package).encode()}
        for name, loop in sorted(loops.items()):
            parts |= {f"{name}.names": "\n".join([loop.symbol, *loop.needs]).encode(), f"{name}.o": loop.code}
        for name, content in parts.items():
            entry = zipfile.ZipInfo(name)  # of a fixed date
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    building.replace(path)


@functools.cache
def _archives(package: str = "") -> tuple[Path, ...]:
    """Return the archives whose code this processor runs, the newest kind first."""
    found = [(target, archive_path(target, package)) for target in TARGETS]
    return tuple(path for target, path in reversed(found) if path.exists() and target.fits())


@functools.cache
def _names(path: Path, package: str = "") -> frozenset[str]:
    """Return the loops in an archive; none if it is damaged, or made from other sources."""
    with suppress(OSError, KeyError, zipfile.BadZipFile, zlib.error), zipfile.ZipFile(path) as archive:
        if archive.read(SOURCES).decode() == sources(package):
            return frozenset(name.removesuffix(".o") for name in archive.namelist() if name.endswith(".o"))
    return frozenset()
