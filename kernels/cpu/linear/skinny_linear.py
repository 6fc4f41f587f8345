"""SkinnyLinear: a linear layer for few rows on a CPU, such as the language-model head in decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_

import numpy as np
import torch

from graftlm.kernels.cpu import PANEL
from graftlm.kernels.cpu.calls import HALVES, SEGMENT, MatmulCall
from graftlm.kernels.cpu.compiled.loop_runtime import Loop, loop_address
from graftlm.kernels.cpu.element_format import ElementFormat
from graftlm.kernels.cpu.linear.panels import AnyPanels, segment

SMALL_BYTES = 1 << 18
"""Bytes: smaller weights are read by one thread, which ends before a second one would start."""


def address_of(x: torch.Tensor | None) -> int:
    return x.data_ptr() if x is not None else 0


class SkinnyLinear:
    """A linear layer for few rows.

    weight          in panels, or a list of panels of consecutive outputs; or a row-major tensor that `fits`
    bias            of a row-major weight; panels have their own
    call, function  its MatmulCall and the address of the loop, for other compiled code
    """

    def __init__(
        self, weight: Sequence[AnyPanels] | torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        segments: list[list[int]] = []
        if isinstance(weight, torch.Tensor):
            self.num_out, self._num_in = weight.shape
            depth, num_bytes, forms = self._num_in, weight.nbytes, 0
            place = [0, self.num_out, 0, weight.data_ptr(), 0, address_of(bias)]
            segments.append([*place, *[0] * (SEGMENT - len(place))])
        else:
            self.num_out, self._num_in, depth = 0, weight[0].num_in, weight[0].depth
            num_bytes, task = sum(part.num_bytes for part in weight), 0
            forms = reduce(or_, (part.forms for part in weight))
            if forms and dtype is torch.bfloat16 and not all(part.forms for part in weight):
                forms |= HALVES  # of plain weights beside quantised ones
            for part in weight:
                segments.append(segment(task, part.num_out, self.num_out, part))
                self.num_out += part.num_out
                task += -(-part.num_out // PANEL)
        self._weights = weight, bias  # kept alive: the call has addresses only
        self._segments = np.array(segments, np.int64)
        self.function = loop_address("matmul", ElementFormat.of(dtype), isinstance(weight, torch.Tensor))
        self._loop = Loop(MatmulCall(), self.function)
        self._single_thread = num_bytes < SMALL_BYTES
        call = self.call = self._loop.call
        call.num_tasks = self._segments[-1, 0] + -(-self._segments[-1, 1] // PANEL)
        call.depth, call.x_row = depth, depth
        call.forms = forms
        call.segments, call.num_segments, call.out_row = self._segments.ctypes.data, len(segments), self.num_out

    @property
    def memory(self) -> list[tuple[int, int]]:
        """Return the address ranges [first, end) in bytes of the weight."""
        weight = self._weights[0]
        if isinstance(weight, torch.Tensor):
            return [(weight.data_ptr(), weight.data_ptr() + weight.nbytes)]
        return [(part.address, part.address + part.num_bytes) for part in weight]

    @staticmethod
    def fits(weight: torch.Tensor) -> bool:
        """Return True if the loop can read this weight [n, k] in place."""
        return weight.is_contiguous() and weight.shape[1] % 16 == 0 and weight.shape[0] >= 4

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [num_rows, k]. -> [num_rows, n], dtype of x"""
        call = self.call
        inputs = x.float().contiguous()
        if call.depth != self._num_in:
            inputs = torch.nn.functional.pad(inputs, (0, call.depth - self._num_in))
        out = torch.empty(x.shape[0], self.num_out, dtype=x.dtype)
        call.num_rows, call.x, call.out = x.shape[0], inputs.data_ptr(), out.data_ptr()
        self._loop.run(single_thread=self._single_thread)
        return out
