"""The exit of an interpreter whose threads are at work: the status and the hooks it ends with."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=600)


TEXT_RUN_AT_EXIT = "import atexit; from graftlm.core import interpreter_exit as ends\n"


@pytest.mark.parametrize(
    ("kept", "ended", "status"),
    [
        (False, "raise KeyboardInterrupt", 1),  # what Python itself does
        (True, "raise KeyboardInterrupt", -signal.SIGINT),
        (True, "raise ValueError", 1),
        (True, "pass", 0),
        (True, "import sys; sys.exit(3)", 3),
        (True, "try: raise KeyboardInterrupt\nexcept KeyboardInterrupt: pass", 0),
    ],
)
def test_text_that_a_thread_runs_at_exit_used_to_change_the_status_of_an_interrupted_script(
    kept: bool, ended: str, status: int
) -> None:
    script = TEXT_RUN_AT_EXIT
    if kept:
        script += "atexit.register(ends.keep_interrupt)\n"
    done = run(script + "atexit.register(lambda: exec('pass'))\n" + ended)
    assert done.returncode == status
    assert done.stderr.count("Traceback") == (1 if "raise" in ended and status else 0)


LLVM_IMPORTED_AT_EXIT = """
import atexit, sys
from graftlm.core import interpreter_exit as ends
atexit.register(lambda: print(sys.modules["llvmlite.binding.common"]._shutting_down))
atexit.register(ends.end_llvm)
atexit.register(lambda: __import__("llvmlite.binding"))
"""


def test_llvm_that_is_imported_at_exit_hears_of_it() -> None:
    assert run(LLVM_IMPORTED_AT_EXIT).stdout.split() == ["[True]"]


EXIT_WHILE_A_MODEL_LOADS = """
import threading, time
from graftlm.core.serving.engine_thread import EngineThread

begun = threading.Event()

def build(wake):
    begun.set()
    try:
        while True:
            try:
                time.sleep(0.001)
            except ValueError:
                pass
    finally:
        print("ended", flush=True)

engine = EngineThread("model", build)
engine.start()
begun.wait()
"""


def test_a_model_load_used_to_run_into_the_end_of_the_interpreter_and_abort_it() -> None:
    done = run(EXIT_WHILE_A_MODEL_LOADS)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["ended"], "")


DROPPED = """
import threading, time, weakref
from graftlm.core import interpreter_exit as ends

class Known:
    pass

def drop(_):
    begun.set()
    try:
        while True:
            time.sleep(0.001)
    finally:
        print("dropped", flush=True)

def work():
    known = Known()
    reference = weakref.ref(known, drop)
    del known
    while True:
        time.sleep(0.001)

begun = threading.Event()
thread = threading.Thread(target=work, daemon=True)
thread.start()
begun.wait()
ends.end_thread(thread, 100)
print(thread.is_alive())
"""


def test_an_interrupt_that_meets_a_weak_reference_used_to_be_reported_and_dropped() -> None:
    done = run(DROPPED)
    assert (done.stdout.split(), done.stderr) == (["dropped", "False"], "")
