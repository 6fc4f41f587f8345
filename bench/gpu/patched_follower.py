"""A follower whose process is patched before it starts: `python -m bench.gpu.patched_follower`, as `crew` starts it.

The names of the patches are in an environment variable, so that rank 0 and its followers apply the same ones.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NAMES = "GRAFTLM_BENCH_PATCHES"
"""Names of patches, and of the folder for their files."""
EVERY = 250
"""Steps between two lines of the digest."""


def digest(folder: Path) -> None:
    """Fold the results of all sums over ranks, the residuals after them included, into one number.

    Each rank writes `number of steps, digest` to a file of its own after every `EVERY` steps. The numbers are computed
    on the device, inside CUDA graphs too.
    """
    import torch

    from graftlm.core import engine_builder
    from graftlm.core.tensor_parallel.ranks import Ranks

    found: list[Any] = []

    def fold(numbers: Any) -> None:
        if not found:
            found.append(torch.zeros((), dtype=torch.int64, device=numbers.device))
        bits = (
            numbers if not numbers.is_floating_point() else numbers.view(getattr(torch, f"int{8 * numbers.itemsize}"))
        )
        found[0].mul_(31).add_(bits.sum(dtype=torch.int64))

    sum_parts, add_norm = Ranks.sum_parts, Ranks.add_norm

    def folded_sum(self: Any, parts: Any, dtype: Any) -> Any:
        total = sum_parts(self, parts, dtype)
        if self.live:
            fold(total)
        return total

    def folded_norm(self: Any, parts: Any, residual: Any, norm: Any) -> Any:
        normed = add_norm(self, parts, residual, norm)
        if normed is not None:
            fold(residual)
        return normed

    Ranks.sum_parts, Ranks.add_norm = folded_sum, folded_norm  # type: ignore[method-assign]
    build = engine_builder.build_runner

    def built(*arguments: Any, **options: Any) -> Any:
        from graftlm.core.tensor_parallel.ranks import ranks_at_hand

        spec = build(*arguments, **options)
        ranks, forward, steps = ranks_at_hand(), spec.runner.forward, 0
        assert ranks is not None
        file = (folder / f"rank-{ranks.rank}").open("w", buffering=1)

        def counted(plan: Any) -> Any:
            nonlocal steps
            logits = forward(plan)
            steps += 1
            if steps % EVERY == 0:
                print(steps, int(found[0]), file=file)
            return logits

        spec.runner.forward = counted
        return spec

    engine_builder.build_runner = built


def equal_layers(folder: Path) -> None:
    """Read the tensors of layer 0 for every layer of a model, so that a large one needs few files."""
    from graftlm.core.tensor_parallel import shards

    pieces = shards._pieces

    def repeated(source: Path, part: Any, dtype: Any) -> Iterator[tuple[str, Any]]:
        for name, tensor in pieces(source, part, dtype):
            if "layers.0." not in name:
                yield name, tensor
                continue
            for number in range(part.hf_config.num_hidden_layers):
                yield name.replace("layers.0.", f"layers.{number}."), tensor

    shards._pieces = repeated


def stacks(folder: Path) -> None:
    """Print what all threads of a process do, every 40 seconds: a rank that hangs shows where."""
    faulthandler.dump_traceback_later(40, repeat=True)


PATCHES: dict[str, Callable[[Path], None]] = {"digest": digest, "equal_layers": equal_layers, "stacks": stacks}


def apply(names: list[str], folder: Path) -> None:
    """Apply patches in this process, and in the followers that it starts."""
    from graftlm.core.tensor_parallel import crew
    from graftlm.kernels.jit import python_process

    os.environ[NAMES] = os.pathsep.join([*names, str(folder)])

    def start(arguments: Any, **options: Any) -> Any:
        return python_process.start(("-m", "bench.gpu.patched_follower"), **options)

    crew.python_process = SimpleNamespace(start=start)  # type: ignore[assignment]
    for name in names:
        PATCHES[name](folder)


def main() -> None:
    from graftlm.core.tensor_parallel import follower

    *names, folder = os.environ[NAMES].split(os.pathsep)
    for name in names:
        PATCHES[name](Path(folder))
    follower.main()


if __name__ == "__main__":
    sys.exit(main())
