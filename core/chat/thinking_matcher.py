"""ThinkingMatcher: a constraint that begins behind a model's thinking, and a limit of the thinking's tokens.

It serves constrained requests of models that think. While the model thinks, every token but an end of sequence is
allowed, so a step costs one filled mask row; behind the end marker every call goes to the constraint's own matcher.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from graftlm.core.grammar.compile import Grammar
    from graftlm.core.grammar.matcher import MaskRow, Matcher

Phase = Literal["before", "opening", "inside", "closing", "behind"]


@dataclass(frozen=True)
class ThinkingRule:
    """The tokens of one model's thinking.

    opening    ids that begin a thought, which the model may write; () if the prompt ends inside the thinking
    end        id of the end marker
    separator  ids between the end marker and the content's header
    eos        ids that end a sequence
    budget     limit of thinking tokens; None for no limit
    header     ids that precede the content, with a thought or without; () if there are none, or the constraint has them
    """

    opening: tuple[int, ...]
    end: int
    separator: tuple[int, ...]
    eos: tuple[int, ...]
    budget: int | None = None
    header: tuple[int, ...] = ()

    @property
    def closing(self) -> tuple[int, ...]:
        """The ids between the end marker and the content."""
        return self.separator + self.header


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
    """A position in the thinking.

    num_opened   tokens of the opening before it
    num_inside   tokens of the thought
    num_closing  tokens of `ThinkingRule.closing` behind the thought
    num_inner    tokens that the constraint's own matcher has consumed
    """

    phase: Phase
    num_opened: int = 0
    num_inside: int = 0
    num_closing: int = 0
    num_inner: int = 0


class ThinkingMatcher:
    """The state of one sequence: before, inside or behind its thinking. Implements `Matcher`.

    While the tokens so far begin both the opening and the content, the phase is "before", and the constraint's own
    matcher has consumed none of them.
    """

    def __init__(self, rule: ThinkingRule, inner: Matcher | None) -> None:
        self._rule = rule
        self._inner = inner
        self._positions = [_Position("before" if rule.opening else "inside")]  # one more than consumed tokens

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

    @property
    def _may_open(self) -> bool:
        """True if a thought may begin: a budget of 0 forbids it, where an answer can do without."""
        return self._rule.budget != 0

    def fill_mask(self, row: MaskRow) -> bool:
        rule, at = self._rule, self._at
        match at.phase:
            case "behind":
                return self._inner is not None and self._inner.fill_mask(row)
            case "before":
                return self._fill_before(row, at.num_opened)
            case "opening":
                return _only(row, rule.opening[at.num_opened])
            case "closing":
                return _only(row, rule.closing[at.num_closing])
        if self._spent:
            return _only(row, rule.end)
        if self._inner is None:
            return False
        row.fill(-1)
        for token_id in rule.eos:
            row.view("uint32")[token_id // 32] &= ~(1 << (token_id % 32)) & 0xFFFFFFFF
        return True

    def _fill_before(self, row: MaskRow, num_opened: int) -> bool:
        rule, begun = self._rule, self._rule.opening[: self._at.num_opened]
        if rule.header:
            _only(row, rule.header[num_opened])
        elif self._inner is None:
            return False
        else:
            self._inner.advance(begun)
            limited = self._inner.fill_mask(row)
            self._inner.rollback(num_opened)
            if not limited:
                return False
        if self._may_open:
            _set(row, rule.opening[num_opened])
        return True

    def advance(self, token_ids: Sequence[int]) -> int:
        for count, token_id in enumerate(token_ids):
            at = self._at
            if at.phase == "behind" and self._inner is not None:
                num = self._inner.advance(token_ids[count:])
                self._positions += [at._replace(num_inner=at.num_inner + i) for i in range(1, num + 1)]
                return count + num
            after = self._next(at, token_id)
            if after is None:
                return count
            self._positions.append(after)
        return len(token_ids)

    def _next(self, at: _Position, token_id: int) -> _Position | None:
        """Return the position behind a token; None if it is not allowed. A constraint's own token advances it."""
        rule = self._rule
        match at.phase:
            case "before":
                return self._next_before(at.num_opened, token_id)
            case "opening":
                return self._opened(at.num_opened + 1) if token_id == rule.opening[at.num_opened] else None
            case "inside":
                if token_id == rule.end:
                    closes = self._inner is not None and bool(rule.closing)
                    return at._replace(phase="closing" if closes else "behind")
                return None if self._spent else at._replace(num_inside=at.num_inside + 1)
            case "closing":
                return self._closed(at, at.num_closing + 1) if token_id == rule.closing[at.num_closing] else None
        return at

    def _next_before(self, num_opened: int, token_id: int) -> _Position | None:
        rule, inner = self._rule, self._inner
        begun = (*rule.opening[:num_opened], token_id)
        opens = self._may_open and token_id == rule.opening[num_opened]
        if rule.header:
            answers = token_id == rule.header[num_opened]
        elif inner is None:
            answers = not opens
        else:
            num = inner.advance(begun)
            answers = num == len(begun)
            if opens or not answers:
                inner.rollback(num)
        if opens:
            both = answers and len(begun) < len(rule.opening)
            return _Position("before", len(begun)) if both else self._opened(len(begun))
        if not answers:
            return None
        if rule.header:
            return self._closed(_Position("closing"), len(rule.separator) + len(begun))
        return _Position("behind", num_inner=len(begun) if inner is not None else 0)

    def _opened(self, num: int) -> _Position:
        return _Position("opening" if num < len(self._rule.opening) else "inside", num)

    def _closed(self, at: _Position, num: int) -> _Position:
        return at._replace(phase="behind" if num == len(self._rule.closing) else "closing", num_closing=num)

    def rollback(self, num_tokens: int) -> None:
        if num_tokens >= len(self._positions):
            raise ValueError(f"{num_tokens} tokens cannot be undone, fewer were consumed")
        target = self._positions[-1 - num_tokens]
        if num_inner := self._at.num_inner - target.num_inner:
            assert self._inner is not None
            self._inner.rollback(num_inner)
        del self._positions[len(self._positions) - num_tokens :]

    def fork(self) -> ThinkingMatcher:
        other = ThinkingMatcher(self._rule, self._inner.fork() if self._inner is not None else None)
        other._positions = list(self._positions)
        return other

    def forced(self, context: Sequence[int]) -> list[int]:
        at, rule = self._at, self._rule
        match at.phase:
            case "opening":
                return list(rule.opening[at.num_opened :])
            case "closing":
                return list(rule.closing[at.num_closing :])
            case "inside":
                return self._closing if self._spent else []
            case "behind" if self._inner is not None:
                return self._inner.forced(context)
        return []

    def forced_bytes(self) -> bytes:
        return self._inner.forced_bytes() if self._at.phase == "behind" and self._inner is not None else b""

    @property
    def _closing(self) -> list[int]:
        """The tokens that end the thinking from inside it."""
        return [self._rule.end, *(self._rule.closing if self._inner is not None else ())]

    def _to_content(self) -> list[int]:
        """Return the tokens up to the content."""
        at, rule = self._at, self._rule
        match at.phase:
            case "before":
                return list(rule.header[at.num_opened :])
            case "opening":
                return [*rule.opening[at.num_opened :], *self._closing]
            case "inside":
                return self._closing
            case "closing":
                return list(rule.closing[at.num_closing :])
        return []

    def min_tokens_to_accept(self) -> int:
        if self._inner is None:
            return 0
        with self._answering() as inner:
            return len(self._to_content()) + inner.min_tokens_to_accept()

    def ending(self, context: Sequence[int]) -> list[int]:
        if self._inner is None:
            return []
        before = self._to_content()
        with self._answering() as inner:
            return [*before, *inner.ending([*context, *before])]

    @contextmanager
    def _answering(self) -> Iterator[Matcher]:
        """Let the constraint's own matcher consume the tokens that begin its answer as well as a thought."""
        inner, at = self._inner, self._at
        assert inner is not None
        num = at.num_opened if at.phase == "before" and not self._rule.header else 0
        inner.advance(self._rule.opening[:num])
        yield inner
        inner.rollback(num)

    @property
    def accepting(self) -> bool:
        if self._inner is None:
            return True
        unopened = self._at.phase == "before" and not (self._rule.header or self._at.num_opened)
        return (unopened or self._at.phase == "behind") and self._inner.accepting

    @property
    def finished(self) -> bool:
        return self._at.phase == "behind" and self._inner is not None and self._inner.finished


def _only(row: MaskRow, token_id: int) -> bool:
    """Allow one token."""
    row.fill(0)
    _set(row, token_id)
    return True


def _set(row: MaskRow, token_id: int) -> None:
    row.view("uint32")[token_id // 32] |= 1 << (token_id % 32)
