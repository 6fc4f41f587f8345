"""Several threads load and render at once, each as if it were alone."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.modeling_utils as building
from torch import nn

from graftlm.core.config import EngineConfig
from graftlm.core.model.weights import read_weights
from tests.models import byte_tokenizer, tiny_model

ROOT = Path(__file__).parents[3]
LOCKS = {"importing_transformers", "building_model"}
WITH_A_MODEL = {  # code that runs only for a model of transformers, or for its processor
    "core/execution/grid_tables.py",
    "core/execution/packed_attention.py",
    "core/execution/vision.py",
    "core/media/hf_processor.py",
    "core/model/quantised/checkpoint.py",
}


def unlocked(node: ast.AST) -> Iterator[int]:
    """The lines that import transformers at run time and hold no lock."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.With) and LOCKS & {
            getattr(getattr(item.context_expr, "func", None), "id", "") for item in child.items
        }:
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            names = [child.module or ""] if isinstance(child, ast.ImportFrom) else [one.name for one in child.names]
            if any(name.split(".")[0] == "transformers" for name in names):
                yield child.lineno
        yield from unlocked(child)


@pytest.mark.parametrize("layer", ["core", "kernels", "adapters"])
def test_transformers_is_imported_under_a_lock(layer: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in (ROOT / layer).rglob("*.py")
        if str(path.relative_to(ROOT)) not in WITH_A_MODEL
        for line in unlocked(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == set()


TWO_FIRST_IMPORTS = """
import sys, threading, time
import graftlm as gl
from graftlm.core.config import EngineConfig
from graftlm.core.model.description import model_config

began, failures = threading.Event(), []

class Pause:
    def find_spec(self, name, path, target=None):
        if name == "transformers.utils" and not began.is_set():
            began.set()
            time.sleep(0.5)  # in the middle of the import; without a lock, the other thread meets the package here

def attempt(work):
    try:
        work()
    except BaseException as error:
        failures.append(error)

def load():
    began.wait()
    model_config(sys.argv[1], EngineConfig())

sys.meta_path.insert(0, Pause())
tokenizer = gl.Runtime("sprout", device="cpu").tokenizer
assert "transformers" not in sys.modules
render = lambda: tokenizer.render([{"role": "user", "content": "a"}])
threads = [threading.Thread(target=attempt, args=(work,)) for work in (render, load)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not failures, failures
"""


def test_a_first_rendering_beside_a_load_imports_transformers_once(tmp_path: Path) -> None:
    """A load used to end with "cannot import name 'AutoConfig' from 'transformers'"."""
    tiny_model("llama").config.save_pretrained(tmp_path)
    subprocess.run([sys.executable, "-c", TWO_FIRST_IMPORTS, str(tmp_path)], check=True)


def test_two_models_that_are_read_at_once_have_their_own_dtypes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them used to get the other's, and torch's default dtype could stay changed."""
    names = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    for name in names:
        tiny_model("llama").save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    both = threading.Barrier(2)
    own = building.local_torch_dtype

    @contextmanager
    def at_once(*args: Any, **options: Any) -> Iterator[None]:
        with own(*args, **options):
            try:
                both.wait(0.5)  # both threads have changed the default, unless one waits for the other
            except threading.BrokenBarrierError:
                both.reset()
            yield

    monkeypatch.setattr(building, "local_torch_dtype", at_once)
    models: dict[str, nn.Module] = {}

    def read(name: str) -> None:
        models[name] = read_weights(str(tmp_path / name), EngineConfig(device="cpu", dtype=name), torch.device("cpu"))

    threads = [threading.Thread(target=read, args=(name,)) for name in names]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.get_default_dtype() is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    assert {name: {p.dtype for p in model.parameters()} for name, model in models.items()} == {
        name: {dtype} for name, dtype in names.items()
    }
