"""RotaryPatch: a fused rotary embedding in place of the function of a modelling file."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

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
