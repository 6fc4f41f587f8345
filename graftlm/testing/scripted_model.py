"""A model with scripted answers, in the real engine."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from graftlm.core.config import EngineConfig
from graftlm.core.engine import LocalEngine
from graftlm.core.engine_builder import RunnerSpec
from graftlm.core.request import Request, Submission
from graftlm.core.runtime import Runtime
from graftlm.core.sequence import Sequence as EngineSequence
from graftlm.plugins import manager
from graftlm.testing.byte_tokenizer import byte_tokenizer

if TYPE_CHECKING:
    from graftlm.core.text.tokenizer import Tokenizer
    from graftlm.kernels.wire_plan import WirePlan

Script = Callable[[str], str | bytes]

_NUM_SLOTS = 1 << 16
_NEXT, _END, _BLANK = 100.0, 80.0, -30.0
"""Logits of the script's next token, of the end of the text, and of white space."""
_CLOSING = {b'"': 60.0, b"}": 40.0, b"]": 40.0}
"""Logits of the tokens that close JSON values; the string first, which can contain the brackets."""


class ScriptedModel(nn.Module):
    """A model that answers each prompt with `script(prompt)`, through the real scheduler, cache, grammars and sampler.

    script          a function of the prompt's text that returns the answer as text or bytes, which may begin inside a
                    character. An exception becomes the error of the request.
    max_model_len   the context in tokens.

    The name of a special token in a script stands for this token.

    The next token of the script has a logit high enough for any usual temperature. If a constraint forbids it, the
    output closes open JSON values and ends as soon as possible. `requests`, `prompts` and `batches` (the number of
    requests of each submission) record the arrivals.
    """

    def __init__(self, script: Script = lambda prompt: "!", *, max_model_len: int = 8192) -> None:
        super().__init__()
        self.script = script
        self.config = types.SimpleNamespace(max_position_embeddings=max_model_len, _name_or_path="scripted")
        self.weight = nn.Parameter(torch.rand(16, dtype=torch.float32))  # gives each scripted model its own fingerprint
        self.requests: list[Request] = []
        self.prompts: list[str] = []
        self.batches: list[int] = []
        self._arrived = threading.Condition()
        self._released = threading.Event()
        self._released.set()

    def runtime(self, *, tokenizer: Any = None, **options: Any) -> Runtime:
        """Return a runtime of this model. `tokenizer` is a Hugging Face tokenizer; None: `byte_tokenizer()`."""
        return Runtime(
            self, tokenizer=byte_tokenizer() if tokenizer is None else tokenizer, engine="scripted", **options
        )

    def hold(self) -> None:
        """Accept requests without answering them until `release()`."""
        self._released.clear()

    def release(self) -> None:
        self._released.set()

    @property
    def held(self) -> bool:
        return not self._released.is_set()

    def wait_for(self, num_requests: int, timeout_s: float = 60.0) -> None:
        """Wait until `num_requests` requests have arrived. Raises TimeoutError."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: len(self.requests) >= num_requests, timeout_s):
                raise TimeoutError(f"{len(self.requests)} of {num_requests} requests arrived within {timeout_s} s")

    def record(self, requests: Sequence[Request], prompts: Sequence[str]) -> None:
        with self._arrived:
            self.requests += requests
            self.prompts += prompts
            self.batches.append(len(requests))
            self._arrived.notify_all()


class ScriptedRunner:
    """A runner whose logits follow the scripts of the requests. See `graftlm.core.engine_builder.Runner`.

    running  the sequences of the steps, which map rows of a plan to requests and their scripts
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.running: Sequence[EngineSequence] = ()
        self._tokenizer = tokenizer
        self._texts = tokenizer.shown_bytes
        self._ids = {text: i for i, text in reversed(list(enumerate(self._texts))) if text}
        self._longest = max(map(len, self._ids))
        self._answers: WeakKeyDictionary[Request, tuple[list[int], bytes]] = WeakKeyDictionary()
        self._elsewhere = self._logits_elsewhere()

    @property
    def vocab_size(self) -> int:
        return len(self._texts)

    def follow(self, request: Request, prompt_ids: list[int], answer: str | bytes) -> None:
        """Set the answer of `request`."""
        self._answers[request] = prompt_ids, answer.encode() if isinstance(answer, str) else answer

    def forward(self, plan: WirePlan) -> torch.Tensor:
        logits = self._elsewhere.repeat(len(plan.logits_rows), 1)
        sequences = {sequence.number: sequence for sequence in self.running}
        of_row = np.searchsorted(plan.ends, plan.logits_rows, side="right").tolist()
        for i, (query, index) in enumerate(zip(plan.logits_rows.tolist(), of_row, strict=True)):
            row, sequence = plan.rows[index], sequences[int(plan.sequences[index])]
            prompt_ids, answer = self._answer_of(sequence)
            written = sequence.tokens[len(prompt_ids) : row.past + query - row.start + 1]
            token_id = self._next(answer, b"".join(self._texts[token] for token in written))
            if token_id is not None:
                logits[i, token_id] = _NEXT
        return logits

    def _answer_of(self, sequence: EngineSequence) -> tuple[list[int], bytes]:
        known = self._answers.get(sequence.request)
        if known is None:  # an option of a choice, which the engine scores as a request of its own with the same prompt
            tokens = sequence.tokens.tolist()
            behind = (known for known in self._answers.values() if tokens[: len(known[0])] == known[0])
            known = max(behind, key=lambda known: len(known[0]))
        return known

    def _next(self, answer: bytes, written: bytes) -> int | None:
        """Return the longest token that continues the answer; None if the output has left the script."""
        if not answer.startswith(written):
            return None
        rest = answer[len(written) : len(written) + self._longest]
        found = (self._ids.get(rest[:length]) for length in range(len(rest), 0, -1))
        return next((token_id for token_id in found if token_id is not None), self._tokenizer.eos_token_ids[0])

    def _logits_elsewhere(self) -> torch.Tensor:
        """Return the logits off the script, float32 [vocab_size], which close JSON values and end the text."""
        logits = torch.zeros(self.vocab_size, dtype=torch.float32)
        for token_id, text in enumerate(self._texts):
            logits[token_id] = _BLANK if text.isspace() else _CLOSING.get(text, 0.0)
        logits[list(self._tokenizer.eos_token_ids)] = _END
        return logits


class ScriptedEngine(LocalEngine):
    """The engine of this process over a ScriptedModel."""

    def __init__(
        self, model: ScriptedModel, config: EngineConfig, tokenizer: Tokenizer, wake: Callable[[], None]
    ) -> None:
        runner = ScriptedRunner(tokenizer)
        spec = RunnerSpec(
            runner,
            num_slots=config.cache.max_tokens or _NUM_SLOTS,
            max_model_len=config.max_model_len or model.config.max_position_embeddings,
            vocab_size=runner.vocab_size,
            num_embeddings=runner.vocab_size,
            step_tokens=config.max_step_tokens or 2048,
        )
        super().__init__(spec, tokenizer, config, wake=wake, finished=manager.load().request_finished)
        runner.running = self.scheduler.running
        self._model = model
        self._runner = runner
        self._tokenizer = tokenizer

    def add(self, submissions: Sequence[Submission]) -> None:
        ids = [s.prompt_ids.tolist() if s.prompt_ids is not None else [] for s in submissions]
        prompts = [self._tokenizer.decode(prompt_ids, skip_special=False) for prompt_ids in ids]
        self._model.record([s.request for s in submissions], prompts)
        taken = []
        for submission, prompt, prompt_ids in zip(submissions, prompts, ids, strict=True):
            try:
                answer = self._model.script(prompt)
            except Exception as error:
                submission.listener.on_error(error)
                continue
            self._runner.follow(submission.request, prompt_ids, answer)
            taken.append(submission)
        super().add(taken)

    def step(self) -> bool:
        return not self._model.held and super().step()


def build_scripted(
    model: ScriptedModel, config: EngineConfig, *, tokenizer: Tokenizer, wake: Callable[[], None]
) -> ScriptedEngine:
    """Build the engine "scripted"."""
    return ScriptedEngine(model, config, tokenizer, wake)
