"""Embeddings, scores and ranks, beside transformers' own forward passes of tiny models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from starlette.testclient import TestClient
from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizerFast

import graftlm as gl
from graftlm.adapters.server import Server
from graftlm.adapters.server.embeddings.model import EmbeddingModel
from graftlm.core.errors import ModelError
from tests.models import byte_tokenizer, tiny_model

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "mara", "is", "a", "baker", "she", "bakes", "bread", "stocks", "fell", "."]
TEXTS = ["Mara is a baker.", "She bakes bread.", "Stocks fell."]
SHAPE: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 24,
}


def written(folder: Path, model: Any, pooling: str | None) -> str:
    (folder / "vocab.txt").parent.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizerFast(vocab_file=str(folder / "vocab.txt"), model_max_length=24).save_pretrained(folder)
    model.save_pretrained(folder)
    if pooling is not None:
        parts = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
        kinds = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in parts]
        (folder / "modules.json").write_text(json.dumps(kinds))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 16, pooling: True}))
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    return written(
        tmp_path_factory.mktemp("models") / "tiny", BertModel(BertConfig(**SHAPE)), "pooling_mode_mean_tokens"
    )


@pytest.fixture(scope="module")
def runtime() -> Iterator[gl.Runtime]:
    with gl.Runtime(tiny_model(), tokenizer=byte_tokenizer()) as runtime:
        runtime.load()
        yield runtime


@pytest.fixture(scope="module")
def client(runtime: gl.Runtime, folder: str) -> Iterator[TestClient]:
    server = Server(runtime, embedding_model=EmbeddingModel(f"mini={folder}"))
    with TestClient(server, base_url="http://localhost") as client:
        yield client


def reference(folder: str) -> np.ndarray:
    tokenizer, model = BertTokenizerFast.from_pretrained(folder), BertModel.from_pretrained(folder).eval()
    rows = []
    for text in TEXTS:
        with torch.inference_mode():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        rows.append(torch.nn.functional.normalize(hidden.mean(0), dim=0).numpy())
    return np.stack(rows)


def test_vectors_are_those_of_the_model_in_every_form(client: TestClient, folder: str) -> None:
    expected = reference(folder)
    api = openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=client)
    answer = api.embeddings.create(model="mini", input=TEXTS)  # as base64
    assert np.allclose([one.embedding for one in answer.data], expected, atol=1e-5)
    assert answer.usage.prompt_tokens == 7 + 6 + 5
    ids = EmbeddingModel(folder).encode(TEXTS[1])
    same = client.post("/v1/embeddings", json={"input": [ids], "encoding_format": "float"}).json()
    assert np.allclose(same["data"][0]["embedding"], expected[1], atol=1e-5)
    told = client.post("/api/embed", json={"model": "mini", "input": TEXTS}).json()
    assert np.allclose(told["embeddings"], expected, atol=1e-5)


def test_scores_are_cosines_and_documents_are_ranked_by_them(client: TestClient, folder: str) -> None:
    vectors = reference(folder)
    scores = client.post("/v1/score", json={"text_1": TEXTS[0], "text_2": TEXTS[1:]}).json()["data"]
    assert [one["score"] for one in scores] == pytest.approx(list(vectors[1:] @ vectors[0]), abs=1e-5)
    ranked = client.post("/v1/rerank", json={"query": TEXTS[0], "documents": TEXTS, "top_n": 2}).json()["results"]
    assert ranked[0] == {"index": 0, "relevance_score": pytest.approx(1, abs=1e-5), "document": {"text": TEXTS[0]}}
    assert len(ranked) == 2


def test_a_cross_encoder_scores_pairs_and_gives_no_vectors(runtime: gl.Runtime, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = BertForSequenceClassification(BertConfig(**SHAPE, num_labels=1)).eval()
    folder = written(tmp_path / "cross", model, None)
    tokenizer = BertTokenizerFast.from_pretrained(folder)
    with torch.inference_mode():
        expected = [float(model(**tokenizer(TEXTS[0], text, return_tensors="pt")).logits.sigmoid()) for text in TEXTS]
    server = Server(runtime, embedding_model=EmbeddingModel(folder))
    with TestClient(server, base_url="http://localhost") as client:
        found = client.post("/v1/score", json={"text_1": TEXTS[0], "text_2": TEXTS}).json()["data"]
        assert [one["score"] for one in found] == pytest.approx(expected, abs=1e-5)
        refused = client.post("/v1/embeddings", json={"input": "x"})
        assert (refused.status_code, "use /v1/rerank" in refused.text) == (400, True)


def test_what_cannot_be_embedded_is_named(client: TestClient, runtime: gl.Runtime, tmp_path: Path) -> None:
    def refusal(status: int, **body: Any) -> str:
        response = client.post("/v1/embeddings", json=body)
        assert response.status_code == status
        return str(response.json()["error"]["message"])

    assert "gives no embeddings here; use mini" in refusal(404, model=runtime.model_name, input="x")
    assert "42 tokens, mini takes 24" in refusal(400, input="mara " * 40)
    assert "token id 99" in refusal(400, input=[[99]])
    assert "dimensions is 5" in refusal(400, input="x", dimensions=5)
    cut = client.post("/v1/embeddings", json={"input": "mara " * 40, "truncate_prompt_tokens": -1})
    assert cut.json()["usage"]["prompt_tokens"] == 24
    with TestClient(Server(runtime), base_url="http://localhost") as plain:
        assert "--embedding-model" in plain.post("/v1/rerank", json={"query": "x", "documents": ["y"]}).text
    BertModel(BertConfig(**SHAPE)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"no modules\.json"):
        EmbeddingModel(str(tmp_path))
