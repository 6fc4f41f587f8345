"""Token masks on a device: packed masks, and automata walked over a vocabulary."""

import torch

from graftlm.kernels.gpu.sampling.token_mask import apply_mask, walk_mask
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


def test_walking_an_automaton_allows_exactly_the_tokens_that_stay_in_it() -> None:
    tokens = [b"", b"a", b"b", b"ab", b"aa", b"ba", b"abab", b"c"]
    token_bytes = torch.zeros(4, len(tokens), dtype=torch.uint8)
    for i, token in enumerate(tokens):
        for position, byte in enumerate(token):
            token_bytes[position, i] = byte
    classes = torch.zeros(256, dtype=torch.int32)
    classes[ord("a")], classes[ord("b")] = 1, 2
    transitions = torch.tensor([[-1, 1, -1], [-1, -1, 0]], dtype=torch.int32)  # (ab)*: state 1 follows an a
    logits = torch.zeros(2, len(tokens), device=DEVICE)
    int32 = {"dtype": torch.int32, "device": DEVICE}
    lens = torch.tensor([len(t) for t in tokens], **int32)
    tables = (transitions.to(DEVICE), classes.to(DEVICE), token_bytes.to(DEVICE), lens)
    walk_mask(logits, torch.tensor([0, 1], **int32), torch.tensor([0, 1], **int32), *tables)
    kept = [[tokens[i] for i in row.isfinite().nonzero().flatten()] for row in logits]
    assert kept == [[b"a", b"ab", b"abab"], [b"b", b"ba"]]
