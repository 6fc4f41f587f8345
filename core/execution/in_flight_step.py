"""InFlightStep: a step between its launch and the commit of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from graftlm.core.execution.step_plan import StepPlan
    from graftlm.core.sampling.step_sampler import PendingTokens


@dataclass(eq=False)
class InFlightStep:
    """A step that was launched and whose results have not been committed.

    pending  the tokens that the device samples; None until it is asked to, and where the host samples
    """

    plan: StepPlan
    logits: torch.Tensor
    pending: PendingTokens | None

    @property
    def constrained(self) -> bool:
        return any(row.sequence.constrained for row in self.plan.rows)
