"""What is kept on disk: private, complete, and checked when it is read."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from graftlm.kernels import disk_cache


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRAFTLM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_folder_is_created_for_this_user_alone(root: Path) -> None:
    folder = disk_cache.private_folder("a", "b")
    assert folder == root / "a" / "b"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (root, root / "a", folder)] == [0o700] * 3


def test_a_folder_that_others_can_write_or_that_is_a_link_is_not_used(root: Path, tmp_path: Path) -> None:
    root.mkdir(mode=0o700)
    (root / "open").mkdir()
    (root / "open").chmod(0o777)
    assert disk_cache.private_folder("open", "x") is None
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (root / "link").symlink_to(tmp_path / "elsewhere")
    assert disk_cache.private_folder("link") is None


@pytest.mark.parametrize("value", ["", "relative/folder", "/proc/nowhere"])
def test_without_a_folder_nothing_is_kept(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFTLM_CACHE_DIR", value)
    assert disk_cache.private_folder("a") is None


def test_arrays_come_back_and_a_damaged_file_counts_as_missing(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    disk_cache.save_arrays(path, {"a": np.arange(3), "b": np.zeros((2, 2), np.int32)})
    found = disk_cache.load_arrays(path)
    assert found is not None and found["a"].tolist() == [0, 1, 2] and found["b"].shape == (2, 2)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert disk_cache.load_arrays(path) is None and not path.exists()
    assert disk_cache.load_arrays(path) is None
    path.write_bytes(hashlib.sha256(b"no archive").digest() + b"no archive")
    path.chmod(0o600)
    assert disk_cache.load_arrays(path) is None and not path.exists()


def test_a_disk_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    disk_cache.save_arrays(tmp_path / "missing" / "x.npz", {"a": np.arange(3)})
    assert not disk_cache.publish(tmp_path / "missing" / "folder", lambda building: None)
    assert os.listdir(tmp_path) == []


def test_a_published_folder_is_complete_and_a_change_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "loops"

    def build(building: Path) -> None:
        (building / "deep").mkdir()
        (building / "deep" / "code").write_bytes(b"1")

    assert not disk_cache.is_intact(folder)
    assert disk_cache.publish(folder, build) and disk_cache.is_intact(folder)
    (folder / "deep" / "code").write_bytes(b"2")
    assert not disk_cache.is_intact(folder)
    assert disk_cache.publish(folder, build) and (folder / "deep" / "code").read_bytes() == b"1"
    assert os.listdir(tmp_path) == ["loops"]


def test_the_entries_used_last_are_kept(tmp_path: Path) -> None:
    for age, name in enumerate(["new", "old", "older"]):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    disk_cache.trim(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == ["new", "old"]
    disk_cache.trim(tmp_path, 1, tmp_path / "old")
    assert os.listdir(tmp_path) == ["old"]


def test_a_folder_below_one_that_everybody_can_write_is_not_used_unless_that_is_sticky(root: Path) -> None:
    root.parent.chmod(0o777)  # another user could exchange the folder for his own
    assert disk_cache.private_folder("a") is None
    root.parent.chmod(0o1777)
    assert disk_cache.private_folder("a") == root / "a"


@pytest.mark.parametrize("kind", ["link", "writable"])
def test_a_file_that_somebody_else_may_have_planted_is_not_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.npz"
    disk_cache.save_arrays(path, {"a": np.arange(3)})
    if kind == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.chmod(0o666)
    assert disk_cache.load_arrays(path) is None
    disk_cache.save_arrays(path, {"a": np.arange(4)})  # takes its place
    found = disk_cache.load_arrays(path)
    assert found is not None and found["a"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_a_folder_or_a_pipe_in_place_of_a_file_used_to_raise_or_to_block(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "x.npz"
    make(path)
    assert disk_cache.load_arrays(path) is None
    disk_cache.save_arrays(path, {"a": np.arange(3)})
    disk_cache.trim(tmp_path, 0)
    assert not disk_cache.publish(path, lambda building: None) or path.is_dir()


def test_a_file_whose_size_cannot_be_read_counts_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.npz"
    disk_cache.save_arrays(path, {"a": np.arange(3)})
    num_open = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0

    def failing(number: int) -> os.stat_result:
        raise OSError(5, "a failing disk")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", failing)
        assert disk_cache.load_arrays(path) is None
    assert not num_open or len(os.listdir("/proc/self/fd")) == num_open
    assert disk_cache.load_arrays(path) is not None


def test_a_published_folder_with_a_link_in_it_is_not_intact(tmp_path: Path) -> None:
    folder = tmp_path / "loops"
    assert disk_cache.publish(folder, lambda building: (building / "code").touch())
    (tmp_path / "same").touch()
    (folder / "code").unlink()
    (folder / "code").symlink_to(tmp_path / "same")
    assert not disk_cache.is_intact(folder)
