"""Support of this machine for the kernels in Gluon, the level below Triton, all of them for Hopper."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Literal

import torch

from graftlm.kernels.gpu.support import triton_version

GluonModule = Literal[
    "bits12.decode",
    "bits12.experts",
    "bits12.matmul",
    "bits12.one_order",
    "codes.experts",
    "codes.matmul",
    "codes.wide_matmul",
    "hopper.gate_up_decode",
    "hopper.gate_up_prefill",
    "hopper.prefetch_matmul",
    "hopper.prompt_kernel",
    "hopper.tiled_matmul",
]
"""The modules of kernels/ that are written in Gluon. Only `gluon_kernel` imports them."""


@functools.cache
def gluon_kernel(name: GluonModule) -> ModuleType | None:
    """Import the module graftlm.kernels.`name`; None if Triton lacks a feature that it uses, as before 3.6."""
    if triton_version() < (3, 6):
        return None
    try:
        return importlib.import_module(f"graftlm.kernels.{name}")
    except (ImportError, AttributeError):
        return None


def takes(weight: torch.Tensor) -> bool:
    """Return True if copy engine and matrix units support `weight` [n, k] in the layout of these kernels."""
    device = weight.device
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    dense = weight.is_contiguous() and weight.data_ptr() % 16 == 0
    return dense and weight.dtype in (torch.bfloat16, torch.float16) and weight.shape[1] % 64 == 0
