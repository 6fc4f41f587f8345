"""Peak memory of a process that serves a model, against weights plus the configured pool."""

from __future__ import annotations

import json
from collections.abc import Sequence

from bench.harness import ROOT, Options, Row
from graftlm.kernels.jit import python_process

SERVE = """
import gc, json, sys
import psutil, torch, transformers
from bench.models import GREEDY, SHAPES, random_ids, random_model
from graftlm import CacheConfig, Runtime
from tests.models import byte_tokenizer, tiny_model

size, pool = sys.argv[1], int(sys.argv[2])
process = psutil.Process()
# heads as the measured models have them: what compiling the kernels takes, once in a checkout, is no part of this
warm = Runtime(tiny_model(head_dim=64, max_position_embeddings=4096), tokenizer=byte_tokenizer())
warm.generate([random_ids(300, 1)], max_tokens=4, **GREEDY)
warm.close()
before = process.memory_info().rss
model = random_model(size)
gc.collect()
weights = sum(p.numel() * p.element_size() for p in model.parameters())
c = model.config
per_token = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * 4
with Runtime(model, tokenizer=byte_tokenizer(), cache=CacheConfig(max_tokens=pool), max_step_tokens=512) as runtime:
    runtime.generate([random_ids(200, seed=i) for i in range(pool // 200)], max_tokens=8, **GREEDY)
    runtime.reset_stats()  # waits until the engine rests
    used = process.memory_info().rss - before
print(json.dumps({"weights": weights, "pool": pool * per_token, "used": used}))
"""


def run(options: Options) -> Sequence[Row]:
    rows = []
    for size, pool in options.choose((("30M", 2048),), (("30M", 4096), ("450M", 4096))):
        command = ["-c", SERVE, size, str(pool)]
        out = python_process.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        found = json.loads(out.splitlines()[-1])
        allowed = found["weights"] + found["pool"]
        rows.append(
            Row(
                "memory",
                f"resident after filling a pool of {pool:,} tokens, {size} float32",
                found["used"] / 2**20,
                "MiB",
                baseline=allowed / 2**20,
                ratio=found["used"] / allowed,
                floor=1.10,
                at_most=True,
            )
        )
    return rows
