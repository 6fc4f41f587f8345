"""The first answer of a script's second start, whose few-shot prompt of `sprout` the first start has computed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence

from bench.harness import Options, Row
from graftlm.kernels.jit import python_process

SCRIPT = """
import json, sys, time
import graftlm as gl

shots = "".join(
    f"Question {i}: what is {i} plus {3 * i}? Answer: {4 * i}. Mara the baker sells {i} loaves.\\n" for i in range(73)
)
folder = sys.argv[1] or None
with gl.Runtime("sprout", quiet=True, cache=gl.CacheConfig(folder=folder)) as runtime:
    runtime.load()
    runtime.generate("Mara is a", max_tokens=1, temperature=0)
    began, began_s = time.process_time(), time.perf_counter()
    done = runtime.generate(shots + "Question: what is 2 plus 2? Answer:", max_tokens=1, temperature=0)
    took = time.process_time() - began, time.perf_counter() - began_s
    print(json.dumps([*took, done.usage.prompt_tokens, done.usage.cached_tokens, done.token_ids]))
"""


def run(options: Options) -> Sequence[Row]:
    def start(folder: str) -> tuple[float, float, int, int, list[int]]:
        ran = python_process.run(["-c", SCRIPT, folder], capture_output=True, text=True, check=True)
        cpu_s, wall_s, num_prompt, num_cached, ids = json.loads(ran.stdout.splitlines()[-1])
        return cpu_s, wall_s, num_prompt, num_cached, ids

    with tempfile.TemporaryDirectory(prefix="graftlm-kv-") as folder:
        first, second, without = start(folder), start(folder), start("")
    what = f"{second[2]:,} prompt tokens, {second[3]:,} of them from files: the first answer, baseline no folder"
    return [
        Row("second_process", what, 1000 * second[0], "ms of CPU", 1000 * without[0], without[0] / second[0], 5.0),
        Row(
            "second_process", "the same by the clock", 1000 * second[1], "ms", 1000 * without[1], without[1] / second[1]
        ),
        Row(
            "second_process",
            "the first start, which writes",
            1000 * first[0],
            "ms of CPU",
            1000 * without[0],
            first[0] / without[0],
        ),
        Row("second_process", "answers equal", float(first[4] == second[4] == without[4]), "of 1", floor=1),
    ]
