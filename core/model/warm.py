"""`graftlm warm`: fill a machine's caches, so that later processes start without compilation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graftlm.core.errors import ConfigError
from graftlm.kernels import disk_cache


def warm_model(model: str, **options: Any) -> Path:
    """Load `model`, run it free and constrained, and wait until all compiled code is on disk. -> the cache folder

    options  as for Runtime. Raises ConfigError if there is no cache folder, and the errors of loading.
    """
    from graftlm.core.grammar.automata import jit
    from graftlm.core.runtime import Runtime
    from graftlm.kernels.cpu.compiled import loop_cache

    folder = disk_cache.private_folder()
    if folder is None:
        raise ConfigError(
            "nothing can be kept on this machine: GRAFTLM_CACHE_DIR, or ~/.cache/graftlm, must be a folder with an "
            "absolute path that this user, and nobody else, can write"
        )
    with Runtime(model, **options) as runtime:
        runtime.load()
        runtime.generate("a", max_tokens=2)
        runtime.generate("a", max_tokens=2, regex="[a-z]+", close_on_length=False)
    jit.wait()
    while loop_cache.compiling():  # each wait has a limit of time, which a busy machine may exceed
        loop_cache.wait_for(lambda: None)
    return folder
