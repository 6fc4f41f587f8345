from __future__ import annotations

import psutil

from graftlm.machine import busy_core_seconds, cores_left, idle_cores, num_cores


def test_the_machine_has_used_at_least_what_this_process_has() -> None:
    before, own = busy_core_seconds(), psutil.Process().cpu_times().user
    while psutil.Process().cpu_times().user < own + 0.2:
        pass
    assert busy_core_seconds() - before >= 0.15


def test_engines_get_the_cores_that_other_programs_leave() -> None:
    # of 2 own cores on a machine with 2, 2, 2 and 8, of which so many are used
    assert [cores_left(2, cores, busy) for cores, busy in ((2, 0.2), (2, 0.9), (2, 2.0), (8, 6.1))] == [2, 1, 1, 2]
    assert 1 <= idle_cores(seconds=0.01) <= num_cores()
