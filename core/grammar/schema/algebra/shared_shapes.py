"""Equal shapes are one object: shapes nest deep and are keys of many tables, and identity is compared at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import partial
from typing import Any, ClassVar, Self, dataclass_transform
from weakref import ref


class _Use(ref[Any]):
    """A shape that is in use, with its values. A WeakValueDictionary does the same and takes half as long again."""

    __slots__ = ("values",)

    values: tuple[Any, ...]


class _Entrance:
    """Enters shapes and leaves them out, one at a time, so that no two threads make equal ones.

    lock  held meanwhile
    late  shapes that are gone and could not be left out because another thread held the lock; it does so
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.late: list[tuple[dict[tuple[Any, ...], _Use], _Use]] = []

    def enter(self, in_use: dict[tuple[Any, ...], _Use], new: _Use) -> Any:
        """The shape with the values of `new` that another thread entered meanwhile; None where `new` is entered."""
        with self.lock:
            use = in_use.setdefault(new.values, new)  # tuples of many values are hashed each time
            found = None if use is new else use()
            if found is None and use is not new:
                in_use[new.values] = new
            while self.late:
                late, gone = self.late.pop()
                if late.get(gone.values) is gone:
                    del late[gone.values]
        return found

    def leave_out(self, in_use: dict[tuple[Any, ...], _Use], use: _Use) -> None:
        """Called where a shape is freed, without waiting: as the interpreter ends, the lock's holder may never go on.

        No global name is read, for then they are gone.
        """
        lock = self.lock
        if not lock.acquire(blocking=False):
            self.late.append((in_use, use))
            return
        try:
            found = in_use.pop(use.values, None)
            if found is not use and found is not None:  # an equal shape that was made meanwhile
                in_use[use.values] = found
        finally:
            lock.release()


_entrance = _Entrance()


def _unlock() -> None:
    """In a fork the thread that held the lock is gone."""
    _entrance.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


@dataclass_transform(frozen_default=True)
class SharedShape:
    """Each class below is a frozen dataclass; with the values of an instance that is in use it gives that instance."""

    _names: ClassVar[tuple[str, ...]]
    _defaults: ClassVar[tuple[Any, ...]]
    _in_use: ClassVar[dict[tuple[Any, ...], _Use]]
    _leave_out: ClassVar[Callable[[_Use], None]]

    def __init_subclass__(cls) -> None:
        make: Any = dataclass(frozen=True, eq=False, init=False)
        described = fields(make(cls))
        cls._names = tuple(field.name for field in described)
        cls._defaults = tuple(field.default for field in described)
        cls._in_use = {}
        cls._leave_out = partial(_entrance.leave_out, cls._in_use)

    def __new__(cls, *values: Any, **named: Any) -> Self:
        if named or len(values) != len(cls._names):
            values = cls._completed(values, named)
        in_use = cls._in_use
        use = in_use.get(values)
        found: Self | None = None if use is None else use()
        if found is not None:
            return found
        made = object.__new__(cls)
        fields_of = made.__dict__
        for i, name in enumerate(cls._names):
            fields_of[name] = values[i]
        new = _Use(made, cls._leave_out)
        new.values = values
        found = _entrance.enter(in_use, new)
        return made if found is None else found

    @classmethod
    def _completed(cls, values: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """All fields in order, by position, by name or by default."""
        given = len(values)
        left = map(named.pop, cls._names[given:], cls._defaults[given:]) if named else cls._defaults[given:]
        values = (*values, *left)
        if named or given > len(cls._names) or MISSING in values:
            raise TypeError(f"{cls.__name__} takes {', '.join(cls._names) or 'nothing'}")
        return values

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[Any, ...]]:
        return type(self), tuple([getattr(self, name) for name in self._names])
