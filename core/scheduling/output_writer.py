"""OutputWriter: what happens to a sequence when a token is appended to it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from graftlm.core.errors import ConfigError, EngineError
from graftlm.core.request import Chunk, Completion, FinishReason, TokenLogprob, Usage
from graftlm.core.scheduling.stop_strings import StopMatcher
from graftlm.core.sequence import Sequence

if TYPE_CHECKING:
    from graftlm.core.sampling.sampler import Sampled
    from graftlm.core.text.tokenizer import Tokenizer


class OutputWriter:
    """Appends sampled and forced tokens, turns them into text, and says when a sequence has ended.

    min_forced  the shortest run of forced tokens that is worth appending at once; 0 switches jumping off.
    """

    def __init__(self, tokenizer: Tokenizer, *, min_forced: int = 1) -> None:
        self.tokenizer = tokenizer
        self.min_forced = min_forced

    def begin(self, sequence: Sequence) -> None:
        """Prepare a sequence that is about to get its first token; raises what its grammar's compilation raised."""
        if sequence.detokenizer is not None:
            return
        sequence.detokenizer = self.tokenizer.detokenizer()
        if sequence.sampling.stop:
            sequence.stop_matcher = StopMatcher(sequence.sampling.stop)
        if sequence.grammar is not None and sequence.matcher is None:
            sequence.matcher = sequence.grammar.result().matcher()

    def open(self, sequence: Sequence) -> None:
        """Append what the grammar forces before the first sampled token. Call once the prompt is in."""
        self.begin(sequence)
        matcher = sequence.matcher
        if matcher is None:
            return
        if self._closes(sequence) and matcher.min_tokens_to_accept() > sequence.remaining:
            raise ConfigError(
                f"max_tokens is {sequence.max_new_tokens}, but the shortest text that the constraint allows takes "
                f"up to {matcher.min_tokens_to_accept()} tokens; raise max_tokens"
            )
        self._jump(sequence)

    def write(self, sequence: Sequence, token_id: int, sampled: Sampled | None = None) -> None:
        """Append a sampled token and all that the grammar forces after it; sets `finish_reason` at the end.

        sampled  what was asked for about the token
        """
        if sequence.matcher is not None and token_id not in self.tokenizer.eos_token_ids:
            if sequence.matcher.advance([token_id]) != 1:
                raise EngineError(f"token {token_id} was sampled against its grammar's mask")
            left = sequence.remaining - 1
            if self._closes(sequence) and sequence.matcher.min_tokens_to_accept() > left:
                sequence.matcher.rollback(1)
                self._close(sequence)
                return
        self._push(sequence, token_id, sampled)
        if sequence.matcher is not None and sequence.finish_reason is None:
            if sequence.matcher.finished:
                self._finish(sequence, "stop")
            else:
                self._jump(sequence)

    def choose(self, sequence: Sequence, chosen: Seq[Sampled]) -> None:
        """Append tokens that were chosen as a whole, and all that the grammar forces after them."""
        assert sequence.matcher is not None
        if sequence.matcher.advance([one.token_id for one in chosen]) != len(chosen):
            raise EngineError("a text was chosen that its grammar does not allow here")
        for one in chosen:
            if sequence.finish_reason is None:
                self._push(sequence, one.token_id, one)
        if sequence.finish_reason is None:
            if sequence.matcher.finished:
                self._finish(sequence, "stop")
            else:
                self._jump(sequence)

    def fork(self, parent: Sequence, index: int) -> Sequence:
        """A sibling of `parent` that stands where `parent` stands and will go its own way."""
        child = Sequence(parent.request, parent.prompt_ids, index=index, tokens=parent.tokens[:])
        child.seed, child.arrived_s, child.deadline_s = parent.seed + index, parent.arrived_s, parent.deadline_s
        child.max_new_tokens, child.group, child.miss = parent.max_new_tokens, parent.group, parent.miss
        child.num_cached, child.num_forced = parent.num_cached, parent.num_forced
        self.begin(child)
        assert child.detokenizer is not None
        text = self._spelled(child, child.num_generated)
        child.text = child.stop_matcher.push(text).text if child.stop_matcher is not None else text
        child.logprobs = list(parent.logprobs)
        child.matcher = parent.matcher.fork() if parent.matcher is not None else None
        return child

    def spell(self, sequence: Sequence) -> None:
        """Bring the text up to date with the tokens; with stop strings it always is."""
        if sequence.stop_matcher is None:
            sequence.text += self._spelled(sequence, sequence.num_generated)

    def chunk(self, sequence: Sequence) -> Chunk | None:
        """What is new since the last chunk; None if there is no new text yet."""
        if sequence.finish_reason is None:
            self.spell(sequence)
        text = sequence.text[sequence.num_streamed :]
        done = sequence.finish_reason is not None
        if not text and not done:
            return None
        ids = sequence.output_ids[sequence.num_streamed_tokens :]
        logprobs = sequence.logprobs[sequence.num_streamed_tokens :] if sequence.sampling.logprobs else None
        sequence.num_streamed += len(text)
        sequence.num_streamed_tokens += len(ids)
        usage = self.usage(sequence) if done else None
        return Chunk(text, ids, logprobs, sequence.finish_reason, usage, sequence.index)

    def usage(self, sequence: Sequence) -> Usage:
        return Usage(sequence.num_prompt_tokens, sequence.num_cached or 0, sequence.num_generated, sequence.num_forced)

    def completion(self, sequence: Sequence) -> Completion:
        """What a sequence that has ended gives: the generated text, or scores, or logits."""
        if sequence.scoring or sequence.request.want_logits:
            return _scored(sequence)
        assert sequence.finish_reason is not None
        matcher = sequence.matcher
        complete = matcher is None or matcher.accepting or sequence.finish_reason == "stop"
        return Completion(
            text=sequence.text,
            token_ids=sequence.output_ids,
            finish_reason=sequence.finish_reason,
            usage=self.usage(sequence),
            logprobs=list(sequence.logprobs) if sequence.sampling.logprobs else None,
            request_id=sequence.request.id,
            stop=sequence.stopped_by,
            text_complete=complete,
            miss=sequence.miss,
        )

    def _closes(self, sequence: Sequence) -> bool:
        close = sequence.sampling.close_on_length
        return sequence.sampling.json_schema is not None if close is None else close

    def _jump(self, sequence: Sequence) -> None:
        """Append the tokens that the grammar leaves no choice about."""
        matcher = sequence.matcher
        assert matcher is not None
        if not self.min_forced or sequence.remaining <= 0:
            return
        forced = matcher.forced(sequence.tokens)[: sequence.remaining]
        if len(forced) < self.min_forced:
            return
        accepted = matcher.advance(forced)
        left = sequence.remaining - accepted
        if self._closes(sequence) and matcher.min_tokens_to_accept() > left:
            matcher.rollback(accepted)
            return  # the ending may be tokenised more tightly than what was forced
        self._push_forced(sequence, forced[:accepted])
        if sequence.finish_reason is None and matcher.finished:
            self._finish(sequence, "stop")

    def _close(self, sequence: Sequence) -> None:
        """Write the shortest valid ending; the budget allows no other."""
        matcher = sequence.matcher
        assert matcher is not None
        ending = matcher.ending(sequence.tokens)
        matcher.advance(ending)
        self._push_forced(sequence, ending)
        if sequence.finish_reason is None:
            self._finish(sequence, "length")

    def _push_forced(self, sequence: Sequence, ids: Seq[int]) -> None:
        for token_id in ids:
            if sequence.finish_reason is not None:
                return
            sequence.num_forced += 1
            self._push(sequence, token_id, None)

    def _push(self, sequence: Sequence, token_id: int, sampled: Sampled | None) -> None:
        sampling = sequence.sampling
        sequence.tokens.append(token_id)
        if sampling.logprobs:
            sequence.logprobs.append(self._logprob(token_id, sampled))
        # a grammar allows the end of text only where its text is complete, so there it always ends
        ignored = sampling.ignore_eos and sequence.matcher is None
        ends = token_id in self.tokenizer.eos_token_ids and not ignored
        if ends or token_id in sampling.stop_token_ids:
            sequence.stopped_by = token_id
            self._finish(sequence, "stop", silent=1)
            return
        if sequence.stop_matcher is not None:
            text, stop = sequence.stop_matcher.push(self._spelled(sequence, sequence.num_generated))
            sequence.text += text
            if stop is not None:
                sequence.stopped_by, sequence.stop_matcher = stop, None
                sequence.finish_reason = "stop"
                return
        if sequence.remaining <= 0:
            finished = sequence.matcher is not None and sequence.matcher.finished
            self._finish(sequence, "stop" if finished else "length")

    def _spelled(self, sequence: Sequence, num_tokens: int) -> str:
        """The text that the tokens add which have not been spelled yet, up to the first `num_tokens` generated."""
        assert sequence.detokenizer is not None
        first = sequence.num_prompt_tokens
        new = sequence.tokens[first + sequence.num_spelled : first + num_tokens]
        sequence.num_spelled = num_tokens
        return sequence.detokenizer.push(new)

    def _finish(self, sequence: Sequence, reason: FinishReason, *, silent: int = 0) -> None:
        """Complete the text; the last `silent` tokens are no part of it."""
        assert sequence.detokenizer is not None
        text = self._spelled(sequence, sequence.num_generated - silent) + sequence.detokenizer.flush()
        if sequence.stop_matcher is not None:
            emitted, stop = sequence.stop_matcher.push(text)
            text = emitted if stop is not None else emitted + sequence.stop_matcher.flush()
            if stop is not None:
                sequence.stopped_by, reason = stop, "stop"
        sequence.text += text
        sequence.finish_reason = reason

    def _logprob(self, token_id: int, sampled: Sampled | None) -> TokenLogprob:
        top = sampled.top if sampled is not None else ()
        return TokenLogprob(
            token_id,
            self._token(token_id),
            sampled.logprob if sampled is not None else None,
            tuple((i, self._token(i), logprob) for i, logprob in top),
        )

    def _token(self, token_id: int) -> str:
        table = self.tokenizer.token_bytes
        return table[token_id].decode("utf-8", "replace") if token_id < len(table) else ""


def _scored(sequence: Sequence) -> Completion:
    request = sequence.request
    scored = [TokenLogprob(i, "", p) for i, p in zip(request.score_ids or [], sequence.scores, strict=True)]
    return Completion(
        text="",
        token_ids=list(request.score_ids or []),
        finish_reason="stop",
        usage=Usage(sequence.num_prompt_tokens, sequence.num_cached or 0),
        logprobs=scored if sequence.scoring else None,
        request_id=request.id,
        miss=sequence.miss,
        logits=sequence.logits,
        pin=sequence.pin,
    )
