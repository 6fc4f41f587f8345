from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from graftlm.core.fusion import linears as fuse_module
from graftlm.core.fusion.linears import fuse
from graftlm.kernels.cpu.linear.packed_linear import PackedLinear, packable
from tests.models import tiny_model

ROOT = Path(__file__).parents[3]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 8, 33, 67, 250, 257])
def test_a_packed_layer_answers_as_the_plain_one(dtype: torch.dtype, num_tokens: int) -> None:
    linear = nn.Linear(48, 80).to(dtype)
    x = torch.randn(1, num_tokens, 48).to(dtype)
    with torch.no_grad():
        torch.testing.assert_close(PackedLinear(linear)(x), linear(x), rtol=2e-2, atol=1e-2 if x.itemsize < 4 else 1e-5)


ALL_NUMBERS_OF_ROWS = """
import psutil, torch
from graftlm.kernels.cpu.linear.packed_linear import PackedLinear

memory = psutil.Process().memory_info
layers = [PackedLinear(torch.nn.Linear(64, num_out)) for num_out in (64, 128, 192, 272)]
with torch.no_grad():
    for layer in layers:
        layer(torch.randn(1, 64))
    before = memory().rss
    for num_rows in range(1, 513):
        for layer in layers:
            layer(torch.randn(num_rows, 64))
    print(memory().rss - before)
"""


def test_products_of_many_numbers_of_rows_used_to_keep_a_third_of_a_megabyte_for_each() -> None:
    command = [sys.executable, "-c", ALL_NUMBERS_OF_ROWS]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
    assert grown < 150 << 20  # 500 MB where oneDNN is given each number of rows


@pytest.mark.parametrize(("kind", "num_layers"), [("llama", 2 * 7 + 1), ("gpt2", 2 * 4 + 1)])
def test_every_plain_linear_layer_is_packed_and_comes_back(kind: str, num_layers: int) -> None:
    model = tiny_model(kind)
    before = dict(model.named_modules())
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    fusions = fuse(model)
    assert fusions.num_packed == num_layers
    fusions.undo()
    assert dict(model.named_modules()) == before
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in weights.items())


def test_a_conv1d_holds_its_weight_the_other_way_round() -> None:
    conv = Conv1D(5, 3)
    packed = PackedLinear(conv)
    assert (packed.in_features, packed.out_features) == (3, 5)
    assert torch.equal(packed.weight, conv.weight)
    with torch.no_grad():
        torch.testing.assert_close(packed(torch.eye(3)), conv(torch.eye(3)))


def test_a_tied_head_stays_where_the_embedding_is() -> None:
    model = tiny_model(tie_word_embeddings=True)
    fuse(model)
    head = model.get_output_embeddings()
    assert isinstance(head, PackedLinear)
    assert head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


def test_a_layer_that_two_modules_share_is_packed_once() -> None:
    shared = nn.Linear(16, 16)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared)})
    assert fuse(model).num_packed == 1
    assert model["a"][0] is model["b"][0]


def test_a_replacement_that_differs_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(PackedLinear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 1.001

    monkeypatch.setattr(fuse_module, "PackedLinear", Wrong)
    model = nn.Sequential(nn.Linear(16, 16))
    assert fuse(model).num_packed == 0
    assert type(model[0]) is nn.Linear


def test_layers_of_a_quantizer_or_with_hooks_are_left_alone() -> None:
    class Quantized(nn.Linear):
        pass

    hooked = nn.Linear(8, 8)
    hooked.register_forward_hook(lambda *_: None)
    assert not packable(Quantized(8, 8))
    assert not packable(hooked)
    assert not packable(nn.Linear(8, 8).to(torch.float64))
    assert packable(nn.Linear(8, 8))


def test_a_packed_layer_saves_its_plain_weight() -> None:
    linear = nn.Linear(8, 4)
    packed = PackedLinear(linear)
    assert torch.equal(packed.state_dict()["weight"], linear.weight)
    assert torch.equal(packed.state_dict()["bias"], linear.bias)
