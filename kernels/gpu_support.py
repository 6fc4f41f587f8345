"""Whether the Triton kernels can run on a device."""

from __future__ import annotations

import importlib.util

import torch

OLDEST = (8, 0)
"""Ampere: the first to compute in bfloat16, and the first that the kernels' block sizes fit."""


def triton_problem(device: torch.device) -> str | None:
    """Why they cannot; None if they can."""
    if device.type != "cuda":
        return f"Triton needs a GPU, this is {device}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < OLDEST:
        has, needs = (".".join(map(str, version)) for version in (capability, OLDEST))
        return f"the kernels need compute capability {needs}, {torch.cuda.get_device_name(device)} has {has}"
    return None
