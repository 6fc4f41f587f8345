"""PromptModules: modules stay in the tree while somebody uses them, and no longer."""

from __future__ import annotations

import numpy as np

from graftlm.core.kv.prompt_modules import PromptModules
from graftlm.core.kv.radix import RadixTree
from graftlm.core.prompt_input import PromptInput
from graftlm.kernels.wire_plan import Extent

A, B = np.arange(10, 20, dtype=np.int32), np.arange(50, 56, dtype=np.int32)
REST = np.array([1, 2], np.int32)


def publish(tree: RadixTree, ids: np.ndarray, first: int) -> None:
    tree.insert(ids, [Extent(first, first + len(ids))], owned_from=0)


def test_modules_are_locked_from_the_first_user_to_the_last() -> None:
    tree = RadixTree()
    modules, prompt = PromptModules(tree), PromptInput.composed([A, B], REST)
    publish(tree, A, 100)
    (missing,) = modules.take(1, prompt, "")
    assert missing.tolist() == B.tolist()
    assert modules.take(2, PromptInput.composed([B], REST), "") == []  # somebody computes it already
    assert modules.users(B, "") == [1, 2]
    assert tree.evict(100) == []
    publish(tree, B, 200)
    modules.computed(B, "")
    assert tree.evict(100) == []
    modules.give(1, prompt, "")
    assert tree.evict(100) == [Extent(100, 110)]
    modules.give(2, PromptInput.composed([B], REST), "")
    assert tree.evict(100) == [Extent(200, 206)]
    tree.check_integrity()


def test_a_module_that_nobody_wants_any_more_is_not_locked() -> None:
    tree = RadixTree()
    modules, prompt = PromptModules(tree), PromptInput.composed([A], REST)
    modules.take(1, prompt, "")
    modules.give(1, prompt, "")
    publish(tree, A, 0)
    modules.computed(A, "")
    assert modules.users(A, "") == [] and tree.evict(100) == [Extent(0, 10)]


def test_a_part_of_a_module_is_not_enough() -> None:
    tree = RadixTree()
    publish(tree, A[:7], 0)
    (missing,) = PromptModules(tree).take(1, PromptInput.composed([A], REST), "")
    assert missing.tolist() == A.tolist()
