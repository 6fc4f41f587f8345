"""Weights in 12 bits are the weights that they were, to the bit."""

from __future__ import annotations

import pytest
import torch

from graftlm.kernels.bits12.weight_codec import LINES, MAX_LISTED, decode, encode


def normal(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return (torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()


def check(weight: torch.Tensor) -> int:
    """-> how many weights are listed"""
    coded = encode(weight)
    assert coded is not None
    assert torch.equal(decode(coded).view(torch.int16), weight.view(torch.int16))
    return len(coded.inputs)


@pytest.mark.parametrize(("n", "k"), [(64, 128), (1, 1), (65, 129), (200, 320), (128, 1024)])
def test_it_comes_back_to_the_bit(n: int, k: int) -> None:
    check(normal(n, k))


def test_every_exponent_and_mantissa_that_has_a_code_comes_back() -> None:
    values = torch.arange(110 << 7, 126 << 7, dtype=torch.int32)  # 16 exponents, all mantissas
    bits = torch.cat([values, values | 0x8000]).to(torch.int16).view(1, -1)
    assert check(bits.view(torch.bfloat16).repeat(70, 1)) == 0


def test_weights_without_a_code_are_listed() -> None:
    weight = normal(100, 300)
    before = check(weight)
    odd = [0.0, -0.0, 1e-9, -1e-20, 3e-39, 5.0, -3e4]  # zeros, near zero, denormal, far out
    for i, value in enumerate(odd):
        weight[7 + i, 11 * i] = value
    assert before + len(odd) - 2 <= check(weight) <= before + len(odd)  # a weight replaced may have been listed


def test_outputs_of_zeros_take_no_list() -> None:
    weight = normal(130, 256)
    before = check(weight)
    weight[64:128] = 0
    weight[3], weight[4] = 0.0, -0.0
    assert check(weight) <= before


def test_outputs_have_exponents_of_their_own() -> None:
    weight = normal(64, 512).float() * torch.logspace(-20, 15, 64)[:, None]
    assert check(weight.bfloat16()) < 30


def test_a_listed_weight_is_found_at_its_output() -> None:
    weight = normal(192, 256)
    weight[:] = weight.abs().clamp(0.01).bfloat16()
    weight[2, 200], weight[150, 3] = 0.0, 1e-12
    coded = encode(weight)
    assert coded is not None
    assert coded.inputs.tolist() == [200, 3]
    assert coded.starts.diff().nonzero().flatten().tolist() == [2, 150]
    assert coded.most.tolist() == [1, 0, 1]


def test_weights_that_have_no_such_form() -> None:
    weight = normal(64, 512)
    assert encode(weight.float()) is None
    assert encode(weight.half()) is None
    for value in (float("inf"), float("nan")):
        spoiled = weight.clone()
        spoiled[5, 6] = value
        assert encode(spoiled) is None
    spread = weight.clone()
    spread[9, : MAX_LISTED + 20] *= 1e-20
    assert encode(spread) is None  # too many of one output


def test_it_takes_three_quarters() -> None:
    weight = normal(256, 4096)
    coded = encode(weight)
    assert coded is not None
    assert coded.codes.shape == (256 // 64 * 4096 // 128 * LINES, 32)
    assert 0.75 < coded.nbytes / weight.nbytes < 0.755


def test_many_outputs_are_coded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(200, 256)
    weight[150, 9] = 0.0
    whole = encode(weight)
    monkeypatch.setattr("graftlm.kernels.bits12.weight_codec._AT_ONCE", 64 * 256)
    pieces = encode(weight)
    assert whole is not None and pieces is not None
    for name in ("codes", "starts", "most", "inputs", "values", "scales"):
        assert torch.equal(getattr(whole, name), getattr(pieces, name))
