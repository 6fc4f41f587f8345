"""Equal shapes are one object: shapes nest deep and are keys of many tables, and identity is compared at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Self, dataclass_transform
from weakref import WeakValueDictionary

_lock = threading.RLock()
"""Held while a shape is made, so that no other thread makes an equal one."""


def _unlock() -> None:
    """In a fork the thread that held the lock is gone."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


@dataclass_transform(frozen_default=True)
class SharedShape:
    """Each class below is a frozen dataclass; with the values of an instance that is in use it gives that instance."""

    _names: ClassVar[tuple[str, ...]]
    _defaults: ClassVar[tuple[Any, ...]]
    _in_use: ClassVar[WeakValueDictionary[tuple[Any, ...], Any]]

    def __init_subclass__(cls) -> None:
        make: Any = dataclass(frozen=True, eq=False, init=False)
        described = fields(make(cls))
        cls._names = tuple(field.name for field in described)
        cls._defaults = tuple(field.default for field in described)
        cls._in_use = WeakValueDictionary()

    def __new__(cls, *values: Any, **named: Any) -> Self:
        if named or len(values) != len(cls._names):
            values = cls._completed(values, named)
        found: Self | None = cls._in_use.get(values)
        if found is None:
            with _lock:
                found = cls._in_use.get(values)
                if found is None:
                    found = super().__new__(cls)
                    found.__dict__.update(zip(cls._names, values, strict=True))
                    cls._in_use[values] = found
        return found

    @classmethod
    def _completed(cls, values: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """All fields in order, by position, by name or by default."""
        given = len(values)
        values = (*values, *map(named.pop, cls._names[given:], cls._defaults[given:]))
        if named or given > len(cls._names) or MISSING in values:
            raise TypeError(f"{cls.__name__} takes {', '.join(cls._names) or 'nothing'}")
        return values

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[Any, ...]]:
        return type(self), tuple([getattr(self, name) for name in self._names])
