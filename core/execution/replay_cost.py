"""ReplayCost: whether a mixed step is done sooner as rows of a captured graph than launched kernel by kernel.

As rows, tokens of one sequence each read what lies before them, which costs the device time; nothing is launched, which
costs the host time. Both grow with the number of layers, so costs are those of one layer, in operations: what a device
does in the same time. Measured on an H100 with the shape of Llama 3.1 8B.
"""

from __future__ import annotations

from typing import Any

from graftlm.kernels.gpu.attention.step_buffers import best_prefix
from graftlm.kernels.wire_plan import WirePlan

LAUNCH = 4.5e11
"""Operations that the device does while the host launches one layer: 0.8 ms, with other threads beside it."""

READ = 132.0
"""Operations in the time of reading one number of K or V again, of a token's own sequence."""

SHARED_READ = 44.0
"""The same for a prefix that rows share, which is read once for many tokens."""


class ReplayCost:
    """Compares the two ways for one model.

    config  the decoder's configuration
    """

    def __init__(self, config: Any) -> None:
        heads = int(getattr(config, "num_attention_heads", 1))
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        width = int(getattr(config, "hidden_size", 1024))
        dim = int(getattr(config, "head_dim", None) or max(width // heads, 1))
        inner = int(getattr(config, "intermediate_size", None) or 4 * width)
        if experts := getattr(config, "num_experts_per_tok", None):
            inner = int(experts) * int(getattr(config, "moe_intermediate_size", None) or inner)
        self._per_token = 2.0 * (2 * width * dim * (heads + kv_heads) + 3 * width * inner)
        self._kv_numbers = 2 * kv_heads * dim

    def fits(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens is worth a graph if nothing is read again."""
        return self._per_token * num_tokens <= LAUNCH

    def worth(self, plan: WirePlan) -> bool:
        """Whether the step takes less time with a row for each of its tokens."""
        num_new, past = plan.num_new, plan.past.copy()
        shared_reads = 0
        shared = best_prefix(plan, num_new)
        if shared is not None:
            members = list(shared.rows)
            past[members] -= shared.length
            shared_reads = shared.length * int(num_new[members].sum())
        more = num_new - 1
        reads = int((more * past + more * num_new // 2).sum())
        again = self._kv_numbers * (READ * reads + SHARED_READ * shared_reads)
        return self._per_token * plan.num_tokens + again <= LAUNCH
