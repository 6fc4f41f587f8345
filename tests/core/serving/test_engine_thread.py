from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
from graftlm.core.runtime import Runtime
from tests.models import byte_tokenizer, tiny_model

for _ in range(2):  # one runtime that was used, one that is still at it
    runtime = Runtime(tiny_model(), tokenizer=byte_tokenizer(), dtype="float32")
    runtime.generate("a", max_tokens=2)
from graftlm.core.request import Request

future = runtime.submit(Request("b"))
print("done")
"""


def test_a_process_that_closes_no_runtime_used_to_abort_at_its_end() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
