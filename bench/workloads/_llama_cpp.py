"""LlamaCppEngine: llama-cpp-python in the process, on the program's own token ids, behind the engine hook."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from graftlm.ab.engines.plain_engine import OneByOneEngine, TokenMask, checked, completion_of, prompt_of
from graftlm.ab.engines.servers import gguf
from graftlm.core.request import Completion, Submission, TokenLogprob, Usage

if TYPE_CHECKING:
    from graftlm.core.config import EngineConfig
    from graftlm.core.text.tokenizer import Tokenizer

LOOK_BACK = 16
"""Last tokens that are searched for a stop string after each new token; the whole text is searched at the end."""


class LlamaCppEngine(OneByOneEngine):
    """An engine over llama-cpp-python: greedy text, stop strings, constraints as a token mask, and scores.

    A prompt reuses the KV of the request before it for their common prefix, as llama-cpp-python does. The KV is in
    float32 for float32 weights, which the file must hold. llama.cpp never tokenises a prompt: the file needs no
    vocabulary.
    """

    def __init__(self, model: str, config: EngineConfig, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        package: Any = importlib.import_module("llama_cpp")
        kind = package.GGML_TYPE_F32 if config.dtype in ("auto", "float32") else package.GGML_TYPE_F16
        threads = torch.get_num_threads()
        self._package = package
        self._llama: Any = package.Llama(
            gguf(model), n_ctx=config.max_model_len or 0, n_gpu_layers=0, n_threads=threads, n_threads_batch=threads,
            type_k=kind, type_v=kind, verbose=False,
        )  # fmt: skip
        self.weights = "float32" if kind == package.GGML_TYPE_F32 else "float16"

    def clear_cache(self) -> None:
        """Drop the KV of the last request."""
        self._llama.reset()

    def _answer(self, submission: Submission) -> Completion:
        request, ids = submission.request, prompt_of(submission)
        if request.score_ids is not None or request.want_logits:
            return self._score(ids, request.score_ids or [])
        sampling = checked(request.sampling)
        mask = TokenMask(submission, len(ids)) if submission.grammar is not None else None
        limit = sampling.max_tokens or self._llama.n_ctx() - len(ids)
        ends = () if sampling.ignore_eos else self.tokenizer.eos_token_ids
        cached, output = self._read(ids), list[int]()
        while True:
            logits = self._logits()
            if mask is not None:
                known = torch.tensor([ids + output])
                logits = mask(known, torch.from_numpy(logits)[None])[0].numpy()
            output.append(int(logits.argmax()))
            recent = self.tokenizer.decode(output[-LOOK_BACK:]) if sampling.stop else ""
            if output[-1] in ends or len(output) == limit or any(stop in recent for stop in sampling.stop):
                return completion_of(self.tokenizer, output, sampling, len(ids), cached)
            self._llama.eval(output[-1:])

    def _read(self, ids: Sequence[int]) -> int:
        """Compute the prompt and return the number of its tokens that the last request had computed."""
        llama = self._llama
        known = llama.input_ids[: min(llama.n_tokens, len(ids) - 1)]  # the last token's logits are needed
        other = np.flatnonzero(known != np.asarray(ids[: len(known)]))
        llama.n_tokens = num_cached = int(other[0]) if len(other) else len(known)
        llama.eval(ids[num_cached:])
        return num_cached

    def _logits(self) -> np.ndarray:
        """Return the logits after the last token, float32 [vocab_size]; the next token overwrites them."""
        pointer = self._package.llama_get_logits_ith(self._llama._ctx.ctx, -1)
        return np.ctypeslib.as_array(pointer, (self._llama.n_vocab(),))

    def _score(self, ids: list[int], continuation: list[int]) -> Completion:
        cached = self._read(ids)
        usage = Usage(len(ids) + max(0, len(continuation) - 1), cached, 0, 0)  # the last token's logits are not needed
        if not continuation:
            return Completion("", [], "length", usage, logits=self._logits().copy())
        named = []
        for i, token in enumerate(continuation):
            if i:
                self._llama.eval(continuation[i - 1 : i])
            row = torch.log_softmax(torch.from_numpy(self._logits()), -1)
            named.append(TokenLogprob(token, self.tokenizer.decode([token]), float(row[token])))
        return Completion("", [], "length", usage, named)


def build_llama_cpp(
    model: str, config: EngineConfig, *, tokenizer: Tokenizer, wake: Callable[[], None]
) -> LlamaCppEngine:
    return LlamaCppEngine(model, config, tokenizer)
