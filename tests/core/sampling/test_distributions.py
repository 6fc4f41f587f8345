"""Columns drawn from weights."""

import pytest
import torch

from graftlm.core.sampling.distributions import BLOCK, Needs, _inverse_cdf, draw

TOP_P = Needs(few=False, masked=False, greedy=False, top_k=0, top_p=True, min_p=True)


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


@pytest.mark.parametrize("num_ties", [5, 70, 1500])
def test_a_nucleus_has_the_first_of_equal_tokens(num_ties: int) -> None:
    values = torch.full((1, 4000), -40.0)
    ties = torch.randperm(4000, generator=torch.Generator().manual_seed(0))[:num_ties].sort().values
    values[0, ties] = 3.0
    uniforms = torch.linspace(0, 1 - 2**-24, 4 * num_ties)[None]
    columns = draw(values, values.amax(1), torch.tensor([[1.0, 0.59999, 0.0]]), uniforms, TOP_P)[0]
    assert columns.tolist() == sorted(columns.tolist())
    assert set(columns.tolist()) == set(ties[: round(0.6 * num_ties)].tolist())


def test_a_nucleus_is_drawn_from_by_its_weights_in_the_order_of_columns() -> None:
    torch.manual_seed(3)
    values = torch.randn(2, 3000) * torch.tensor([[6.0], [0.5]])
    params = torch.tensor([[0.7, 0.8, 0.0], [1.0, 0.8, 0.3]])
    uniforms = (torch.arange(2000) + 0.5)[None].expand(2, -1) / 2000
    columns = draw(values, values.amax(1), params, uniforms, TOP_P)
    for row, (temperature, top_p, min_p), found in zip(values, params, columns, strict=True):
        weights = ((row.double() - row.max()) / temperature).exp()
        ordered, order = weights.sort(descending=True)
        inside = order[(ordered.cumsum(0) - ordered < top_p * weights.sum()) & (ordered >= min_p)]
        kept = torch.zeros_like(weights).index_copy_(0, inside, weights[inside])
        ends = kept.cumsum(0) / kept.sum()
        expected = torch.searchsorted(ends, uniforms[0].double(), right=True)
        assert float((found == expected).double().mean()) > 0.99  # sums are rounded
        assert bool((kept[found] > 0).all())
