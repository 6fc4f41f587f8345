"""Files of KV: found by a later process, and never used unless every byte is that of the same prefix and model."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import graftlm as gl
from graftlm.core.errors import ConfigError
from graftlm.core.kv.tiers import context, folder as files
from graftlm.core.kv.tiers.block_index import first_key
from graftlm.core.kv.tiers.folder import BLOCK, BlockFolder, FileKey
from tests.models import byte_tokenizer, tiny_model

PROMPT = [40 + i * 7 % 150 for i in range(300)]
KEY = first_key("")
ROW = np.arange(1000, dtype=np.int64).view(np.uint8)


def ask(
    root: Path, kind: str = "llama", *, namespace: str = "", model: object = None, **options: object
) -> tuple[list[int], int]:
    """Return the answer of a fresh runtime, and how many tokens of the prompt it did not compute."""
    cache = gl.CacheConfig(folder=root, states=8 if kind != "llama" else None)
    runtime = gl.Runtime(
        model or tiny_model(kind),
        tokenizer=byte_tokenizer(),
        device="cpu",
        cache=cache,
        **{"dtype": "float32", **options},
    )
    with runtime:
        sampling = gl.SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        done = runtime.submit(gl.Request(PROMPT, sampling, namespace=namespace)).result()
        return done.token_ids, done.usage.cached_tokens


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_a_second_runtime_finds_the_prompt_of_the_first(root: Path, kind: str) -> None:
    answer, cached = ask(root, kind)
    assert cached == 0
    again, cached = ask(root, kind)
    assert again == answer
    assert cached >= len(PROMPT) - 2
    assert {path.stat().st_mode & 0o777 for path in root.rglob("*") if path.is_file()} == {0o600}


def test_nothing_else_that_changes_a_number_finds_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, _ = ask(root)
    assert ask(root, namespace="another")[1] == 0
    assert ask(root, dtype="bfloat16")[1] == 0
    edited = tiny_model("llama")
    edited.model.layers[1].mlp.up_proj.weight.data[3, 5] += 1e-3
    assert ask(root, model=edited)[1] == 0
    assert ask(root, model=tiny_model("llama", rope_theta=9_000.0))[1] == 0
    with monkeypatch.context() as patch:
        patch.setattr(context, "FORMAT", 2)
        assert ask(root)[1] == 0
    assert ask(root) == (answer, len(PROMPT) - 1)


def test_damaged_files_are_computed_and_written_again(root: Path) -> None:
    answer, _ = ask(root)
    for number, path in enumerate(sorted(root.rglob("b*-*"))):
        damage(path, (3, 20, 70, 200, -1)[number % 5])
    assert ask(root)[0] == answer
    assert ask(root) == (answer, len(PROMPT) - 1)


def damage(path: Path, place: int | None) -> None:
    """Flip a bit at `place`; None: cut the file in two."""
    data = bytearray(path.read_bytes())
    if place is None:
        del data[len(data) // 2 :]
    else:
        data[place] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("place", [3, 10, 30, 45, 50, 70, 320, 1000, -1, None])
def test_a_damaged_file_is_a_miss(tmp_path: Path, place: int | None) -> None:
    folder = BlockFolder(tmp_path, "one model", 1 << 30)
    keys = keys_of(2)
    write_all(folder, keys)
    (path,) = tmp_path.rglob(keys[0].name)
    damage(path, place)
    folder = BlockFolder(tmp_path, "one model", 1 << 30)
    reading = folder.read([(key, np.zeros_like(ROW), key) for key in keys])
    reading.wait(120)
    assert reading.found == keys[1:]
    assert not path.exists()
    assert folder.block(KEY, keys[0].ids[:40]) is None


def test_a_full_disk_costs_a_warning(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, *parts: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "_write", full)
        answer, _ = ask(root)
    assert "free space there, make it writable or choose another CacheConfig.folder" in caplog.text
    assert ask(root) == (answer, 0)


def write_all(folder: BlockFolder, keys: list[FileKey]) -> None:
    for key in keys:
        assert folder.write(key, ROW, lambda: None)
    folder.close(5.0)


def keys_of(count: int) -> list[FileKey]:
    return [FileKey(BLOCK, KEY, np.full(64, value, np.int32).tobytes()) for value in range(count)]


def test_two_processes_share_a_folder_and_see_what_the_other_wrote(tmp_path: Path) -> None:
    first, second = (BlockFolder(tmp_path, "one model", 1 << 30) for _ in range(2))
    (key,) = keys_of(1)
    write_all(first, [key])
    second._scanned_s = 0.0
    second.refresh()
    limit = time.monotonic() + 120
    while second.block(KEY, key.ids) is None and time.monotonic() < limit:
        time.sleep(0.002)
    row = np.zeros_like(ROW)
    reading = second.read([(key, row, "token")])
    reading.wait(120)
    assert reading.found == ["token"]
    assert np.array_equal(row, ROW)
    assert BlockFolder(tmp_path, "another model", 1 << 30).block(KEY, key.ids) is None


def test_the_least_recently_used_files_go(tmp_path: Path) -> None:
    keys = keys_of(10)
    write_all(BlockFolder(tmp_path, "one model", 1 << 30), keys)
    size = (len(ROW) + 500) * 5
    for place, key in enumerate(keys):
        (path,) = tmp_path.rglob(key.name)
        os.utime(path, (place, place))
    BlockFolder(tmp_path, "one model", size).close(5.0)
    left = {path.name for path in tmp_path.rglob("b*-*")}
    assert left <= {key.name for key in keys[5:]}
    assert keys[-1].name in left


def test_sigkill_during_writes_leaves_whole_files_only(tmp_path: Path) -> None:
    program = f"""
import numpy as np
from pathlib import Path
from graftlm.core.kv.tiers.folder import BLOCK, BlockFolder, FileKey
folder = BlockFolder(Path({str(tmp_path)!r}), "one model", 1 << 30)
row = np.tile(np.arange(1000, dtype=np.int64), 250).view(np.uint8)
print("ready", flush=True)
for value in range(10**6):
    while folder.num_queued > 100:
        pass
    folder.write(FileKey(BLOCK, bytes(16), np.full(64, value, np.int32).tobytes()), row, lambda: None)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    limit = time.monotonic() + 120
    while len(list(tmp_path.rglob("b*-*"))) < 5 and time.monotonic() < limit:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    folder = BlockFolder(tmp_path, "one model", 1 << 30)
    wanted = [FileKey(BLOCK, bytes(16), np.full(64, value, np.int32).tobytes()) for value in range(3000)]
    there = [key for key in wanted if folder.holds(key)]
    rows = [np.zeros(2_000_000, np.uint8) for _ in there[:20]]
    reading = folder.read([(key, row, key) for key, row in zip(there, rows, strict=False)])
    reading.wait(120)
    assert len(reading.found) == len(rows) >= 5


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda path: path.write_text(""), "cannot be used: .*give another folder"),
        (lambda path: (path.mkdir(), path.chmod(0o777)), "has mode 777, so others can write KV there; it must be 700"),
    ],
)
def test_a_folder_that_is_not_safe_is_refused_before_weights_are_read(root: Path, prepare: object, words: str) -> None:
    prepare(root)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=words):
        gl.Runtime("sprout", cache=gl.CacheConfig(folder=root)).load()


def test_a_folder_of_another_owner_is_refused_with_both_users(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir(0o700)
    owner = root.stat().st_uid
    monkeypatch.setattr(context.os, "getuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {owner}, this process runs as user {owner + 1}"):
        context.check_folder(gl.EngineConfig(cache=gl.CacheConfig(folder=root)))


def test_a_folder_that_is_too_small_is_refused_with_both_numbers(root: Path) -> None:
    with pytest.raises(ConfigError, match="folder_bytes is 1000; it must be at least 67108864 bytes"):
        gl.CacheConfig(folder=root, folder_bytes=1000)
