"""Linear layers on a CPU with a packed weight: in oneDNN's block layout, or in panels of our own loop.

Decoding multiplies a few rows with every weight of the model. torch runs float32 matmuls by a BLAS that is slow for so
few rows on many CPUs, and bfloat16 matmuls by oneDNN, which then reorders the weight in every call. A weight that is
reordered once takes no more memory and runs 1.3 to 2.6 times as fast with 1 to 64 rows. oneDNN reorders no bfloat16
weight for a CPU without AVX-512, where torch's matmul is ten times slower than ours, which widens.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
from typing import Any

import numpy as np
import torch
from torch import nn

from graftlm.kernels.cpu import PANEL
from graftlm.kernels.cpu.amx import HAS_TILES
from graftlm.kernels.cpu.element_format import ElementFormat
from graftlm.kernels.cpu.linear.panels import AnyPanels, Panels, pack, unpack
from graftlm.kernels.cpu.linear.quantised_panels import QuantisedPanels
from graftlm.kernels.weight import PlainWeight, weight_of

_LINEAR: Any = None
_REORDER: Any = None
if torch._C._has_mkldnn:
    # The capacity of oneDNN's cache of primitives, one for each shape and number of rows; compiled code is never freed
    # (num_rows_multiplied). oneDNN reads the variable at its first use; its default is 1,024.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
    _LINEAR = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)
    _REORDER = getattr(getattr(torch.ops.mkldnn, "_reorder_linear_weight", None), "default", None)


MIN_TILE_ROWS = 64
"""bfloat16 rows from which on AMX tiles are faster than our loop, the new layout of the weight included: 16 MB in 17 ms
instead of 23, by one thread of an Intel Xeon. With 117 MB the limit is some 80 rows."""
_LAID_OUT_BYTES = 4 << 20
"""Bytes of a weight that are laid out at a time: they stay in the processor's cache until the matmul."""
_COMPARED = 16 * PANEL
"""Outputs of the largest random weight in the check of a layout: a full-size one would take twice its memory."""


class PackedLinear(nn.Linear):
    """The replacement of an nn.Linear, or of a Conv1D of transformers; `unpack` restores the original.

    The original module's weight is empty meanwhile, so the weight is in memory once. With `in_place` the weight is not
    packed, because other modules share it, such as a head tied to the embedding: slower, but still by oneDNN.
    """

    def __init__(self, original: nn.Module, *, in_place: bool = False) -> None:
        nn.Module.__init__(self)
        self._transposed = not isinstance(original, nn.Linear)  # a Conv1D holds it as [in, out]
        self._original = (original,)  # in a tuple: a submodule's parameters would be counted twice
        weight = self._plain(self._source.detach())
        self.out_features, self.in_features = weight.shape
        self.register_parameter("bias", getattr(original, "bias", None))
        self.training = original.training
        self._packed: torch.Tensor | None = None
        self._own: Panels | None = None
        bias = self.bias.detach() if self.bias is not None else None
        if not in_place and own_panels(weight.dtype):
            self._own = pack(weight.detach(), bias)
        elif not in_place:
            self._packed = _REORDER(weight.contiguous())
            if not self._transposed and _lays_out_otherwise(self._packed):
                self._packed, self._own = None, pack(weight.detach(), bias)

    @property
    def _source(self) -> nn.Parameter:
        """Return the original's weight."""
        return self._original[0].get_parameter("weight")

    def _plain(self, weight: torch.Tensor) -> torch.Tensor:
        """Convert a weight in the original's layout to [out, in], or back."""
        return weight.t() if self._transposed else weight

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """Return the weight in the original's layout; a copy unless `in_place`."""
        if self._own is not None:
            return self._plain(unpack(self._own)).contiguous()
        if self._packed is None:
            return self._source
        return self._plain(self._packed.to_dense()).contiguous()

    @property
    def dtype(self) -> torch.dtype:
        """Return the weight's dtype, without the copy of `weight`."""
        return self._source.dtype

    @property
    def in_place(self) -> bool:
        """Return True if the weight is still the original's."""
        return self._packed is None and self._own is None

    def panels(self) -> Panels | None:
        """Return the weight for our own loops; None if oneDNN's layout is not panels."""
        if self._own is not None:
            return self._own
        if self._packed is None or self._transposed or not hasattr(torch.ops.mkldnn, "data_ptr"):
            return None
        bias = self.bias.detach() if self.bias is not None else None
        found = _panels(self._packed, bias)
        shape = self.out_features, self.in_features, self._packed.dtype
        # in some versions of oneDNN the layout depends on the number of threads
        if found is None or not _is_in_panels(*shape, found.depth, torch.get_num_threads()):
            return None
        return found

    def release_original(self) -> None:
        """Free the original weight's memory."""
        if not self.in_place:
            self._source.data = torch.empty(0, dtype=self._source.dtype)

    def unpack(self) -> nn.Module:
        """Restore the original module's weight."""
        if not self.in_place and self._source.numel() == 0:
            self._source.data = self.weight
        return self._original[0]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self._own is not None:
            return linear(input.reshape(-1, self.in_features), self._own).view(*input.shape[:-1], self.out_features)
        weight = self._plain(self._source) if self._packed is None else self._packed
        return _product(input, weight, self.bias)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight


def linear(x: torch.Tensor, panels: AnyPanels) -> torch.Tensor:
    """Multiply x [n, num_in] by our own loop. -> [n, num_out]"""
    if isinstance(panels, QuantisedPanels) or not panels.is_mkldnn:
        has_tiles = HAS_TILES and x.dtype is panels.packed.dtype is torch.bfloat16
        if has_tiles and isinstance(panels, Panels) and x.shape[0] >= MIN_TILE_ROWS:
            return linear_by_tiles(x, panels)
        from graftlm.kernels.cpu.linear.skinny_linear import SkinnyLinear

        return SkinnyLinear([panels], None, x.dtype)(x)
    return _product(x, panels.packed, panels.bias)


def linear_by_tiles(x: torch.Tensor, panels: Panels) -> torch.Tensor:
    """Multiply x [n, num_in] by oneDNN, with our own bfloat16 panels, a few panels at a time. -> [n, num_out]"""
    num_rows, pairs = x.shape[0], panels.packed.view(torch.int32).squeeze(-1)
    x = nn.functional.pad(x, (0, 0, 0, num_rows_multiplied(num_rows) - num_rows))
    output = torch.empty(x.shape[0], panels.num_out, dtype=x.dtype)
    step = max(1, _LAID_OUT_BYTES * len(pairs) // panels.num_bytes)
    for first in range(0, len(pairs), step):
        here = slice(first * PANEL, min((first + step) * PANEL, panels.num_out))
        rows = pairs[first : first + step].transpose(1, 2).contiguous().view(-1, panels.depth // 2).view(x.dtype)
        bias = panels.bias[here] if panels.bias is not None else None
        output[:, here] = nn.functional.linear(x, rows[: here.stop - here.start, : panels.num_in], bias)
    return output[:num_rows]


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply x [..., num_in] by oneDNN. -> [..., num_out]"""
    num_rows = x.numel() // x.shape[-1]
    padding = num_rows_multiplied(num_rows) - num_rows
    if not padding:
        output: torch.Tensor = _LINEAR(x, weight, bias, "none", [], "")
        return output
    padded = nn.functional.pad(x.reshape(num_rows, x.shape[-1]), (0, 0, 0, padding))
    output = _LINEAR(padded, weight, bias, "none", [], "")[:num_rows]
    return output.view(*x.shape[:-1], -1)


def num_rows_multiplied(num_rows: int) -> int:
    """Round `num_rows` up for oneDNN, which compiles for each number of rows up to 512 and never frees the code.

    Each number of rows and shape of a weight costs 0.3 MB and a millisecond or two. Padding to one of 92 numbers up to
    2,048 does not change a row's results.
    """
    multiple = next((m for most, m in ((16, 1), (64, 4), (128, 8), (512, 16), (1024, 32)) if num_rows <= most), 64)
    return -(-num_rows // multiple) * multiple


def _lays_out_otherwise(packed: torch.Tensor) -> bool:
    """Return True if oneDNN has chosen a layout that our loops do not read for a weight that they support.

    oneDNN of torch 2.11 does for float32 weights whose number of outputs is no multiple of PANEL.
    """
    if not hasattr(torch.ops.mkldnn, "data_ptr") or importlib.util.find_spec("numba") is None:
        return False
    found = _panels(packed, None)
    return found is None or not _is_in_panels(*packed.shape, packed.dtype, found.depth, torch.get_num_threads())


@functools.cache
def own_panels(dtype: torch.dtype) -> bool:
    """Return True if our loop multiplies this dtype for every number of rows: oneDNN cannot reorder its weights."""
    try:
        _REORDER(torch.zeros(PANEL, PANEL, dtype=dtype))
    except RuntimeError:
        return importlib.util.find_spec("numba") is not None
    return False


def packable(module: nn.Module) -> bool:
    """Return True if `module` is a linear layer on a CPU with a plain weight that oneDNN supports."""
    transposed = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    is_plain = type(module) is transposed or type(weight_of(module)) is PlainWeight
    if _LINEAR is None or _REORDER is None or not is_plain:
        return False
    weight = module.get_parameter("weight")
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and weight.is_contiguous()
        and not (module._forward_hooks or module._forward_pre_hooks or getattr(module, "parametrizations", None))
    )


def _panels(packed: torch.Tensor, bias: torch.Tensor | None) -> Panels | None:
    """Return the packed weight as panels; None if its size is not that of panels."""
    num_out, num_in = packed.shape
    num_bytes, address = torch.ops.mkldnn._nbytes(packed), torch.ops.mkldnn.data_ptr(packed)
    row = -(-num_out // PANEL) * ElementFormat.of(packed.dtype).panel_bytes(1)
    depth = num_bytes // row
    if num_bytes % row or depth < num_in or depth % 2:
        return None
    return Panels(packed, bias, num_out, num_in, depth, address, num_bytes)


@functools.cache
def _is_in_panels(num_out: int, num_in: int, dtype: torch.dtype, depth: int, num_threads: int) -> bool:
    """Return True if oneDNN's layout of this shape is panels of this depth, by comparison of a random weight.

    A weight of more outputs is represented by a shorter one, and later checked by its results.

    num_threads  torch's current number of threads: part of the cache key, as the layout may depend on it
    """
    weight = torch.randn(min(num_out, _COMPARED + num_out % PANEL), num_in, dtype=dtype)
    packed = _REORDER(weight)
    panels = _panels(packed, None)
    if panels is None or panels.depth != depth:
        return False
    pair = ElementFormat.of(dtype).interleaved
    element, kind = {1: (np.uint32, torch.int32), 2: (np.uint16, torch.int16)}[pair]
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * panels.num_bytes).from_address(panels.address)).view(element)
    plain = weight.view(kind).numpy().view(element)
    for index, found in enumerate(raw.reshape(-1, panels.depth // pair, PANEL, pair)):
        rows = plain[index * PANEL : (index + 1) * PANEL]
        expected = np.zeros((PANEL, panels.depth), element)
        expected[: len(rows), :num_in] = rows
        if not np.array_equal(found, expected.reshape(PANEL, -1, pair).transpose(1, 0, 2)):
            return False
    return True
