"""Sampling: penalties, masks, draws and log-probabilities. The result of a row depends on that row alone."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from graftlm.core.errors import ConfigError, EngineError, GraftError
from graftlm.core.sampling.distributions import Needs, draw, drawing

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from graftlm.core.sequence import Sequence

FEW_WORDS = 256
"""A mask with at most this many non-zero words is sampled over its allowed ids alone."""


class SampleRow(NamedTuple):
    """One row of logits and what is wanted of it.

    mask         int32 [ceil(vocab_size / 32)], bit set = allowed; None allows all.
    num_samples  how many tokens to draw, for samples sequence.index, sequence.index + 1, ...
    """

    sequence: Sequence
    mask: NDArray[np.int32] | None = None
    num_samples: int = 1


class Sampled(NamedTuple):
    """A drawn token. `logprob` (natural log, of the model's own distribution) and `top` are there if asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Draw the next tokens of a batch of rows."""

    def __init__(self, vocab_size: int, eos_token_ids: Seq[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)

    def sample(self, logits: torch.Tensor, rows: Seq[SampleRow]) -> list[list[Sampled] | GraftError]:
        """Draw `num_samples` tokens for each row; a row that cannot be drawn gets its error instead.

        logits  [num_rows, vocab_size], any floating dtype; not changed
        """
        with torch.inference_mode():
            if all(_is_plain(row) for row in rows):
                return _sample_plain(logits)
            return self._sample(logits, rows)

    def likeliest(self, logits: torch.Tensor) -> list[list[Sampled] | GraftError]:
        """The likeliest token of each row [num_rows, vocab_size], which is what a sequence gets that `is_greedy`."""
        with torch.inference_mode():
            return _sample_plain(logits)

    def _sample(self, logits: torch.Tensor, rows: Seq[SampleRow]) -> list[list[Sampled] | GraftError]:
        answers: list[list[Sampled] | GraftError] = [[] for _ in rows]
        allowed = [None if row.mask is None else _few_ids(row.mask, logits.shape[1]) for row in rows]
        edited = self._edit(logits, rows, allowed, answers)
        groups: dict[Needs, list[int]] = {}
        for i, row in enumerate(rows):
            if not isinstance(answers[i], GraftError):
                groups.setdefault(needs_of(row, few=allowed[i] is not None), []).append(i)
        drawn: dict[int, list[int]] = {}
        for needs, members in groups.items():
            group = [rows[i] for i in members]
            values, ids = _values(edited, members, group, [allowed[i] for i in members])
            peaks = values.amax(dim=1)
            finite = torch.isfinite(peaks).tolist()
            sequences = [row.sequence for row in group]
            num_samples = max(row.num_samples for row in group)
            if needs.greedy:
                columns = values.argmax(dim=1, keepdim=True).expand(-1, num_samples)
            else:
                params, uniforms = drawing(sequences, num_samples)
                columns = draw(values, peaks, params.to(values.device), uniforms.to(values.device), needs)
            picked = (columns if ids is None else ids.gather(1, columns)).tolist()
            for i, row, tokens, is_finite, peak in zip(members, group, picked, finite, peaks.tolist(), strict=True):
                if is_finite:
                    drawn[i] = tokens[: row.num_samples]
                else:
                    answers[i] = nothing_allowed(row.sequence) if peak == -np.inf else not_finite()
        self._report(logits, rows, drawn, answers)
        return answers

    def _edit(
        self,
        logits: torch.Tensor,
        rows: Seq[SampleRow],
        allowed: list[NDArray[np.int64] | None],
        answers: list[list[Sampled] | GraftError],
    ) -> torch.Tensor:
        """Apply penalties, biases and `min_tokens`. The same tensor if no row needs any, else a float32 copy."""
        edits = _Edits()
        for i, row in enumerate(rows):
            sequence, sampling = row.sequence, row.sequence.sampling
            if sampling.repetition_penalty != 1:
                edits.scale(i, _ids_of(sequence, logits.shape[1]), sampling.repetition_penalty)
            if (sampling.frequency_penalty or sampling.presence_penalty) and sequence.num_generated:
                ids, counts = np.unique(np.asarray(sequence.output_ids, dtype=np.int64), return_counts=True)
                edits.add(i, ids, -sampling.frequency_penalty * counts - sampling.presence_penalty)
            if sampling.logit_bias:
                ids = np.fromiter(sampling.logit_bias.keys(), dtype=np.int64)
                if ids.min() < 0 or ids.max() >= logits.shape[1]:
                    wrong = ids.min() if ids.min() < 0 else ids.max()
                    answers[i] = ConfigError(f"logit_bias names token id {wrong}; ids are 0 to {logits.shape[1] - 1}")
                    continue
                edits.add(i, ids, np.fromiter(sampling.logit_bias.values(), dtype=np.float64))
            if sampling.allowed_token_ids is not None:
                allowed[i] = _permitted(np.unique(np.array(sampling.allowed_token_ids, np.int64)), row.mask)
            if sequence.num_generated < sampling.min_tokens:
                ends = np.array([*self.eos_token_ids, *sampling.stop_token_ids], dtype=np.int64)
                ends = ends[(ends >= 0) & (ends < logits.shape[1])]
                few = allowed[i]
                if few is None:
                    edits.forbid(i, ends)
                else:  # a constraint that only allows the end is kept: the text cannot go on
                    others = few[~np.isin(few, ends)]
                    allowed[i] = others if len(others) else few
        return edits.apply(logits)

    def _report(
        self,
        logits: torch.Tensor,
        rows: Seq[SampleRow],
        drawn: dict[int, list[int]],
        answers: list[list[Sampled] | GraftError],
    ) -> None:
        """Fill `answers` with the drawn tokens and the log-probabilities that their rows asked for."""
        wanted = [i for i in drawn if rows[i].sequence.sampling.logprobs or rows[i].sequence.sampling.top_logprobs]
        for i, tokens in drawn.items():
            answers[i] = [Sampled(token) for token in tokens]
        if not wanted:
            return
        raw = logits[wanted].float()
        total = raw.logsumexp(dim=1, keepdim=True)
        width = max(len(drawn[i]) for i in wanted)
        columns = torch.tensor([drawn[i] + drawn[i][:1] * (width - len(drawn[i])) for i in wanted], device=raw.device)
        chosen = (raw.gather(1, columns) - total).tolist()
        num_top = min(max(rows[i].sequence.sampling.top_logprobs for i in wanted), raw.shape[1])
        best = raw.topk(num_top, dim=1)
        top_ids, top_values = best.indices.tolist(), (best.values - total).tolist()
        for j, i in enumerate(wanted):
            keep = rows[i].sequence.sampling.top_logprobs
            top = tuple(zip(top_ids[j][:keep], top_values[j][:keep], strict=True))
            pairs = zip(drawn[i], chosen[j], strict=False)
            answers[i] = [Sampled(token, logprob, top) for token, logprob in pairs]


@dataclass
class _Edits:
    """Changes of single logits, gathered over the batch and applied at once."""

    scaled: list[tuple[int, NDArray[np.int64], float]] = field(default_factory=list)
    added: list[tuple[int, NDArray[np.int64], NDArray[np.floating[Any]]]] = field(default_factory=list)
    forbidden: list[tuple[int, NDArray[np.int64]]] = field(default_factory=list)

    def scale(self, row: int, ids: NDArray[np.int64], factor: float) -> None:
        self.scaled.append((row, ids, factor))

    def add(self, row: int, ids: NDArray[np.int64], values: NDArray[np.floating[Any]]) -> None:
        self.added.append((row, ids, values))

    def forbid(self, row: int, ids: NDArray[np.int64]) -> None:
        self.forbidden.append((row, ids))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not (self.scaled or self.added or self.forbidden):
            return logits
        edited = logits.to(torch.float32, copy=True)
        device = logits.device
        if self.scaled:
            places = _places([(row, ids) for row, ids, _ in self.scaled], device)
            factors = np.concatenate([np.full(len(ids), factor, np.float32) for _, ids, factor in self.scaled])
            factor = torch.from_numpy(factors).to(device)
            old = edited[places]
            edited[places] = torch.where(old > 0, old / factor, old * factor)
        if self.added:
            places = _places([(row, ids) for row, ids, _ in self.added], device)
            values = torch.from_numpy(np.concatenate([values for *_, values in self.added]).astype(np.float32))
            edited.index_put_(places, values.to(device), accumulate=True)
        if self.forbidden:
            edited[_places(self.forbidden, device)] = -torch.inf
        return edited


def _places(edits: list[tuple[int, NDArray[np.int64]]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    rows = np.concatenate([np.full(len(ids), row, np.int64) for row, ids in edits])
    columns = np.concatenate([ids for _, ids in edits])
    return torch.from_numpy(rows).to(device), torch.from_numpy(columns).to(device)


def _ids_of(sequence: Sequence, vocab_size: int) -> NDArray[np.int64]:
    """Return the distinct tokens of a sequence; of its pictures the placeholders, as in transformers."""
    ids = np.unique(np.asarray(sequence.tokens, dtype=np.int64))
    if sequence.prompt.spans:
        placeholders = {span.values.item.placeholder for span in sequence.prompt.spans}
        ids = np.unique(np.array([*ids[ids >= 0], *(one for one in placeholders if one < vocab_size)], np.int64))
    return ids


def needs_of(row: SampleRow, *, few: bool) -> Needs:
    return Needs.of(row.sequence.sampling, few=few, masked=row.mask is not None)


def is_unedited(sequence: Sequence) -> bool:
    """Whether the sequence draws from its logits as they are, but for a mask, and is told nothing of them."""
    s = sequence.request.sampling
    return (
        s.repetition_penalty == 1
        and not (s.logprobs or s.top_logprobs or s.frequency_penalty or s.presence_penalty or s.logit_bias)
        and s.allowed_token_ids is None
        and (s.min_tokens == 0 or sequence.num_generated + sequence.progress.num_in_flight >= s.min_tokens)
    )


def is_greedy(sequence: Sequence) -> bool:
    """Whether the sequence takes the likeliest token of its logits as they are, but for a mask."""
    return sequence.sampling.temperature == 0 and is_unedited(sequence)


def _is_plain(row: SampleRow) -> bool:
    """Whether the likeliest token of the untouched logits is all that is wanted."""
    return row.mask is None and row.num_samples == 1 and is_greedy(row.sequence)


def _sample_plain(logits: torch.Tensor) -> list[list[Sampled] | GraftError]:
    if logits.device.type == "cpu":  # numpy needs a tenth of torch's time for a row or two
        table = logits.float().numpy()  # it also finds the largest of floats many times faster than of half floats
        columns = table.argmax(axis=1)
        finite = np.isfinite(table[np.arange(len(table)), columns]).tolist()
        tokens = columns.tolist()
    else:
        places = logits.argmax(dim=1, keepdim=True)
        finite = torch.isfinite(logits.gather(1, places)).squeeze(1).tolist()
        tokens = places.squeeze(1).tolist()
    return [[Sampled(token)] if ok else not_finite() for token, ok in zip(tokens, finite, strict=True)]


def not_finite() -> EngineError:
    return EngineError(
        "the model's logits are not finite; load it in a wider dtype (dtype='float32'); if that does not help, its "
        "files are damaged: download them again"
    )


def nothing_allowed(sequence: Sequence) -> EngineError:
    return EngineError(
        f"no token is allowed after {sequence.num_generated} generated tokens: the constraint, logit_bias and "
        "min_tokens exclude the whole vocabulary; loosen one of them"
    )


def _few_ids(mask: NDArray[np.int32], vocab_size: int) -> NDArray[np.int64] | None:
    """The allowed ids, ascending, if the mask has few; None if it has many."""
    words = np.flatnonzero(mask)
    if len(words) > FEW_WORDS:
        return None
    bits = np.unpackbits(np.ascontiguousarray(mask[words]).view(np.uint8), bitorder="little").reshape(-1, 32)
    word, bit = np.nonzero(bits)
    ids = words[word] * 32 + bit
    return ids[ids < vocab_size].astype(np.int64, copy=False)


def _permitted(ids: NDArray[np.int64], mask: NDArray[np.int32] | None) -> NDArray[np.int64]:
    """Return the ids that a mask allows."""
    if mask is None:
        return ids
    ids = ids[ids < 32 * len(mask)]
    is_allowed: NDArray[np.bool_] = (mask[ids >> 5] >> (ids & 31)) & 1 == 1
    return ids[is_allowed]


def _values(
    logits: torch.Tensor, members: list[int], rows: list[SampleRow], allowed: list[NDArray[np.int64] | None]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The float32 logits that the group's rows choose from, and their token ids if they are not 0, 1, 2, ..."""
    if allowed[0] is not None:
        few = [ids for ids in allowed if ids is not None]
        width = max(1, max(len(ids) for ids in few))
        table = np.zeros((len(few), width), dtype=np.int64)
        valid = np.zeros((len(few), width), dtype=bool)
        for j, ids in enumerate(few):
            table[j, : len(ids)] = ids
            valid[j, : len(ids)] = True
        ids_tensor = torch.from_numpy(table).to(logits.device)
        values = logits[torch.tensor(members, device=logits.device)[:, None], ids_tensor].float()
        return values.masked_fill_(~torch.from_numpy(valid).to(logits.device), -torch.inf), ids_tensor
    values = (logits if len(members) == len(logits) else logits[members]).float()
    masks = [row.mask for row in rows if row.mask is not None]
    if masks:
        values = values.masked_fill(~unpack_masks(masks, logits.shape[1], logits.device), -torch.inf)
    return values, None


def unpack_masks(masks: list[NDArray[np.int32]], vocab_size: int, device: torch.device) -> torch.Tensor:
    """Unpack token masks to bool [num_masks, vocab_size]. Ids beyond a short mask are not allowed."""
    num_words = -(-vocab_size // 32)
    packed = np.zeros((len(masks), num_words), dtype=np.int32)
    for j, mask in enumerate(masks):
        packed[j, : len(mask)] = mask[:num_words]
    if device.type == "cpu":
        bits = np.unpackbits(packed.view(np.uint8), axis=1, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))[:, :vocab_size]
    words = torch.from_numpy(packed).to(device)  # an eighth of the bytes; unpacked where they are used
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    return ((words[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :vocab_size]


def score_logprobs(logits: torch.Tensor, ids: Seq[int], num_top: int = 0) -> list[Sampled]:
    """Given tokens with their log-probabilities (natural log), that of ids[i] under row i of [num_ids, vocab_size].

    num_top  how many likeliest tokens to report beside each
    """
    with torch.inference_mode():
        rows = logits.float()
        columns = torch.tensor(list(ids), dtype=torch.int64, device=logits.device)[:, None]
        total = rows.logsumexp(dim=1)
        scores = (rows.gather(1, columns).squeeze(1) - total).tolist()
        if not num_top:
            return [Sampled(i, score) for i, score in zip(ids, scores, strict=True)]
        found = torch.topk(rows, min(num_top, rows.shape[1]), dim=1)
        tops = zip(found.indices.tolist(), (found.values - total[:, None]).tolist(), strict=True)
        return [
            Sampled(i, score, tuple(zip(*top, strict=True))) for i, score, top in zip(ids, scores, tops, strict=True)
        ]
