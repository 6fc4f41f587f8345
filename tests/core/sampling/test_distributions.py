"""Columns drawn from weights."""

import pytest
import torch

from graftlm.core.sampling.distributions import BLOCK, _inverse_cdf


@pytest.mark.parametrize("width", [BLOCK, 4 * BLOCK + 904, 128_256])
def test_a_uniform_number_picks_the_first_column_whose_cumulative_weight_passes_it(width: int) -> None:
    torch.manual_seed(0)
    weights = torch.rand(3, width) ** 8
    weights[:, ::3] = 0
    weights[1, : width // 2] = 0
    weights[2] = 0
    weights[2, 77] = 1.0  # one column takes all
    uniforms = torch.rand(3, 50)
    uniforms[:, 0], uniforms[:, 1] = 0, 1 - 2**-24
    found = _inverse_cdf(weights, uniforms)
    assert bool((weights.gather(1, found) > 0).all())
    exact = weights.double().cumsum(1)
    expected = torch.searchsorted(exact, uniforms.double() * exact[:, -1:], right=True)
    assert float((found == expected).double().mean()) > 0.99  # sums are rounded
    share = (exact.gather(1, found) - exact.gather(1, expected)).abs() / exact[:, -1:]
    assert float(share.max()) < 1e-5
