"""Pictures on a GPU: encoders on packed attention and fused kernels, in 12 bits, strict, and within their memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graftlm.core.chat.messages import ImagePart
from graftlm.core.config import CacheConfig
from graftlm.core.execution.packed_attention import packed_attention
from graftlm.core.fusion.gpu_encoders import AlignedMlp
from graftlm.core.runtime import Runtime
from graftlm.testing import random_vision
from graftlm.testing.random_vision import random_picture, random_vision_model
from tests.gpu.device import relative, replace_forward
from tests.vision import question, reference, written

pytestmark = pytest.mark.gpu


def on_gpu(model: Any, processor: Any, **options: Any) -> Runtime:
    options = {"cache": CacheConfig(max_tokens=4096), "max_batch": 16, "device": "cuda", **options}
    return Runtime(model, tokenizer=processor, **options)


def vision_of(runtime: Runtime) -> Any:
    engine: Any = runtime.load()._thread.engine
    return engine.spec.vision


@pytest.mark.parametrize("head_dim", [64, 72, 80, 128])
def test_packed_attention_of_half_precision(head_dim: int) -> None:
    bounds = [0, 64, 128, 1000, 1004]
    offsets = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    qkv = torch.randn(bounds[-1], 3, 4, head_dim, device="cuda", dtype=torch.bfloat16)  # as encoders lay it out
    q, k, v = (x.transpose(0, 1)[None] for x in qkv.permute(1, 0, 2, 3))
    found, _ = packed_attention(torch.nn.Identity(), q, k, v, scaling=head_dim**-0.5, cu_seq_lens_q=offsets)
    for start, stop in zip(bounds, bounds[1:], strict=False):
        own = (x[:, :, start:stop].float() for x in (q, k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(*own).transpose(1, 2)
        assert relative(found[:, start:stop], expected) < 1e-2


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_embeddings_are_near_those_of_float32(family: str) -> None:
    model, processor = random_vision_model(family)
    exact, _ = random_vision_model(family)
    exact.load_state_dict({name: x.bfloat16().float() for name, x in model.state_dict().items()})
    with on_gpu(model.bfloat16(), processor) as runtime:
        vision = vision_of(runtime)
        assert vision is not None and vision.batches
        media: Any = runtime.tokenizer.media
        items = [media.item(ImagePart(random_picture(seed, width))) for seed, width in enumerate((80, 80, 120))]
        with torch.inference_mode():
            found = vision.features(items)
            for item, of_item in zip(items, found, strict=True):
                pixels = item.tensors()["pixel_values"]
                output = exact.model.get_image_features(pixels, item.inputs["image_grid_thw"], return_dict=True)
                assert relative(of_item.layers[0].cpu(), torch.cat(list(output.pooler_output))) < 3e-2


def test_an_odd_hidden_layer_of_an_encoder_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    build = random_vision._qwen
    odd = lambda kind, patch, encoder, *rest: build(kind, patch, {**encoder, "intermediate_size": 60}, *rest)  # noqa: E731
    monkeypatch.setattr(random_vision, "_qwen", odd)
    model, processor = random_vision_model("qwen2_5_vl")
    before = {name: x.bfloat16().clone() for name, x in model.state_dict().items()}
    with on_gpu(model.bfloat16(), processor) as runtime:
        runtime.load()
        assert sum(isinstance(vars(m).get("forward"), AlignedMlp) for m in model.modules()) == 2
    assert all(torch.equal(before[name], x.cpu()) for name, x in model.state_dict().items())


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "internvl", "llava_onevision"])
def test_tokens_of_float32(family: str) -> None:
    model, processor = random_vision_model(family)
    model = model.to("cuda")
    a, b = random_picture(0), random_picture(1)
    prompts = [question("What is it?", a), question("What is it?", b), question("Compare", a, b), question("And?", a)]
    expected = [on_device(model, processor, prompt) for prompt in prompts]
    with on_gpu(model, processor) as runtime:
        for _ in range(2):
            done = runtime.generate(prompts, max_tokens=8, temperature=0)
            assert [written(one.token_ids) for one in done] == expected


def on_device(model: Any, processor: Any, prompt: list[dict[str, Any]]) -> list[int]:
    """The tokens that transformers generates on the GPU."""

    class OnDevice:
        def __getattr__(self, name: str) -> Any:
            return getattr(processor, name)

        def __call__(self, **given: Any) -> Any:
            return processor(**given).to("cuda")

    OnDevice.__name__ = type(processor).__name__
    ids, _ = reference(model, OnDevice(), prompt)
    return ids


@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_pictures_in_12_bits_give_the_logits_of_16(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    monkeypatch.setitem(random_vision._DECODER, "head_dim", 128)
    monkeypatch.setitem(random_vision._ROPE, "mrope_section", [24, 20, 20])
    a, b = random_picture(0), random_picture(1)
    prompts = [question("What is it?", a), question("And now?", a), question("What is it?", b)]
    logits: dict[str, list[torch.Tensor]] = {"auto": [], "model": []}
    forms = []
    for kv, found in logits.items():

        def record(runner: Any, plan: Any, found: Any = found) -> torch.Tensor:
            out: torch.Tensor = type(runner).forward(runner, plan)
            found.append(out.float().cpu())
            return out

        model, processor = random_vision_model(family)
        cache = CacheConfig(max_tokens=4096, dtype=kv)  # type: ignore[arg-type]
        with on_gpu(model.bfloat16(), processor, cache=cache) as runtime:
            replace_forward(runtime, record)
            for prompt in prompts:
                runtime.generate(prompt, max_tokens=1, temperature=0)
            forms.append(runtime.stats().kv)
            assert runtime.stats().images_encoded == 2
    assert "12 bits" in forms[0] and "12 bits" not in forms[1]
    assert all(relative(x, y) < 2e-2 for x, y in zip(*logits.values(), strict=True))


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "qwen2_5_vl"])
def test_a_strict_answer_does_not_depend_on_the_batch(family: str) -> None:
    if family not in random_vision.vision_families():
        pytest.skip("needs a newer transformers")
    model, processor = random_vision_model(family)
    prompts = [question(f"What is {i}?", random_picture(i % 3)) for i in range(9)] + [question("No picture")]
    with on_gpu(model.bfloat16(), processor, strict=True) as runtime:

        def answers(asked: Any) -> list[list[int]]:
            runtime.clear_cache()
            return [one.token_ids for one in runtime.generate(asked, max_tokens=24, temperature=0, ignore_eos=True)]

        alone = [answers([prompt])[0] for prompt in prompts]
        assert answers(prompts) == alone
        assert answers(prompts[::-1]) == alone[::-1]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl", "llava"])
def test_the_largest_picture_fits_in_the_room_that_is_left(family: str) -> None:
    model, processor = random_vision_model(family)
    with on_gpu(model.bfloat16(), processor) as runtime:
        vision = vision_of(runtime)
        media: Any = runtime.tokenizer.media
        largest = media.largest()
        assert vision.work_bytes > sum(x.nbytes for x in largest.inputs.values())
        many = [largest] * max(1, vision.most_numbers // vision.size_of(largest))
        for batch in ([largest], many if vision.batches else [largest]):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with torch.inference_mode():
                vision.encode(batch)
            torch.cuda.synchronize()
            assert torch.cuda.max_memory_allocated() - before <= vision.reserved_bytes
