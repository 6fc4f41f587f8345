"""FlashInfer for prefill, over the same KV store: pages of one token, whose numbers are the slots.

Decode rows go through the Triton kernels, which are faster and need no planning call between two replays of a graph; so
do steps of few new tokens in each row. FlashInfer compiles its kernels when it first needs them, for a minute or two;
what it cannot compile or run goes through Triton too, with one warning.
"""

from __future__ import annotations

import math
from typing import Any

import flashinfer
import numpy as np
import torch

from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.cpu.attention.metadata import spans_of
from graftlm.kernels.gpu.attention.backend import TritonAttention
from graftlm.kernels.gpu.attention.prefill_path import PrefillCall
from graftlm.kernels.gpu.verified_path import MAX_ERROR, VerifiedPath
from graftlm.kernels.kv_store import KVStore
from graftlm.kernels.transfer import send
from graftlm.kernels.wire_plan import WirePlan

WORKSPACE_BYTES = 256 << 20
HEAD_DIMS = (64, 128, 256)  # others are refused after minutes of compiling
MIN_NEW = 128  # new tokens of a row, on average over a step: with fewer Triton is faster


class Planned:
    """A wrapper of FlashInfer, planned for one step after the other.

    A plan is written to pinned memory, from where the device copies it once it gets there. Steps are launched ahead,
    so the next plan waits until the last one was copied; else that step would run by a mixture of both.
    """

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self.wrapper = wrapper
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._recorded = False

    def plan(self, *args: Any, **options: Any) -> None:
        if self._copied is not None and self._recorded:
            self._copied.synchronize()
        self.wrapper.plan(*args, **options)
        if self._copied is not None:
            self._copied.record()
            self._recorded = True


class FlashInferPrefill(VerifiedPath):
    """Attends all prefill rows of steps of many new tokens a row."""

    def __init__(self, store: KVStore) -> None:
        super().__init__("FlashInfer is left out, prefill goes through Triton", enabled=True)
        self.store = store
        self._workspace_bytes = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=store.device)
        self._wrappers: dict[tuple[Any, ...], Planned] = {}
        self._planned: set[tuple[Any, ...]] = set()
        self._pages: tuple[np.ndarray, np.ndarray, torch.Tensor] | None = None

    def prepare(self, plan: WirePlan, first_row: int) -> None:
        self.forget()
        rows = plan.rows[first_row:]
        num_new = sum(row.num_new for row in rows)
        if self.enabled and rows and num_new >= MIN_NEW * len(rows):
            starts = [row.start for row in rows] + [rows[-1].stop]
            lens = np.fromiter((row.kv_len for row in rows), np.int64, len(rows))
            spans = [span for row in rows for span in spans_of(row.extents, 0, row.kv_len)]
            slots = [np.arange(first, last, dtype=np.int32) for first, last in spans]
            queries = np.array(starts, np.int32) - np.int32(starts[0])
            pages = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
            self._pages = queries, pages, send(np.concatenate(slots), self.store.device)

    def forget(self) -> None:
        self._planned.clear()
        self._pages = None

    def takes(self, call: PrefillCall) -> bool:
        if self._pages is not None and self.enabled:
            self._refuse(self.store.k[call.layer].shape[2], self.store.v[call.layer].shape[2])
        return self._pages is not None and self.enabled

    def run(self, call: PrefillCall) -> torch.Tensor:
        assert self._pages is not None
        q, params = call.q, call.params
        first = int(q.shape[0] - self._pages[0][-1])
        kind = (q.shape[1:], self.store.v[call.layer].shape[1:], params.scale, params.window, params.softcap)

        def plain() -> torch.Tensor:
            call.extend(call.rows)
            return call.out[first:]

        call.out[first:] = self.verified(kind, lambda: self._run(call.layer, q[first:], kind, params), plain)
        return call.out

    def _run(self, layer: int, q: torch.Tensor, kind: tuple[Any, ...], params: AttentionParams) -> torch.Tensor:
        k, v = self.store.k[layer], self.store.v[layer]
        planned = self._wrappers.get(kind)
        if planned is None:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace_bytes, "NHD")
            planned = self._wrappers[kind] = Planned(wrapper, self.store.device)
        if kind not in self._planned:
            assert self._pages is not None
            queries, pages, slots = self._pages
            planned.plan(
                torch.from_numpy(queries), torch.from_numpy(pages), slots,
                torch.ones(len(queries) - 1, dtype=torch.int32), q.shape[1], k.shape[1], k.shape[2], 1,
                head_dim_vo=v.shape[2], causal=True, sm_scale=params.scale,
                window_left=-1 if params.window is None else params.window - 1,
                logits_soft_cap=params.softcap, q_data_type=q.dtype, kv_data_type=k.dtype,
            )  # fmt: skip
            self._planned.add(kind)
        out: torch.Tensor
        out, lse = planned.wrapper.run(q.contiguous(), (k.unsqueeze(1), v.unsqueeze(1)), return_lse=True)
        if params.sinks is not None:
            share = torch.sigmoid(lse * math.log(2.0) - params.sinks.float())  # its sums are in base 2
            out = (out.float() * share[..., None]).to(q.dtype)
        return out

    def _refuse(self, k_dim: int, v_dim: int) -> None:
        """Give up, before anything is compiled, what FlashInfer has no kernels for."""
        if self.store.dtype not in MAX_ERROR:
            self.disable(f"it is used for KV in float16 and bfloat16, not {str(self.store.dtype)[6:]}")
        elif k_dim != v_dim or k_dim not in HEAD_DIMS:
            self.disable(f"it has no kernels for heads of {k_dim} and {v_dim} dimensions")


class FlashInferAttention(TritonAttention):
    """Triton's attention whose only path for prefill, beside the extend kernel, is FlashInfer."""

    def __init__(self, store: KVStore) -> None:
        super().__init__(store)
        self.flashinfer = FlashInferPrefill(store)
        self.paths = (self.flashinfer,)
