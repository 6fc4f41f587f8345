"""Weights in any format, and the modules that hold them."""

import pytest
import torch
from torch import nn

from graftlm.kernels.bits12.weight import Bits12Weight
from graftlm.kernels.weight import PlainWeight, WeightFormat, hold_as, put_weight, register_format, weight_of

VALUES = torch.arange(24.0).view(6, 4)


@pytest.mark.parametrize("form", [PlainWeight, Bits12Weight])
def test_concatenated_weights_are_split_again(form: type[PlainWeight]) -> None:
    q, k, v = form(VALUES[:3]), form(VALUES[3:5]), form(VALUES[5:])
    packed = q.concat([k, v])
    assert type(packed) is form and packed.shape == (6, 4) and torch.equal(packed.dense(), VALUES)
    parts = packed.split([3, 2, 1])
    assert [type(part) for part in parts] == [form] * 3
    assert all(torch.equal(a.dense(), b.dense()) for a, b in zip(parts, (q, k, v), strict=True))
    assert parts[1].dense().data_ptr() == packed.dense()[3:].data_ptr()  # views, not copies


def test_weights_of_different_kinds_have_no_concatenation() -> None:
    plain = PlainWeight(VALUES)
    for other in (Bits12Weight(VALUES), PlainWeight(VALUES.bfloat16()), PlainWeight(VALUES[:, :2])):
        with pytest.raises(ValueError, match="has no concatenation"):
            plain.concat([other])


def test_a_shard_is_an_equal_part_of_outputs_or_inputs() -> None:
    weight = PlainWeight(VALUES)
    assert torch.equal(weight.shard(0, 1, 3).dense(), VALUES[2:4])
    assert torch.equal(weight.shard(1, 1, 2).dense(), VALUES[:, 2:])
    assert weight.shard(1, 1, 2).num_bytes == 6 * 2 * 4
    with pytest.raises(ValueError, match=r"axis 0 of a weight \(6, 4\) has 6 entries, no multiple of 4 ranks"):
        weight.shard(0, 0, 4)


def test_some_outputs_are_dense() -> None:
    assert torch.equal(PlainWeight(VALUES).dense(slice(1, 3)), VALUES[1:3])


def test_codes_take_three_quarters_more_memory_and_the_fallback_has_none() -> None:
    held = Bits12Weight(VALUES.bfloat16())
    assert held.num_bytes == 48 + int(0.77 * 48)
    assert type(held.fallback) is PlainWeight and held.fallback.num_bytes == 48
    assert held.fallback.fallback is None


def test_a_linear_layer_has_a_weight_and_a_subclass_has_none() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    linear = nn.Linear(4, 6)
    weight = weight_of(linear)
    assert type(weight) is PlainWeight and weight.values is linear.weight
    assert weight_of(Scaled(4, 6)) is None and weight_of(nn.Embedding(4, 6)) is None and weight_of(None) is None


def test_a_module_holds_its_tensor_in_another_form_until_it_is_told_not_to() -> None:
    linear = nn.Linear(4, 6)
    hold_as(linear, Bits12Weight)
    assert type(weight_of(linear)) is Bits12Weight
    hold_as(linear, None)
    assert type(weight_of(linear)) is PlainWeight


def test_the_memory_of_a_weight_is_freed_and_given_back() -> None:
    linear = nn.Linear(4, 6, bias=False)
    put_weight(linear, None)
    assert linear.weight.numel() == 0
    put_weight(linear, PlainWeight(VALUES))
    assert torch.equal(linear(torch.eye(4)), VALUES.T)


def test_a_quantizer_registers_its_modules() -> None:
    class Halved(nn.Module):
        """Keeps half of each number."""

        def __init__(self) -> None:
            super().__init__()
            self.halves, self.bias = VALUES / 2, None

    register_format(Halved, WeightFormat(lambda module: PlainWeight(2 * module.halves), lambda module, weight: None))
    found = weight_of(Halved())
    assert found is not None and torch.equal(found.dense(), VALUES)
