from __future__ import annotations

import psutil
import pytest

from graftlm.ab.measure.worker import lost_share


def test_threads_lack_the_cores_that_others_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    used = [(0.0, 2.0), (2.0, 2.0), (3.0, 1.0), (3.5, 0.5)]  # by others, by this process
    assert [lost_share(others, own) for others, own in used] == [-2.0, 0.0, 0.5, 0.75]
    assert lost_share(3.0, 0.0) == 0.0  # it wanted no core: one was idle
