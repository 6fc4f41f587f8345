"""The greedy kernel against torch; without a GPU, in Triton's interpreter."""

import pytest
import torch

from graftlm.kernels.gpu.sampling.argmax import greedy
from graftlm.kernels.sampling_codes import NOT_FINITE, NOTHING_ALLOWED

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 5), (3, 2048), (9, 5001)])
def test_the_first_of_the_largest_logits_is_found(num_rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(num_rows, vocab_size + 3, device=DEVICE).to(dtype)[:, :vocab_size]
    tokens = torch.full((num_rows + 1,), -7, device=DEVICE)
    first = (logits == logits.amax(1, keepdim=True)).int().argmax(1)  # half precision has ties
    assert greedy(logits, tokens).tolist() == first.tolist() == tokens[:-1].tolist()
    assert tokens[-1] == -7


def test_rows_without_a_token_are_told_apart() -> None:
    logits = torch.zeros(5, 3000, device=DEVICE)
    logits[0] = float("-inf")
    logits[1, 2999] = float("nan")
    logits[2, 7] = float("inf")
    logits[3, :2500] = float("-inf")
    logits[4] = float("nan")
    tokens = torch.full((5,), -7, device=DEVICE)
    codes = greedy(logits, tokens).tolist()
    assert codes == [NOTHING_ALLOWED, NOT_FINITE, NOT_FINITE, 2500, NOT_FINITE]
    assert tokens.tolist() == [0, 0, 0, 2500, 0]
