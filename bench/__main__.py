"""python -m bench GROUP [case ...]: the measurements of one group, each with its baseline in the same run."""

from __future__ import annotations

import importlib
import sys

from bench import harness

GROUPS = {
    "runtime": "the engine: equality, reuse, decode speed, scheduling, memory",
    "start": "process start to answers: on a fresh machine and later, beside the imports of torch and transformers",
    "cpu": "any CPU beside llama.cpp and OpenVINO: decode, prefill, shared prefixes, guesses, memory",
    "frameworks": "calls, batches and tokens behind LangChain, DSPy, LlamaIndex and Guidance",
    "workloads": "twelve workloads in each framework, beside transformers, its continuous batching and Guidance",
    "ablation": "what each part of the runtime brings to the workloads, by leaving it out",
    "page": "docs/benchmarks.md and bench/notes/workloads.md, their tables written from the committed figures",
    "compiler": "planned programs, reordered prompts: computed tokens, hit rates, beside the same programs without",
    "semantic": "the semantic cache: hits on paraphrases, wrong hits on near-misses",
    "remote": "models behind an API: calls saved by speculation, overhead of a call",
    "tiers": "cache tiers: chats larger than the pool, waiting agents, a second process, the cost of no reuse",
    "hostile": "attacks on the HTTP server: the p50 of a steady client beside them, the server's memory",
    "faults": "one call of the system that fails, at every n-th: requests that hang or get wrong answers after it",
    "fuzz": "coverage-guided fuzzing of schemas, patterns, grammars, bodies, streams and files: [TARGET] [--seconds N]",
    "serve": "the HTTP server beside the runtime in process, CPU time of a chunk, replicas on Ray",
    "grammar": "constraints: masks, jump-forward, schemas",
    "sprout": "the embedded model: right answers by task",
    "images": "pictures and videos in every family of vision models, beside transformers",
    "gpu": "one GPU beside vLLM, SGLang and plain transformers: decode, reuse, chats, JSON, prefill",
}
OWN_MAIN = {
    "fuzz": "bench.fuzz.main",
    "page": "bench.page",
    "ablation": "bench.ablation",
    "workloads": "bench.workloads._suite",
    "sprout": "bench.sprout.evaluate",
    "gpu": "bench.gpu.compare",
    "images": "bench.pictures.families",
}
"""Groups with a command of their own in place of a table of cases."""


def main() -> int:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] not in GROUPS:
        if arguments and arguments[0] not in ("-h", "--help"):
            print(f"python -m bench: no group {arguments[0]!r}; the groups are below\n", file=sys.stderr)
        print("usage: python -m bench GROUP [case ...] [--quick] [--json FILE]", file=sys.stderr)
        print("       python -m bench runtime soak [--seconds N]", file=sys.stderr)
        print("       python -m bench gpu families [--real] [NAME ...]\n", file=sys.stderr)
        for name, what in GROUPS.items():
            print(f"  {name:12}{what}", file=sys.stderr)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    group, rest = arguments[0], arguments[1:]
    if arguments[:2] == ["runtime", "soak"]:
        return int(importlib.import_module("bench.soak").main(rest[1:]))
    if arguments[:2] == ["gpu", "families"]:
        return int(importlib.import_module("bench.gpu.families").main(rest[1:]))
    if group in OWN_MAIN:
        return int(importlib.import_module(OWN_MAIN[group]).main(rest) or 0)
    return harness.main(group, rest)


if __name__ == "__main__":
    raise SystemExit(main())
