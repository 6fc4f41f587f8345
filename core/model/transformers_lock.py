"""Locks around transformers, which is not written for several threads.

It replaces itself and its packages in sys.modules when their import ends, and its modules import each other in circles.
A thread that imports a name while another thread imports the package gets an ImportError. While it builds a model,
torch's default dtype and initialisers are changed for all threads: two models at once get each other's dtype.

Code that has a model of transformers in hand may import from it without a lock.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_importing = threading.RLock()
_building = threading.RLock()
"""Held for the time in which weights are read; taken before `_importing`, never the other way round."""


@contextmanager
def importing_transformers() -> Iterator[None]:
    """Let one thread at a time import from transformers, read configurations and load tokenizers.

    Waits for an import of the package that another thread has begun without the lock.
    """
    with _importing:
        importlib.import_module("transformers")
        yield


@contextmanager
def building_model() -> Iterator[None]:
    """Let one thread at a time build a model of transformers. The names that it imports are imported before."""
    with _building:
        yield
