"""The built-in engines, grammars, kernels and loaders, registered through the hooks that plugins use."""

from __future__ import annotations

from graftlm.plugins.hookspecs import Register, hookimpl


@hookimpl
def graftlm_register_engines(register: Register) -> None:
    register("local", "graftlm.core.engine_builder:build_local", "a model in this process, continuous batching")
    register("ray", "graftlm.core.cluster.ray_cluster:build_ray", "replicas on a Ray cluster; needs ray")
    register("scripted", "graftlm.testing.scripted_model:build_scripted", "answers that a test has written down")


@hookimpl
def graftlm_register_grammars(register: Register) -> None:
    register("fsm", "graftlm.core.grammar.compile:compile_fsm", "compressed automaton with jump-forward")
    register("pda", "graftlm.core.grammar.compile:compile_pda", "pushdown automaton: what contains itself, any JSON")
    register("llguidance", "graftlm.core.grammar.compile:compile_llguidance", "context-free grammars, lazily")


@hookimpl
def graftlm_register_attention(register: Register) -> None:
    register("torch", "graftlm.kernels.cpu.attention.backend:TorchAttention", "PyTorch, any device; the best on a CPU")
    register("triton", "graftlm.kernels.gpu.attention.backend:TritonAttention", "Triton, for GPUs")
    register(
        "flashinfer",
        "graftlm.kernels.gpu.attention.flashinfer:FlashInferAttention",
        "FlashInfer for prefill, Triton for decoding; needs flashinfer",
    )


@hookimpl
def graftlm_register_models(register: Register) -> None:
    register("hf", "graftlm.core.model.load:load_model", "any Hugging Face decoder")


@hookimpl
def graftlm_register_thinking(register: Register) -> None:
    register("markers", "graftlm.core.chat.thinking:learn_markers", "one thought between markers, then the answer")
    register("channels", "graftlm.core.chat.harmony:learn_channels", "messages in channels, as GPT-OSS writes them")
