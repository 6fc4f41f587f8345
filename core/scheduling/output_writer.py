"""OutputWriter: appends tokens to a sequence, advances its grammar, and turns tokens into text."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from graftlm.core.errors import ConfigError, EngineError, GrammarError
from graftlm.core.grammar.matcher import NO_ENDING, ends_within
from graftlm.core.request import Begun, Chunk, Completion, FinishReason, Timing, TokenLogprob, Usage
from graftlm.core.scheduling.stop_strings import StopMatcher
from graftlm.core.sequence import Output, Progress, Sequence
from graftlm.core.text.detokenizer import MAX_UNFINISHED

if TYPE_CHECKING:
    from graftlm.core.grammar.matcher import Matcher
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
        output = sequence.output
        if output.detokenizer is not None:
            return
        before = () if sequence.grammar is not None else sequence.prompt_ids[-MAX_UNFINISHED:].tolist()
        special = sequence.sampling.special_tokens or sequence.request.markers
        output.detokenizer = self.tokenizer.detokenizer(before, special=special)
        if sequence.sampling.stop and output.stop_matcher is None:
            output.stop_matcher = StopMatcher(sequence.sampling.stop)
        if sequence.grammar is not None and output.matcher is None:
            output.matcher = sequence.grammar.result().matcher()

    def open(self, sequence: Sequence) -> None:
        """Append what the grammar forces before the first sampled token. Call it once the prompt is encoded."""
        self.begin(sequence)
        matcher = sequence.output.matcher
        if matcher is None:
            return
        if self._closes(sequence) and not ends_within(matcher, sequence.remaining):
            if matcher.min_tokens_to_accept() >= NO_ENDING:
                raise GrammarError(
                    "no text was found that completes the constraint, so that max_tokens could cut one; simplify the "
                    "constraint, or pass close_on_length=False to take a text that is cut"
                )
            num = matcher.min_tokens_to_accept()
            raise _too_short(sequence, f"the shortest text that the constraint allows takes up to {num} tokens")
        self._jump(sequence)

    def write(self, sequence: Sequence, token_id: int, sampled: Sampled | None = None) -> None:
        """Append a sampled token and all that the grammar forces after it; sets `finish_reason` at the end.

        sampled  what was asked for about the token
        """
        matcher = sequence.output.matcher
        if matcher is not None and token_id not in self.tokenizer.eos_token_ids:
            if matcher.advance([token_id]) != 1:
                raise EngineError(f"token {token_id} was sampled against its grammar's mask")
            left = sequence.remaining - 1
            if self._closes(sequence) and not ends_within(matcher, left):
                num = matcher.min_tokens_to_accept() + 1
                matcher.rollback(1)
                if not sequence.num_generated and matcher.accepting:  # the shortest ending would be an empty answer
                    raise _too_short(sequence, f"the tool call that the model begins takes up to {num} tokens")
                self._close(sequence)
                return
        self._push(sequence, token_id, sampled)
        if matcher is not None:
            self._go_on(sequence, matcher)

    def replay(self, sequence: Sequence, begun: Begun) -> None:
        """Append the delivered part of an answer that another engine began, and all that the grammar forces after it.

        Its text depends on its tokens alone, so the next chunk begins where the last delivered one ended.
        """
        self.begin(sequence)
        output, matcher = sequence.output, sequence.output.matcher
        for token_id in begun.token_ids:
            if output.finish_reason is not None:
                break
            if matcher is not None and token_id not in self.tokenizer.eos_token_ids and not matcher.advance([token_id]):
                raise EngineError(f"token {token_id} was delivered by a replica that has died, and is not allowed here")
            self._push(sequence, token_id, None)
        if output.finish_reason is None:
            if begun.finish_reason is not None:
                self._finish(sequence, begun.finish_reason)
            else:
                self.spell(sequence)
        if sequence.sampling.logprobs:
            output.logprobs[:] = begun.logprobs
        output.num_streamed, output.num_streamed_tokens = len(output.text), sequence.num_generated
        if matcher is not None:
            self._go_on(sequence, matcher)

    def choose(self, sequence: Sequence, chosen: Seq[Sampled]) -> None:
        """Append tokens that were chosen as a whole, and all that the grammar forces after them."""
        matcher = sequence.output.matcher
        assert matcher is not None
        if matcher.advance([one.token_id for one in chosen]) != len(chosen):
            raise EngineError("a text was chosen that its grammar does not allow here")
        for one in chosen:
            if sequence.output.finish_reason is None:
                self._push(sequence, one.token_id, one)
        self._go_on(sequence, matcher)

    def fork(self, parent: Sequence, index: int) -> Sequence:
        """A sibling of `parent` that stands where `parent` stands, or has ended as it has, and will go its own way."""
        matcher = parent.output.matcher
        child = Sequence(
            parent.request,
            parent.prompt,
            index=index,
            arrived_s=parent.arrived_s,
            tokens=parent.tokens[:],
            bounds=parent.bounds._replace(seed=parent.bounds.seed + index),
            group=parent.group,
            progress=Progress(num_cached=parent.progress.num_cached, miss=parent.progress.miss),
            output=Output(
                matcher=matcher.fork() if matcher is not None else None,
                logprobs=list(parent.output.logprobs),
                num_forced=parent.output.num_forced,
                finish_reason=parent.output.finish_reason,
                stopped_by=parent.output.stopped_by,
            ),
        )
        if child.output.finish_reason is not None:
            child.output.text = parent.output.text
            return child
        if parent.output.stop_matcher is not None:
            child.output.stop_matcher = StopMatcher(parent.output.stop_matcher.automaton)
        self.begin(child)
        text = self._spelled(child, child.num_generated)
        stop_matcher = child.output.stop_matcher
        child.output.text = stop_matcher.push(text).text if stop_matcher is not None else text
        return child

    def spell(self, sequence: Sequence) -> None:
        """Bring the text up to date with the tokens; with stop strings it always is."""
        if sequence.output.stop_matcher is None:
            sequence.output.text += self._spelled(sequence, sequence.num_generated)

    def chunk(self, sequence: Sequence) -> Chunk | None:
        """The text since the last chunk; None if there is none yet."""
        output = sequence.output
        done = output.finish_reason is not None
        if not done:
            self.spell(sequence)
        text = output.text[output.num_streamed :]
        if not text and not done:
            return None
        ids = sequence.tokens[sequence.num_prompt_tokens + output.num_streamed_tokens :].tolist()
        logprobs = output.logprobs[output.num_streamed_tokens :] if sequence.sampling.logprobs else None
        output.num_streamed += len(text)
        output.num_streamed_tokens += len(ids)
        usage = self.usage(sequence) if done or sequence.request.stream_usage else None
        return Chunk(text, ids, logprobs, output.finish_reason, usage, sequence.index)

    def usage(self, sequence: Sequence) -> Usage:
        num_cached, num_forced = sequence.progress.num_cached or 0, sequence.output.num_forced
        thinking = sequence.request.thinking
        num_thinking = 0 if thinking is None else thinking.num_tokens(self.tokenizer, sequence.output_ids)
        return Usage(sequence.num_prompt_tokens, num_cached, sequence.num_generated, num_forced, num_thinking)

    def completion(self, sequence: Sequence, pin: int | None = None) -> Completion:
        """The completion of a sequence that has ended: the generated text, or scores, or logits.

        pin  what unpins its prefix, if that stays in the cache
        """
        if sequence.scoring or sequence.request.want_logits:
            return self._scored(sequence, pin)
        output = sequence.output
        assert output.finish_reason is not None
        matcher = output.matcher
        complete = matcher is None or matcher.accepting or output.finish_reason == "stop"
        return Completion(
            text=output.text,
            token_ids=sequence.output_ids,
            finish_reason=output.finish_reason,
            usage=self.usage(sequence),
            logprobs=list(output.logprobs) if sequence.sampling.logprobs else None,
            request_id=sequence.request.id,
            stop=output.stopped_by,
            text_complete=complete,
            miss=sequence.progress.miss,
            pin=pin,
            timing=_timing(sequence),
        )

    def _closes(self, sequence: Sequence) -> bool:
        close = sequence.sampling.close_on_length
        return sequence.sampling.json_schema is not None if close is None else close

    def _go_on(self, sequence: Sequence, matcher: Matcher) -> None:
        """After new tokens: end where the grammar ends, else append what it forces."""
        if sequence.output.finish_reason is None:
            if matcher.finished:
                self._finish(sequence, "stop")
            else:
                self._jump(sequence)

    def _jump(self, sequence: Sequence) -> None:
        """Append the tokens that the grammar leaves no choice about."""
        matcher = sequence.output.matcher
        assert matcher is not None
        remaining = sequence.remaining
        if not self.min_forced or remaining <= 0:
            return
        forced = matcher.forced(sequence.tokens)[:remaining]
        if len(forced) < self.min_forced:
            return
        accepted = matcher.advance(forced)
        if self._closes(sequence) and not ends_within(matcher, remaining - accepted):
            matcher.rollback(accepted)
            return  # the ending may be tokenised more tightly than what was forced
        self._push_forced(sequence, forced[:accepted])
        if sequence.output.finish_reason is None and matcher.finished:
            self._finish(sequence, "stop")

    def _close(self, sequence: Sequence) -> None:
        """Write the shortest valid ending; the budget allows no other."""
        matcher = sequence.output.matcher
        assert matcher is not None
        ending = matcher.ending(sequence.tokens)
        matcher.advance(ending)
        self._push_forced(sequence, ending)
        if sequence.output.finish_reason is None:
            self._finish(sequence, "length")

    def _push_forced(self, sequence: Sequence, ids: Seq[int]) -> None:
        output, sampling, remaining = sequence.output, sequence.sampling, sequence.remaining
        one_by_one = output.stop_matcher is not None or sampling.logprobs or sampling.stop_token_ids
        if not one_by_one and 1 < len(ids) < remaining and not any(i in ids for i in self.tokenizer.eos_token_ids):
            if output.first_s is None:
                output.first_s = time.monotonic()
            sequence.tokens.extend(ids)
            output.num_forced += len(ids)
            return
        for token_id in ids:  # one of which may end the text
            if output.finish_reason is not None:
                return
            output.num_forced += 1
            self._push(sequence, token_id, None)

    def _push(self, sequence: Sequence, token_id: int, sampled: Sampled | None) -> None:
        sampling = sequence.sampling
        output = sequence.output
        sequence.tokens.append(token_id)
        if output.first_s is None:
            output.first_s = time.monotonic()
        if sampling.logprobs:
            output.logprobs.append(_logprob(self.tokenizer.token_bytes, token_id, sampled))
        # a grammar allows the end of text only where its text is complete, so there it always ends
        ignored = sampling.ignore_eos and output.matcher is None
        ends = token_id in self.tokenizer.eos_token_ids and not ignored
        if ends or token_id in sampling.stop_token_ids:
            output.stopped_by = token_id
            self._finish(sequence, "stop", silent=1)
            return
        if output.stop_matcher is not None:
            text, stop = output.stop_matcher.push(self._spelled(sequence, sequence.num_generated))
            output.text += text
            if stop is not None:
                output.text += stop if sampling.include_stop else ""
                output.stopped_by, output.stop_matcher, output.finish_reason = stop, None, "stop"
                return
        if sequence.remaining <= 0:
            finished = output.matcher is not None and output.matcher.finished
            self._finish(sequence, "stop" if finished else "length")

    def _spelled(self, sequence: Sequence, num_tokens: int) -> str:
        """The text that the tokens add which have not been spelled yet, up to the first `num_tokens` generated."""
        output, first = sequence.output, sequence.num_prompt_tokens
        assert output.detokenizer is not None
        new = sequence.tokens[first + output.num_spelled : first + num_tokens]
        output.num_spelled = num_tokens
        return output.detokenizer.push(new)

    def _finish(self, sequence: Sequence, reason: FinishReason, *, silent: int = 0) -> None:
        """Complete the text; the last `silent` tokens are no part of it."""
        output = sequence.output
        assert output.detokenizer is not None
        text = self._spelled(sequence, sequence.num_generated - silent)
        text += output.detokenizer.flush(cut=reason == "length")
        if output.stop_matcher is not None:
            emitted, stop = output.stop_matcher.push(text)
            text = emitted if stop is not None else emitted + output.stop_matcher.flush()
            if stop is not None:
                text += stop if sequence.sampling.include_stop else ""
                output.stopped_by, reason = stop, "stop"
        output.text += text
        output.finish_reason = reason

    def _scored(self, sequence: Sequence, pin: int | None) -> Completion:
        request, table = sequence.request, self.tokenizer.token_bytes
        return Completion(
            text="",
            token_ids=list(request.score_ids or []),
            finish_reason="stop",
            usage=Usage(sequence.num_prompt_tokens, sequence.progress.num_cached or 0),
            logprobs=[_logprob(table, s.token_id, s) for s in sequence.readout.scores] if sequence.scoring else None,
            request_id=request.id,
            miss=sequence.progress.miss,
            logits=sequence.readout.logits,
            pin=pin,
        )


def _too_short(sequence: Sequence, needed: str) -> ConfigError:
    """Return the error of a request whose tokens allow no answer, with the limit that holds and its remedy."""
    room = sequence.bounds.max_new_tokens
    limit, remedy = f"max_tokens is {room}", "raise max_tokens"
    if sequence.sampling.max_tokens != room:
        limit = f"the prompt of {sequence.num_prompt_tokens:,} tokens leaves room for {room:,}"
        remedy = f"shorten it{sequence.bounds.remedy}"
    return ConfigError(f"{limit}, but {needed}; {remedy}")


def _timing(sequence: Sequence) -> Timing:
    arrived_s, now = sequence.arrived_s, time.monotonic()
    first_s = now if sequence.output.first_s is None else sequence.output.first_s
    started_s = first_s if sequence.progress.started_s is None else sequence.progress.started_s
    return Timing(max(0.0, started_s - arrived_s), max(0.0, first_s - started_s), now - first_s)


def _logprob(table: Seq[bytes], token_id: int, sampled: Sampled | None) -> TokenLogprob:
    """Return the log-probability of a token with its bytes. table: bytes of each token; ids beyond it have none"""
    logprob, top = (sampled.logprob, sampled.top) if sampled is not None else (None, ())
    ids = (token_id, *(i for i, _ in top))
    data, *top_data = (table[i] if i < len(table) else b"" for i in ids)
    shown = [(i, piece.decode("utf-8", "replace"), value) for (i, value), piece in zip(top, top_data, strict=True)]
    return TokenLogprob(token_id, data.decode("utf-8", "replace"), logprob, tuple(shown), data, tuple(top_data))
