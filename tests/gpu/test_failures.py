"""A kernel that fails takes the device with it: its requests get the cause, the runtime is closed, and nothing hangs.

Each in a process of its own, since the process can use its GPU no more afterwards.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120

SCRIPT = """
import os, sys, torch
from graftlm.core.config import SamplingParams
from graftlm.core.errors import EngineError
from graftlm.core.request import Request
from tests.gpu.device import GREEDY, on_gpu, replace_forward
from tests.models import random_prompt

def break_the_device(runner, plan):
    if armed and plan.is_decode == (when == "decode"):
        torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]
    return type(runner).forward(runner, plan)

when, armed = sys.argv[1], False
runtime = on_gpu()
replace_forward(runtime, break_the_device)
assert runtime.generate("before", **GREEDY).finish_reason == "length"
armed = True
params = SamplingParams(**GREEDY)
futures = runtime.submit_many([Request(random_prompt(20, seed=i), params) for i in range(20)])
for future in futures:
    error = future.exception(timeout=60)
    assert isinstance(error, EngineError), error
    print("request:", error)
try:
    runtime.generate("after", **GREEDY)
except EngineError as error:
    print("after:", error)
print("closed:", runtime.closed)
runtime.close()
sys.stdout.flush()
os._exit(0)  # torch's own tidying up at the end of a process meets the same error and aborts
"""


@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_a_cuda_error_in_a_step_fails_all_requests_with_the_cause_and_closes_the_runtime(when: str) -> None:
    command = [sys.executable, "-c", SCRIPT, when]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    said = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    requests = [line for line in said if line.startswith("request:")]
    assert len(requests) == 20
    assert all("device-side assert" in line for line in requests)
    assert "closed: True" in said
    (after,) = [line for line in said if line.startswith("after:")]
    assert "the device cannot be used any more" in after and "start a new process" in after
