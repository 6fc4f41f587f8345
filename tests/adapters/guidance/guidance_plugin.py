"""A pytest plugin that runs guidance's own model tests against `GraftModel`.

From a checkout of guidance, with this file's folder on PYTHONPATH:

    python -m pytest --noconftest -p guidance_plugin tests/model_integration \\
        --ignore tests/model_integration/test_tokenizers.py

The model is random but tame: special tokens and parts of characters are unlikely, long tokens, closing brackets and
quotes are likely, as in a model that has learned to write, because some of the tests count tokens or need a text
that ends.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

VOCAB_SIZE = 4096
SPECIALS = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
CHAT_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def trained_tokenizer(vocab_size: int = VOCAB_SIZE) -> Any:
    """A byte-level BPE tokenizer with words, trained in memory on the sources of the standard library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    tokenizer.train([str(path) for path in sources], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tame_model(tokenizer: Any) -> Any:
    """A tiny random Llama whose output layer favours what closes a text over special tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    ids = {piece: i for piece, i in tokenizer.get_vocab().items()}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    bias = torch.zeros(len(tokenizer))
    for piece, i in ids.items():
        bias[i] = 0.1 * len(piece)
    bias[list(tokenizer.all_special_ids)] = -30.0
    broken = [i for i in ids.values() if "\ufffd" in tokenizer.decode([i])]
    bias[broken] = -30.0
    for piece in ('"', "}", "]", '"}', '"]'):
        if piece in ids:
            bias[ids[piece]] = 4.0
    head = torch.nn.Linear(64, len(tokenizer), bias=True)
    head.weight, head.bias = model.lm_head.weight, torch.nn.Parameter(bias)
    model.lm_head = head
    return model


@pytest.fixture(scope="session")
def selected_model_name() -> str:
    return "graftlm_tiny"


@pytest.fixture(scope="session")
def selected_model() -> Iterator[Any]:
    from graftlm.adapters.guidance import GraftModel
    from graftlm.core.runtime import Runtime

    tokenizer = trained_tokenizer()
    with Runtime(tame_model(tokenizer), tokenizer=tokenizer, dtype="float32") as runtime:
        yield GraftModel(runtime=runtime, echo=False)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "resource_intensive: a long prompt")
