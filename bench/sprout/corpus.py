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
ANSWER_WEIGHT, REST_WEIGHT = 100, 4  # of the loss, in hundredths


@dataclass(frozen=True)
class Block:
    """tokens uint16 [num_tokens], weights uint8 [num_tokens], starts int32 [num_documents + 1]."""

    tokens: NDArray[np.uint16]
    weights: NDArray[np.uint8]
    starts: NDArray[np.int32]

    def padded_starts(self) -> NDArray[np.int32]:
        """Offsets of length MAX_DOCUMENTS + 1; documents past the last are empty."""
        padded = np.full(MAX_DOCUMENTS + 1, len(self.tokens), np.int32)
        padded[: len(self.starts)] = self.starts
        return padded

    def positions(self) -> NDArray[np.int64]:
        """Each token's place in its document."""
        lengths = np.diff(self.starts)
        return np.arange(len(self.tokens), dtype=np.int64) - np.repeat(self.starts[:-1], lengths)


def make_block(seed: int, index: int, num_tokens: int, context: int, encoder: FastEncoder, wires: Wires) -> Block:
    """Draw documents until the block is full; the last one is cut. Documents longer than `context` are left out."""
    ids: list[int] = []
    weights: list[int] = []
    starts = [0]
    for document in documents(f"{seed} {index}", "train", wires):
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
    first: int,
    stride: int,
    start: int,
    num_tokens: int,
    context: int,
    ahead: Any,
) -> None:
    from tokenizers import Tokenizer

    encoder = FastEncoder(Tokenizer.from_str(tokenizer_json))
    wires = Wires(json.loads(Path(wires_path).read_text(encoding="utf-8")))
    index = start + first
    while True:
        while index > ahead.value:
            time.sleep(0.02)
        block = make_block(seed, index, num_tokens, context, encoder, wires)
        partial = os.path.join(folder, f"{index}.partial.npz")
        np.savez(partial, tokens=block.tokens, weights=block.weights, starts=block.starts)
        os.replace(partial, os.path.join(folder, f"{index}.npz"))
        index += stride


class Corpus:
    """Serves blocks in windows: each window is played `reuse` times, in other orders, then dropped."""

    def __init__(
        self,
        tokenizer_json: str,
        *,
        seed: int,
        num_tokens: int,
        context: int,
        num_workers: int,
        window: int = 128,
        reuse: int = 2,
        first_window: int = 0,
        wires_path: Path = PATH,
    ) -> None:
        self.window, self.reuse, self.seed = window, reuse, seed
        self._first = first_window
        self._folder = tempfile.mkdtemp(prefix="sprout-")
        spawn = multiprocessing.get_context("spawn")
        self._ahead = spawn.Value("q", (first_window + 3) * window)
        self._workers = [
            spawn.Process(
                target=_work,
                daemon=True,
                args=(
                    self._folder,
                    tokenizer_json,
                    str(wires_path),
                    seed,
                    w,
                    num_workers,
                    first_window * window,
                    num_tokens,
                    context,
                    self._ahead,
                ),
            )
            for w in range(num_workers)
        ]
        for worker in self._workers:
            worker.start()

    def __iter__(self) -> Iterator[Block]:
        window = self._first
        while True:
            self._ahead.value = (window + 3) * self.window
            for turn in range(self.reuse):
                order = np.random.default_rng((self.seed, window, turn)).permutation(self.window)
                # the first pass takes blocks as they are made, so that training starts early
                order = np.arange(self.window) if turn == 0 else order
                for i in order:
                    yield self._read(window * self.window + int(i))
            for i in range(self.window):
                os.unlink(self._path(window * self.window + i))
            window += 1

    def _path(self, index: int) -> str:
        return os.path.join(self._folder, f"{index}.npz")

    def _read(self, index: int) -> Block:
        path = self._path(index)
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
