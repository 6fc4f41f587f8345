"""Where there is a GPU the kernels run on it; without one in Triton's interpreter, and tests marked `gpu` are skipped.

Each test draws the same in every run, and other texts with GRAFTLM_TEST_DRAWS=1, 2, ...: see `same_draws`.
`python -m pytest -m gpu` runs what needs a GPU and looks only where such tests are, so that it needs no more than
PyTorch, transformers, Triton and pytest. `make test` runs the tests in several processes, a file in one of them.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from graftlm.machine import num_cores

WORKER = os.environ.get("PYTEST_XDIST_WORKER")
if WORKER is not None:
    # Before torch and numba are imported, and for processes that tests start. Workers divide the cores among them, and
    # share no cache: numba may give two functions that are compiled at the same time the same file.
    caches = Path(__file__).parents[1] / ".pytest_cache" / WORKER
    num_workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_workers)))
    os.environ.setdefault("NUMBA_CACHE_DIR", str(caches / "numba"))
    os.environ.setdefault("DSPY_CACHEDIR", str(caches / "dspy"))

import torch  # noqa: E402

HAS_GPU = torch.cuda.is_available()
GPU_FOLDERS = ("gpu", "kernels")
KERNEL_TESTS = Path(__file__).parent / "kernels"

if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # it must be chosen before a kernel is imported
    with suppress(ModuleNotFoundError):  # Triton is for Linux alone
        from tests.triton_interpreter import quicken

        quicken()
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic products ask for

with suppress(ModuleNotFoundError):  # GPU tests run without it
    from hypothesis import HealthCheck, settings

    # An example may take any time: beside other processes a deadline or a health check of seconds fails by chance.
    settings.register_profile("any-machine", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any-machine")


def pytest_configure(config: pytest.Config) -> None:
    # Before Python 3.14 the main thread's first asyncio.get_event_loop() makes a loop, which frameworks call and nobody
    # closes: it would fail a later test, of another file, as an unclosed one. After this it raises, as elsewhere.
    asyncio.set_event_loop(None)
    if hasattr(config.option, "benchmark_disable"):  # a plugin that LangChain's tests bring: nothing is timed here
        config.option.benchmark_disable = True


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    inside = collection_path.relative_to(Path(__file__).parent).parts
    other = len(inside) > 0 and inside[0] not in GPU_FOLDERS
    return True if other and config.getoption("markexpr") == "gpu" else None


LONGEST = "test_other_cards.py"
"""The file whose two tests compile for two minutes. It runs first, so that both processes end together."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name != LONGEST)
    for item in items:
        if HAS_GPU and item.path.is_relative_to(KERNEL_TESTS):
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") is None:
            continue
        if HAS_GPU:  # its packages may be older or newer than those that are pinned for development
            item.add_marker(pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning"))
        else:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """What all tests have imported lives on: a full collection, which takes half a second then, leaves it out."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


_seeds = random.Random()


@pytest.fixture(scope="session", autouse=True)
def one_source_of_seeds() -> Iterator[None]:
    """Runtimes of this process that have no seed of their own take those of their requests from `_seeds`."""
    from graftlm.core.scheduling import request_tracker

    with pytest.MonkeyPatch.context() as patched:
        seeded = SimpleNamespace(Random=lambda seed: _seeds if seed is None else random.Random(seed))
        patched.setattr(request_tracker, "random", seeded)
        yield


@pytest.fixture(autouse=True)
def same_draws(request: pytest.FixtureRequest) -> None:
    """Requests without a seed draw the same in every run of a test, alone or not; two of them draw differently.

    So a text that breaks an assertion breaks it always. What processes that a test starts draw is not settled here.
    """
    _seeds.seed(os.environ.get("GRAFTLM_TEST_DRAWS", "") + request.node.nodeid)
