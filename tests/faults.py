"""Faults on purpose: the one seam through which tests and the soak let a real part fail at its n-th call."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class InjectedFault(RuntimeError):
    """Raised by a part that was told to fail."""


class InjectedExit(BaseException):
    """The same for what is no Exception."""


@contextmanager
def failing(
    owner: Any, name: str, *, every: int, once: bool = False, kind: type[BaseException] = InjectedFault
) -> Iterator[list[int]]:
    """Let `owner.name` raise `kind` at each n-th call, or at the n-th alone. -> the calls that raised

    owner  an object, a class or a module: a runner ("forward": a step), a PagePool ("allocate"), a tokenizer
           ("detokenizer"), `graftlm.core.grammar.cache` ("compile_spec"), a kernel's class ("forward"), ...
    """
    original = getattr(owner, name)
    own = name in vars(owner)
    calls, failed = itertools.count(1), []

    def called(*args: Any, **options: Any) -> Any:
        number = next(calls)
        if number == every if once else number % every == 0:
            failed.append(number)
            raise kind(f"{name} was told to fail at call {number}")
        return original(*args, **options)

    setattr(owner, name, called)
    try:
        yield failed
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
