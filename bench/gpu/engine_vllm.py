"""vLLM, offline, in this process and the one it starts for its core."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from bench.gpu.workloads import Answer, Ids

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # the cut-down build holds no FlashInfer; greedy decoding does not sample
}


class VLLM:
    started: dict[str, float] = {}

    def __init__(self, folder: str) -> None:
        import vllm

        self.about = {"version": vllm.__version__}
        self.llm = vllm.LLM(
            model=folder,
            load_format="dummy",
            dtype="bfloat16",
            seed=0,
            max_model_len=16_384,
            max_num_seqs=256,
            gpu_memory_utilization=0.85,
            enable_prefix_caching=True,
            structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
        )

    def generate(self, prompts: Sequence[Ids], max_tokens: int, schema: dict[str, Any] | None = None) -> list[Answer]:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=schema is None,
            detokenize=schema is not None,
            structured_outputs=StructuredOutputsParams(json=schema) if schema else None,
        )
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        answers = [(o.outputs[0], o.num_cached_tokens) for o in outputs]
        return [Answer(list(answer.token_ids), cached, answer.text) for answer, cached in answers]

    def flush(self) -> None:
        self.llm.reset_prefix_cache()

    def close(self) -> None:
        """Do nothing: the engine's process ends with this one."""


def start(folder: str | None) -> VLLM:
    if folder is None:
        raise NotImplementedError("vLLM needs a GPU and a model folder")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return VLLM(folder)
