"""A tokenizer with words and random models over it, for workloads whose token counts should look like real ones."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

SPECIALS = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
CHAT_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@cache
def word_tokenizer(vocab_size: int = 8192) -> Any:
    """Byte-level BPE, trained in memory on the sources of the standard library; the chat template is ChatML."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:80]
    tokenizer.train([str(path) for path in sources], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def word_model(tokenizer: Any, hidden: int = 384, layers: int = 6) -> PreTrainedModel:
    """Build a random Llama over `tokenizer` that seldom generates a special token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128 or 1,
        max_position_embeddings=8192,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    head = torch.nn.Linear(hidden, len(tokenizer), bias=True)
    head.weight = model.lm_head.weight
    bias = torch.zeros(len(tokenizer))
    vocab = tokenizer.get_vocab()
    bias[[i for i in vocab.values() if "\ufffd" in tokenizer.decode([i])]] = -30.0
    bias[list(tokenizer.all_special_ids)] = -30.0
    head.bias = torch.nn.Parameter(bias)
    model.lm_head = head
    return model
