"""ThinkingMatcher: a constraint that begins behind a model's thinking, and a limit of the thinking's tokens.

It serves constrained requests of models that think. While the model thinks, every token but an end of sequence is
allowed, so a step costs one filled mask row; behind the end marker every call goes to the constraint's own matcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from graftlm.core.chat.thinking import ThinkingFormat
    from graftlm.core.grammar.compile import Grammar
    from graftlm.core.grammar.matcher import MaskRow, Matcher
    from graftlm.core.text.tokenizer import Tokenizer

Phase = Literal["before", "inside", "closing", "behind"]


@dataclass(frozen=True)
class ThinkingRule:
    """The tokens of one model's thinking.

    begin      id of the begin marker, which the model may write; None if the prompt ends inside the thinking
    end        id of the end marker
    separator  ids of the whitespace between the end marker and the content
    eos        ids that end a sequence
    budget     limit of thinking tokens; None for no limit
    """

    begin: int | None
    end: int
    separator: tuple[int, ...]
    eos: tuple[int, ...]
    budget: int | None = None

    @classmethod
    def of(cls, form: ThinkingFormat, tokenizer: Tokenizer, budget: int | None = None) -> ThinkingRule | None:
        """Return the rule of a request.

        None if its answer begins behind the thinking, or if a marker is no single token: such a model thinks without a
        constraint only.
        """
        begin, end = tokenizer.encode_continuation(form.begin), tokenizer.encode_continuation(form.end)
        if form.starts == "after" or len(end) != 1 or (form.starts == "before" and len(begin) != 1):
            return None
        separator = tuple(tokenizer.encode_continuation(form.separator))
        return cls(begin[0] if form.starts == "before" else None, end[0], separator, tokenizer.eos_token_ids, budget)


class ThinkingGrammar:
    """A grammar whose matchers begin behind the thinking.

    inner  the constraint of the content; None for free text
    """

    def __init__(self, rule: ThinkingRule, inner: Grammar | None) -> None:
        self.rule = rule
        self.inner = inner
        self.warnings = getattr(inner, "warnings", ())

    def matcher(self) -> ThinkingMatcher:
        return ThinkingMatcher(self.rule, self.inner.matcher() if self.inner is not None else None)


def behind_thinking(rule: ThinkingRule, grammar: Future[Grammar] | None) -> Future[Any]:
    """Return the grammar of a request whose constraint begins behind the thinking.

    grammar  the constraint, perhaps still being compiled; None for free text
    """
    wrapped: Future[Any] = Future()
    if grammar is None:
        wrapped.set_result(ThinkingGrammar(rule, None))
        return wrapped

    def wrap(compiled: Future[Grammar]) -> None:
        error = compiled.exception()
        if error is not None:
            wrapped.set_exception(error)
        else:
            wrapped.set_result(ThinkingGrammar(rule, compiled.result()))

    grammar.add_done_callback(wrap)
    abandon = getattr(grammar, "abandon", None)
    if abandon is not None:
        wrapped.abandon = abandon  # type: ignore[attr-defined]
    return wrapped


class _Position(NamedTuple):
    """A position in the thinking: its phase, tokens inside it, and tokens of the separator behind it."""

    phase: Phase
    num_inside: int = 0
    num_closing: int = 0


class ThinkingMatcher:
    """The state of one sequence: before, inside or behind its thinking. Implements `Matcher`."""

    def __init__(self, rule: ThinkingRule, inner: Matcher | None) -> None:
        self._rule = rule
        self._inner = inner
        self._positions = [_Position("inside" if rule.begin is None else "before")]  # one more than consumed tokens
        self._num_inner = 0

    @property
    def goes_back(self) -> bool:
        """True if `rollback` is cheap, which drafts need."""
        return getattr(self._inner, "goes_back", True)

    @property
    def _at(self) -> _Position:
        return self._positions[-1]

    @property
    def _spent(self) -> bool:
        """True if the thinking has used up its budget."""
        budget = self._rule.budget
        return budget is not None and self._at.num_inside >= budget

    def fill_mask(self, row: MaskRow) -> bool:
        rule, at = self._rule, self._at
        if at.phase == "behind":
            return self._inner is not None and self._inner.fill_mask(row)
        if at.phase == "before":
            if self._inner is None or not self._inner.fill_mask(row):
                return False
            if rule.begin is not None and rule.budget != 0:
                _set(row, rule.begin)
            return True
        if at.phase == "closing" or self._spent:
            row.fill(0)
            _set(row, rule.separator[at.num_closing] if at.phase == "closing" else rule.end)
            return True
        if self._inner is None:
            return False
        row.fill(-1)
        for token_id in rule.eos:
            row.view("uint32")[token_id // 32] &= ~(1 << (token_id % 32)) & 0xFFFFFFFF
        return True

    def advance(self, token_ids: Sequence[int]) -> int:
        for count, token_id in enumerate(token_ids):
            if self._at.phase == "behind" and self._inner is not None:
                num = self._inner.advance(token_ids[count:])
                self._num_inner += num
                return count + num
            after = self._next(token_id)
            if after is None:
                return count
            self._positions.append(after)
        return len(token_ids)

    def _next(self, token_id: int) -> _Position | None:
        """Return the position behind a token; None if it is not allowed. A constraint's own token advances it."""
        rule, at = self._rule, self._at
        match at.phase:
            case "before":
                if token_id == rule.begin and rule.budget != 0:
                    return _Position("inside")
                if self._inner is None:
                    return _Position("behind")
                if self._inner.advance([token_id]) != 1:
                    return None
                self._num_inner += 1
                return _Position("behind")
            case "inside":
                if token_id == rule.end:
                    closes = self._inner is not None and bool(rule.separator)
                    return at._replace(phase="closing" if closes else "behind")
                return None if self._spent else at._replace(num_inside=at.num_inside + 1)
            case "closing":
                if token_id != rule.separator[at.num_closing]:
                    return None
                num = at.num_closing + 1
                return at._replace(phase="behind" if num == len(rule.separator) else "closing", num_closing=num)
        return at

    def rollback(self, num_tokens: int) -> None:
        # The first token of a constraint that began without thinking is counted in both parts.
        shared = int(self._num_inner > 0 and len(self._positions) > 1 and self._positions[-2].phase == "before")
        num_inner = min(num_tokens, self._num_inner)
        num_before = num_tokens - num_inner + (shared if num_inner == self._num_inner and num_inner else 0)
        if num_before >= len(self._positions):
            raise ValueError(f"{num_tokens} tokens cannot be undone, fewer were consumed")
        if num_inner:
            assert self._inner is not None
            self._inner.rollback(num_inner)
            self._num_inner -= num_inner
        del self._positions[len(self._positions) - num_before :]

    def fork(self) -> ThinkingMatcher:
        other = ThinkingMatcher(self._rule, self._inner.fork() if self._inner is not None else None)
        other._positions = list(self._positions)
        other._num_inner = self._num_inner
        return other

    def forced(self, context: Sequence[int]) -> list[int]:
        at, rule = self._at, self._rule
        if at.phase == "closing":
            return list(rule.separator[at.num_closing :])
        if at.phase == "inside":
            return self._closing if self._spent else []
        return self._inner.forced(context) if at.phase == "behind" and self._inner is not None else []

    def forced_bytes(self) -> bytes:
        return self._inner.forced_bytes() if self._at.phase == "behind" and self._inner is not None else b""

    @property
    def _closing(self) -> list[int]:
        """The tokens that end the thinking from inside it."""
        return [self._rule.end, *(self._rule.separator if self._inner is not None else ())]

    def _to_content(self) -> list[int]:
        """Return the tokens up to the content."""
        if self._at.phase == "inside":
            return self._closing
        return list(self._rule.separator[self._at.num_closing :]) if self._at.phase == "closing" else []

    def min_tokens_to_accept(self) -> int:
        return 0 if self._inner is None else len(self._to_content()) + self._inner.min_tokens_to_accept()

    def ending(self, context: Sequence[int]) -> list[int]:
        if self._inner is None:
            return []
        before = self._to_content()
        return [*before, *self._inner.ending([*context, *before])]

    @property
    def accepting(self) -> bool:
        if self._inner is None:
            return True
        return self._at.phase in ("before", "behind") and self._inner.accepting

    @property
    def finished(self) -> bool:
        return self._at.phase == "behind" and self._inner is not None and self._inner.finished


def _set(row: MaskRow, token_id: int) -> None:
    row.view("uint32")[token_id // 32] |= 1 << (token_id % 32)
