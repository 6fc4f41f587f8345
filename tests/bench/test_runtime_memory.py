from __future__ import annotations

from bench.harness import Options
from bench.runtime import memory


def test_a_process_that_serves_takes_little_more_than_weights_and_pool() -> None:
    """The floor is 1.10, which `python -m bench runtime memory` shows; this one holds whatever else runs.

    On a cold cache the process may have imported numba by then, for the loops of grammars: some 35 MiB.
    """
    (row,) = memory.run(Options(quick=True))
    assert row.ratio is not None
    assert 0.9 < row.ratio < 1.35
