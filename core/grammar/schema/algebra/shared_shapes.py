"""Shared shapes: equal shapes are one object, so that nested shapes are compared and hashed by identity.

Frozen dataclasses instead take 1.7 times as long for all 566 MaskBench schemas (10.2 and 6.0 s of CPU time).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Self, cast, dataclass_transform
from weakref import ref


class _Use(ref[Any]):
    """A shape that is in use, with its values. A WeakValueDictionary does the same and takes half as long again."""

    __slots__ = ("values",)

    values: tuple[Any, ...]


_lock = threading.RLock()
"""Held while entries of shapes that are gone are replaced or left out."""
_MOST_GONE = 500
"""Such entries of one class, after which they are left out."""


def _unlock() -> None:
    """In a fork the thread that held the lock is gone."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


@dataclass_transform(frozen_default=True)
class SharedShape:
    """Each class below is a dataclass; with the values of an instance that is in use it gives that instance. To type
    checkers it is frozen; while a program runs, a frozen one would take twice as long to make.

    Where a shape is freed, nothing is done but to note it: that may happen anywhere, also as the interpreter ends.
    """

    _names: ClassVar[tuple[str, ...]]
    _defaults: ClassVar[tuple[Any, ...]]
    _in_use: ClassVar[dict[tuple[Any, ...], _Use]]
    _gone: ClassVar[list[_Use]]
    _note_gone: ClassVar[Callable[[_Use], None]]
    _fill: ClassVar[Callable[..., None]]

    def __init_subclass__(cls) -> None:
        described = fields(cast(Any, dataclass(eq=False)(cls)))
        cls._fill = cls.__init__
        del cls.__init__  # which would be called for shapes that there are already
        cls._names = tuple(field.name for field in described)
        cls._defaults = tuple(field.default for field in described)
        cls._in_use, cls._gone = {}, []
        cls._note_gone = cls._gone.append

    def __new__(cls, *values: Any, **named: Any) -> Self:
        if named or len(values) != len(cls._names):
            values = cls._completed(values, named)
        in_use = cls._in_use
        use = in_use.get(values)
        found: Self | None = None if use is None else use()
        if found is not None:
            return found
        made = object.__new__(cls)
        cls._fill(made, *values)
        new = _Use(made, cls._note_gone)
        new.values = values
        if in_use.setdefault(values, new) is not new:  # of a shape that is gone, or that another thread made meanwhile
            return cls._instead(made, new)
        if len(cls._gone) > _MOST_GONE:
            leave_out_gone()
        return made

    @classmethod
    def _instead(cls, made: Self, new: _Use) -> Self:
        """The shape with the values of `new` that another thread entered meanwhile; else `made`, which is entered."""
        with _lock:
            use = cls._in_use.setdefault(new.values, new)
            found: Self | None = use()
            if found is None:
                cls._in_use[new.values] = new
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


def leave_out_gone() -> None:
    """Leave out the entries of shapes that are gone, and free what these were made of.

    Until then the values of a shape live on. Nothing is done while another thread is about it.
    """
    lock = _lock
    if not lock.acquire(blocking=False):
        return
    try:
        is_left = True
        while is_left:  # values are shapes that go as well
            is_left = False
            for kind in SharedShape.__subclasses__():
                gone, in_use = kind._gone, kind._in_use
                while gone:
                    is_left = True
                    use = gone.pop()
                    if in_use.get(use.values) is use:  # else an equal shape was made meanwhile
                        del in_use[use.values]
                    del use  # and with it the values
    finally:
        lock.release()
