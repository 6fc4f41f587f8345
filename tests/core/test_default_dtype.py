"""torch's default dtype, which a user or a load in another thread may change, changes no buffer and no answer."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import graftlm as gl
from tests.models import byte_tokenizer, tiny_model

ROOT = Path(__file__).parents[2]
MAKERS = {"empty", "empty_strided", "zeros", "ones", "rand", "randn", "linspace"}
"""Functions of torch whose dtype is the default one; others take it from their arguments."""


def without_dtype(path: Path) -> Iterator[int]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        made = ast.unparse(node.func.value) == "torch" and node.func.attr in MAKERS
        if made and not any(keyword.arg in ("dtype", None) for keyword in node.keywords):
            yield node.lineno


@pytest.mark.parametrize("layer", ["core", "kernels"])
def test_every_tensor_is_made_with_its_dtype(layer: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}" for path in (ROOT / layer).rglob("*.py") for line in without_dtype(path)
    ]
    assert found == []


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_answers_do_not_depend_on_the_default_dtype(kind: str, default: torch.dtype) -> None:
    """With bfloat16, compiled loops used to write past the end of their buffers."""

    def answers() -> list[list[int]]:
        with gl.Runtime(tiny_model(kind), tokenizer=byte_tokenizer(), device="cpu") as runtime:
            prompts = [f"The same beginning of all of them. {i}" for i in range(3)]
            return [list(found.token_ids) for found in runtime.generate(prompts, max_tokens=8, temperature=0)]

    expected = answers()
    torch.set_default_dtype(default)
    try:
        assert answers() == expected
    finally:
        torch.set_default_dtype(torch.float32)
