"""The shape of Qwen2.5-VL-7B with random weights, and a processor of its sizes. Nothing is downloaded.

    python -m bench.pictures.model FOLDER

writes the configuration and the processor, which is all that engines read: each fills in random weights. The
tokenizer is one of bytes; the model's vocabulary keeps its size.
"""

from __future__ import annotations

import sys
from typing import Any

from graftlm.testing.random_vision import byte_tokenizer, random_vision_model

_TEXT: dict[str, Any] = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6}
_VISION: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 1280,
    "out_hidden_size": 3584,
    "num_heads": 16,
    "intermediate_size": 3420,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "tokens_per_second": 2,
}


def write(folder: str) -> None:
    """Write the configuration, the processor and the tokenizer of the 7B shape."""
    import transformers as tf

    names = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    names |= {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
    begin, end = "<|vision_start|>", "<|vision_end|>"
    tokenizer = byte_tokenizer(names, image=f"{begin}<|image_pad|>{end}", video=f"{begin}<|video_pad|>{end}")
    config = tf.Qwen2_5_VLConfig(
        text_config={**_TEXT, "rope_parameters": {**_ROPE, "mrope_section": [16, 24, 24]}},
        vision_config=_VISION,
        tie_word_embeddings=False,
        **{f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()},
    )
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    config.dtype = "bfloat16"
    sizes = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    images = tf.Qwen2VLImageProcessor(**sizes, size={"shortest_edge": 3136, "longest_edge": 12_845_056})
    videos = tf.Qwen2VLVideoProcessor(**sizes)
    config.save_pretrained(folder)
    tf.Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=tokenizer.chat_template).save_pretrained(folder)
    tf.GenerationConfig(eos_token_id=256, pad_token_id=257, do_sample=False).save_pretrained(folder)


def random_weights(folder: str | None) -> tuple[Any, Any]:
    """Return a folder's model with random bfloat16 weights on the GPU, and its processor; by default a tiny one."""
    if folder is None:
        return random_vision_model("qwen2_5_vl")
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    config = AutoConfig.from_pretrained(folder)
    return filled(AutoModelForImageTextToText, config, "cuda"), AutoProcessor.from_pretrained(folder)


def text_model(model: Any) -> Any:
    """Return the decoder of a vision model as a text model with weights of its own; Qwen2.5-VL's is that of Qwen2."""
    import transformers as tf

    given: Any = model.config.get_text_config()
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    shape = {name: getattr(given, name) for name in (*names, "vocab_size", "max_position_embeddings", "rms_norm_eps")}
    config = tf.Qwen2Config(**shape, rope_parameters=_ROPE, tie_word_embeddings=False, eos_token_id=256)
    return filled(tf.AutoModelForCausalLM, config, model.device, model.dtype)


def filled(auto: Any, config: Any, device: Any, dtype: Any = None) -> Any:
    """Build a model, by default in bfloat16, its matrices drawn from a normal distribution."""
    import torch

    with torch.device(device), torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto.from_config(config, dtype=dtype or torch.bfloat16).eval()
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.data.normal_(0.0, 0.02)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return model


if __name__ == "__main__":
    write(sys.argv[1])
