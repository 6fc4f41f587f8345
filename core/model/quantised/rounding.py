"""Round plain weights to codes: 8 bits per output or group, and 4 bits by a search for each group's scale.

Rounding alone loses much with 4 bits: the scale that fits a group's largest weight is not the one of least error. The
search tries scales around it and keeps, for each group, the one whose rounded weights are closest to the originals.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from graftlm.kernels.quantised_weight import QuantisedWeight

Scheme = Literal["fp8", "int8", "int4"]
"""fp8: e4m3 with a scale per output. int8: a scale per 128 inputs. int4: a scale per 32 inputs, found by a search."""

SCHEMES: tuple[str, ...] = get_args(Scheme)

GROUP = {"int8": 128, "int4": 32}
"""Inputs of a scale."""

_LARGEST_FP8 = 448.0
_SHARES = torch.linspace(0.62, 1.06, 23, dtype=torch.float32).tolist()
"""Candidates for the scale of a group of 4-bit codes, of the one that fits its largest weight."""
_AT_ONCE = 1 << 24
"""Weights that are rounded at once, which bounds the temporary memory."""


def scheme_problem(shape: tuple[int, ...], scheme: Scheme) -> str | None:
    """Return the reason why a weight of this shape has no codes of the scheme; None if it has."""
    if len(shape) != 2:
        return f"it has {len(shape)} dimensions"
    group = GROUP.get(scheme, 1)
    return f"{shape[1]} inputs are no multiple of {group}" if shape[1] % group else None


@torch.no_grad()
def rounded(
    weight: torch.Tensor,
    scheme: Scheme,
    *,
    importance: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    largest: torch.Tensor | None = None,
) -> QuantisedWeight:
    """Return codes of a weight [n, k] on its device.

    importance  mean squares of the inputs [k], by which the search of int4 weighs errors; None weighs all equally
    dtype       of the values; that of the weight by default
    largest     [n, 1], the largest size of a weight of each output, from which fp8's scales follow; those of a shard
                are those of the whole weight. None computes it
    Raises ValueError if inputs are no multiple of the scheme's groups, or a weight is not finite.
    """
    reason = scheme_problem(tuple(weight.shape), scheme)
    if reason is None and not bool(torch.isfinite(weight).all()):
        reason = "a weight is not finite"
    if reason is not None:
        raise ValueError(f"a weight {tuple(weight.shape)} cannot be {scheme}: {reason}")
    n, k = weight.shape
    rows = max(_AT_ONCE // k, 1)
    sizes = (weight.abs().amax(1, keepdim=True) if largest is None else largest.to(weight)).split(rows)
    pieces = [
        _rounded(some.float(), scheme, importance, size.float())
        for some, size in zip(weight.split(rows), sizes, strict=True)
    ]
    codes = torch.cat([piece[0] for piece in pieces])
    scale = torch.cat([piece[1] for piece in pieces])
    kind = dtype or weight.dtype
    if scheme == "fp8":
        return QuantisedWeight(codes, 8, "e4m3", k, 1, scale, dtype=kind)
    bits: Literal[4, 8] = 4 if scheme == "int4" else 8
    return QuantisedWeight(codes, bits, None, GROUP[scheme], 1, scale, zero=1 << bits - 1, dtype=kind)


def _rounded(
    weight: torch.Tensor, scheme: Scheme, importance: torch.Tensor | None, largest: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes uint8 and scales in bfloat16 of a weight [n, k] in float32. largest: [n, 1]"""
    n, k = weight.shape
    if scheme == "fp8":
        scale = _bfloat16(largest / _LARGEST_FP8)
        values = (weight / scale.float()).clamp(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn)
        return values.view(torch.uint8), scale
    groups = weight.view(n, -1, GROUP[scheme])
    if scheme == "int8":
        scale = _bfloat16(groups.abs().amax(2) / 127)
        codes = (groups / scale.float()[:, :, None]).round_().clamp_(-128, 127).add_(128)
        return codes.to(torch.uint8).view(n, k), scale
    scale = _searched(groups, importance)
    codes = (groups / scale.float()[:, :, None]).round_().clamp_(-8, 7).add_(8).to(torch.uint8).view(n, k)
    return codes[:, ::2] | codes[:, 1::2] << 4, scale


def _searched(groups: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """Return the scales [n, groups] with the least error of groups [n, groups, inputs]; they may be negative."""
    weighed = groups if importance is None else groups * importance.to(groups).view(1, *groups.shape[1:])
    most, least = groups.amax(2), groups.amin(2)
    base = torch.where(most > -least, most, least) / -8  # the code -8 is the number farthest from 0
    best = torch.full_like(base, -1.0)
    found = base.clone()
    for share in _SHARES:
        codes = (groups / _nonzero(base * share)[:, :, None]).round_().clamp_(-8, 7)
        along = (weighed * codes).sum(2)
        power = (
            codes.square() if importance is None else codes.square() * importance.to(groups).view(1, *groups.shape[1:])
        ).sum(2)
        gain = along.square() / power.clamp_min(1e-30)  # by which the error falls with the best scale for these codes
        better = gain > best
        best = torch.where(better, gain, best)
        found = torch.where(better & (power > 0), along / power.clamp_min(1e-30), found)
    return _bfloat16(found)


def _nonzero(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 1.0, scale)


def _bfloat16(scale: torch.Tensor) -> torch.Tensor:
    """Return scales in bfloat16; 1 for those of zeros alone."""
    return _nonzero(scale.to(torch.bfloat16))
