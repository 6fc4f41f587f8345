"""Tiny random models and a byte tokenizer, built in memory: what the tests run on instead of downloads."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

BOS, EOS, IM_START, IM_END, PAD = 256, 257, 258, 259, 260
SPECIALS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<tool_call>", "</tool_call>", "<|mask|>")
VOCAB_SIZE = 256 + 2 * len(SPECIALS)
"""Of the models: a little more than the tokenizer knows, as with most published models."""

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools:
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{{ '\\n' }}\
Call one as <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function if call.function is defined else call %}<tool_call>{"name": "{{ function.name }}", \
"arguments": {{ function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "head_dim": 16,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": IM_END,
    "pad_token_id": PAD,
}
_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
}
_MLA: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_WITH_EXPERTS = {"mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3", "qwen3_next", "llama4_text", "minimax", "jamba"}
_WITH_WINDOW = {
    "mistral",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "gpt_oss",
    "cohere2",
    "olmo3",
    "ministral",
    "exaone4",
    "smollm3",
}
_OWN: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 64},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "smollm3": {"use_sliding_window": True},
    "deepseek_v3": {"head_dim": 8},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
}
"""What makes the tiny configuration of a kind valid, quick, or show its peculiarity."""
_WITHOUT: dict[str, tuple[str, ...]] = {"falcon": ("head_dim",), "dbrx": ("head_dim",)}
_ALIASES = {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "llama4": "llama4_text", "hunyuan": "hunyuan_v1_dense"}


def tiny_model(kind: str = "llama", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Build a random two-layer model of any Hugging Face architecture, in float32, ready to generate.

    `kind` is a `model_type` ("llama", "qwen3", "gemma3", "gpt2", "bloom", ...); `overrides` go to its config.
    Weights are wide enough that greedy decoding does not sit on ties. Equal arguments give equal weights.
    """
    kind = _ALIASES.get(kind, kind)
    options = dict(_BASE)
    if "moe" in kind or kind in _WITH_EXPERTS:
        options.update(_MOE)
    if kind.startswith("deepseek"):
        options.update(_MLA)
    if kind in _WITH_WINDOW:
        options["sliding_window"] = 8
        if kind not in ("mistral", "ministral"):
            options["layer_types"] = ["sliding_attention", "full_attention"]
    options.update(_OWN.get(kind, {}))
    options.update(overrides)
    for name in _WITHOUT.get(kind, ()):
        del options[name]
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        config = AutoConfig.for_model(kind, **options)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.data.normal_(0.0, 0.15)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=[EOS, IM_END], pad_token_id=PAD)
    return model


def byte_tokenizer(*, merges: Sequence[tuple[str, str]] = (), add_bos: bool = False) -> PreTrainedTokenizerFast:
    """Build a tokenizer whose id of a byte is that byte; special tokens follow from 256 on.

    merges   pairs of BPE pieces in the byte alphabet, e.g. [("t", "h"), ("th", "e")]; their ids follow the specials.
    add_bos  whether encoding puts "<|bos|>" first, as Llama's tokenizer does.

    The end of a turn and of the text is "<|im_end|>". The chat template is ChatML with tools.
    """
    vocab = {character: byte for byte, character in enumerate(_byte_alphabet())}
    first_merge = len(vocab) + len(SPECIALS)
    vocab |= {name: 256 + i for i, name in enumerate(SPECIALS)}
    vocab |= {left + right: first_merge + i for i, (left, right) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    words = Regex(r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for name in SPECIALS:  # the tags of tool calls are text, as in published models: decoding keeps them
        special = not name.endswith("tool_call>")
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(name, special=special, normalized=False)])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def greedy_reference(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What `model.generate` answers greedily, one prompt alone, exactly `num_tokens` tokens, whatever they are."""
    own = model.generation_config
    model.generation_config = GenerationConfig(pad_token_id=PAD)  # knows no end of text: nothing stops or is masked
    try:
        with torch.inference_mode():
            output = model.generate(torch.tensor([list(prompt)]), max_new_tokens=num_tokens, do_sample=False)
    finally:
        model.generation_config = own
    return [int(token) for token in output[0, len(prompt) :]]


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """Byte tokens, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(3, 250, (length,), generator=generator)]


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE vocabularies."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet, extra = [""] * 256, 256
    for byte in range(256):
        if byte in printable:
            alphabet[byte] = chr(byte)
        else:
            alphabet[byte] = chr(extra)
            extra += 1
    return alphabet
