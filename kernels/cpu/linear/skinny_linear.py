"""SkinnyLinear: a linear layer for few rows on a CPU, such as the language-model head in decode steps."""

from __future__ import annotations

import numpy as np
import torch

from graftlm.kernels.cpu import PANEL
from graftlm.kernels.cpu.calls import MatmulCall
from graftlm.kernels.cpu.compiled.loop_runtime import Loop, loop_address
from graftlm.kernels.cpu.linear.panels import Panels

SMALL_BYTES = 1 << 18
"""Weights of fewer bytes are read by one thread: it is done before a second one would start."""


def address_of(x: torch.Tensor | None) -> int:
    return x.data_ptr() if x is not None else 0


class SkinnyLinear:
    """A linear layer for few rows. Its weight is packed in panels, or a row-major tensor that `fits`.

    call, function  its MatmulCall and the address of the loop, for other compiled code
    """

    def __init__(self, weight: Panels | torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        half = dtype is torch.bfloat16
        if isinstance(weight, Panels):
            self.num_out, self._num_in, depth = weight.num_out, weight.num_in, weight.depth
            num_bytes, address, function = weight.num_bytes, weight.address, loop_address("matmul", half, False)
        else:
            self.num_out, self._num_in = weight.shape
            depth, num_bytes = self._num_in, weight.nbytes
            address, function = weight.data_ptr(), loop_address("matmul", half, True)
        self._weights = weight, bias  # the call has their addresses only
        self._segments = np.array([[0, self.num_out, 0, address, 0, address_of(bias)]], np.int64)
        self.function = function
        self._loop = Loop(MatmulCall(), function)
        self._single_thread = num_bytes < SMALL_BYTES
        call = self.call = self._loop.call
        call.num_tasks, call.depth, call.x_row = -(-self.num_out // PANEL), depth, depth
        call.segments, call.num_segments, call.out_row = self._segments.ctypes.data, 1, self.num_out

    @property
    def memory(self) -> tuple[int, int]:
        """The address range [first, end) in bytes of the weight."""
        weight = self._weights[0]
        if isinstance(weight, Panels):
            return weight.address, weight.address + weight.num_bytes
        return weight.data_ptr(), weight.data_ptr() + weight.nbytes

    @staticmethod
    def fits(weight: torch.Tensor) -> bool:
        """Whether the loop can read this weight [n, k] as it is."""
        return weight.is_contiguous() and weight.shape[1] % 16 == 0 and weight.shape[0] >= 4

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_rows, k] -> [num_rows, n], dtype of x"""
        call = self.call
        inputs = x.float().contiguous()
        if call.depth != self._num_in:
            inputs = torch.nn.functional.pad(inputs, (0, call.depth - self._num_in))
        out = torch.empty(x.shape[0], self.num_out, dtype=x.dtype)
        call.num_rows, call.x, call.out = x.shape[0], inputs.data_ptr(), out.data_ptr()
        self._loop.run(single_thread=self._single_thread)
        return out
