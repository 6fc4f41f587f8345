"""CPU time by package of a call to an engine that answers at once.

Each thread has its own profiler, which counts CPU time, so waiting costs nothing; built-in functions count for their
caller. The profiler reads the clock at each call, which takes longer than most functions: the results are shares, and
`python -m bench frameworks instant` has the times.
"""

from __future__ import annotations

import cProfile
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.frameworks._instant import instant_runtime
from bench.frameworks._ways import WAYS
from bench.frameworks.instant import STOCK, prompts
from bench.harness import Options, Row

ROOT = Path(__file__).parents[2]
LIBRARY = "Python's library"
ROUNDS = 3
SHOWN = 5


def run(options: Options) -> Sequence[Row]:
    work = prompts(options.choose(64, 256))
    rows = []
    with instant_runtime(options.model or "sprout") as runtime:
        runtime.load()
        for name in STOCK:
            job = WAYS[name](runtime, work)
            job()
            spent = profiled(job)
            total = sum(spent.values())
            for owner, seconds in spent.most_common(SHOWN):
                rows.append(Row("profile", f"{name}: {owner}", 100 * seconds / total, "% of CPU time"))
    return rows


def profiled(job: Callable[[], Any]) -> Counter[str]:
    """CPU seconds by package, of all threads, while `job` runs `ROUNDS` times."""
    profiles: list[cProfile.Profile] = []

    def begin(*_: Any) -> None:
        profiles.append(cProfile.Profile(time.thread_time))
        profiles[-1].enable()

    threading.setprofile(begin)
    begin()
    try:
        for _ in range(ROUNDS):
            job()
    finally:
        profiles[0].disable()
        threading.setprofile(None)  # type: ignore[arg-type]
    spent: Counter[str] = Counter()
    for profile in profiles:
        for entry in profile.getstats():
            if isinstance(entry.code, str):  # counted for its callers
                continue
            own = entry.inlinetime + sum(c.inlinetime for c in entry.calls or () if isinstance(c.code, str))
            spent[owner_of(entry.code.co_filename)] += own
    return spent


def owner_of(file: str) -> str:
    """Return the package that a source file belongs to; for this package the folder."""
    if file.startswith("<"):
        return "jinja2" if file == "<template>" else LIBRARY
    path = Path(file)
    for part in ("purelib", "platlib"):
        with suppress(ValueError):
            return path.relative_to(sysconfig.get_path(part)).parts[0]
    with suppress(ValueError):
        folder = path.relative_to(ROOT).parent
        return "/".join(part for part in folder.parts if part != "graftlm") or "graftlm"
    return LIBRARY
