"""Sampling a token from logits: temperature, top-k, top-p, min-p, and a random stream for each sequence.

The randomness of a token is a hash of (seed, tokens generated before it, sample index), so a seeded answer is the same
in any batch, on any device that draws by these functions.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from graftlm.core.config import SamplingParams
    from graftlm.core.sequence import Sequence

NUCLEUS_WIDTHS = (64, 1024)
"""How many of the likeliest tokens a top-p row looks at before it sorts the whole vocabulary."""

BLOCK = 1024
"""Columns that are summed together where a row is searched for a random number."""

_TEMPERATURES = (1e-30, 1e30)
"""Temperatures that float32 holds. Lower ones draw the same tokens, higher ones too."""

_MASK_64 = (1 << 64) - 1


class Needs(NamedTuple):
    """The sampling parameters that decide how a row is computed; rows with equal needs are computed together."""

    few: bool
    masked: bool
    greedy: bool
    top_k: int
    top_p: bool
    min_p: bool

    @classmethod
    def of(cls, sampling: SamplingParams, *, few: bool, masked: bool) -> Needs:
        if sampling.temperature == 0:
            return cls(few, masked, True, 0, False, False)
        return cls(few, masked, False, max(sampling.top_k, 0), sampling.top_p < 1, sampling.min_p > 0)


def drawing(sequences: Seq[Sequence], num_samples: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The arguments of `draw` that follow from the rows, on the CPU.

    -> float32 [num_rows, 3]: temperature, top_p, min_p; float32 [num_rows, num_samples]: uniforms
    """
    wanted = [s.request.sampling for s in sequences]
    params = np.array([(s.temperature, s.top_p, s.min_p) for s in wanted])
    np.clip(params[:, 0], *_TEMPERATURES, out=params[:, 0])
    return torch.from_numpy(params.astype(np.float32)), torch.from_numpy(uniforms_of(sequences, num_samples))


def draw(
    values: torch.Tensor, peaks: torch.Tensor, params: torch.Tensor, uniforms: torch.Tensor, needs: Needs
) -> torch.Tensor:
    """Draw columns of `values`.

    values    float32 [num_rows, width], -inf where not allowed;  peaks  [num_rows], their maxima
    params    float32 [num_rows, 3]: temperature, top_p, min_p
    uniforms  float32 [num_rows, num_samples], in [0, 1)
    -> int64 [num_rows, num_samples]
    """
    scaled = (values - peaks[:, None]) / params[:, 0:1]  # at most 0, so exp does not overflow
    if needs.top_k:  # sorted even where all tokens stay: the order must not depend on the group's width
        best = scaled.topk(min(needs.top_k, scaled.shape[1]), dim=1)
        return best.indices.gather(1, _draw_sorted(best.values, params, uniforms, needs))
    if needs.top_p:
        return _draw_nucleus(scaled, params, uniforms)
    if needs.min_p:
        scaled = scaled.masked_fill(scaled < params[:, 2:3].log(), -torch.inf)
    return _inverse_cdf(scaled.exp(), uniforms)


def _draw_nucleus(scaled: torch.Tensor, params: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw by top-p and min-p, in the order of columns: look at only as many of the likeliest as a nucleus may have.

    A GPU looks at all of them: to see how far a nucleus reaches would be to wait for all that was launched before.
    """
    goals = params[:, 1:2] * scaled.exp().sum(dim=1, keepdim=True)
    num_columns = scaled.shape[1]
    widths = [width for width in NUCLEUS_WIDTHS if width < num_columns and scaled.device.type == "cpu"]
    columns = torch.empty(uniforms.shape, dtype=torch.int64, device=scaled.device)
    left = torch.arange(len(scaled), device=scaled.device)
    for width in (*widths, num_columns):
        values, ids = scaled[left].topk(width, dim=1)
        num_before = (values.exp().cumsum(dim=1) < goals[left]).sum(dim=1, keepdim=True)
        threshold = values.gather(1, num_before.clamp_(max=width - 1))
        is_whole = threshold > values[:, -1:] if width < num_columns else torch.ones_like(threshold, dtype=torch.bool)
        done = is_whole[:, 0]  # no token as likely as the threshold was left out
        rows = left[done]
        ids, order = ids[done].sort(dim=1)
        weights = _nucleus(values[done].gather(1, order), threshold[done], goals[rows], params[rows])
        columns[rows] = ids.gather(1, _inverse_cdf(weights, uniforms[rows]))
        left = left[~done]
        if not len(left):
            break
    return columns


def _nucleus(scaled: torch.Tensor, threshold: torch.Tensor, goal: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
    """The weights of a nucleus, 0 outside: all above the threshold, and as many equal to it as it takes to the goal."""
    weights = scaled.exp()
    is_above, is_equal = scaled > threshold, scaled == threshold
    missing = goal - weights.masked_fill(~is_above, 0).sum(dim=1, keepdim=True)
    wanted = (missing / threshold.exp()).ceil_().clamp_(min=1)
    is_kept = (is_above | (is_equal & (is_equal.cumsum(dim=1) <= wanted))) & (weights >= params[:, 2:3])
    return weights.masked_fill(~is_kept, 0)


def _draw_sorted(scaled: torch.Tensor, params: torch.Tensor, uniforms: torch.Tensor, needs: Needs) -> torch.Tensor:
    """Draw from rows sorted downwards by top-p and min-p."""
    weights = scaled.exp()
    if needs.top_p:
        total = weights.sum(dim=1, keepdim=True)
        before = weights.cumsum(dim=1) - weights  # a token stays while those before it do not reach top_p
        weights = weights.masked_fill(before >= params[:, 1:2] * total, 0)
        weights[:, 0] = scaled[:, 0].exp()
    if needs.min_p:
        weights = weights.masked_fill(scaled < params[:, 2:3].log(), 0)
    return _inverse_cdf(weights, uniforms)


def _inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first columns whose cumulative weight passes the uniforms.

    weights  [num_rows, width];  uniforms  [num_rows, n], in [0, 1)  -> int64 [num_rows, n]
    """
    num_rows, width = weights.shape
    if (
        width > 4 * BLOCK
    ):  # a scan of few long rows leaves most of a GPU idle: sum blocks, then scan the one that is hit
        blocks = torch.nn.functional.pad(weights, (0, -width % BLOCK)).view(num_rows, -1, BLOCK)
        ends = blocks.sum(dim=2).cumsum(dim=1)
        targets = torch.minimum(uniforms * ends[:, -1:], torch.nextafter(ends[:, -1:], torch.zeros_like(ends[:, -1:])))
        block = torch.searchsorted(ends, targets, right=True).clamp_(max=ends.shape[1] - 1)
        hit = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).cumsum(dim=2)
        before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)
        last = hit[:, :, -1]
        within = torch.minimum(targets - before, torch.nextafter(last, torch.zeros_like(last)))
        return block * BLOCK + torch.searchsorted(hit, within[:, :, None], right=True)[:, :, 0].clamp_(max=BLOCK - 1)
    cumulative = weights.cumsum(dim=1)
    total = cumulative[:, -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    return torch.searchsorted(cumulative, torch.minimum(uniforms * total, below_total), right=True).clamp_(
        max=weights.shape[1] - 1
    )


def uniforms_of(sequences: Seq[Sequence], num_samples: int) -> NDArray[np.float32]:
    """The random numbers of the sequences' next tokens, in [0, 1), multiples of 2^-24. [num_rows, num_samples]"""
    x = np.array([s.bounds.seed & _MASK_64 for s in sequences], np.uint64)[:, None]
    position = np.array([s.num_generated + s.progress.num_in_flight for s in sequences], np.uint64)[:, None]
    index = np.array([s.index for s in sequences], np.uint64)[:, None] + np.arange(num_samples).astype(np.uint64)
    x = _splitmix64(x ^ _splitmix64(position))
    x = _splitmix64(x ^ _splitmix64(index))
    return ((x >> np.uint64(40)) / np.float64(1 << 24)).astype(np.float32)


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Source: Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
