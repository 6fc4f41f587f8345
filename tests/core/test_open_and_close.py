"""Opening and closing runtimes, again and again in one process, leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CYCLES = """
import gc, json, os, threading
import graftlm as gl
from tests.models import byte_tokenizer, tiny_model

def left(num_cycles):
    for _ in range(num_cycles):
        with gl.Runtime(tiny_model(), tokenizer=byte_tokenizer(), dtype="float32") as runtime:
            runtime.generate("hello", max_tokens=4, regex="[0-9]{3}")
            for _ in runtime.stream("hello", max_tokens=4):
                pass
    for thread in threading.enumerate():
        if thread.name == "graftlm grammar":  # compiles loops, once a process
            thread.join()
    gc.collect()
    return len(gc.get_objects()), threading.active_count(), len(os.listdir("/proc/self/fd"))

print(json.dumps([left(10), left(10)]))
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
def test_no_object_thread_or_descriptor_stays_of_a_closed_runtime() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", CYCLES], cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (objects, *before), (objects_after, *after) = json.loads(done.stdout.splitlines()[-1])
    assert after == before
    assert objects_after - objects < 10  # of 10 cycles
