"""Blocks of training tokens, made by many processes while one GPU trains.

A block is one batch: whole documents, one after the other, up to a fixed number of tokens. Block b
of a run depends on the seed and b alone, so a run can be repeated, and taken up again, exactly.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.sprout.mixture import documents
from bench.sprout.tokenizer import FastEncoder
from bench.sprout.wires import PATH, Wires

MAX_DOCUMENTS = 768
AHEAD = 256  # blocks
ANSWER_WEIGHT, REST_WEIGHT = 100, 4  # of the loss, in hundredths


@dataclass(frozen=True)
class Block:
    """tokens uint16 [num_tokens], weights uint8 [num_tokens], starts int32 [num_documents + 1]."""

    tokens: NDArray[np.uint16]
    weights: NDArray[np.uint8]
    starts: NDArray[np.int32]

    def padded_starts(self) -> NDArray[np.int32]:
        """Return offsets of length MAX_DOCUMENTS + 1; documents past the last are empty."""
        padded = np.full(MAX_DOCUMENTS + 1, len(self.tokens), np.int32)
        padded[: len(self.starts)] = self.starts
        return padded

    def positions(self) -> NDArray[np.int64]:
        """Return each token's place in its document."""
        lengths = np.diff(self.starts)
        return np.arange(len(self.tokens), dtype=np.int64) - np.repeat(self.starts[:-1], lengths)


def make_block(
    seed: int, index: int, num_tokens: int, context: int, encoder: FastEncoder, wires: Wires, far: float = 0.0
) -> Block:
    """Draw documents until the block is full; the last one is cut. Documents longer than `context` are left out."""
    ids: list[int] = []
    weights: list[int] = []
    starts = [0]
    for document in documents(f"{seed} {index}", "train", wires, far):
        new, weight = encoder.document(document, ANSWER_WEIGHT, REST_WEIGHT)
        if len(new) > context or len(starts) >= MAX_DOCUMENTS:
            continue
        ids += new
        weights += weight
        starts.append(min(len(ids), num_tokens))
        if len(ids) >= num_tokens:
            break
    return Block(
        np.array(ids[:num_tokens], np.uint16), np.array(weights[:num_tokens], np.uint8), np.array(starts, np.int32)
    )


def _work(
    folder: str,
    tokenizer_json: str,
    wires_path: str,
    seed: int,
    num_tokens: int,
    context: int,
    far: float,
    limit: Any,
    stride: int,
    index: int,
) -> None:
    """Write every `stride`-th block from `index` on, as far as `limit` allows."""
    from tokenizers import Tokenizer

    encoder = FastEncoder(Tokenizer.from_str(tokenizer_json))
    wires = Wires(json.loads(Path(wires_path).read_text(encoding="utf-8")))
    while True:
        while index > limit.value:
            time.sleep(0.02)
        block = make_block(seed, index, num_tokens, context, encoder, wires, far)
        partial = os.path.join(folder, f"{index}.partial.npz")
        np.savez(partial, tokens=block.tokens, weights=block.weights, starts=block.starts)
        os.replace(partial, os.path.join(folder, f"{index}.npz"))
        index += stride


class Corpus:
    """Blocks `first`, `first + 1`, … of a seed, made by `num_workers` processes up to AHEAD blocks before use."""

    def __init__(
        self,
        tokenizer_json: str,
        *,
        seed: int,
        num_tokens: int,
        context: int,
        num_workers: int,
        first: int = 0,
        far: float = 0.0,
        wires_path: Path = PATH,
    ) -> None:
        self._next = first
        self._folder = tempfile.mkdtemp(prefix="sprout-")
        spawn = multiprocessing.get_context("spawn")
        self._limit = spawn.Value("q", first + AHEAD)
        order = (
            self._folder,
            tokenizer_json,
            str(wires_path),
            seed,
            num_tokens,
            context,
            far,
            self._limit,
            num_workers,
        )
        self._workers = [spawn.Process(target=_work, daemon=True, args=(*order, first + i)) for i in range(num_workers)]
        for worker in self._workers:
            worker.start()

    def __iter__(self) -> Iterator[Block]:
        while True:
            path = os.path.join(self._folder, f"{self._next}.npz")
            yield self._read(path)
            os.unlink(path)
            self._next += 1
            self._limit.value = self._next + AHEAD

    def _read(self, path: str) -> Block:
        while not os.path.exists(path):
            if not any(worker.is_alive() for worker in self._workers):
                raise RuntimeError("all corpus workers ended; see their messages above")
            time.sleep(0.005)
        with np.load(path) as stored:
            return Block(stored["tokens"], stored["weights"], stored["starts"])

    def close(self) -> None:
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.join()
        shutil.rmtree(self._folder, ignore_errors=True)
