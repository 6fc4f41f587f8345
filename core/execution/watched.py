"""WatchedRunner: the paged lane on a CPU, whose steps tell whether other work takes the cores."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from graftlm.core.engine_builder import Runner
    from graftlm.core.step_plan import StepPlan
    from graftlm.kernels.cpu.cores import CoreContention


class WatchedRunner:
    """Runs steps by another runner and counts their seconds."""

    def __init__(self, runner: Runner, contention: CoreContention) -> None:
        self._runner = runner
        self._contention = contention

    def forward(self, plan: StepPlan) -> torch.Tensor:
        started_s = time.perf_counter()
        logits = self._runner.forward(plan)
        self._contention.add(time.perf_counter() - started_s)
        return logits
