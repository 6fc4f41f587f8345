"""Elementwise loops of a decoder layer on a CPU, for many tokens: norm, rotary embedding, gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from graftlm.kernels.cpu.calls import GateMulCall, NormCall, RotationCall
from graftlm.kernels.cpu.compiled.loop_runtime import Loop, loop_address
from graftlm.kernels.cpu.element_format import ElementFormat

if TYPE_CHECKING:
    from graftlm.kernels.activation import Activation
    from graftlm.kernels.norm import Norm

_SMALL = 1 << 14
"""Elements: smaller tensors run on one thread, which ends before a second one would start."""


class Elementwise:
    """The loops for one dtype, compiled by the constructor."""

    def __init__(self, dtype: torch.dtype) -> None:
        element = ElementFormat.of(dtype)
        self._norm = Loop(NormCall(), loop_address("norm", element))
        self._rotation = Loop(RotationCall(), loop_address("rotation", element))
        self._gate_mul = Loop(GateMulCall(), loop_address("gate_mul", element))

    def norm(self, x: torch.Tensor, norm: Norm, out: torch.Tensor) -> None:
        """Compute out = RMSNorm of x.

        x    [num_rows, n], dense
        out  [num_rows or more, n], rows dense; rows of padding stay unchanged
        """
        self._run_norm(x, None, None, norm, out)

    def add_norm(
        self, x: torch.Tensor, added: torch.Tensor, post: Norm | None, norm: Norm | None, out: torch.Tensor | None
    ) -> None:
        """Compute x += post(added); out = norm(x), as `norm`.

        added      [num_rows or more, n], rows dense
        post       None adds `added` unchanged
        norm, out  both None compute the sum alone
        """
        self._run_norm(x, added, post, norm, out)

    def _run_norm(
        self,
        x: torch.Tensor,
        added: torch.Tensor | None,
        post: Norm | None,
        norm: Norm | None,
        out: torch.Tensor | None,
    ) -> None:
        call: Any = self._norm.call
        call.num_rows, call.size = x.shape
        call.x = x.data_ptr()
        call.weight, call.eps = (norm.weight.data_ptr(), norm.eps) if norm is not None else (0, 0.0)
        call.out, call.out_row = (out.data_ptr(), out.stride(0)) if out is not None else (0, 0)
        call.added, call.added_row = (added.data_ptr(), added.stride(0)) if added is not None else (0, 0)
        call.added_norm, call.added_eps = (post.weight.data_ptr(), post.eps) if post is not None else (0, 0.0)
        call.wide = any(one is not None and not one.rounded for one in (post, norm))
        self._norm.run(single_thread=x.numel() < _SMALL)

    def rotate(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        q_norm: Norm | None,
        k_norm: Norm | None,
    ) -> None:
        """Norm and rotate the heads of q and k [num_rows, num_heads or num_kv_heads, head_dim] in place.

        cos, sin  [num_rows, rotary_dim], both halves equal
        """
        call: Any = self._rotation.call
        call.num_rows, call.num_heads, call.head_dim = q.shape
        call.q, call.q_row, call.k, call.k_row = q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0)
        call.num_kv_heads, call.rotary_dim = k.shape[1], cos.shape[1]
        call.cos, call.sin, call.table_row = cos.data_ptr(), sin.data_ptr(), cos.stride(0)
        call.q_norm, call.eps = (q_norm.weight.data_ptr(), q_norm.eps) if q_norm is not None else (0, 0.0)
        call.k_norm = k_norm.weight.data_ptr() if k_norm is not None else 0
        call.wide = q_norm is not None and not q_norm.rounded
        self._rotation.run(single_thread=q.numel() < _SMALL)

    def gate_mul(self, gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor, activation: Activation) -> None:
        """Compute out = activation(gate) * up.

        All [num_rows, n], rows dense, gate and up of one stride; out may be gate.
        """
        call: Any = self._gate_mul.call
        call.gelu = activation == "gelu_tanh"
        assert gate.stride(0) == up.stride(0)
        call.num_rows, call.size = gate.shape
        call.gate, call.up, call.row = gate.data_ptr(), up.data_ptr(), gate.stride(0)
        call.out, call.out_row = out.data_ptr(), out.stride(0)
        self._gate_mul.run(single_thread=gate.numel() < _SMALL)
