"""The shape of Llama 3.1 8B with random weights, and a tokenizer of its size. Nothing is downloaded.

    python -m bench.gpu.model FOLDER

writes config.json and a tokenizer, which is all that the engines read: each fills in random weights. The tokenizer is
a byte-level BPE of 128,000 pieces and 256 special tokens, learnt from text files of Python's own library and of what is
installed beside it; that takes half a minute. Its chat template is that of Llama 3.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

PIECES, SPECIALS = 128_000, 256
NAMES = ("<|begin_of_text|>", "<|end_of_text|>", "<|pad|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = """\
{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content }}<|eot_id|>{% endfor %}\
{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
MAX_CHARS = 60_000_000
"""Characters of text that the tokenizer is trained on."""

TEXT = frozenset({".py", ".pyi", ".txt", ".md", ".rst", ".html", ".json", ".h"})

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "vocab_size": PIECES + SPECIALS,
    "bos_token_id": PIECES,
    "eos_token_id": PIECES + 1,
    "torch_dtype": "bfloat16",
}


def texts(folders: Iterable[Path]) -> Iterator[str]:
    """Yield the beginnings of text files, MAX_CHARS in all, in an order that does not depend on the file system."""
    left = MAX_CHARS
    for folder in folders:
        for path in sorted(p for p in folder.rglob("*") if p.suffix in TEXT and p.is_file()):
            with path.open(encoding="utf-8", errors="ignore") as file:
                text = file.read(min(1_000_000, left))
            yield text
            left -= len(text)
            if left <= 0:
                return


def learn_tokenizer(folders: Iterable[Path], pieces: int = PIECES, specials: int = SPECIALS) -> Any:
    """Return a transformers tokenizer of `pieces` learnt pieces, with `specials` special tokens after them."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=pieces,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=32,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(folders), trainer)
    found = tokenizer.get_vocab_size()
    if found != pieces:
        raise SystemExit(f"the text gave {found:,} of {pieces:,} pieces; name folders with more of it")
    reserved = [f"<|reserved_{i}|>" for i in range(specials - len(NAMES))]
    tokenizer.add_special_tokens([*NAMES, *reserved])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=NAMES[0],
        eos_token=NAMES[1],
        pad_token=NAMES[2],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def write(folder: Path) -> Path:
    """Fill `folder` with config.json, generation_config.json and the tokenizer, unless they are there already."""
    if not (folder / "tokenizer.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        paths = sysconfig.get_paths()
        learn_tokenizer(dict.fromkeys(Path(paths[name]) for name in ("stdlib", "purelib"))).save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
        ends = {"bos_token_id": CONFIG["bos_token_id"], "eos_token_id": CONFIG["eos_token_id"], "do_sample": False}
        (folder / "generation_config.json").write_text(json.dumps(ends, indent=1) + "\n")
    return folder


def random_weights(folder: str | None) -> tuple[Any, Any]:
    """Return a folder's model with random bfloat16 weights on the GPU, and its tokenizer; by default a tiny one."""
    import torch

    if folder is None:
        from tests.models import byte_tokenizer, tiny_model

        device = "cuda" if torch.cuda.is_available() else "cpu"
        tiny: Any = tiny_model(max_position_embeddings=4096)
        return tiny.to(device), byte_tokenizer()
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(folder)
    with torch.device("cuda"), torch.random.fork_rng(devices=[torch.cuda.current_device()]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.data.normal_(0.0, 0.02)
    torch.cuda.synchronize()
    return model, AutoTokenizer.from_pretrained(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
