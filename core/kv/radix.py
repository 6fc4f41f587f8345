"""The radix tree over computed prompts: match, insert, lock, evict.

Source: RadixAttention, SGLang, arXiv 2312.07104, section 3.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graftlm.core.config import CacheConfig
from graftlm.kernels.wire_plan import Extent, clip_range

if TYPE_CHECKING:
    from graftlm.core.kv.waits import Hold

Ids = np.ndarray  # int32 [num_tokens]


class Node:
    """A run of tokens whose KV lies in one extent.

    `locks` counts the running sequences and pins at or below this node; only nodes without locks
    are evicted. `last_access` is a tick of the tree's own clock, `hits` how often a match used the node. `state` is the
    slot of the model's state after the node's last token (states.py), for a model with layers that have one. `in_files`
    says whether it was given to a cache folder. `hold` says when the caller returns that waits with it.
    """

    __slots__ = (
        "key",
        "extent",
        "children",
        "parent",
        "locks",
        "last_access",
        "hits",
        "created",
        "namespace",
        "queued",
        "state",
        "in_files",
        "hold",
    )

    def __init__(self, key: Ids, extent: Extent, parent: Node | None, tick: int, namespace: str) -> None:
        self.key = key
        self.extent = extent
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.last_access = tick
        self.created = tick
        self.hits = 0
        self.namespace = namespace
        self.queued = False
        self.state: int | None = None
        self.in_files = False
        self.hold: Hold | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.key)

    @property
    def depth(self) -> int:
        """Tokens up to the node's last one."""
        depth, node = 0, self
        while node.parent is not None:
            depth, node = depth + node.num_tokens, node.parent
        return depth

    def __repr__(self) -> str:
        return f"Node({self.num_tokens} tokens, {len(self.children)} children, {self.locks} locks)"


class Match(NamedTuple):
    """The longest cached prefix: the node it ends at and its slots in order."""

    node: Node
    extents: list[Extent]
    length: int


class Peek(NamedTuple):
    """Where a match would end: after `node`, or `offset` tokens into its child `inside`."""

    node: Node
    length: int
    inside: Node | None
    offset: int


class Inserted(NamedTuple):
    """The node where the inserted tokens end, all their slots in the tree, and the caller's slots it did not take."""

    node: Node
    extents: list[Extent]
    duplicates: list[Extent]


def _lru(node: Node) -> Any:
    return node.last_access


def _lfu(node: Node) -> Any:
    return (node.hits, node.last_access)


def _place(node: Node, policy: Callable[[Node], Any]) -> tuple[int, Any]:
    """Return the sort key of a leaf: waiting ones that move to host memory, the policy's order, those that stay."""
    if node.hold is None:
        return 1, policy(node)
    return 0 if node.hold.moves else 2, -node.hold.returns_s


def eviction_key(config: CacheConfig) -> Callable[[Node], Any]:
    """The sort key of a policy: the leaf with the smallest one goes first."""
    if callable(config.eviction):
        return config.eviction
    return {"lru": _lru, "lfu": _lfu}[config.eviction]


def _common(a: Ids, b: Ids) -> int:
    """Length of the longest common prefix of two id arrays."""
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length


def path_of(node: Node) -> tuple[Ids, list[Extent]]:
    """Return all tokens up to the last one of `node`, and their slots."""
    keys, extents, step = [], [], node
    while step.parent is not None:
        keys.append(step.key)
        extents.append(step.extent)
        step = step.parent
    return np.concatenate(keys[::-1]) if keys else node.key, extents[::-1]


def _whole_pages(num_tokens: int, page_size: int) -> int:
    return num_tokens - num_tokens % page_size


def _root(namespace: str) -> Node:
    return Node(np.empty(0, np.int32), Extent(0, 0), None, 0, namespace)


class RadixTree:
    """Which token prefixes are cached, and in which slots.

    One root per namespace. Keys are whole pages. The tree never touches the pool: slots that it lets go
    are returned to the caller, who frees them.

    forget    called with a node before it is removed or cut: its state is of no use afterwards
    evicting  called with a leaf before that, and how many of its tokens stay: its slots still hold the KV
    """

    def __init__(
        self,
        *,
        page_size: int = 1,
        key: Callable[[Node], Any] = _lru,
        forget: Callable[[Node], None] = lambda node: None,
    ) -> None:
        self.page_size = page_size
        self.key = key
        self.forget = forget
        self.evicting: Callable[[Node, int], None] = lambda leaf, keep: None
        self.num_tokens = 0
        self.num_protected = 0
        self.version = 0
        self._roots: dict[str, Node] = {}
        self._tick = itertools.count(1)
        self._heap: list[tuple[Any, int, Node]] = []
        self._order = itertools.count()

    @property
    def num_evictable(self) -> int:
        return self.num_tokens - self.num_protected

    def root(self, namespace: str = "") -> Node:
        if namespace not in self._roots:
            self._roots[namespace] = _root(namespace)
        return self._roots[namespace]

    def peek(self, ids: Ids, namespace: str = "") -> Peek:
        """Find where a match of `ids` would end. Changes nothing, not even the order of eviction."""
        node, length = self._roots.get(namespace) or _root(namespace), 0
        while child := self._child(node, ids, length):
            common = _whole_pages(_common(child.key, ids[length:]), self.page_size)
            if common < child.num_tokens:
                return Peek(node, length + common, child, common)
            node, length = child, length + common
        return Peek(node, length, None, 0)

    def match(self, ids: Ids, namespace: str = "", *, with_state: bool = False) -> Match:
        """Find the longest cached prefix of `ids`, in whole pages.

        May split one node; never adds or frees slots. The slots stay valid only while the returned node
        is locked.

        with_state  end at the last node of the path whose state is cached
        """
        tick = next(self._tick)
        if with_state:
            found = self.find_state(ids, namespace)
            step = found.node
            while step.parent is not None:
                step.last_access, step.hits = tick, step.hits + 1
                step = step.parent
            return found
        node, length, extents = self.root(namespace), 0, []
        while child := self._child(node, ids, length):
            common = _whole_pages(_common(child.key, ids[length:]), self.page_size)
            if common < child.num_tokens:
                if common == 0:
                    break
                child = self._split(child, common)
            child.last_access = tick
            child.hits += 1
            extents.append(child.extent)
            node, length = child, length + common
        return Match(node, extents, length)

    def find_state(self, ids: Ids, namespace: str = "") -> Match:
        """Find the last node of the path of `ids` whose state is cached. Changes nothing, as `peek`."""
        node, length = self.root(namespace), 0
        path: list[Extent] = []
        found = Match(node, [], 0)
        while child := self._child(node, ids, length):
            if _whole_pages(_common(child.key, ids[length:]), self.page_size) < child.num_tokens:
                break
            path.append(child.extent)
            node, length = child, length + child.num_tokens
            if node.state is not None:
                found = Match(node, path[:], length)
        return found

    def insert(self, ids: Ids, extents: Iterable[Extent], owned_from: int, namespace: str = "") -> Inserted:
        """Publish the KV of `ids`, whose slots are `extents` in order, in whole pages.

        Slots of ids[:owned_from] are the tree's already. Where the tree holds a token of ids[owned_from:]
        in other slots, it keeps its own and the caller's are returned as duplicates; so are the slots of a
        last page that is not full.
        """
        tick = next(self._tick)
        whole = _whole_pages(len(ids), self.page_size)
        slots = list(extents)
        match = self.match(ids[:whole], namespace)
        # [owned_from, match.length) became shared meanwhile: give the caller's copies back
        duplicates = clip_range(slots, owned_from, match.length)
        node, path = match.node, match.extents
        position = match.length
        for piece in clip_range(slots, match.length, whole):
            child = Node(ids[position : position + piece.size].copy(), piece, node, tick, namespace)
            node.children[self._first_page(child.key)] = child
            position += piece.size
            self.num_tokens += piece.size
            node = child
            path.append(piece)
        duplicates += clip_range(slots, max(whole, owned_from), len(ids))
        if position > match.length:
            self.version += 1
            self.offer(node)
        return Inserted(node, path, duplicates)

    def lock(self, node: Node) -> None:
        """Keep `node` and its ancestors from eviction until unlocked as often."""
        step: Node | None = node
        while step is not None:
            if step.locks == 0:
                self.num_protected += step.num_tokens
            step.locks += 1
            step = step.parent

    def unlock(self, node: Node) -> None:
        step: Node | None = node
        while step is not None:
            step.locks -= 1
            if step.locks == 0:
                self.num_protected -= step.num_tokens
                self.offer(step)
            step = step.parent

    def evict(self, num_tokens: int) -> list[Extent]:
        """Evict at least `num_tokens` unlocked tokens if there are as many, in whole pages.

        Leaves go in the order of the policy; of the last one only the tail that is needed.
        Returns the freed slots.
        """
        freed: list[Extent] = []
        missing = num_tokens
        while missing > 0 and (leaf := self._pop_leaf()) is not None:
            cut = -(-missing // self.page_size) * self.page_size
            freed.append(self._trim(leaf, leaf.num_tokens - cut) if cut < leaf.num_tokens else self._remove(leaf))
            missing -= freed[-1].size
        if freed:
            self.version += 1
        return freed

    def drop(self, ids: Ids, keep: int, namespace: str = "") -> list[Extent]:
        """Remove the cached tokens of `ids` after the first `keep`, in whole pages; return the freed slots.

        Tokens that are locked, or that another cached sequence continues, stay.
        """
        freed: list[Extent] = []
        keep = -(-keep // self.page_size) * self.page_size
        peek = self.peek(ids, namespace)
        leaf, depth = peek.node, peek.length - peek.offset
        while depth > keep and leaf.parent is not None and not leaf.children and not leaf.locks:
            parent, above = leaf.parent, depth - leaf.num_tokens
            freed.append(self._remove(leaf) if above >= keep else self._trim(leaf, keep - above))
            leaf, depth = parent, above
        if freed:
            self.version += 1
        return freed

    def continuation(self, peek: Peek, num_tokens: int) -> Ids:
        """The cached tokens that follow where `peek` ended: of the branch used last, at most `num_tokens`."""
        node = peek.inside or peek.node
        found = node.key[peek.offset :] if peek.inside is not None else np.empty(0, np.int32)
        while len(found) < num_tokens and node.children:
            node = max(node.children.values(), key=_lru)
            found = np.concatenate([found, node.key[: num_tokens - len(found)]])
        return found[:num_tokens]

    def nodes(self) -> list[Node]:
        """Every node but the roots, parents before children."""
        stack = list(self._roots.values())
        found: list[Node] = []
        while stack:
            node = stack.pop()
            found.extend(node.children.values())
            stack.extend(node.children.values())
        return found

    def check_integrity(self) -> None:
        """Raise AssertionError unless the counters and links agree. For tests."""
        nodes = self.nodes()
        assert sum(n.num_tokens for n in nodes) == self.num_tokens
        assert sum(n.num_tokens for n in nodes if n.locks) == self.num_protected
        for node in nodes:
            assert node.parent is not None and node.num_tokens == node.extent.size > 0
            assert node.parent.children[self._first_page(node.key)] is node
            assert node.parent.locks >= node.locks
            assert node.num_tokens % self.page_size == 0, "a page in two nodes cannot be found again"

    def _child(self, node: Node, ids: Ids, start: int) -> Node | None:
        if start + self.page_size > len(ids):
            return None
        return node.children.get(ids[start : start + self.page_size].tobytes())

    def _first_page(self, key: Ids) -> bytes:
        return key[: self.page_size].tobytes()

    def _split(self, node: Node, length: int) -> Node:
        """Put a new node above `node` for its first `length` tokens; `node` stays the lower one, so locks hold."""
        parent = node.parent
        assert parent is not None
        start, stop = node.extent
        upper = Node(node.key[:length], Extent(start, start + length), parent, node.last_access, node.namespace)
        upper.locks, upper.hits, upper.created = node.locks, node.hits, node.created
        upper.hold = node.hold
        if upper.hold is not None:
            upper.hold.nodes.append(upper)
        parent.children[self._first_page(upper.key)] = upper
        node.key, node.extent, node.parent = node.key[length:], Extent(start + length, stop), upper
        upper.children[self._first_page(node.key)] = node
        return upper

    def offer(self, node: Node) -> None:
        """Queue `node` for eviction if it is an unlocked leaf; drop the root of a namespace that is empty."""
        if node.parent is None:
            if not node.children and node.locks == 0 and self._roots.get(node.namespace) is node:
                del self._roots[node.namespace]
        elif not node.children and node.locks == 0 and not node.queued:
            node.queued = True
            heapq.heappush(self._heap, (_place(node, self.key), next(self._order), node))

    def _pop_leaf(self) -> Node | None:
        while self._heap:
            key, _, node = heapq.heappop(self._heap)
            node.queued = False
            if node.children or node.locks or node.parent is None:
                continue  # no longer an evictable leaf
            if _place(node, self.key) != key:
                self.offer(node)  # used since it was queued
                continue
            return node
        return None

    def _remove(self, leaf: Node) -> Extent:
        parent = leaf.parent
        assert parent is not None
        self.evicting(leaf, 0)
        self.forget(leaf)
        del parent.children[self._first_page(leaf.key)]
        leaf.parent = None
        self.num_tokens -= leaf.num_tokens
        self.offer(parent)
        return leaf.extent

    def _trim(self, leaf: Node, keep: int) -> Extent:
        self.evicting(leaf, keep)
        self.forget(leaf)
        start, stop = leaf.extent
        self.num_tokens -= leaf.num_tokens - keep
        leaf.key, leaf.extent = leaf.key[:keep], Extent(start, start + keep)
        self.offer(leaf)
        return Extent(start + keep, stop)
