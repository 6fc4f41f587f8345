"""The embedded model's files: whole, and named when they are not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from graftlm.core.errors import ModelError
from graftlm.core.model.embedded import SHA256_LIST, listed_files, sprout_folder, sprout_path, verify_sprout
from graftlm.core.runtime import Runtime


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(sprout_folder(), tmp_path / "sprout"))


def test_every_file_of_the_embedded_model_has_its_listed_checksum() -> None:
    assert verify_sprout() == sprout_folder()


def test_every_file_of_the_folder_is_listed_but_the_list() -> None:
    present = {path.name for path in sprout_folder().iterdir()}
    assert {listed.name for listed in listed_files(sprout_folder())} == present - {SHA256_LIST}


def test_the_embedded_model_is_at_most_32_megabytes() -> None:
    assert sum(path.stat().st_size for path in sprout_folder().iterdir()) <= 32_000_000


def test_a_missing_file_is_named_with_its_remedy(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing; restore it with `pip install"):
        sprout_path(copy)


def test_a_truncated_file_is_named_with_both_sizes(copy: Path) -> None:
    path = copy / "config.json"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match=rf"config\.json is {size - 1} bytes, expected {size};"):
        sprout_path(copy)


def test_a_changed_byte_is_found_by_the_checksum_alone(copy: Path) -> None:
    path = copy / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert sprout_path(copy) == copy
    with pytest.raises(ModelError, match=r"model\.safetensors is corrupted \(sha256 .*git checkout"):
        verify_sprout(copy)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_runtime_does_not_run_on_a_corrupted_file(copy: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / name).write_bytes(data)
    monkeypatch.setattr("graftlm.core.model.embedded.sprout_folder", lambda: copy)
    with Runtime("sprout") as runtime, pytest.raises(ModelError, match=f"{name} is corrupted .*restore it with"):
        runtime.generate("x", max_tokens=1)


@pytest.mark.parametrize("text", ["", "0123  not-a-number  config.json\n"])
def test_a_list_that_cannot_be_read_is_itself_named(copy: Path, text: str) -> None:
    path = copy / SHA256_LIST
    path.write_text(text) if text else path.unlink()
    with pytest.raises(ModelError, match=f"cannot read .*{SHA256_LIST}"):
        sprout_path(copy)
