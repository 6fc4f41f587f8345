"""GPUs that are not here: every Triton kernel compiles for Ampere and Ada and fits their shared memory."""

import os
import subprocess
import sys

import pytest
import torch

from graftlm.kernels.hopper import support
from tests.kernels import other_cards

SHARED_MEMORY_KIB = {
    (8, 0): 163,  # A100
    (8, 6): 99,  # A10, RTX 30
    (8, 7): 163,  # Orin
    (8, 9): 99,  # L4, L40, RTX 40
    (9, 0): 227,  # H100, H200
    (10, 0): 227,  # B200
    (12, 0): 99,  # RTX 50
}
"""What a program can have of shared memory, by compute capability. Source: CUDA C++ programming guide."""

KERNELS = {
    "_norm", "_gate", "_rotate", "_rotate_store", "_store_kv", "_decode", "_decode_prefix", "_extend", "_attend",
    "_skinny", "_gemv", "_product", "_largest", "_pick", "_apply_mask", "_write_table", "_sort_pairs",
    "_grouped", "_sum_parts", "_logits", "_route", "_add_up", "_keep", "_copy",
    "_feed", "_table",
}  # fmt: skip


def test_every_kernel_compiles_and_fits_the_shared_memory() -> None:
    pytest.importorskip("triton")
    limits = {10 * major + minor: SHARED_MEMORY_KIB[major, minor] << 10 for major, minor in ((8, 9), (8, 0))}
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)  # the tree may not be installed
    command = [sys.executable, other_cards.__file__, *(str(x) for card in limits.items() for x in card)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    found = [line.split() for line in run.stdout.splitlines()]
    for capability, limit in limits.items():
        own = [line for line in found if line[0] == str(capability)]
        assert {kernel for _, kernel, *_ in own} == KERNELS
        assert [line for line in own if int(line[-1]) > limit] == []


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)])
def test_kernels_for_hopper_are_for_hopper_only(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCard(torch.Tensor):
        @property
        def device(self) -> torch.device:
            return torch.device("cuda:0")

    weight = torch.empty(128, 512, dtype=torch.bfloat16).as_subclass(OnCard)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert not support.takes(weight)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert support.takes(weight)
