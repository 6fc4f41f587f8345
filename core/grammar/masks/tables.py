"""Automata as device tables: states advance and logits are masked on the GPU, without the host.

What each function computes is written in plain torch, for any device; kernels/gpu/sampling/token_mask.py
computes the same from the same tables. A sequence is one number, its state. Counters are multiplied out: a state and
its counts become one state, so a bound of 400 characters makes 400 times the states of a string; over `max_states`
there are no tables, and the host fills the masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata.dfa import Dfa, Place
from graftlm.core.grammar.automata.jit import Int32Array
from graftlm.core.grammar.masks.rows.packed_row import PackedRow, write
from graftlm.core.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from graftlm.core.grammar.engines.fsm import FsmGrammar

DEAD = -1


@dataclass(frozen=True, eq=False)
class TokenTables:
    """The bytes of every token, shared by all grammars over a vocabulary.

    bytes    uint8 [max_token_bytes, vocab_size]: byte p of token i, so that neighbours load together
    lengths  int32 [vocab_size]: 0 for ids without bytes
    eos      int64 [num_eos]
    """

    bytes: torch.Tensor
    lengths: torch.Tensor
    eos: torch.Tensor

    @classmethod
    def of(cls, vocabulary: Vocabulary, device: torch.device | str = "cpu") -> TokenTables:
        tokens = vocabulary.tokens
        lengths = np.fromiter(map(len, tokens), np.int32, len(tokens))
        table = np.zeros((len(tokens), max(1, int(lengths.max(initial=0)))), np.uint8)
        filled = np.arange(table.shape[1]) < lengths[:, None]
        table[filled] = np.frombuffer(b"".join(tokens), np.uint8)
        return cls(
            bytes=torch.from_numpy(np.ascontiguousarray(table.T)).to(device),
            lengths=torch.from_numpy(lengths).to(device),
            eos=torch.tensor(vocabulary.eos_token_ids, dtype=torch.int64, device=device),
        )


@dataclass(frozen=True, eq=False)
class GrammarTables:
    """One automaton on a device.

    transitions  int32 [num_states, num_classes]: the next state, -1 where the byte is not allowed
    classes      int32 [256]: the class of a byte
    accepting    bool [num_states]
    masks        int32 [num_masks, num_words]: the different token masks, as `Matcher.fill_mask` writes them
    mask_of      int32 [num_states]: each state's row of `masks`
    tokens       the vocabulary's tables
    numbers      the state of each place of the automaton (`FsmMatcher.place`)
    """

    transitions: torch.Tensor
    classes: torch.Tensor
    accepting: torch.Tensor
    masks: torch.Tensor
    mask_of: torch.Tensor
    tokens: TokenTables
    numbers: dict[Place, int]

    @classmethod
    def of(cls, grammar: FsmGrammar, tokens: TokenTables, *, max_states: int = 4096) -> GrammarTables:
        """Lay out `grammar` on the device of `tokens`. Raises GrammarError over `max_states` states."""
        numbers, transitions = _multiplied_out(grammar.dfa, max_states)
        rows: dict[int, int] = {}
        masks: list[PackedRow] = []
        mask_of = np.empty(len(numbers), np.int32)
        for place, number in numbers.items():
            row = grammar.masks.row(place)
            if id(row) not in rows:
                rows[id(row)] = len(masks)
                masks.append(row)  # keeps the row, and so its id, alive
            mask_of[number] = rows[id(row)]
        unpacked = np.empty((len(masks), grammar.vocabulary.num_words), np.int32)
        for packed, written in zip(masks, unpacked, strict=True):
            write(packed, written)
        accepting = grammar.dfa.accepting[[place[0] for place in numbers]]
        device = tokens.bytes.device
        return cls(
            transitions=torch.from_numpy(transitions).to(device),
            classes=torch.from_numpy(grammar.dfa.classes.astype(np.int32)).to(device),
            accepting=torch.from_numpy(accepting).to(device),
            masks=torch.from_numpy(unpacked).to(device),
            mask_of=torch.from_numpy(mask_of).to(device),
            tokens=tokens,
            numbers=numbers,
        )

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (self.transitions, self.classes, self.accepting, self.masks, self.mask_of))

    def advance(self, states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """The states after one more token each.

        states     int32 [num_reqs]
        token_ids  int64 [num_reqs]
        -> int32 [num_reqs]; -1 where the token is not allowed. End-of-sequence leaves an accepting state as it is.
        """
        lengths = self.tokens.lengths[token_ids]
        after = self._walk(states, self.tokens.bytes[:, token_ids], lengths)
        ends = torch.isin(token_ids, self.tokens.eos) & self.accepting[states.clamp(min=0)] & (states >= 0)
        return torch.where(lengths > 0, after, torch.where(ends, states, DEAD)).to(torch.int32)

    def walk(self, states: torch.Tensor) -> torch.Tensor:
        """Which tokens each state allows, by reading all of them: the definition of `masks`.

        states  int32 [num_reqs] -> bool [num_reqs, vocab_size]
        """
        lengths = self.tokens.lengths
        every = torch.stack([self._walk(state.expand(len(lengths)), self.tokens.bytes, lengths) for state in states])
        allowed = (every >= 0) & (lengths > 0)
        allowed[:, self.tokens.eos] = self.accepting[states.long()][:, None]
        return allowed

    def mask_logits(self, logits: torch.Tensor, states: torch.Tensor) -> None:
        """Set the logits of what each state does not allow to -inf, in place. logits [num_reqs, vocab_size]"""
        words = self.masks[self.mask_of[states.long()].long()]
        bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
        logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, float("-inf"))

    def _walk(self, states: torch.Tensor, data: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Read `lengths[i]` bytes of column i of `data` from each state."""
        for position in range(int(lengths.max()) if len(lengths) else 0):
            alive = (position < lengths) & (states >= 0)
            kind = self.classes[data[position].long()]
            states = torch.where(alive, self.transitions[states.clamp(min=0).long(), kind.long()], states)
        return states


def _multiplied_out(dfa: Dfa, max_states: int) -> tuple[dict[Place, int], Int32Array]:
    """Number every place and give its transitions. With no counters, places are states."""
    if not dfa.loops:
        _check(dfa.num_states - 1, max_states)
        table = np.where(dfa.table > 0, dfa.table - 1, DEAD).astype(np.int32)
        return {(state,): state - 1 for state in range(1, dfa.num_states)}, np.ascontiguousarray(table[1:])
    numbers: dict[Place, int] = {dfa.start: 0}
    rows: list[Sequence[int]] = []
    for place in (queue := [dfa.start]):
        row = []
        for byte in dfa.first_bytes:
            after = dfa.step(place, byte)
            if after is not None and after not in numbers:
                numbers[after] = len(numbers)
                _check(len(numbers), max_states)
                queue.append(after)
            row.append(DEAD if after is None else numbers[after])
        rows.append(row)
    return numbers, np.array(rows, np.int32)


def _check(num_states: int, max_states: int) -> None:
    if num_states > max_states:
        raise GrammarError(
            f"the automaton has more than {max_states:,} states with its counters multiplied out; "
            "leave its masks to the host, or raise max_states"
        )
