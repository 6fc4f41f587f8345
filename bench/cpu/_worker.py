"""One engine in a process of its own: JSON lines in, JSON lines out. Run by `_engines.py`.

A line {"prompts", "num_new", "shared", "speculation", "schema"} is answered by {"seconds", "ids", "peak_mib"}: greedy
tokens of all prompts, computed together from an empty cache. The first `shared` tokens of all prompts are equal. With a
JSON schema answers keep to it, and end with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Ids = list[list[int]]
Generate = Callable[[Ids, int, int, str, Any], Ids]

JSON_LIMIT_S = 120.0
"""Seconds after which llama.cpp's answers with a schema are cut: its grammars count characters at every token."""


def graftlm(model: str, precision: str, threads: int, activations: Any) -> Generate:
    import torch

    import graftlm as gl

    torch.set_num_threads(threads)
    runtimes: dict[str, Any] = {}

    def generate(prompts: Ids, num_new: int, shared: int, speculation: str, schema: Any) -> Ids:
        if speculation not in runtimes:
            for loaded in runtimes.values():
                loaded.close()
            runtimes.clear()
            runtimes[speculation] = gl.Runtime(
                model,
                device="cpu",
                dtype=precision,
                activations=activations,
                speculation=speculation,
                quiet=True,
            )
        runtime = runtimes[speculation]
        runtime.clear_cache()
        how: Any = {"ignore_eos": True} if schema is None else {"json_schema": schema}
        answers = runtime.generate(prompts, max_tokens=num_new, temperature=0.0, **how)
        return [list(answer.token_ids) for answer in answers]

    return generate


def llama_cpp(model: str, precision: str, threads: int) -> Generate:
    """llama.cpp's own batches: a sequence for each prompt, a shared prefix once, as an expert would write it."""
    import llama_cpp as ll
    import numpy as np

    ll.llama_backend_init()
    ll.llama_log_set(_keep(ll.llama_log_callback(lambda level, text, data: None)), None)
    loaded = ll.llama_model_load_from_file(model.encode(), _without_gpu(ll))
    vocabulary = ll.llama_model_get_vocab(loaded)
    vocab_size = ll.llama_vocab_n_tokens(vocabulary)
    batch = ll.llama_batch_init(2048, 0, 1)
    held: dict[tuple[int, int, bool], Any] = {}

    def context(num: int, length: int, unified: bool) -> Any:
        key = num, length, unified
        if key not in held:
            for old in held.values():
                ll.llama_free(old)
            held.clear()
            asked = ll.llama_context_default_params()
            asked.n_ctx, asked.n_batch, asked.n_ubatch, asked.n_seq_max = num * length, 2048, 512, num
            asked.n_threads = asked.n_threads_batch = threads
            asked.type_k = asked.type_v = ll.GGML_TYPE_F32 if precision == "float32" else ll.GGML_TYPE_F16
            asked.kv_unified = unified
            held[key] = ll.llama_init_from_model(loaded, asked)
            if not held[key]:
                raise RuntimeError("llama.cpp made no context")
        return held[key]

    samplers: list[Any] = []

    def decode(ctx: Any, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Run one batch; rows are (id, position, sequence, whether its logits are needed)."""
        chosen: list[int] = []
        for first in range(0, len(rows), 2048):
            part = rows[first : first + 2048]
            batch.n_tokens = len(part)
            for i, (token, position, sequence, wanted) in enumerate(part):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, int(wanted)
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            if ll.llama_decode(ctx, batch):
                raise RuntimeError("llama.cpp could not decode")
            for i, row in enumerate(part):
                if row[3]:
                    logits = np.ctypeslib.as_array(ll.llama_get_logits_ith(ctx, i), (vocab_size,))
                    best = int(logits.argmax())
                    chosen.append(allowed(samplers[row[2]], logits, best) if samplers else best)
        return chosen

    def allowed(grammar: Any, logits: Any, best: int) -> int:
        """Return the best token under a grammar: as llama.cpp's own programs do, first ask about the best of all."""
        for ids in ([best], np.arange(vocab_size)):
            found = np.zeros(len(ids), [("id", np.int32), ("logit", np.float32), ("p", np.float32)])
            found["id"], found["logit"] = ids, logits[ids]
            entries = found.ctypes.data_as(ctypes.POINTER(ll.llama_token_data))
            ll.llama_sampler_apply(grammar, ctypes.byref(ll.llama_token_data_array(entries, len(ids), -1, False)))
            at = int(found["logit"].argmax())
            if found["logit"][at] > -np.inf:
                ll.llama_sampler_accept(grammar, int(found["id"][at]))
                return int(found["id"][at])
        raise RuntimeError("the grammar allows no token")

    def constrain(num: int, schema: Any) -> None:
        """Give each sequence the grammar of a schema; none without one."""
        from llama_cpp.llama_grammar import json_schema_to_gbnf

        for old in samplers:
            ll.llama_sampler_free(old)
        samplers.clear()
        for _ in range(num if schema is not None else 0):
            grammar = json_schema_to_gbnf(json.dumps(schema)).encode()
            samplers.append(ll.llama_sampler_init_grammar(vocabulary, grammar, b"root"))

    def generate(prompts: Ids, num_new: int, shared: int, speculation: str, schema: Any) -> Ids:
        constrain(len(prompts), schema)
        longest = max(map(len, prompts)) + num_new
        ctx = context(len(prompts), -(-longest // 256) * 256, bool(shared))
        memory = ll.llama_get_memory(ctx)
        ll.llama_memory_clear(memory, True)
        if shared:
            decode(ctx, [(token, i, 0, False) for i, token in enumerate(prompts[0][:shared])])
            for sequence in range(1, len(prompts)):
                ll.llama_memory_seq_cp(memory, 0, sequence, 0, shared)
        rows = [
            (token, i, sequence, i == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for i, token in enumerate(prompt)
            if i >= shared
        ]
        answers = [[token] for token in decode(ctx, rows)]
        began = time.perf_counter()
        for step in range(num_new - 1):
            if schema is not None and time.perf_counter() - began > JSON_LIMIT_S:
                break
            open_ones = [
                i for i, a in enumerate(answers) if not samplers or not ll.llama_vocab_is_eog(vocabulary, a[-1])
            ]
            rows = [(answers[i][-1], len(prompts[i]) + step, i, True) for i in open_ones]
            if not rows:
                break
            for i, token in zip(open_ones, decode(ctx, rows), strict=True):
                answers[i].append(token)
        return answers

    return generate


_kept: list[Any] = []
"""Callbacks of C code, kept for the lifetime of the process."""


def _keep(function: Any) -> Any:
    _kept.append(function)
    return function


def _without_gpu(ll: Any) -> Any:
    asked = ll.llama_model_default_params()
    asked.n_gpu_layers = 0
    return asked


def openvino(model: str, precision: str, threads: int) -> Generate:
    """OpenVINO GenAI; one of several prompts with a shared prefix runs first, as an expert would write it."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    kind = "f32" if precision == "float32" else "bf16"
    chosen = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": kind, "KV_CACHE_PRECISION": kind}
    pipes: dict[bool, Any] = {}

    def pipe(caching: bool) -> Any:
        if caching not in pipes:
            pipes.clear()
            scheduler = genai.SchedulerConfig()
            scheduler.cache_size = 2  # GB
            scheduler.enable_prefix_caching = caching
            scheduler.max_num_batched_tokens = 2048
            tokenizer = genai.Tokenizer(model) if (Path(model) / "openvino_tokenizer.xml").exists() else None
            arguments = (model, tokenizer, scheduler, "CPU") if tokenizer else (model, scheduler, "CPU")
            pipes[caching] = genai.ContinuousBatchingPipeline(*arguments, chosen)
        return pipes[caching]

    def ask(prompts: Ids, num_new: int, caching: bool) -> Ids:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.ignore_eos = num_new, False, True
        tensors = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        return [list(x.m_generation_ids[0]) for x in pipe(caching).generate(tensors, [config] * len(prompts))]

    def generate(prompts: Ids, num_new: int, shared: int, speculation: str, schema: Any) -> Ids:
        if schema is not None:
            raise ValueError("no schemas here")
        if not shared:
            return ask(prompts, num_new, False)
        return ask(prompts[:1], num_new, True) + ask(prompts[1:], num_new, True)

    return generate


ENGINES = {"llama.cpp": llama_cpp, "OpenVINO": openvino}


def peak_mib() -> float:
    """Return the peak memory of this process in MiB; Linux only."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return 0.0


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with answers
    engine, model, precision, threads, activations = sys.argv[1:]
    if engine == "GraftLM":
        generate = graftlm(model, precision, int(threads), activations)
    else:
        generate = ENGINES[engine](model, precision, int(threads))
    for line in sys.stdin:
        asked = json.loads(line)
        started = time.perf_counter()
        ids = generate(asked["prompts"], asked["num_new"], asked["shared"], asked["speculation"], asked["schema"])
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, "ids": ids, "peak_mib": peak_mib()}), file=answers, flush=True)


if __name__ == "__main__":
    main()
