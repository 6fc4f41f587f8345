"""How classes of nodes are made, and nodes read back from a pickle: equal small ones are one object.

Schemas have much alike, and processes send nodes by the thousand. What is shared is kept here until newer nodes
displace it, so it has to be small.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, TypeVar, cast, dataclass_transform

_MAX_NODES = 8192
_MAX_LENGTH = 64
"""Bytes or items of a node that is shared; a larger one is read back as an object of its own."""

T = TypeVar("T")
_kinds: dict[str, type[SharedNode]] = {}


class SharedNode:
    """A node is pickled as the call that makes it: the state of a class with slots takes longer to read back."""

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        _kinds[cls.__name__] = cls

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        values = [getattr(self, name) for name in self.__match_args__]
        return _shared if _is_small(self) else _made, (type(self).__name__, *values)


class ComposedNode(SharedNode):
    """A node made of others: it computes its hash once, as nodes nest deep and are keys of many tables."""

    __slots__ = ("_hash", "_is_small", "_survey")


@dataclass_transform(frozen_default=True)
def simple(cls: type[T]) -> type[T]:
    """A class of nodes that type checkers keep frozen: a class that is so while it runs takes twice as long to make."""
    return dataclass(unsafe_hash=True, slots=True)(cls)


@dataclass_transform(frozen_default=True)
def composed(cls: type[T]) -> type[T]:
    """The same of nodes that know their hash."""
    made: Any = dataclass(unsafe_hash=True, slots=True)(cls)
    compute: Callable[[Any], int] = made.__hash__

    def cached(self: Any) -> int:
        try:
            found: int = self._hash
        except AttributeError:
            found = self._hash = compute(self)
        return found

    made.__hash__ = cached
    return cast(type[T], made)


def _made(kind: str, *values: Any) -> SharedNode:
    return _kinds[kind](*values)


@lru_cache(maxsize=_MAX_NODES)
def _shared(kind: str, *values: Any) -> SharedNode:
    return _made(kind, *values)


def _is_small(value: Any) -> bool:
    """Whether `value` and all that it is made of are short."""
    if isinstance(value, ComposedNode):
        found: bool | None = getattr(value, "_is_small", None)
        if found is None:
            found = all([_is_small(getattr(value, name)) for name in value.__match_args__])
            object.__setattr__(value, "_is_small", found)
        return found
    if isinstance(value, SharedNode):
        return all([_is_small(getattr(value, name)) for name in value.__match_args__])
    if isinstance(value, tuple):
        return len(value) <= _MAX_LENGTH and all([_is_small(item) for item in value])
    return value is None or isinstance(value, int) or len(value) <= _MAX_LENGTH
