"""The names that mean a GGUF file, its description as a folder, and files that cannot be read."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from graftlm.core.errors import ModelError
from graftlm.core.model.description import resolve
from graftlm.core.model.gguf.folder import find_gguf, listed_gguf
from graftlm.core.runtime import Runtime
from graftlm.core.text.plain_tokenizer import KnownTokenizer
from graftlm.core.text.tokenizer import Tokenizer
from tests.gguf_files import metadata_of, tensors_of, tiny_gguf, write_gguf
from tests.models import EOS, IM_END, byte_tokenizer, tiny_model


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tiny_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))


def test_a_file_is_described_as_a_folder_of_hugging_face_files(file: Path) -> None:
    folder = Path(resolve(file))
    assert resolve(file) == str(folder) == resolve(file.parent)
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["hidden_size"], config["dtype"]) == ("llama", 64, "float32")
    listed = listed_gguf(folder)
    assert listed is not None and listed.paths == (file,)
    assert listed_gguf(file.parent) is None
    own, given = Tokenizer.from_pretrained(str(folder)), Tokenizer(byte_tokenizer())
    for text in ("The quick brown fox", " é 你好 🙂\n\n", "<|im_start|>user\nhi<|im_end|>"):
        assert own.encode(text) == given.encode(text) and own.decode(own.encode(text)) == given.decode(own.encode(text))
    assert own.render([{"role": "user", "content": "hi"}]) == given.render([{"role": "user", "content": "hi"}])
    assert set(own.eos_token_ids) == {EOS, IM_END}
    assert KnownTokenizer.find(str(folder)) is not None  # later processes need no transformers


def test_a_changed_file_has_another_description(file: Path) -> None:
    before = resolve(file)
    tiny_gguf(file, tiny_model("llama", hidden_size=32, head_dim=8))
    assert resolve(file) != before


def test_a_folder_with_several_models_asks_for_one(file: Path) -> None:
    for name in ("mmproj-tiny.gguf", "tiny.mmproj-f16.gguf", "imatrix_tiny.gguf"):  # no models
        (file.parent / name).write_bytes(b"GGUF")
    assert find_gguf(str(file.parent)) == file
    (file.parent / "other.gguf").write_bytes(file.read_bytes())
    with pytest.raises(ModelError, match="has 2 models: 'other.gguf', 'tiny.gguf'; give the path of one"):
        resolve(file.parent)


def test_a_folder_s_file_may_end_in_capitals(file: Path) -> None:
    renamed = file.rename(file.with_suffix(".GGUF"))
    assert resolve(file.parent) == resolve(renamed)


@pytest.mark.parametrize("twice", ["tensor", "metadata"])
def test_what_a_file_has_twice_is_named(file: Path, twice: str) -> None:
    whole = file.read_bytes()
    tensor = whole.replace(b"blk.1.attn_q", b"blk.0.attn_q")
    file.write_bytes(tensor if twice == "tensor" else _with_key_twice(whole))
    with pytest.raises(ModelError, match=r"has the (tensor|metadata) '(blk.0.attn_q.weight|llama.x)' twice"):
        resolve(file)


def _with_key_twice(whole: bytes) -> bytes:
    entry = struct.pack("<Q", 7) + b"llama.x" + struct.pack("<II", 4, 1)
    (count,) = struct.unpack_from("<Q", whole, 16)
    return whole[:16] + struct.pack("<Q", count + 2) + entry * 2 + whole[24:]


def test_a_missing_file_and_an_empty_folder_are_named(tmp_path: Path) -> None:
    for name in ("/nowhere/x.gguf", "nowhere.gguf", "models/nowhere.gguf"):
        with pytest.raises(ModelError, match=f"no model folder or GGUF file '{name}'"):
            resolve(name)
    with pytest.raises(ModelError, match=r"without config.json and without a GGUF file"):
        resolve(tmp_path)


@pytest.fixture
def ollama(file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ollama's folder with one model, "tiny"."""
    root = file.parent / "ollama"
    manifest = root / "manifests/registry.ollama.ai/library/tiny/latest"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:12ab", "size": 1}
    manifest.write_text(json.dumps({"layers": [{"mediaType": "x.image.template", "digest": "sha256:00"}, layer]}))
    (root / "blobs").mkdir()
    file.rename(root / "blobs/sha256-12ab")
    monkeypatch.setenv("OLLAMA_MODELS", str(root))
    return root


def test_a_model_of_ollama_runs_by_its_name(ollama: Path) -> None:
    with Runtime("ollama:tiny", device="cpu") as runtime:
        assert len(runtime.generate("The", max_tokens=4, temperature=0.0, ignore_eos=True).token_ids) == 4
    assert resolve("ollama:tiny") == resolve("ollama:library/tiny:latest")


def test_a_model_that_ollama_does_not_have_is_named(ollama: Path) -> None:
    with pytest.raises(ModelError, match=r"has no model 'ollama:llama3.2' in .* has 'ollama:tiny'\); run `ollama pull"):
        resolve("ollama:llama3.2")
    (ollama / "blobs/sha256-12ab").unlink()
    with pytest.raises(ModelError, match="has no file .*sha256-12ab'; run `ollama pull tiny`"):
        resolve("ollama:tiny")


def test_a_damaged_file_is_named_with_what_to_do(file: Path) -> None:
    whole = file.read_bytes()
    for content, message in (
        (whole[:1000], r"ends inside its header, after 1,000 bytes: .* download it again"),
        (whole[:-5000], r"is truncated: '.*' ends at byte [\d,]+, the file has [\d,]+; download it again"),
        (b"PK\x03\x04" + whole[4:], "is no GGUF file: it does not begin with 'GGUF'"),
        (b"GGUF" + struct.pack("<I", 1) + whole[8:], "a GGUF file of version 1; versions 2 and 3"),
        (b"GGUF" + struct.pack(">I", 3) + whole[8:], "a GGUF file big-endian"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 0) + struct.pack("<I", 9) * 9000, "ends inside its header"),  # nested
    ):
        file.write_bytes(content)
        with pytest.raises(ModelError, match=message):
            resolve(file)


def test_a_damaged_type_of_a_tensor_is_told_by_the_place_of_the_next(file: Path) -> None:
    whole, name = bytearray(file.read_bytes()), b"blk.0.attn_q.weight"
    at = whole.index(name) + len(name)
    at += 4 + 8 * int(struct.unpack_from("<I", whole, at)[0])
    whole[at : at + 4] = struct.pack("<I", 1 if whole[at] != 1 else 0)  # F16, or F32
    file.write_bytes(whole)
    with pytest.raises(ModelError, match=r"begins at byte [\d,]+, expected [\d,]+ after the tensor before: .* damaged"):
        resolve(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "mystery"}, "has the architecture 'mystery'; GGUF files of command-r, gemma, "),
        ({"llama.block_count": None}, "has no metadata 'llama.block_count', which 'llama' needs"),
        ({"llama.feed_forward_length": [96, 128]}, r"layers of .* differ in feed_forward_length: \[96, 128\]"),
        ({"llama.rope.scaling.type": "odd"}, "scales its rotary embedding by 'odd', which is not supported"),
        ({"tokenizer.ggml.pre": "strange"}, "splits texts by the rule 'strange', .* pass tokenizer="),
        ({"tokenizer.ggml.model": "rwkv"}, "has a tokenizer of kind 'rwkv'; byte-level BPE"),
        ({"general.architecture": None}, "names no architecture"),
        ({"general.alignment": 0}, "aligns its tensors to 0 bytes, expected a power of two"),  # was a ZeroDivisionError
        ({"llama.context_length": "long"}, "has 'long' as metadata 'llama.context_length', expected a whole number"),
        ({"llama.context_length": 0}, "'llama.context_length', expected a whole number from 1 on"),  # was read
        ({"llama.rope.freq_base": float("nan")}, "has nan as metadata 'llama.rope.freq_base', expected a number above"),
        ({"llama.rope.scaling.type": "yarn"}, "by 'yarn' with the factor None over a context of None"),
        ({"llama.rope.dimension_count": 8}, "rotates 8 of 16 values of a head"),  # rotated all
        ({"llama.block_count": 1}, "has tensors of 2 layers, expected 1 by 'llama.block_count'"),  # dropped a layer
        ({"llama.block_count": 1 << 30}, "expected 1,073,741,824 by"),  # described them all
        ({"llama.pooling_type": 3}, "is a model for embeddings or scores"),
        ({"general.type": "adapter"}, "is no model but a LoRA adapter: merge it into its model"),
        ({"split.count": 2}, r"is a part \(split.no 0\) of a model in 2 files, whose names must end in"),
        ({"tokenizer.ggml.token_type": [1] * 3}, "tokens and 3 values in 'tokenizer.ggml.token_type', expected one"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "has 9999 as metadata 'tokenizer.ggml.eos_token_id', expected the id"),
        ({"tokenizer.chat_template": 3}, "has 3 as metadata 'tokenizer.chat_template', expected a text"),
    ],
)
def test_metadata_that_is_not_understood_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    model = tiny_model("llama")
    metadata = {key: value for key, value in (metadata_of(model, "llama") | change).items() if value is not None}
    with pytest.raises(ModelError, match=message):
        resolve(write_gguf(tmp_path / "m.gguf", metadata, tensors_of(model, "llama")))
