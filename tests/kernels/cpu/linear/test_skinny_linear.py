from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from graftlm.kernels.cpu.compiled.openmp import parallel_region
from graftlm.kernels.cpu.linear import skinny_linear
from graftlm.kernels.cpu.linear.packed_linear import PackedLinear
from graftlm.kernels.cpu.linear.panels import pack
from graftlm.kernels.cpu.linear.skinny_linear import SkinnyLinear

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(skinny_linear, "SMALL_BYTES", 0)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 7, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_out", "num_in", "bias"), [(70, 48, True), (128, 33, False), (5, 16, False)])
def test_a_weight_in_panels_gives_what_the_layer_gives(
    num_out: int, num_in: int, bias: bool, dtype: torch.dtype, num_rows: int
) -> None:
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN packs no bfloat16 on this CPU")
    linear = nn.Linear(num_in, num_out, bias=bias).to(dtype)
    packed = PackedLinear(linear)
    panels = packed.panels()
    if panels is None:
        pytest.skip("oneDNN lays weights out otherwise on this CPU")
    x = torch.randn(num_rows, num_in).to(dtype)
    with torch.inference_mode():
        found, expected = SkinnyLinear([panels], None, dtype)(x), linear(x)
    assert (found.float() - expected.float()).norm() <= TOLERANCE[dtype] * expected.float().norm()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 7, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_out", "num_in", "bias"), [(70, 48, True), (128, 33, False)])
def test_a_weight_that_is_packed_here_gives_what_the_layer_gives(
    num_out: int, num_in: int, bias: bool, dtype: torch.dtype, num_rows: int
) -> None:
    weight, x = torch.randn(num_out, num_in).to(dtype), torch.randn(num_rows, num_in).to(dtype)
    panels = pack(weight, torch.randn(num_out).to(dtype) if bias else None)
    expected = nn.functional.linear(x, weight, panels.bias).float()
    found = SkinnyLinear([panels], None, dtype)(x).float()
    assert (found - expected).norm() <= TOLERANCE[dtype] * expected.norm()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_out", "num_in", "bias"), [(130, 48, True), (67, 16, False), (4, 32, False), (67, 96, True)]
)
def test_a_weight_that_lies_row_by_row_is_read_in_place(
    num_out: int, num_in: int, bias: bool, dtype: torch.dtype, num_rows: int
) -> None:
    linear = nn.Linear(num_in, num_out, bias=bias).to(dtype)
    x = torch.randn(num_rows, num_in).to(dtype)
    assert SkinnyLinear.fits(linear.weight)
    with torch.inference_mode():
        expected = linear(x)
        found = SkinnyLinear(linear.weight.detach(), linear.bias.detach() if bias else None, dtype)(x)
    assert (found.float() - expected.float()).norm() <= TOLERANCE[dtype] * expected.float().norm()


@pytest.mark.skipif(parallel_region() is None, reason="torch is not linked with OpenMP here")
def test_threads_share_the_panels_and_answer_as_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny_linear, "SMALL_BYTES", 0)
    weight, x = torch.randn(1000, 64), torch.randn(5, 64)
    before, answers = torch.get_num_threads(), []
    for num_threads in (1, 4):
        torch.set_num_threads(num_threads)
        answers.append(SkinnyLinear(weight, None, torch.float32)(x))
    torch.set_num_threads(before)
    assert torch.equal(*answers)


def test_a_weight_of_few_outputs_or_odd_inputs_is_left_to_torch() -> None:
    assert not SkinnyLinear.fits(torch.zeros(3, 16))
    assert not SkinnyLinear.fits(torch.zeros(8, 20))
    assert not SkinnyLinear.fits(torch.zeros(16, 8).t())
