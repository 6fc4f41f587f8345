"""Ids, tables of cosines and sines, and copies of a step against torch; without a GPU, in Triton's interpreter."""

import pytest
import torch

from graftlm.kernels.gpu.step_inputs import copy_words, feed_tokens, rotary_table
from graftlm.kernels.jit.precompile import compile_together
from tests.kernels.gpu.test_elementwise import DEVICE, HALF_DTYPES


@pytest.mark.parametrize("num_tokens", [1, 5, 300])
def test_ids_are_those_given_or_drawn(num_tokens: int) -> None:
    ids = torch.arange(num_tokens, device=DEVICE, dtype=torch.int32) + 1000
    drawn = torch.arange(num_tokens, device=DEVICE) * 7
    sources = torch.where(ids % 3 == 0, -1, torch.randperm(num_tokens, device=DEVICE)).int()
    expected = torch.where(sources >= 0, drawn[sources.clamp(min=0)], ids)
    assert torch.equal(feed_tokens(ids, sources, drawn), expected)
    assert torch.equal(feed_tokens(ids.long(), sources, drawn), expected)


@pytest.mark.gpu
def test_ids_of_a_dry_run_can_be_looked_up() -> None:
    ids, sources = torch.arange(5000, device=DEVICE).int(), torch.full((5000,), -1, device=DEVICE).int()
    garbage = torch.full((5000,), -(1 << 40), device=DEVICE)
    del garbage  # its memory is what the ids are written to
    found: list[torch.Tensor] = []
    compile_together(lambda: found.append(feed_tokens(ids, sources, ids.long())), DEVICE)
    assert not found[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, HALF_DTYPES[-1]])
@pytest.mark.parametrize(("num_tokens", "half"), [(1, 32), (5, 12), (40, 64)])
def test_the_table_is_torchs_to_the_bit(num_tokens: int, half: int, dtype: torch.dtype) -> None:
    positions = torch.randint(0, 130_000, (num_tokens,), device=DEVICE, dtype=torch.int32)
    positions[0] = 0
    frequencies = 1.0 / 500_000 ** (torch.arange(half, device=DEVICE) / half)
    angle = positions[:, None].float() * frequencies
    found = rotary_table(positions, frequencies, 1.25, dtype)
    for values, f in zip(found, (torch.cos, torch.sin), strict=True):
        expected = torch.cat([f(angle) * 1.25] * 2, -1)
        assert values.dtype == dtype
        assert float((values.float() - expected).abs().max()) <= (2e-7 if dtype is torch.float32 else 4e-3)
        if DEVICE.type == "cuda":
            assert torch.equal(values, expected.to(dtype))


@pytest.mark.parametrize("n", [1, 1024, 5000])
def test_words_are_copied(n: int) -> None:
    source, target = torch.arange(n, dtype=torch.int32, device=DEVICE), torch.zeros(n, dtype=torch.int32, device=DEVICE)
    copy_words(source, target)
    assert torch.equal(source, target)
