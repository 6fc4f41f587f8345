"""llguidance's parser as the matcher of a running sequence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import llguidance
import numpy as np

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.matcher import MaskRow
from graftlm.core.request import Request
from guidance._schema import LLInterpreterResponse

_GOOD_ENDS = ("NoExtension", "EndOfSentence")


@dataclass(frozen=True)
class Progress:
    """The progress of one step: the accepted tokens, their text and captures.

    issued           True if the first of `tokens` was sampled; the remaining ones were forced.
    num_backtracked  number of earlier tokens removed from the text; a sampled token that is not the first of `tokens`
                     is removed too.
    report           llguidance's report, which contains text and captures; parsed on demand. None: `text` and
                     `captures` are set.
    at               number of tokens of the request written before this step.
    """

    tokens: tuple[int, ...]
    issued: bool = False
    num_backtracked: int = 0
    report: str | None = None
    text: bytes = b""
    captures: dict[str, Any] = field(default_factory=dict)
    at: int = 0

    def told(self) -> tuple[bytes, dict[str, Any]]:
        """Return the new bytes, and the captures: bytes by name, or lists of bytes."""
        if self.report is None:
            return self.text, self.captures
        told = LLInterpreterResponse.model_validate_json(self.report).progress.to_engine_call_response()
        return told.new_bytes, told.capture_groups


class Parser:
    """The state of one guidance grammar, with the semantics of guidance's own loop.

    `tokens` are the prompt's ids and all accepted tokens, `num_forced` the forced ones among them since its last reset;
    `steps` are the unread steps, in order. In an accepting state every token may be sampled, and a token that the
    grammar refuses ends the text, as in guidance. Implements `graftlm.core.grammar.matcher.Matcher` for one sequence.
    """

    goes_back = False
    """No rollback: the scheduler does not speculate on this matcher."""

    def __init__(self, interpreter: llguidance.LLInterpreter, eos_token_id: int) -> None:
        self.tokens: list[int] = []
        self.steps: list[Progress] = []
        self.stopped = False
        self.num_forced = 0
        self._num_written = 0
        self._interpreter = interpreter
        self._eos_token_id = eos_token_id
        self._request: Request | None = None
        self._mask: np.ndarray = np.zeros(0, np.uint8)
        self._forced: list[int] = []
        self._rebuild = False
        self._temperature: float | None = None

    def start(self, tokens: list[int]) -> None:
        """Start after `tokens`, to which `interpreter.process_prompt` has been applied."""
        self.tokens = list(tokens)
        self._compute((), issued=False, num_backtracked=0)

    def run_in(self, request: Request) -> None:
        """Become the matcher of `request`, whose prompt is `tokens`."""
        self._request = request
        self._num_written = 0
        self._rebuild = False
        self._forced = []
        self._apply_temperature()

    def end_of_text(self, token_id: int) -> None:
        """Process a sampled end-of-text token, which the engine does not pass to matchers."""
        self._take(token_id if self._allows(token_id) else self._eos_token_id)

    def check_end(self) -> None:
        """Raise GrammarError if the parser stopped before the end of the text."""
        reason = str(self._interpreter.stop_reason())
        if reason == "NoExtensionBias":
            raise GrammarError(f"the grammar allows no text here ({reason}); loosen what stands at this place")
        if reason not in _GOOD_ENDS:
            raise GrammarError(f"llguidance stopped with {reason}; simplify the grammar or raise its limits")

    # -- Matcher -----------------------------------------------------------------------------------------------

    def matcher(self) -> Self:
        """Return this object: it is the matcher of its one sequence."""
        return self

    def fill_mask(self, row: MaskRow) -> bool:
        if self.accepting:
            return False
        bits = np.packbits(self._mask != 0, bitorder="little")
        padded = np.zeros(4 * len(row), np.uint8)
        length = min(len(bits), len(padded))
        padded[:length] = bits[:length]
        row[:] = padded.view(np.int32)
        return True

    def advance(self, token_ids: Sequence[int]) -> int:
        for i, token_id in enumerate(token_ids):
            self._num_written += 1
            if self._forced and self._forced[0] == token_id:
                del self._forced[0]  # accepted already, together with the token before it
            elif self.finished:
                return i
            elif self._allows(token_id):
                self._take(token_id)
            elif self.accepting:
                self._take(self._eos_token_id)
            else:
                return i
        return len(token_ids)

    def forced(self, context: Sequence[int]) -> list[int]:
        return list(self._forced)

    def forced_bytes(self) -> bytes:
        return b""

    def rollback(self, num_tokens: int) -> None:
        raise ValueError("llguidance's interpreter cannot go back; it is never asked to")

    def fork(self) -> Parser:
        copy = Parser(self._interpreter.deep_copy(), self._eos_token_id)
        copy.__dict__.update({k: v for k, v in self.__dict__.items() if k != "_interpreter"})
        copy.tokens, copy.steps, copy._forced = list(self.tokens), list(self.steps), list(self._forced)
        return copy

    def min_tokens_to_accept(self) -> int:
        return 0

    def ending(self, context: Sequence[int]) -> list[int]:
        return []

    @property
    def accepting(self) -> bool:
        return bool(self._interpreter.is_accepting())

    @property
    def finished(self) -> bool:
        """True at the end of the text, or after backtracking, which requires a new request."""
        return self.stopped or self._rebuild

    # -- steps -------------------------------------------------------------------------------------------------

    def _allows(self, token_id: int) -> bool:
        return token_id < len(self._mask) and self._mask[token_id] != 0

    def _take(self, token_id: int) -> None:
        try:
            num_backtracked, accepted = self._interpreter.commit_token(token_id)
        except ValueError as error:
            if "forced bytes" not in str(error):
                raise
            raise GrammarError(
                "a text inside the grammar has the name of a special token, and llguidance encodes it as that token; "
                "give guidance.special_token(name), guidance._ast.SpecialToken(id=...), or append the text on its own"
            ) from error
        if num_backtracked:
            del self.tokens[-num_backtracked:]
        self.tokens += accepted
        issued = accepted[:1] == [token_id]
        self._rebuild = bool(num_backtracked) or not issued
        self._forced = [] if self._rebuild else accepted[1:]
        self.num_forced += len(accepted) - issued
        self._compute(tuple(accepted), issued=issued, num_backtracked=num_backtracked)

    def _compute(self, tokens: tuple[int, ...], *, issued: bool, num_backtracked: int) -> None:
        mask, report = self._interpreter.compute_mask()
        told: dict[str, Any] = json.loads(report)
        self.stopped = told["stop"]
        self._temperature = told["temperature"]
        if mask is not None:
            self._mask = np.frombuffer(mask, np.uint8)
        self._apply_temperature()
        self.steps.append(Progress(tokens, issued, num_backtracked, report, at=self._num_written))

    def _apply_temperature(self) -> None:
        """Set the request's temperature to that of the next token's rule."""
        request, wanted = self._request, self._temperature
        if request is not None and wanted is not None and request.sampling.temperature != wanted:
            request.sampling = replace(request.sampling, temperature=wanted)
