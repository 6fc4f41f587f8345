"""Attention of single queries on a CPU, for decode steps and short extends: one compiled loop on torch's own threads.

Each query reads its spans of slots in place, with an online softmax over blocks of keys. Unlike with one library call
per span, nothing is padded or merged, and bfloat16 is widened in registers. A run of queries, the last tokens of one
sequence, reads its keys together, so that keys come from memory once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from graftlm.kernels.cpu.calls import DecodeCall
from graftlm.kernels.cpu.compiled.loop_runtime import Loop, loop_address, row_address
from graftlm.kernels.cpu.element_format import ElementFormat

if TYPE_CHECKING:
    from graftlm.kernels.cpu.attention.metadata import DecodeQueries

_SMALL_BYTES = 1 << 18
"""Bytes of K: a layer that reads fewer runs on one thread, which ends before a second one would start."""


class CompiledDecode:
    """The loop for one shape of heads and one dtype, compiled by the constructor.

    int8  for stores in int8, with scales; queries, keys and values of the step are in `dtype`
    """

    def __init__(
        self, group: int, k_dim: int, v_dim: int, dtype: torch.dtype, *, capped: bool, int8: bool = False
    ) -> None:
        name = "decode_attention_int8" if int8 else "decode_attention"
        self._loop = Loop(DecodeCall(), loop_address(name, group, k_dim, v_dim, ElementFormat.of(dtype), capped))

    def run(
        self,
        q: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        stores: tuple[torch.Tensor, torch.Tensor],
        queries: DecodeQueries,
        scale: float,
        softcap: float | None,
        out: torch.Tensor,
        lse: torch.Tensor,
        scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Attend each of `queries` to its spans.

        q       [num_tokens, Hq, Dk]
        new     this step's K [num_tokens, Hkv, Dk] and V, which the loop stores first, each at the end of its query's
                last span; None if they are stored already
        stores  K and V [num_slots, Hkv, D], KV head first in memory
        scales  of stores in int8: K's and V's, float32 [num_slots, Hkv], KV head first in memory
        out     [num_tokens, Hq, Dv], dtype of q or float32; lse float32 [num_tokens, Hq]; only `queries` are set
        """
        k_store, v_store = stores
        call = self._loop.call
        call.num_queries, call.num_runs = len(queries.query), len(queries.runs) - 1
        call.num_slots, call.num_kv_heads = k_store.shape[:2]
        call.num_tasks = call.num_runs * call.num_kv_heads
        call.q, call.q_token, call.q_head = row_address(q)
        if new is None:
            call.new_k = 0
        else:
            call.new_k, call.k_token, call.k_head = row_address(new[0])
            call.new_v, call.v_token, call.v_head = row_address(new[1])
        call.k, call.v = k_store.data_ptr(), v_store.data_ptr()
        call.k_scale, call.v_scale = (x.data_ptr() for x in scales) if scales is not None else (0, 0)
        call.query, call.indptr, call.spans, call.runs = queries.addresses
        call.out, call.lse, call.float32_out = out.data_ptr(), lse.data_ptr(), out.itemsize == 4
        call.scale, call.softcap = scale, softcap or 0.0
        self._loop.run(single_thread=queries.num_keys * k_store[0].numel() * k_store.itemsize < _SMALL_BYTES)
