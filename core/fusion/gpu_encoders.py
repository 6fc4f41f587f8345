"""Encoders of pictures on a GPU: their rotary embedding as one kernel, their patches by a matmul, aligned MLPs.

Each replacement is compared with its original on random input and dropped if they differ, as in gpu_modules.py.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from graftlm.core.fusion.layer_parts import activation_of
from graftlm.core.fusion.linears import Fusions
from graftlm.core.fusion.rotary import EncoderRotaryPatch
from graftlm.kernels.activation import Activation
from graftlm.kernels.gpu.elementwise import gate_mul, rotate_all
from graftlm.kernels.linear_dispatch import AllClose

_ALIGNED = 64
"""Columns to whose multiple a hidden layer is padded: rows that begin at no multiple of 16 bytes take a slow matmul."""


def fuse_encoders(
    model: nn.Module, fusions: Fusions, agree: AllClose, *, strict: bool = False, dry: bool = False
) -> None:
    """Replace parts of the encoders in `model`. strict, dry: as in `fuse_gpu`; linear layers stay in strict mode"""
    blocks = [module for module in model.modules() if "cu_seqlens" in inspect.signature(module.forward).parameters]
    for block in blocks if not strict else []:
        for child in block.children():
            _align_mlp(child, fusions, agree)
    for module in model.modules() if not strict else []:
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            _embed_by_matmul(module, fusions, agree)
    if not dry:
        for source in {type(block).__module__ for block in blocks}:
            _patch_rotary(sys.modules.get(source), next(model.parameters()), fusions, agree)


def _patch_rotary(source: Any, like: torch.Tensor, fusions: Fusions, agree: AllClose) -> None:
    patch = EncoderRotaryPatch.of(source, rotate_all) if source is not None else None
    if patch is None:
        return
    q, k = (torch.randn(3, 4, 16, device=like.device, dtype=torch.float32).to(like.dtype) for _ in range(2))
    cos, sin = torch.randn(2, 3, 16, device=like.device, dtype=torch.float32)
    try:
        pairs = zip(patch.original(q, k, cos, sin), patch.fused(q, k, cos, sin), strict=True)
        same = all(agree(a, b) for a, b in pairs)
    except Exception:  # another signature or kind of rotation: the original stays
        return
    if same:
        patch.add(like.device.type)
        fusions.add(partial(patch.remove, like.device.type))


def _embed_by_matmul(conv: nn.Conv2d | nn.Conv3d, fusions: Fusions, agree: AllClose) -> None:
    """Compute a convolution of patches that are given one by one as a matmul."""
    own, size = conv.forward, conv.kernel_size
    if conv.stride != size or any(conv.padding) or conv.groups != 1 or isinstance(conv.padding, str):
        return

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.shape[2:] != size:
            return own(x)
        made = linear(x.flatten(1), conv.weight.flatten(1), conv.bias)
        return made.view(*made.shape, *(1 for _ in size))

    probe = torch.randn(3, conv.in_channels, *size, device=conv.weight.device, dtype=torch.float32).to(
        conv.weight.dtype
    )
    _replace(conv, forward, probe, fusions, agree)


def _align_mlp(mlp: nn.Module, fusions: Fusions, agree: AllClose) -> None:
    """Pad the hidden layer of a gated MLP with zeros, and pack its gates."""
    gate, up, down = (getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    kind = activation_of(getattr(mlp, "act_fn", None))
    layers = [layer for layer in (gate, up, down) if isinstance(layer, nn.Linear)]
    if len(layers) < 3 or kind is None or layers[0].weight.element_size() > 2:
        return
    gate, up, down = layers
    width = gate.out_features
    if width * gate.weight.element_size() % 16 == 0 or up.out_features != width or down.in_features != width:
        return
    aligned = AlignedMlp(gate, up, down, kind)
    probe = torch.randn(5, gate.in_features, device=gate.weight.device, dtype=torch.float32).to(gate.weight.dtype)
    if _replace(mlp, aligned, probe, fusions, agree):
        aligned.take(gate, up, down)
        fusions.add(partial(aligned.give_back, gate, up, down), weights=True)
        fusions.num_packed += 1


class AlignedMlp:
    """A gated MLP whose hidden layer is padded with zeros."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear, kind: Activation) -> None:
        self.kind, self.width = kind, gate.out_features
        self.padded = math.ceil(self.width / _ALIGNED) * _ALIGNED
        self.gates = gate.weight.new_zeros(2 * self.padded, gate.in_features)
        self.gates_bias = gate.weight.new_zeros(2 * self.padded)
        for layer, rows in zip((gate, up), self._rows, strict=True):
            self.gates[rows] = layer.weight
            if layer.bias is not None:
                self.gates_bias[rows] = layer.bias
        self.out = down.weight.new_zeros(down.out_features, self.padded)
        self.out[:, : self.width] = down.weight
        self.out_bias = down.bias

    @property
    def _rows(self) -> tuple[slice, slice]:
        return slice(0, self.width), slice(self.padded, self.padded + self.width)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features]"""
        return linear(gate_mul(linear(x, self.gates, self.gates_bias), self.kind), self.out, self.out_bias)

    def take(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        """Let the layers' weights be views of the padded ones."""
        for layer, rows in zip((gate, up), self._rows, strict=True):
            layer.weight.data = self.gates[rows]
        down.weight.data = self.out[:, : self.width]

    def give_back(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        """Give the layers dense weights of their own again."""
        for layer in (gate, up, down):
            layer.weight.data = layer.weight.data.clone(memory_format=torch.contiguous_format)


def _replace(
    module: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor], probe: torch.Tensor, fusions: Fusions,
    agree: AllClose,
) -> bool:  # fmt: skip
    try:
        same = agree(module(probe), forward(probe))
    except Exception:  # its arguments differ, or the kernel refuses this shape: the original stays
        return False
    if same:
        setattr(module, "forward", forward)  # noqa: B010
        fusions.add(partial(delattr, module, "forward"))
    return same
