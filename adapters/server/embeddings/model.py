"""EmbeddingModel: vectors of texts from a folder of sentence-transformers, and scores of pairs of texts."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graftlm.core.errors import ConfigError, ModelError, RequestTooLong
from graftlm.core.hub import why_not
from graftlm.core.model.transformers_lock import building_model, importing_transformers

if TYPE_CHECKING:
    from numpy.typing import NDArray

BATCH = 32
"""Texts of one forward pass: padding and memory grow with it, and its speed hardly beyond it."""

_POOLINGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
}


class EmbeddingModel:
    """A text encoder with its pooling, or a cross-encoder, which scores pairs and has no vectors.

    name        the model's name for clients
    dimensions  size of a vector; 0 for a cross-encoder
    max_tokens  limit of a text, or of a pair
    """

    def __init__(self, path: str, *, device: str = "cpu") -> None:
        """Load a local folder, or NAME=FOLDER. Raises ModelError for one that is of neither kind."""
        name, equals, named = path.partition("=")
        path = named if equals and not Path(path).is_dir() else path
        folder = Path(path)
        self.name = name if path == named else folder.resolve().name
        self._device = device
        try:
            config = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise ModelError(f"no embedding model could be read from {path!r}: {error}") from error
        classes = config.get("architectures") or [""]
        self.is_cross_encoder = classes[0].endswith("ForSequenceClassification")
        self.pooling, self.normalizes = ("", False) if self.is_cross_encoder else _modules(folder)
        with importing_transformers():
            from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer
        kind: Any = AutoModelForSequenceClassification if self.is_cross_encoder else AutoModel
        tokenizers: Any = AutoTokenizer
        try:
            with building_model(), importing_transformers():
                self._tokenizer = tokenizers.from_pretrained(path, local_files_only=True)
                self._model = kind.from_pretrained(path, local_files_only=True).to(device).eval()
        except Exception as error:  # odd files raise any error in transformers
            raise ModelError(f"no embedding model could be loaded from {path!r}: {why_not(path, error)}") from error
        if self.is_cross_encoder and config.get("num_labels", len(config.get("id2label", [0]))) != 1:
            raise ModelError(f"{path!r} is a classifier of several labels; give a cross-encoder with one score")
        self.dimensions = 0 if self.is_cross_encoder else int(self._model.config.hidden_size)
        limits = [int(self._tokenizer.model_max_length), int(getattr(self._model.config, "max_position_embeddings", 0))]
        if (told := folder / "sentence_bert_config.json").exists():
            limits.append(int(json.loads(told.read_text()).get("max_seq_length") or 0))
        self.max_tokens = min((limit for limit in limits if limit > 0), default=512)

    def encode(self, text: str, other: str | None = None, *, truncate: int | None = None) -> list[int]:
        """Return the ids of a text or a pair, special tokens included. Raises RequestTooLong.

        truncate  the tokens that are kept, the first ones; -1 stands for `max_tokens`; None refuses longer texts
        """
        limit = self.max_tokens if truncate in (None, -1) else min(truncate or 1, self.max_tokens)
        given = self._tokenizer(text, other, verbose=False)["input_ids"]
        if len(given) <= limit:
            return list(given)
        if truncate is None:
            raise RequestTooLong(
                f"a text has {len(given):,} tokens, {self.name} takes {limit:,}; shorten it or set "
                "truncate_prompt_tokens to -1",
                length=len(given),
                limit=limit,
            )
        return list(self._tokenizer(text, other, truncation=True, max_length=limit)["input_ids"])

    def check(self, ids: Sequence[Sequence[int]]) -> None:
        """Raise ConfigError or RequestTooLong for ids that are not the model's, or too many or none."""
        size = int(self._model.config.vocab_size)
        for row in ids:
            wrong = next((i for i in row if not 0 <= i < size), None)
            if wrong is not None:
                raise ConfigError(f"input has token id {wrong:,}; {self.name} knows 0 to {size - 1:,}")
            if not row:
                raise ConfigError("input has a text without tokens; leave it out")
            if len(row) > self.max_tokens:
                message = f"input has {len(row):,} ids in one text, {self.name} takes {self.max_tokens:,}; send fewer"
                raise RequestTooLong(message, length=len(row), limit=self.max_tokens)

    def embed(self, ids: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Return the vectors of texts, float32 [num_texts, dimensions]."""
        if self.is_cross_encoder:
            raise ConfigError(f"{self.name} scores pairs of texts and gives no vectors; use /v1/rerank or /v1/score")
        found = np.zeros((len(ids), self.dimensions), np.float32)
        for rows, batch, mask in self._batches(ids):
            hidden = self._model(input_ids=batch, attention_mask=mask).last_hidden_state.float()
            found[rows] = self._pooled(hidden, mask).cpu().numpy()
        return found

    def score(self, pairs: Sequence[tuple[str, str]], *, truncate: int | None = None) -> tuple[list[float], int]:
        """Return the score of each pair, higher for more similar ones, and the number of tokens that were read.

        A cross-encoder gives a probability, an encoder the cosine of two vectors.
        """
        if self.is_cross_encoder:
            ids = [self.encode(first, second, truncate=truncate) for first, second in pairs]
            scores = np.zeros(len(ids), np.float32)
            for rows, batch, mask in self._batches(ids):
                scores[rows] = self._model(input_ids=batch, attention_mask=mask).logits[:, 0].sigmoid().float().cpu()
            return scores.tolist(), sum(map(len, ids))
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        ids = [self.encode(text, truncate=truncate) for text in texts]
        vectors = self.embed(ids)
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        rows_of = dict(zip(texts, vectors, strict=True))
        return [float(rows_of[first] @ rows_of[second]) for first, second in pairs], sum(map(len, ids))

    def _batches(self, ids: Sequence[Sequence[int]]) -> Any:
        """Yield (row numbers, ids, mask) of at most BATCH texts, those of about equal length together."""
        import torch

        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        pad = self._tokenizer.pad_token_id or 0
        for start in range(0, len(order), BATCH):
            rows = order[start : start + BATCH]
            width = max(len(ids[i]) for i in rows)
            batch = torch.tensor([[*ids[i], *[pad] * (width - len(ids[i]))] for i in rows], device=self._device)
            mask = torch.tensor([[1] * len(ids[i]) + [0] * (width - len(ids[i])) for i in rows], device=self._device)
            with torch.inference_mode():
                yield rows, batch, mask

    def _pooled(self, hidden: Any, mask: Any) -> Any:
        import torch

        weights = mask[:, :, None].to(hidden.dtype)
        if self.pooling == "mean":
            pooled = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)
        elif self.pooling == "cls":
            pooled = hidden[:, 0]
        elif self.pooling == "last":
            pooled = hidden[torch.arange(len(hidden)), mask.sum(1) - 1]
        else:
            pooled = hidden.masked_fill(weights == 0, -torch.inf).amax(1)
        return torch.nn.functional.normalize(pooled, dim=1) if self.normalizes else pooled


def _modules(folder: Path) -> tuple[str, bool]:
    """Return the pooling and whether vectors are normalised, as the folder's modules say."""
    try:
        modules = json.loads((folder / "modules.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{os.fspath(folder)!r} is no embedding model: it has no modules.json of sentence-transformers, and no "
            "class for sequence classification; give a folder of either kind"
        ) from error
    pooling, normalizes = "", False
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            given = json.loads((folder / module["path"] / "config.json").read_text())
            used = [name for name, value in given.items() if name.startswith("pooling_mode") and value]
            if len(used) == 1 and used[0] in _POOLINGS:
                pooling = _POOLINGS[used[0]]
            else:
                raise ModelError(f"the pooling {used} of {os.fspath(folder)!r} is not supported; known: {[*_POOLINGS]}")
        elif kind == "Normalize":
            normalizes = True
        elif kind != "Transformer":
            raise ModelError(
                f"the module {kind} of {os.fspath(folder)!r} is not supported; known: Transformer, Pooling"
            )
    return pooling or "mean", normalizes
