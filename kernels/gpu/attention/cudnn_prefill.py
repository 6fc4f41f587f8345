"""Long cold prompts on a GPU: attention through cuDNN, which computes it 1.6 times as fast as a Triton kernel.

It takes dense sequences, and prepares itself anew, for a third of a second, for every length; so only rows of many new
tokens and no cached ones go through it, read up to the next multiple of 1,024 tokens. What is read beyond the end of a
row lies after all its queries, which do not see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from graftlm.kernels.attention import Plan, Row
from graftlm.kernels.cpu.attention.backend import Partial, attend
from graftlm.kernels.gpu.attention.prefill_path import PrefillCall
from graftlm.kernels.gpu.verified_path import MAX_ERROR, VerifiedPath

MIN_TOKENS = 2048  # new tokens of a row that is worth it
MIN_INSTEAD = 8192  # the same where another fast kernel takes the step: what that loses is less than to be prepared
STEP = 1024  # lengths are rounded up to multiples of this


class Segment(NamedTuple):
    """Consecutive rows of a step, to be attended in one go; a dense one is a single row."""

    first_row: int
    last_row: int
    start: int
    stop: int
    dense: bool

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.last_row)


def segments_of(rows: Sequence[Row], first_row: int) -> tuple[Segment, ...]:
    """Cut rows [first_row, ...) of a step into runs of rows, with every long cold row by itself."""
    segments: list[Segment] = []
    for index in range(first_row, len(rows)):
        row = rows[index]
        dense = row.past == 0 and row.num_new >= MIN_TOKENS
        stop = row.start + row.num_new
        if segments and not dense and not segments[-1].dense:
            segments[-1] = segments[-1]._replace(last_row=index + 1, stop=stop)
        else:
            segments.append(Segment(index, index + 1, row.start, stop, dense))
    return tuple(segments)


class DensePrefill(VerifiedPath):
    """Attends each long row without cached tokens through cuDNN, the other prefill rows through the extend kernel."""

    def __init__(self, *, enabled: bool, rounded_store: bool = False) -> None:
        # the extend kernel reads K and V as the store holds them, cuDNN as they were computed
        super().__init__(
            "long prompts are attended by Triton, more slowly than by cuDNN",
            enabled=enabled,
            tolerance=4 if rounded_store else 1,
        )
        self.segments: tuple[Segment, ...] = ()

    def prepare(self, plan: Plan, first_row: int) -> None:
        self.segments = segments_of(plan.rows, first_row)

    def forget(self) -> None:
        self.segments = ()

    def takes(self, call: PrefillCall) -> bool:
        q, params = call.q, call.params
        return (
            self.enabled
            and any(segment.dense for segment in self.segments)
            and q.dtype in MAX_ERROR
            and q.shape[-1] == call.v.shape[-1] <= 256
            and q.shape[-1] % 8 == 0
            and params.softcap is None
            and (params.window is None or len(q) <= params.window)
        )

    def run(self, call: PrefillCall) -> torch.Tensor:
        for segment in self.segments:
            if segment.dense and self.enabled:
                found = self._attend(call, segment)
                if len(found) == len(call.out):
                    return found
                call.out[segment.start : segment.stop] = found
            else:
                call.extend(segment.rows)
        return call.out

    def _attend(self, call: PrefillCall, segment: Segment) -> torch.Tensor:
        """Attend one long row. -> [num_new, num_heads, head_dim], dtype of q; perhaps a part of `call.out`"""
        q, k, v, params = call.q, call.k, call.v, call.params

        def fast() -> torch.Tensor:
            found, lse = causal(q, k, v, segment, params.scale)
            if params.sinks is None:
                return found
            return (found.float() * torch.sigmoid(lse - params.sinks.float())[..., None]).to(q.dtype)

        def plain() -> torch.Tensor:
            call.extend(segment.rows)
            return call.out[segment.start : segment.stop]

        return self.verified((q.shape[1:], k.shape[1:], q.dtype, params.sinks is None), fast, plain)


class AllDense:
    """`dense` for steps all of whose prefill rows are very long and without cached tokens, before any other path.

    It is prepared as a path of its own.
    """

    def __init__(self, dense: DensePrefill) -> None:
        self._dense = dense
        self.run = dense.run

    def prepare(self, plan: Plan, first_row: int) -> None:
        pass

    def forget(self) -> None:
        pass

    def takes(self, call: PrefillCall) -> bool:
        segments = self._dense.segments
        long = all(segment.dense and segment.stop - segment.start >= MIN_INSTEAD for segment in segments)
        return long and self._dense.takes(call)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segment: Segment, scale: float) -> Partial:
    """Attend the tokens of one row to each other. Without a GPU: the definition.

    -> out [n, num_heads, head_dim], lse float32 [n, num_heads]
    """
    num_tokens = segment.stop - segment.start
    length = -(-num_tokens // STEP) * STEP
    views = []
    for x in (q, k, v):
        taken = x[segment.start : segment.start + length]
        if len(taken) < length:
            taken = torch.nn.functional.pad(taken, (0, 0, 0, 0, 0, length - len(taken)))
        views.append(taken.transpose(0, 1)[None])
    if q.device.type == "cuda":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *views, None, True, 0.0, True, False, scale=scale
        )
        lse = lse.reshape(q.shape[1], length)
    else:
        group = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(group, 1) for x in views[1:])
        out, lse = attend(views[0], keys, values, scale=scale, causal=True)
        lse = lse[0]
    return Partial(out[0].transpose(0, 1)[:num_tokens], lse.transpose(0, 1)[:num_tokens])
