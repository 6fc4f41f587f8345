"""Engines that run a model shape with random weights: GraftLM and vLLM. Prompts are token ids.

`answer` takes prompts and one mapping of sampling options a prompt: max_tokens, and where tokens are drawn temperature,
top_p and seed. Answers have exactly max_tokens tokens. `flush` empties the prefix cache.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Ids = list[int]
Sampling = Mapping[str, Any]


class GraftLMShape:
    """A transformers model of the shape in this process, bfloat16 on a GPU, float32 elsewhere.

    kv  CacheConfig.dtype
    """

    def __init__(self, config: PretrainedConfig, max_model_len: int, kv: str = "auto") -> None:
        import torch
        from transformers import AutoModelForCausalLM

        cuda = torch.cuda.is_available()
        with torch.device("cuda" if cuda else "cpu"):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if cuda else torch.float32).eval()
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.data.normal_(0.0, 0.02)
        self.model, self.max_model_len, self.kv = model, max_model_len, kv
        self.runtime: Any = None

    def start(self) -> str:
        """Load the runtime over the weights in memory; returns how it runs."""
        from graftlm import CacheConfig, Runtime
        from graftlm.testing.byte_tokenizer import byte_tokenizer

        options = {"max_model_len": self.max_model_len, "cache": CacheConfig(dtype=self.kv)}
        self.runtime = Runtime(self.model, tokenizer=byte_tokenizer(), **options).load()
        stats = self.runtime.stats()
        return f"{stats.execution}; KV in {stats.kv}"

    def answer(self, prompts: Sequence[Ids], samplings: Sequence[Sampling]) -> None:
        from graftlm import Request, SamplingParams

        requests = [
            Request(prompt, SamplingParams(**{"temperature": 0.0, **sampling}, ignore_eos=True))
            for prompt, sampling in zip(prompts, samplings, strict=True)
        ]
        for future in self.runtime.submit_many(requests):
            future.result()

    def flush(self) -> None:
        self.runtime.clear_cache()


class VLLMShape:
    """vLLM with weights of its own making; `start` includes them, for it does not separate the two."""

    def __init__(self, config: PretrainedConfig, max_model_len: int, _kv: str = "auto") -> None:
        from bench.gpu.engine_vllm import ENVIRONMENT

        os.environ.update(ENVIRONMENT)
        self.folder = tempfile.mkdtemp(prefix="shape-")
        config.save_pretrained(self.folder)
        self.max_model_len = max_model_len
        self.llm: Any = None

    def start(self) -> str:
        import vllm

        self.llm = vllm.LLM(
            model=self.folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=self.max_model_len,
            max_num_seqs=256,
            gpu_memory_utilization=0.85,
            enable_prefix_caching=True,
        )
        return f"vLLM {vllm.__version__}"

    def answer(self, prompts: Sequence[Ids], samplings: Sequence[Sampling]) -> None:
        from vllm import SamplingParams

        params = [
            SamplingParams(**{"temperature": 0.0, **sampling}, ignore_eos=True, detokenize=False)
            for sampling in samplings
        ]
        self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    def flush(self) -> None:
        self.llm.reset_prefix_cache()


SHAPE_ENGINES: dict[str, Any] = {"graftlm": GraftLMShape, "vllm": VLLMShape}
