from __future__ import annotations

import threading
import weakref

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from graftlm.core.fusion.gpu_modules import PackedPart, PackedProjections


def packed() -> tuple[list[nn.Linear], PackedProjections, list[PackedPart]]:
    linears = [nn.Linear(8, n) for n in (6, 4, 4)]
    made = PackedProjections(linears)
    return linears, made, [PackedPart(made, 1), PackedPart(made, 2)]


@torch.no_grad()
def test_input_and_outputs_used_to_be_kept_until_the_next_step() -> None:
    linears, first, rest = packed()
    x = torch.randn(1, 5, 8)
    outputs = [first(x), *(part(x) for part in rest)]
    for linear, output in zip(linears, outputs, strict=True):
        torch.testing.assert_close(output, linear(x))
    gone = weakref.ref(x)
    del x, outputs, output
    assert gone() is None and first.held == {}


@torch.no_grad()
def test_parts_of_another_input_and_of_another_thread_are_right() -> None:
    linears, first, rest = packed()
    x, other = torch.randn(1, 5, 8), torch.randn(1, 3, 8)
    first(x)

    def beside() -> None:
        first(other)
        torch.testing.assert_close(rest[1](other), linears[2](other))

    thread = threading.Thread(target=beside)
    thread.start()
    thread.join()
    torch.testing.assert_close(rest[0](other), linears[1](other))
    torch.testing.assert_close(rest[0](x), linears[1](x))
