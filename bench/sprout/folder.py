"""The model folder: what transformers loads, and the checksums of its files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from bench.sprout.network import Network, Shape
from bench.sprout.tokenizer import SPECIAL, as_transformers

SHIPPED = (
    "MODEL_CARD.md",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


def load_tokenizer(folder: Path) -> Any:
    """Return the `tokenizers.Tokenizer` of a folder."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def write_tokenizer(folder: Path, tokenizer: Any, context: int = Shape.context) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    as_transformers(tokenizer, context).save_pretrained(folder)


def write_folder(folder: Path, network: Network, tokenizer: Any) -> None:
    """Write config, weights (bfloat16), tokenizer and generation config as transformers does."""
    from transformers import GenerationConfig, LlamaForCausalLM

    end_of_text, _, im_end = (tokenizer.token_to_id(token) for token in SPECIAL)
    model: Any = LlamaForCausalLM(network.shape.config(im_end, end_of_text))
    weights = {f"model.{name}": p.detach().cpu() for name, p in network.named_parameters()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    model.generation_config = GenerationConfig(
        eos_token_id=[im_end, end_of_text],
        pad_token_id=end_of_text,
        do_sample=False,
        max_new_tokens=256,
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder, tokenizer, network.shape.context)


def write_checksums(folder: Path) -> None:
    """Write sha256 and size of each shipped file; `graftlm.core.model.embedded` reads it."""
    from graftlm.core.model.embedded import SHA256_LIST

    lines = []
    for name in SHIPPED:
        data = (folder / name).read_bytes()
        lines.append(f"{hashlib.sha256(data).hexdigest()}  {len(data)}  {name}\n")
    (folder / SHA256_LIST).write_text("".join(lines), encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
