"""Whether the processor multiplies matrices in tiles (AMX)."""

from __future__ import annotations

import torch

HAS_TILES = bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())
"""Whether torch and oneDNN multiply bfloat16 by AMX tiles, ten times as fast as our loops do; oneDNN lays weights out
otherwise then."""
