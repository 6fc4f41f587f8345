"""What a process does around a runtime: signals, forks, workers, an end with work in flight. Nothing may hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import graftlm as gl
from tests.models import byte_tokenizer, tiny_model

ROOT = Path(__file__).parents[2]
LIMIT_S = 240
"""How long a script may take before it counts as hung: many times what it takes on a busy machine."""

PRELUDE = """
import os, signal, sys, threading
import torch
import graftlm as gl

PROMPT = list(range(97, 117))
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell lets background jobs ignore


def new_runtime():
    return gl.Runtime(os.environ["MODEL"], dtype="float32", max_model_len=512)


def answer(runtime):
    return runtime.generate(PROMPT, max_tokens=6, temperature=0, ignore_eos=True).token_ids


def endless(runtime, count=8):
    params = gl.SamplingParams(max_tokens=None, ignore_eos=True, temperature=0)
    return runtime.submit_many([gl.Request([*PROMPT, i], params) for i in range(count)])
"""


INTERRUPTED = (-signal.SIGINT, 130, 1)
"""What it may end with: 1 where a thread runs `exec` at that moment, as imports do, for CPython then forgets why."""


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A model that was loaded once: processes that load it again do not import transformers for seconds."""
    folder = str(tmp_path_factory.mktemp("model"))
    tiny_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    gl.Runtime(folder, dtype="float32", max_model_len=512).load().close()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MODEL", folder)
        yield


def start(script: str) -> subprocess.Popen[str]:
    """A script in a session of its own, so that a signal reaches it alone."""
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, list[str], str]:
    """-> exit status, lines of stdout, stderr"""
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"the script hung; it had written\n{out}\n{err}")
    return process.returncode, out.splitlines(), err


def run(script: str) -> list[str]:
    status, lines, err = finish(start(script))
    assert status == 0, err
    assert "Traceback" not in err, err
    return lines


def signalled(script: str, number: int) -> tuple[int, str]:
    """Send a signal while the script, which has written "ready", is at work. -> exit status, stderr"""
    process = start(script)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)  # into the call that follows; earlier or later must not matter
    for _ in range(3):  # Python drops the interrupt where it meets a weak reference's callback
        process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=60)  # long: a second one while a busy machine ends the first would show two tracebacks
            break
    status, _, err = finish(process)
    return status, err


def test_an_interpreter_ends_with_work_in_flight() -> None:
    assert run("runtime = new_runtime().load(); endless(runtime); print('left')") == ["left"]


def test_an_interpreter_ends_while_a_model_is_loading() -> None:
    assert run("runtime = new_runtime(); endless(runtime); print('left')") == ["left"]


def test_control_c_in_a_batch_raises_keyboard_interrupt_and_frees_its_requests() -> None:
    status, err = signalled(
        """
        runtime = new_runtime().load()
        expected = answer(runtime)
        print("ready", flush=True)
        try:
            while True:
                runtime.generate([PROMPT] * 8, max_tokens=400, ignore_eos=True)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            assert answer(runtime) == expected
            runtime.close()
        """,
        signal.SIGINT,
    )
    assert (status, err) == (0, "")


def test_control_c_that_nobody_catches_shows_one_traceback() -> None:
    status, err = signalled(
        """
        runtime = new_runtime().load()
        print("ready", flush=True)
        while True:
            runtime.generate([PROMPT] * 8, max_tokens=400, ignore_eos=True)
        """,
        signal.SIGINT,
    )
    assert status in INTERRUPTED, err
    assert err.count("Traceback") == 1 and err.rstrip().endswith("KeyboardInterrupt")


def test_a_terminated_script_is_gone() -> None:
    status, err = signalled(
        """
        runtime = new_runtime().load()
        print("ready", flush=True)
        while True:
            runtime.generate([PROMPT] * 8, max_tokens=400, ignore_eos=True)
        """,
        signal.SIGTERM,
    )
    assert (status, err) == (-signal.SIGTERM, "")


def test_sys_exit_in_a_handler_of_sigterm_ends_the_runtime_in_order() -> None:
    status, err = signalled(
        """
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        with new_runtime().load() as runtime:
            print("ready", flush=True)
            while True:
                runtime.generate([PROMPT] * 8, max_tokens=400, ignore_eos=True)
        """,
        signal.SIGTERM,
    )
    assert (status, err) == (3, "")


FORKED = """
def child_answers():
    '''Fork; the child makes a runtime of its own and says what it answers. -> what the child wrote'''
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        runtime = new_runtime()
        schema = runtime.generate(PROMPT, max_tokens=40, choices=["yes", "no"]).text
        os.write(writer, repr((answer(runtime), schema in ("yes", "no"))).encode())
        runtime.close()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    return text
"""


def test_a_child_forked_before_the_load_answers_as_its_parent_does() -> None:
    script = "print(child_answers() == repr((answer(new_runtime()), True)))"
    assert run(FORKED + script) == ["True"]


def test_a_child_forked_after_the_load_answers_as_its_parent_does_and_leaves_it_unhurt() -> None:
    script = """
runtime = new_runtime()
expected = answer(runtime)
runtime.generate(PROMPT, choices=["yes", "no"])  # compiles a constraint, so that its threads exist
print(child_answers() == repr((expected, True)), answer(runtime) == expected)
"""
    assert run(FORKED + script) == ["True True"]


def test_a_child_forked_while_its_parent_computes_answers() -> None:
    script = """
runtime = new_runtime()
expected = answer(runtime)
futures = endless(runtime)
print(child_answers() == repr((expected, True)), [len(f.result().token_ids) for f in futures] == [491] * 8)
"""
    assert run(FORKED + script) == ["True True"]


def test_a_fork_waits_for_what_a_load_prepares_beside_it() -> None:
    script = """
import time
from graftlm.core import constraint

begun, prepared = threading.Event(), threading.Event()

def slow(tokenizer):
    begun.set()
    time.sleep(1)
    prepared.set()

constraint.vocabulary_of = slow
constraint.prepare_constraints(None)
assert begun.wait(60)
pid = os.fork()
if pid == 0:
    os._exit(0 if prepared.is_set() else 1)
print(os.waitpid(pid, 0)[1])
"""
    assert run(script) == ["0"]


def test_workers_that_are_spawned_have_one_runtime_each(tmp_path: Path) -> None:
    script = tmp_path / "workers.py"
    script.write_text(
        PRELUDE
        + textwrap.dedent(
            """
            from torch.utils.data import DataLoader, Dataset

            class Answers(Dataset):
                runtime = None

                def __len__(self):
                    return 4

                def __getitem__(self, index):
                    if Answers.runtime is None:
                        Answers.runtime = new_runtime()
                    return answer(Answers.runtime)

            if __name__ == "__main__":
                loader = DataLoader(Answers(), num_workers=2, multiprocessing_context="spawn", batch_size=None)
                found = list(loader)
                print(all(ids == answer(new_runtime()) for ids in found), len(found))
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stdout) == (0, "True 4\n"), done.stderr
    assert "Traceback" not in done.stderr, done.stderr


def test_two_runtimes_compute_side_by_side() -> None:
    script = """
first, second = new_runtime(), new_runtime()
expected = answer(first)
found = {}
def work(name, runtime):
    found[name] = [answer(runtime) for _ in range(10)]
threads = [threading.Thread(target=work, args=item) for item in (("first", first), ("second", second))]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(found == {"first": [expected] * 10, "second": [expected] * 10})
"""
    assert run(script) == ["True"]


def test_a_cell_that_is_run_again_makes_no_second_engine_thread() -> None:
    script = """
import gc
from graftlm.testing import byte_tokenizer, random_model
for _ in range(3):  # the name is bound anew, as in a notebook
    runtime = gl.Runtime(random_model(), tokenizer=byte_tokenizer(), dtype="float32", max_model_len=512)
    answer(runtime)
    gc.collect()
names = [thread.name for thread in threading.enumerate() if thread.name.startswith("graftlm ")]
import time
limit = time.monotonic() + 120
while len(names) > 1 and time.monotonic() < limit:  # a thread ends after its step
    time.sleep(0.01)
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("graftlm ")]
print(names)
"""
    assert run(script) == ["['graftlm LlamaForCausalLM']"]


PROGRAMS = """
@gl.program
def long(s, i):
    s += f"item {i}" + gl.gen("a", max_tokens=400, ignore_eos=True)
    s["a"]
    at_work.set()
    never.wait()  # code of the program's own

at_work, never = threading.Event(), threading.Event()
"""


def test_control_c_in_a_batch_of_programs_used_to_wait_for_the_programs_own_code() -> None:
    status, err = signalled(
        PROGRAMS
        + """
with new_runtime().load() as runtime:
    threading.Thread(target=lambda: (at_work.wait(), print("ready", flush=True))).start()
    long.batch([{"i": i} for i in range(8)], runtime=runtime)
""",
        signal.SIGINT,
    )
    assert status in INTERRUPTED, err
    assert err.count("Traceback") == 1 and err.rstrip().endswith("KeyboardInterrupt")


def test_control_c_while_programs_are_started_used_to_leave_those_that_were_waiting_for_ever() -> None:
    script = """
from graftlm.core.program import batch

started = []
start = threading.Thread.start

def interrupted(thread):
    start(thread)
    if thread.name.startswith("graftlm batch"):
        started.append(thread)
        if len(started) == 3:
            at_gate.acquire(); at_gate.acquire(); at_gate.acquire()
            raise KeyboardInterrupt

at_gate, hold = threading.Semaphore(0), batch.BatchGate.hold
batch.BatchGate.hold = lambda *given: (hold(*given), at_gate.release())[0]
threading.Thread.start = interrupted
runtime = new_runtime().load()
try:
    long.batch([{"i": i} for i in range(8)], runtime=runtime)
except KeyboardInterrupt:
    for thread in started:
        thread.join(60)
    print(len(started), [thread.is_alive() for thread in started])
"""
    assert run(PROGRAMS + script) == ["3 [False, False, False]"]


def test_an_interpreter_ends_with_programs_in_flight() -> None:
    script = """
runtime = new_runtime().load()
states = [long.run(i=i, runtime=runtime) for i in range(4)]
items = [{"i": i} for i in range(4)]
threading.Thread(target=lambda: long.batch(items, runtime=runtime), daemon=True).start()
at_work.wait()
print("left")
"""
    assert run(PROGRAMS + script) == ["left"]


def test_two_runtimes_in_two_processes_answer_alike_side_by_side() -> None:
    script = """
runtime = new_runtime().load()
print("ready", flush=True)
sys.stdin.readline()
print([answer(runtime) for _ in range(10)])
"""
    both = [start(script), start(script)]
    for process in both:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in both:
        assert process.stdin is not None
        print(file=process.stdin, flush=True)
    (first, second) = (finish(process) for process in both)
    assert first == second and first[0] == 0
    assert first[2] == ""


XDIST = """
import os

import graftlm as gl
import pytest


@pytest.fixture(scope="session")
def runtime():
    with gl.Runtime(os.environ["MODEL"], dtype="float32") as made:
        yield made


@pytest.mark.parametrize("i", range(6))
def test_answers(runtime, i):
    ids = runtime.generate([97, 98, i + 3], max_tokens=6, temperature=0, ignore_eos=True).token_ids
    print(f"answer {i}: {ids}")
    assert len(ids) == 6
"""


def test_workers_of_pytest_xdist_have_one_runtime_each(tmp_path: Path) -> None:
    (tmp_path / "test_answers.py").write_text(XDIST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error::ResourceWarning\n")
    outputs = []
    for workers in ("2", "0"):
        plugins = ["-p", "xdist", "-p", "graftlm.pytest_plugin", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *plugins, "-n", workers, "-rP"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # those of others take seconds in each process
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**environment, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0 and "6 passed" in done.stdout, done.stdout + done.stderr
        outputs.append(sorted(line for line in done.stdout.splitlines() if line.startswith("answer ")))
    assert outputs[0] == outputs[1] and len(outputs[0]) == 6
