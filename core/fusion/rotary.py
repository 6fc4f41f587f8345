"""Rotary embeddings by one kernel: tables of cosines and sines, and the rotation of queries and keys.

A table replaces the forward of a model's module where frequencies do not depend on the positions, a RotaryPatch the
function of a modelling file; both only if the kernel's output equals what it replaces.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from graftlm.core.fusion.layer_probe import rotations
from graftlm.core.fusion.linears import Fusions
from graftlm.kernels.gpu.step_inputs import rotary_table

CONSTANT = frozenset({"default", "linear", "llama3", "yarn"})
"""Types whose frequencies are constant over all positions."""

_PROBED = (0, 1, 2, 7, 100, 1_000, 4_095, 32_767, 100_003)
"""Positions for which the kernel is compared with the module."""

_TOLERANCE = 1e-6


class Frequencies(NamedTuple):
    """The frequencies of a table. values  float32 [rotary_dim / 2]"""

    values: torch.Tensor
    factor: float


def fuse_rotary_tables(model: nn.Module, fusions: Fusions, *, dry: bool = False) -> None:
    """Replace the forward of every rotary embedding with an equivalent; if `dry`, without comparison."""
    for module in model.modules():
        found = _frequencies(module)
        if not found:
            continue
        own = module.forward
        for once in (False, True):
            table = _forward(own, found, once=once)
            if dry or all(_same(own, table, kind, frequencies) for kind, frequencies in found.items()):
                setattr(module, "forward", table)  # noqa: B010
                fusions.add(partial(delattr, module, "forward"))
                break


def _frequencies(module: nn.Module) -> dict[str | None, Frequencies]:
    """Return the frequencies of a rotary embedding by layer type, under None if all layers share them.

    Empty for any other module, and where frequencies depend on the positions.
    """
    types: Any = getattr(module, "rope_type", None)
    kinds: dict[str | None, str] = {None: types} if isinstance(types, str) else types if isinstance(types, dict) else {}
    found: dict[str | None, Frequencies] = {}
    for kind, rope_type in kinds.items():
        prefix = "" if kind is None else f"{kind}_"
        values = getattr(module, f"{prefix}inv_freq", None)
        factor = getattr(module, f"{prefix}attention_scaling", None)
        if not isinstance(values, torch.Tensor) or values.dim() != 1 or not isinstance(factor, float | int):
            return {}
        if rope_type not in CONSTANT:
            return {}
        found[kind] = Frequencies(values.float().contiguous(), float(factor))
    return found


def _forward(own: Callable[..., Any], found: dict[str | None, Frequencies], *, once: bool) -> Callable[..., Any]:
    """Return the forward of a rotary embedding. once: each cosine once, not twice (GPT-OSS)"""

    @functools.wraps(own)
    def forward(x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        frequencies = found.get(layer_type)
        if position_ids.dim() == 3 and position_ids.stride(0) == 0:
            position_ids = position_ids[0]  # three equal coordinates, expanded: those of text in a vision model
        one_row = position_ids.dim() == 2 and position_ids.shape[0] == 1
        if frequencies is None or not one_row or position_ids.device != frequencies.values.device:
            return own(x, position_ids) if layer_type is None else own(x, position_ids, layer_type)
        cos, sin = rotary_table(position_ids[0], *frequencies, x.dtype)
        if once:
            cos, sin = (x[..., : x.shape[-1] // 2] for x in (cos, sin))
        return cos[None], sin[None]

    return forward


def _same(own: Callable[..., Any], table: Callable[..., Any], kind: str | None, frequencies: Frequencies) -> bool:
    """Return True if both outputs are equal in float32."""
    device = frequencies.values.device
    x = torch.empty(1, len(_PROBED), 1, device=device, dtype=torch.float32)
    positions = torch.tensor([_PROBED], device=device)
    options = {} if kind is None else {"layer_type": kind}
    try:
        expected, found = rotations(own, x, positions, **options), table(x, positions, **options)
    except Exception:  # its arguments differ, or the kernel refuses the shape: the original stays
        return False
    shapes = all(a.shape == b.shape for a, b in zip(expected, found, strict=True))
    limit = _TOLERANCE * max(frequencies.factor, 1.0)
    return shapes and all(float((a - b).abs().max()) <= limit for a, b in zip(expected, found, strict=True))


_lock = threading.Lock()


class RotaryPatch:
    """One patch for all models of a modelling file, while any of them uses it.

    original  the file's own function, which other devices and shapes still use
    rotate    (q, k, cos, sin) -> q, k; heads [num_tokens, num_heads, head_dim], cos and sin [num_tokens, head_dim]
    """

    name = "apply_rotary_pos_emb"

    def __init__(self, source: ModuleType, original: Callable[..., Any], rotate: Callable[..., Any]) -> None:
        self.source, self.original, self.rotate = source, original, rotate
        self._users: Counter[str] = Counter()

    @classmethod
    def of(cls, source: ModuleType, rotate: Callable[..., Any]) -> RotaryPatch | None:
        """Return the existing patch of `source`, or a new one; None if the file has no such function."""
        current = getattr(source, cls.name, None)
        if current is None:
            return None
        return current if isinstance(current, cls) else cls(source, current, rotate)

    def add(self, device_type: str) -> None:
        """Use the patch for tensors on devices of this type, until `remove` has been called as often."""
        with _lock:
            self._users[device_type] += 1
            setattr(self.source, self.name, self)

    def remove(self, device_type: str) -> None:
        """Restore the file's own function once no model uses the patch."""
        with _lock:
            self._users -= Counter([device_type])
            if not self._users and getattr(self.source, self.name, None) is self:
                setattr(self.source, self.name, self.original)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **options: Any
    ) -> Any:
        if q.device.type in self._users:
            return self.fused(q, k, cos, sin, *rest, **options)
        return self.original(q, k, cos, sin, *rest, **options)

    def fused(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **options: Any
    ) -> Any:
        """Rotate q, k [1, num_heads, num_tokens, head_dim] on any device; the original rotates other batches."""
        plain = q.shape[0] == cos.shape[0] == 1 and not rest and not options and cos.shape[-1] == q.shape[-1]
        if not plain:
            return self.original(q, k, cos, sin, *rest, **options)
        q_out, k_out = self.rotate(q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0])
        return q_out.transpose(0, 1)[None], k_out.transpose(0, 1)[None]


class EncoderRotaryPatch(RotaryPatch):
    """The patch of an encoder of pictures, whose tokens have no batch."""

    name = "apply_rotary_pos_emb_vision"

    def fused(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **options: Any
    ) -> Any:
        """Rotate q, k [num_tokens, num_heads, head_dim] on any device; the original rotates other shapes."""
        plain = q.dim() == 3 and q.shape == k.shape and cos.shape == sin.shape == (len(q), q.shape[-1])
        if not plain or rest or options or {x.stride(-1) for x in (q, k, cos, sin)} != {1}:
            return self.original(q, k, cos, sin, *rest, **options)
        return self.rotate(q, k, cos, sin)
