"""The process of a follower: loads its shard, then runs the steps that rank 0 sends.

It has no scheduler, no cache, no tokenizer and no sampler, and ends with rank 0: when its standard input ends, or its
parent is another process.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from graftlm.core.tensor_parallel.crew import Job
    from graftlm.core.tensor_parallel.plan_ring import PlanRing
    from graftlm.core.tensor_parallel.ranks import Meeting

BEAT_S = 0.25
"""Seconds between two beats."""


class Line:
    """The connection to rank 0."""

    def __init__(self, incoming: BinaryIO, outgoing: BinaryIO) -> None:
        self._incoming, self._outgoing = incoming, outgoing

    def say(self, kind: str, value: Any = None) -> None:
        pickle.dump((kind, value), self._outgoing)
        self._outgoing.flush()

    def hear(self) -> Any:
        """Return the next message; end this process if rank 0 has ended."""
        try:
            return pickle.load(self._incoming)
        except (EOFError, OSError, pickle.UnpicklingError):
            os._exit(0)

    def end_with_it(self) -> None:
        """End this process when rank 0 closes the line or ends."""
        self._incoming.read(1)
        os._exit(0)


def follow(job: Job, line: Line) -> None:
    """Load the shard and run steps for ever. An exception ends the process, which rank 0 is told of."""
    import torch

    from graftlm.core.engine_builder import build_runner
    from graftlm.core.model.weights import choose_device
    from graftlm.core.tensor_parallel.plan_ring import PlanRing
    from graftlm.core.tensor_parallel.ranks import Ranks, loading_for
    from graftlm.kernels.cpu.cores import fit_threads
    from graftlm.plugins import manager

    ring = PlanRing(job.ring, job.rank, job.size, spin=job.spin_s)
    threading.Thread(target=_beat, args=(ring, os.getppid()), daemon=True).start()
    device = choose_device(job.config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels are launched on the current one
    ranks = Ranks(job.rank, job.size, device, f"/proc/self/fd/{job.store}", ring)

    def meet(mine: Meeting) -> Meeting:
        line.say("facts", mine)
        common: Meeting = line.hear()
        threading.Thread(target=line.end_with_it, daemon=True).start()
        return common

    ranks.meet = meet
    registry = manager.load()
    fit_threads(job.size)
    with loading_for(ranks):
        loaded = registry.models[job.config.loader](job.model, job.config, None)
        spec = build_runner(loaded, job.config, registry.attention)
    line.say("ready")
    while True:
        spec.runner.forward(ring.read())
        ring.done()


def _beat(ring: PlanRing, parent: int) -> None:
    while os.getppid() == parent:
        ring.beat()
        time.sleep(BEAT_S)
    os._exit(0)


def main() -> None:
    from graftlm.core.errors import GraftError

    outgoing = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no message
    line = Line(sys.stdin.buffer, outgoing)
    warnings.simplefilter("ignore")  # rank 0 gives the same ones
    logging.disable(logging.WARNING)
    job: Job = line.hear()
    try:
        follow(job, line)
    except GraftError as error:
        line.say("refused", error)
        line.say("error", str(error))
    except BaseException as error:
        line.say("error", f"{type(error).__name__}: {str(error)[:500]}")
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
