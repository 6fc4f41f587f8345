"""Engines that run a model shape with random weights, which may be quantised: GraftLM and vLLM. Prompts are token ids.

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

    kv       CacheConfig.dtype
    weights  a format of bench.gpu.quantised
    """

    def __init__(self, config: PretrainedConfig, max_model_len: int, kv: str = "auto", weights: str = "bf16") -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from bench.gpu.quantised import quantise

        cuda = torch.cuda.is_available()
        with torch.device("cuda" if cuda else "cpu"):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if cuda else torch.float32).eval()
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.data.normal_(0.0, 0.02)
            quantise(model, weights)
        self.model, self.max_model_len, self.kv, self.weights = model, max_model_len, kv, weights
        self.runtime: Any = None

    def start(self) -> str:
        """Load the runtime over the weights in memory; returns how it runs."""
        from graftlm import CacheConfig, Runtime
        from graftlm.testing.byte_tokenizer import byte_tokenizer

        options: dict[str, Any] = {"max_model_len": self.max_model_len, "cache": CacheConfig(dtype=self.kv)}
        if self.weights == "fp8-rows":
            options["activations"] = "fp8"
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

    def computed(self) -> int:
        """Prompt tokens computed so far."""
        return int(self.runtime.stats().computed_tokens)


_FOUR_BITS = {"bits": 4, "group_size": 128}
VLLM_WEIGHTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"quantization": "fp8_per_channel"},
    "awq": {"quant_method": "awq", "zero_point": True, "version": "gemm", **_FOUR_BITS},
    "int4-128": {"quant_method": "gptq", "desc_act": False, "sym": True, "checkpoint_format": "gptq", **_FOUR_BITS},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "self_attn", "router", "embed_tokens"]},
}
"""Formats of weights for vLLM: `quantization_config` of a folder, or the argument of a plain one's rounding.
vLLM multiplies FP8 by activations in FP8."""


class VLLMShape:
    """vLLM with weights of its own making; `start` includes them, for it does not separate the two."""

    def __init__(self, config: PretrainedConfig, max_model_len: int, _kv: str = "auto", weights: str = "bf16") -> None:
        from bench.gpu.engine_vllm import ENVIRONMENT

        os.environ.update(ENVIRONMENT)
        self.folder = tempfile.mkdtemp(prefix="shape-")
        given = VLLM_WEIGHTS["fp8" if weights == "fp8-rows" else weights]
        self.options = given if "quantization" in given else {}
        if "quant_method" in given:
            config.quantization_config = given
            _fill_codes()
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
            **self.options,
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


def _fill_codes() -> None:
    """Let vLLM's dummy loader, in processes forked from this one, fill codes too, which it leaves as memory was."""
    import torch
    from vllm.model_executor.model_loader import dummy_loader

    original: Any = dummy_loader.initialize_dummy_weights

    def filled(model: Any, *arguments: Any, **options: Any) -> None:
        original(model, *arguments, **options)
        for name, tensor in model.state_dict().items():
            if tensor.device.type == "meta" or tensor.dtype not in (torch.uint8, torch.int32) or "g_idx" in name:
                continue
            if tensor.dtype is torch.uint8 and "scale" in name:
                tensor.random_(119, 122)  # exponents of 2: as of weights of the size 0.02
            else:
                tensor.view(torch.uint8).random_(0, 256)

    dummy_loader.initialize_dummy_weights = filled


SHAPE_ENGINES: dict[str, Any] = {"graftlm": GraftLMShape, "vllm": VLLMShape}
