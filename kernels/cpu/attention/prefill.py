"""Attention of many queries over the same keys on a CPU, for prefill: one compiled loop on torch's own threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from graftlm.kernels.cpu.calls import PrefillCall
from graftlm.kernels.cpu.compiled.loop_runtime import Loop, loop_address, row_address
from graftlm.kernels.cpu.element_format import ElementFormat

if TYPE_CHECKING:
    from graftlm.kernels.cpu.attention.metadata import QueryBlocks


class CompiledPrefill:
    """The loop for one shape of heads and one dtype, compiled by the constructor."""

    def __init__(self, group: int, k_dim: int, v_dim: int, dtype: torch.dtype) -> None:
        self._loop = Loop(
            PrefillCall(), loop_address("prefill_attention", group, k_dim, v_dim, ElementFormat.of(dtype))
        )

    def run(
        self,
        q: torch.Tensor,
        stores: tuple[torch.Tensor, torch.Tensor],
        blocks: QueryBlocks,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Attend the queries of each block to the block's spans.

        q       [num_tokens, Hq, Dk]
        stores  K and V [num_slots, Hkv, D], dtype of q, KV head first in memory
        out     [num_tokens, Hq, Dv], lse [num_tokens, Hq], both float32; only the blocks' queries are set
        """
        k_store, v_store = stores
        call = self._loop.call
        call.num_blocks = len(blocks.query_ptr) - 1
        call.num_slots, call.num_kv_heads = k_store.shape[:2]
        call.num_tasks = call.num_blocks * call.num_kv_heads
        call.q, call.q_token, call.q_head = row_address(q)
        call.k, call.v = k_store.data_ptr(), v_store.data_ptr()
        call.query, call.visible, call.query_ptr, call.spans, call.span_ptr = blocks.addresses
        call.out, call.lse = out.data_ptr(), lse.data_ptr()
        call.scale = scale
        self._loop.run()
