"""Packed token masks on a device."""

import torch

from graftlm.kernels.gpu.sampling.token_mask import apply_mask
from tests.kernels.gpu.test_elementwise import DEVICE, random


def test_a_packed_mask_forbids_the_tokens_whose_bit_is_clear() -> None:
    logits = random(3, 70)
    before = logits.clone()
    allowed = torch.rand(2, 70, device=DEVICE) < 0.5
    bits = torch.zeros(2, 96, dtype=torch.int64, device=DEVICE)
    bits[:, :70] = allowed
    words = (bits.view(2, 3, 32) << torch.arange(32, device=DEVICE)).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    apply_mask(logits, words, torch.tensor([2, 0], dtype=torch.int32, device=DEVICE))
    assert torch.equal(logits[1], before[1])
    for row, keep in ((2, allowed[0]), (0, allowed[1])):
        assert torch.equal(logits[row], before[row].masked_fill(~keep, float("-inf")))
