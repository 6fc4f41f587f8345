"""PromptModules: the KV of modules, by which prompts begin in any order, locked while requests use it.

The KV of a module is that of a prompt of the module alone: a path of the radix tree, which prompts that begin with the
same text share. A sequence of a prompt with modules reads the slots of all its modules and owns those of its other
tokens. It publishes nothing, for the KV of its text depends on the modules and their number, not on the ids before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    from graftlm.core.kv.radix import Node, RadixTree
    from graftlm.core.prompt_input import PromptInput
    from graftlm.core.sequence import Sequence
    from graftlm.kernels.wire_plan import Extent


class Key(NamedTuple):
    """The identity of a module: its namespace, and its ids as bytes."""

    namespace: str
    ids: bytes


def keys_of(prompt: PromptInput, namespace: str) -> list[Key]:
    """Return the keys of a prompt's modules, in their order."""
    return [Key(namespace, ids.tobytes()) for ids in prompt.of_modules]


@dataclass(eq=False)
class _Module:
    """One module: the numbers of the submissions that use it, and the locked node of its last token once computed."""

    users: set[int] = field(default_factory=set)
    node: Node | None = None
    extents: list[Extent] = field(default_factory=list)


class PromptModules:
    """The modules of the requests that wait or run."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._modules: dict[Key, _Module] = {}

    def take(self, user: int, prompt: PromptInput, namespace: str) -> list[np.ndarray]:
        """Let a submission use the modules of its prompt. -> the ids of those that must be computed for it"""
        missing = []
        for key, ids in zip(keys_of(prompt, namespace), prompt.of_modules, strict=True):
            module = self._modules.get(key)
            if module is None:
                module = self._modules[key] = _Module()
                if not self._lock(module, ids, namespace):
                    missing.append(ids)
            module.users.add(user)
        return missing

    def give(self, user: int, prompt: PromptInput, namespace: str) -> None:
        """Let the modules of a submission that has ended be evicted, unless others use them."""
        for key in dict.fromkeys(keys_of(prompt, namespace)):
            module = self._modules.get(key)
            if module is None:
                continue
            module.users.discard(user)
            if not module.users:
                del self._modules[key]
                if module.node is not None:
                    self._tree.unlock(module.node)

    def computed(self, ids: np.ndarray, namespace: str) -> None:
        """Note that the KV of a module is in the tree."""
        module = self._modules.get(Key(namespace, ids.tobytes()))
        if module is not None and module.node is None:
            self._lock(module, ids, namespace)

    def users(self, ids: np.ndarray, namespace: str) -> list[int]:
        """Return the submissions that use a module, in the order of their numbers."""
        module = self._modules.get(Key(namespace, ids.tobytes()))
        return sorted(module.users) if module is not None else []

    def ready(self, sequence: Sequence) -> bool:
        """Whether the KV of all modules of a prompt is in the tree."""
        return all(self._modules[key].node is not None for key in keys_of(sequence.prompt, sequence.request.namespace))

    def extents(self, sequence: Sequence) -> list[Extent]:
        """Return the slots of all modules of a prompt that are `ready`, in the order of the prompt."""
        keys = keys_of(sequence.prompt, sequence.request.namespace)
        return [extent for key in keys for extent in self._modules[key].extents]

    def _lock(self, module: _Module, ids: np.ndarray, namespace: str) -> bool:
        """Lock the KV of a module if the tree has all of it."""
        if self._tree.peek(ids, namespace).length < len(ids):
            return False
        match = self._tree.match(ids, namespace)
        self._tree.lock(match.node)
        module.node, module.extents = match.node, match.extents
        return True
