"""Support of the processor for matmuls in AMX tiles."""

from __future__ import annotations

import torch

HAS_TILES = bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())
"""True if torch and oneDNN multiply bfloat16 by AMX tiles, ten times as fast as our loops; oneDNN then uses another
layout of weights."""
