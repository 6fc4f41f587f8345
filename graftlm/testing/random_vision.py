"""Random vision models of many families with their processors, from configurations alone: nothing is downloaded.

A model has two or three small layers and answers with noise that depends on every pixel of its pictures.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from graftlm.core.model.transformers_lock import importing_transformers

END = 256
"""The token that ends an answer."""

_DECODER: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "head_dim": 16,
}
_ENCODER: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_PINPOINTS = [[56, 56], [56, 112], [112, 56]]
_VIDEO = "<video>"


def random_picture(seed: int = 0, width: int = 80, height: int = 60) -> Any:
    """Return a Pillow image of noise, smooth enough to survive resizing."""
    from PIL import Image

    noise = np.random.default_rng(seed).normal(128, 50, (height // 4, width // 4, 3))
    return Image.fromarray(np.clip(noise, 0, 255).astype("uint8")).resize((width, height))


def vision_families() -> list[str]:
    """Return the names of the families that can be built here; some need torchvision or num2words."""
    return [name for name in _FAMILIES if all(importlib.util.find_spec(one) for one in _NEEDS.get(name, ()))]


def random_vision_model(family: str) -> tuple[Any, Any]:
    """Build a model and its processor. Videos need torchvision."""
    model, processor = _FAMILIES[family]()
    return _random(model), processor


def save_vision_model(family: str, folder: str | os.PathLike[str]) -> Path:
    """Write a model and its processor as a folder of Hugging Face files."""
    folder = Path(folder)
    model, processor = random_vision_model(family)
    model.save_pretrained(folder)
    if getattr(processor, "video_processor", processor) is not None:
        processor.save_pretrained(folder)
        return folder
    processor.tokenizer.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    settings = {name: getattr(processor, name, None) for name in inspect.signature(type(processor)).parameters}
    plain = {name: value for name, value in settings.items() if isinstance(value, int | str)}
    described = {"processor_class": type(processor).__name__, **plain}
    (folder / "processor_config.json").write_text(json.dumps(described))
    return folder


def _transformers() -> Any:
    with importing_transformers():
        return importlib.import_module("transformers")


def _random(model: Any) -> Any:
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * 0.12)
            elif parameter.dim() == 1 and "norm" not in name.lower() and "ln" not in name.lower():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * 0.02)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = END, END + 1
    model.generation_config.bos_token_id = None
    return model.eval()


def byte_tokenizer(names: dict[str, str], *more: str, image: str, video: str = _VIDEO) -> Any:
    """Return a tokenizer of bytes. names: its special tokens by attribute; image, video: what the template writes"""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    with importing_transformers():
        from transformers import PreTrainedTokenizerFast
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = dict.fromkeys(["<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", *names.values(), *more])
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>", extra_special_tokens=names
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{% if p.type == 'image' %}" + image + "{% elif p.type == 'video' %}" + video + ""
        "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    return tokenizer


def _processor(
    name: str, image_processor: Any, tokenizer: Any, video: Callable[[], Any] | None = None, **more: Any
) -> Any:
    """Build a processor; without its part for videos where torchvision is missing."""
    cls = getattr(_transformers(), name)
    if video is not None:
        if importlib.util.find_spec("torchvision") is not None:
            more["video_processor"] = video()
        else:
            cls = type(name, (cls,), {"check_argument_for_proper_class": lambda self, name, given: type(given)})
            more["video_processor"] = None
    return cls(image_processor=image_processor, tokenizer=tokenizer, chat_template=tokenizer.chat_template, **more)


def _llava() -> tuple[Any, Any]:
    tf = _transformers()

    tokenizer = byte_tokenizer({"image_token": "<image>"}, image="<image>")
    encoder = tf.CLIPVisionConfig(**_ENCODER, image_size=56, patch_size=14, projection_dim=32)
    config = tf.LlavaConfig(
        vision_config=encoder,
        text_config=tf.LlamaConfig(**_DECODER),
        image_token_id=tokenizer.image_token_id,
        vision_feature_layer=-1,
    )
    images = tf.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    options: dict[str, Any] = {
        "patch_size": 14,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    processor = _processor("LlavaProcessor", images, tokenizer, image_token="<image>", **options)
    return tf.LlavaForConditionalGeneration(config), processor


def _llava_next() -> tuple[Any, Any]:
    tf = _transformers()

    tokenizer = byte_tokenizer({"image_token": "<image>"}, image="<image>")
    encoder = tf.CLIPVisionConfig(**_ENCODER, image_size=56, patch_size=14, projection_dim=32)
    config = tf.LlavaNextConfig(
        vision_config=encoder,
        text_config=tf.LlamaConfig(**_DECODER),
        image_token_id=tokenizer.image_token_id,
        image_grid_pinpoints=_PINPOINTS,
        vision_feature_layer=-1,
    )
    crop = {"height": 56, "width": 56}
    images = tf.LlavaNextImageProcessor(size={"shortest_edge": 56}, crop_size=crop, image_grid_pinpoints=_PINPOINTS)
    options: dict[str, Any] = {
        "patch_size": 14,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    processor = _processor("LlavaNextProcessor", images, tokenizer, image_token="<image>", **options)
    return tf.LlavaNextForConditionalGeneration(config), processor


def _llava_onevision() -> tuple[Any, Any]:
    tf = _transformers()

    names = {"image_token": "<image>", "video_token": _VIDEO}
    tokenizer, size = byte_tokenizer(names, image="<image>"), {"height": 56, "width": 56}
    config = tf.LlavaOnevisionConfig(
        vision_config=tf.SiglipVisionConfig(**_ENCODER, image_size=56, patch_size=14, vision_use_head=False),
        text_config=tf.Qwen2Config(**_DECODER),
        image_token_id=tokenizer.image_token_id,
        video_token_id=tokenizer.video_token_id,
        image_grid_pinpoints=_PINPOINTS,
        vision_feature_layer=-1,
    )
    images = tf.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=_PINPOINTS)
    options = {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}
    processor = _processor(
        "LlavaOnevisionProcessor",
        images,
        tokenizer,
        lambda: tf.LlavaOnevisionVideoProcessor(size=size),
        image_token="<image>",
        video_token=_VIDEO,
        **options,
    )
    return tf.LlavaOnevisionForConditionalGeneration(config), processor


def _qwen(
    kind: str, patch: int, encoder: dict[str, Any], decoder: dict[str, Any], processor: str = ""
) -> tuple[Any, Any]:
    tf = _transformers()

    names = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    names |= {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
    begin, end = "<|vision_start|>", "<|vision_end|>"
    tokenizer = byte_tokenizer(names, image=f"{begin}<|image_pad|>{end}", video=f"{begin}<|video_pad|>{end}")
    config = getattr(tf, f"{kind}Config")(
        text_config={**_DECODER, "rope_parameters": _ROPE, **decoder},
        vision_config={
            "num_heads": 2,
            "patch_size": patch,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            **encoder,
        },
        **{f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()},
    )
    sizes = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2}
    limits = {"shortest_edge": (4 * patch) ** 2, "longest_edge": (10 * patch) ** 2}
    frames = {"shortest_edge": (4 * patch) ** 2, "longest_edge": 8 * (8 * patch) ** 2}
    video = "Qwen3VLVideoProcessor" if kind.startswith("Qwen3") else "Qwen2VLVideoProcessor"
    built = _processor(
        processor or f"{kind}Processor",
        tf.Qwen2VLImageProcessor(**sizes, size=limits),
        tokenizer,
        lambda: getattr(tf, video)(**sizes, size=frames),
    )
    return getattr(tf, f"{kind}ForConditionalGeneration")(config), built


def _qwen2_vl() -> tuple[Any, Any]:
    return _qwen("Qwen2VL", 14, {"depth": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}, {})


def _qwen2_5_vl() -> tuple[Any, Any]:
    encoder = {"depth": 2, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64, "window_size": 56}
    return _qwen("Qwen2_5_VL", 14, {**encoder, "fullatt_block_indexes": [1], "tokens_per_second": 2}, {})


_DEEP: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "out_hidden_size": 64,
    "intermediate_size": 64,
    "num_position_embeddings": 64,
}


def _qwen3_vl() -> tuple[Any, Any]:
    rope = {"rope_parameters": {**_ROPE, "mrope_interleaved": True}}
    return _qwen("Qwen3VL", 16, {**_DEEP, "deepstack_visual_indexes": [0, 1]}, rope)


def _qwen3_5() -> tuple[Any, Any]:
    decoder = {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "head_dim": 32,
        "rope_parameters": {
            **_ROPE,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.25,
        },
    }
    return _qwen("Qwen3_5", 16, _DEEP, decoder, "Qwen3VLProcessor")


def _idefics(kind: str, tokens: int) -> tuple[Any, Any]:
    tf = _transformers()

    rows = [f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)]
    names = {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>"}
    names |= {"global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>"}
    tokenizer = byte_tokenizer(names, *rows, image="<image>")
    config = getattr(tf, f"{kind}Config")(
        vision_config={**_ENCODER, "image_size": 64, "patch_size": 16},
        text_config=tf.LlamaConfig(**_DECODER),
        scale_factor=2,
        image_token_id=tokenizer.image_token_id,
    )
    edges = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}}
    images = getattr(tf, f"{kind}ImageProcessor")(**edges)
    more: dict[str, Any] = {}
    if kind == "SmolVLM":
        more["video"] = lambda: tf.SmolVLMVideoProcessor(size={"longest_edge": 64}, max_image_size={"longest_edge": 64})
    return (
        getattr(tf, f"{kind}ForConditionalGeneration")(config),
        _processor(f"{kind}Processor", images, tokenizer, image_seq_len=tokens, **more),
    )


def _smolvlm() -> tuple[Any, Any]:
    return _idefics("SmolVLM", 4)


def _idefics3() -> tuple[Any, Any]:
    return _idefics("Idefics3", 4)


def _internvl() -> tuple[Any, Any]:
    tf = _transformers()

    names = {"context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>"}
    tokenizer = byte_tokenizer({**names, "video_token": _VIDEO}, image="<IMG_CONTEXT>")
    config = tf.InternVLConfig(
        vision_config={**_ENCODER, "image_size": [56, 56], "patch_size": [14, 14]},
        text_config=tf.Qwen2Config(**_DECODER),
        image_token_id=tokenizer.context_image_token_id,
        downsample_ratio=0.5,
    )
    size = {"height": 56, "width": 56}
    images = tf.GotOcr2ImageProcessor(size=size, crop_to_patches=True, max_patches=3)
    processor = _processor(
        "InternVLProcessor", images, tokenizer, lambda: tf.InternVLVideoProcessor(size=size), image_seq_length=4
    )
    return tf.InternVLForConditionalGeneration(config), processor


_WINDOWED: dict[str, Any] = {
    "num_hidden_layers": 3,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}


def _gemma3() -> tuple[Any, Any]:
    tf = _transformers()

    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = byte_tokenizer(names, image="<start_of_image>")
    decoder = {**_DECODER, **_WINDOWED, "query_pre_attn_scalar": 16}
    config = tf.Gemma3Config(
        vision_config={**_ENCODER, "image_size": 112, "patch_size": 14, "vision_use_head": False},
        text_config=tf.Gemma3TextConfig(**decoder),
        mm_tokens_per_image=16,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_id=tokenizer.image_token_id,
    )
    images = tf.Gemma3ImageProcessor(size={"height": 112, "width": 112})
    return tf.Gemma3ForConditionalGeneration(config), _processor(
        "Gemma3Processor", images, tokenizer, image_seq_length=16
    )


def _gemma4(kind: str = "Gemma4") -> tuple[Any, Any]:
    tf = _transformers()

    names = {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>", "video_token": "<|video|>"}
    names |= {"boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"}
    tokenizer = byte_tokenizer(names, image="<|image|>", video="<|video|>")
    decoder = {**_DECODER, **_WINDOWED, "num_kv_shared_layers": 0, "global_head_dim": 16}
    decoder["use_bidirectional_attention"] = "vision"
    ids = ("image_token", "video_token", "boi_token", "eoi_token", "audio_token", "boa_token")
    encoder: dict[str, Any] = {"patch_size": 8, "pooling_kernel_size": 2}
    if kind == "Gemma4":
        decoder |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320}
        encoder |= {**_ENCODER, "head_dim": 16, "num_key_value_heads": 2}
        encoder |= {"position_embedding_size": 64, "default_output_length": 16}
    else:
        encoder |= {"mm_embed_dim": 32, "mm_posemb_size": 128, "output_proj_dims": 32}
    config = getattr(tf, f"{kind}Config")(
        vision_config=encoder,
        audio_config=None,
        text_config=decoder,
        **{f"{name}_id": getattr(tokenizer, f"{name}_id") for name in ids},
    )
    patches = {"patch_size": 8, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    processor = _processor(
        f"{kind}Processor",
        getattr(tf, f"{kind}ImageProcessor")(**patches),
        tokenizer,
        lambda: getattr(tf, f"{kind}VideoProcessor")(**patches),
        feature_extractor=getattr(tf, f"{kind}AudioFeatureExtractor")(),
    )
    return getattr(tf, f"{kind}ForConditionalGeneration")(config), processor


def random_gemma4_unified() -> tuple[Any, Any]:
    """Build a model like Gemma 4's 12B, whose pictures have more tokens than its window, and its processor.

    It needs torchvision and transformers 5.24. Only `generate` with a static cache follows the published model.
    """
    model, processor = _gemma4("Gemma4Unified")
    return _random(model), processor


def _mistral3() -> tuple[Any, Any]:
    tf = _transformers()

    names = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    tokenizer = byte_tokenizer(names, image="[IMG]")
    config = tf.Mistral3Config(
        vision_config=tf.PixtralVisionConfig(**_ENCODER, image_size=112, patch_size=14, head_dim=16),
        text_config=tf.MistralConfig(**_DECODER),
        image_token_id=tokenizer.image_token_id,
        spatial_merge_size=2,
        vision_feature_layer=-1,
    )
    images = tf.PixtralImageProcessor(patch_size=28, size={"longest_edge": 112})
    processor = _processor("PixtralProcessor", images, tokenizer, None, patch_size=14, spatial_merge_size=2, **names)
    return tf.Mistral3ForConditionalGeneration(config), processor


def random_idefics2() -> tuple[Any, Any]:
    """Build a model like Idefics2, whose processor writes a space between a picture and a word, and its processor."""
    tf = _transformers()

    fake = "<fake_token_around_image>"
    names = {"image_token": "<image>", "fake_image_token": fake, "image_boundary_token": fake}
    tokenizer = byte_tokenizer({**names, "end_of_utterance_token": "<end_of_utterance>"}, image="<image>")
    sampled = {"resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 4, "resampler_head_dim": 16}
    config = tf.Idefics2Config(
        vision_config={**_ENCODER, "image_size": 56, "patch_size": 14},
        text_config={"model_type": "mistral", **_DECODER, "sliding_window": None},
        perceiver_config={"hidden_size": 64, "num_key_value_heads": 2, **sampled},
        image_token_id=tokenizer.image_token_id,
    )
    images = tf.Idefics2ImageProcessor(size={"shortest_edge": 28, "longest_edge": 56}, do_image_splitting=False)
    processor = _processor("Idefics2Processor", images, tokenizer, image_seq_len=4)
    return _random(tf.Idefics2ForConditionalGeneration(config)), processor


def _llama4() -> tuple[Any, Any]:
    tf = _transformers()

    names = {"image_token": "<|image|>", "patch_token": "<|patch|>"}
    names |= {"start_of_image_token": "<|image_start|>", "end_of_image_token": "<|image_end|>"}
    tiles = ("<|tile_x_separator|>", "<|tile_y_separator|>")
    tokenizer = byte_tokenizer(names, *tiles, image="<|image|>")
    encoder = {**_ENCODER, "intermediate_size": 128, "image_size": 56, "patch_size": 14}
    config = tf.Llama4Config(
        vision_config={**encoder, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
        text_config={**_DECODER, "intermediate_size_mlp": 96, "num_local_experts": 4, "pad_token_id": END + 1},
        image_token_index=tokenizer.patch_token_id,
        boi_token_index=tokenizer.start_of_image_token_id,
        eoi_token_index=tokenizer.end_of_image_token_id,
    )
    images = tf.Llama4ImageProcessor(size={"height": 56, "width": 56}, max_patches=2)
    processor = _processor("Llama4Processor", images, tokenizer, patch_size=14, pixel_shuffle_ratio=0.5)
    return tf.Llama4ForConditionalGeneration(config), processor


_FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_5": _qwen3_5,
    "smolvlm": _smolvlm,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "mistral3": _mistral3,
    "llama4": _llama4,
}
_NEEDS = {"smolvlm": ("num2words", "torchvision"), "mistral3": ("torchvision",), "llama4": ("torchvision",)}
