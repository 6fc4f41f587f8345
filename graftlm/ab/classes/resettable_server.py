"""The servers of transformers and llama-cpp-python with one request more, which empties their prefix cache.

They end with the process that started them, also where that one is killed.

python -m graftlm.ab.classes.resettable_server transformers MODEL --continuous-batching --port 8000
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from functools import wraps
from typing import Any

from graftlm.ab.prefix_caches import forget

RESET = "/reset_prefix_cache"
_SERVERS = {
    "transformers": ("transformers.cli.serving.server", "build_server", "transformers.cli.transformers", ["serve"]),
    "llama_cpp": ("llama_cpp.server.app", "create_app", "llama_cpp.server.__main__", []),
}
"""Per server: the function that builds its FastAPI application, and its command line with the first arguments."""


def main(arguments: Sequence[str]) -> None:
    """Run a server's own command line."""
    name, *rest = arguments
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    module, function, command, first = _SERVERS[name]
    _add_reset(importlib.import_module(module), function)
    sys.argv[1:] = [*first, *rest, *(_cpu_sizes() if name == "transformers" else [])]
    importlib.import_module(command).main()


def end_with(parent: int) -> None:
    """End this process as soon as process `parent` is no longer its parent."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _cpu_sizes() -> list[str]:
    """The sizes that continuous batching has in this process too: on a CPU it takes all free memory by itself.

    A first chat then waits until that is written, and two such servers end each other.
    """
    import torch

    from graftlm.ab.classes.batching_engine import BATCH_TOKENS, NUM_BLOCKS

    if torch.cuda.is_available():
        return []
    return ["--cb-num-blocks", str(NUM_BLOCKS), "--cb-max-batch-tokens", str(BATCH_TOKENS)]


def _add_reset(module: Any, function: str) -> None:
    build = getattr(module, function)

    @wraps(build)
    def built(*args: Any, **options: Any) -> Any:
        app = build(*args, **options)
        app.post(RESET)(_reset)
        return app

    setattr(module, function, built)


def _reset() -> dict[str, int]:
    return {"caches": forget()}


if __name__ == "__main__":
    main(sys.argv[1:])
