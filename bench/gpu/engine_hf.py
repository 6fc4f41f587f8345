"""Plain transformers: `generate` on a batch, with nothing reused between calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.gpu.model import random_weights
from bench.gpu.workloads import Answer, Ids

MAX_TOKENS = 140_000
"""Maximum prompt tokens of one call; more prompts take several calls, since activations would not fit."""


class Transformers:
    started: dict[str, float] = {}

    def __init__(self, folder: str | None) -> None:
        import transformers

        self.model, _ = random_weights(folder)
        self.model.generation_config = transformers.GenerationConfig(pad_token_id=0)
        self.about = {"version": transformers.__version__, "attention": str(self.model.config._attn_implementation)}

    def generate(self, prompts: Sequence[Ids], max_tokens: int, schema: dict[str, Any] | None = None) -> list[Answer]:
        if schema is not None:
            raise NotImplementedError("plain transformers does not constrain its text")
        import torch

        at_once = max(1, MAX_TOKENS // max(map(len, prompts)))
        answers: list[Answer] = []
        for first in range(0, len(prompts), at_once):
            ids = torch.tensor(prompts[first : first + at_once], device=self.model.device)  # all of one length
            with torch.inference_mode():
                output = self.model.generate(ids, max_new_tokens=max_tokens, do_sample=False)
            answers += [Answer(row) for row in output[:, ids.shape[1] :].tolist()]
        return answers

    def flush(self) -> None:
        """Do nothing: there is no prefix cache."""

    def close(self) -> None:
        """Do nothing: there is no background process."""


def start(folder: str | None) -> Transformers:
    return Transformers(folder)
