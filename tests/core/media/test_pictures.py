from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import transformers

import graftlm as gl
from graftlm.core.execution import vision
from graftlm.core.execution.vision import _flat
from graftlm.core.text.processor import TextProcessor
from graftlm.testing.random_vision import (
    random_gemma4_unified,
    random_idefics2,
    random_picture,
    random_vision_model,
    save_vision_model,
)
from tests.vision import question, reference, written

CAT, DOG = random_picture(0), random_picture(1, 60, 90)
QUESTIONS = [
    question("What is it?", CAT),
    question("And its colour?", CAT),
    question("What is it?", DOG),
    question("Compare them", CAT, DOG),
    question("Compare them", DOG, CAT),
    question("No picture"),
]


def answers(runtime: gl.Runtime, prompts: list[Any]) -> list[tuple[list[int], int]]:
    done = runtime.generate(prompts, max_tokens=8, temperature=0)
    return [(written(one.token_ids), one.usage.prompt_tokens) for one in done]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5", "llava_onevision", "gemma4"])
def test_answers_are_those_of_transformers(family: str) -> None:
    model, processor = random_vision_model(family)
    expected = [reference(model, processor, one) for one in QUESTIONS]
    with gl.Runtime(model, tokenizer=processor, device="cpu") as runtime:
        assert answers(runtime, QUESTIONS) == expected
        assert runtime.stats().execution.startswith("paged")
        assert [answers(runtime, [one])[0] for one in QUESTIONS] == expected  # warm
    with gl.Runtime(model, tokenizer=processor, device="cpu", max_step_tokens=7) as runtime:
        assert [answers(runtime, [one])[0] for one in QUESTIONS] == expected


def test_a_picture_whose_text_depends_on_the_text_after_it() -> None:
    model, processor = random_idefics2()
    expected = [reference(model, processor, one) for one in QUESTIONS]
    with gl.Runtime(model, tokenizer=processor, device="cpu") as runtime:
        assert answers(runtime, QUESTIONS) == expected
        assert answers(runtime, QUESTIONS) == expected


class Numbered(transformers.LlavaProcessor):
    """A processor that numbers the pictures of a prompt, as that of MiniCPM-V does."""

    def __call__(self, images: Any = None, text: Any = None, **options: Any) -> Any:
        first, *others = text[0].split("<image>")
        numbered = "".join(f"({i})<image>{other}" for i, other in enumerate(others))
        return super().__call__(images, [first + numbered], **options)


def test_pictures_that_the_processor_numbers() -> None:
    model, processor = random_vision_model("llava")
    processor.__class__ = Numbered
    expected = [reference(model, processor, one) for one in QUESTIONS]
    with gl.Runtime(model, tokenizer=processor, device="cpu") as runtime:
        assert answers(runtime, QUESTIONS) == expected
        media: Any = runtime.tokenizer.media
        assert media.hf.least_expanded == 2


def test_a_folder_loads_by_its_name(tmp_path: Path) -> None:
    folder = save_vision_model("qwen2_5_vl", tmp_path / "model")
    model, processor = random_vision_model("qwen2_5_vl")
    CAT.save(tmp_path / "cat.png")
    with gl.Runtime(folder, device="cpu") as runtime:
        expected = reference(model, processor, question("What is it?", CAT))
        assert answers(runtime, [question("What is it?", str(tmp_path / "cat.png"))]) == [expected]


def test_pictures_of_one_size_and_text_never_mix() -> None:
    model, processor = random_vision_model("qwen3_vl")
    pictures = [random_picture(seed, 60, 60) for seed in range(10, 16)]
    prompts = [question("What?", one) for one in pictures * 4]
    expected = [reference(model, processor, question("What?", one)) for one in pictures] * 4
    assert len({tuple(ids) for ids, _ in expected}) == len(pictures)
    with gl.Runtime(model, tokenizer=processor, device="cpu") as runtime:
        assert answers(runtime, prompts) == expected
        stats = runtime.stats()
        assert stats.images == 24 and stats.images_encoded == len(pictures) and stats.no_images == ""
        assert stats.image_tokens == 24 * 4


@pytest.mark.parametrize("max_step_tokens", [5, 512])
def test_a_small_pool_retracts_requests_with_pictures(max_step_tokens: int) -> None:
    model, processor = random_vision_model("gemma3")
    pictures = [random_picture(seed, 60, 60) for seed in range(4)]
    prompts = [question("What is it?"[: 3 + i], pictures[i % 4], pictures[i % 3]) for i in range(6)]
    options: dict[str, Any] = {"tokenizer": processor, "device": "cpu", "max_step_tokens": max_step_tokens}
    found = []
    for pool in (4096, 300):
        with gl.Runtime(model, cache=gl.CacheConfig(max_tokens=pool), **options) as runtime:
            done = runtime.generate(prompts, max_tokens=150, temperature=0)
            found.append([(one.token_ids, one.usage.prompt_tokens) for one in done])
            assert (runtime.stats().retracted > 0) is (pool < 4096)
    assert found[0] == found[1] and {len(ids) for ids, _ in found[0]} == {150}


def sized(text: str, picture: Any, **options: Any) -> list[dict[str, Any]]:
    return [
        {
            "role": "user",
            "content": [
                {"type": "image", "image": picture, "mm_processor_kwargs": options},
                {"type": "text", "text": text},
            ],
        }
    ]


@pytest.mark.parametrize(
    ("family", "given", "own"),
    [
        ("qwen2_5_vl", {"max_pixels": 6000}, {"size": {"longest_edge": 6000, "shortest_edge": 3136}}),
        ("idefics3", {"do_image_splitting": False}, {"do_image_splitting": False}),
    ],
)
def test_the_size_of_a_picture_is_part_of_its_identity(family: str, given: dict[str, Any], own: dict[str, Any]) -> None:
    model, processor = random_vision_model(family)
    picture = random_picture(0, 140, 140)
    large = reference(model, processor, question("What?", picture))
    small = reference(model, processor, question("What?", picture), images_kwargs=own)
    assert small[1] < large[1]
    with gl.Runtime(model, tokenizer=processor, device="cpu") as runtime:
        prompts = [question("What?", picture), sized("What?", picture, **given)]
        assert answers(runtime, [*prompts, *prompts]) == [large, small] * 2
        assert runtime.stats().images_encoded == 2
    with gl.Runtime(model, tokenizer=processor, device="cpu", mm_processor_kwargs=given) as runtime:
        assert answers(runtime, [question("What?", picture), sized("What?", picture)]) == [small] * 2
        assert runtime.stats().images_encoded == 1
    with pytest.raises(gl.ConfigError, match="mm_processor_kwargs.longest is no option"):
        gl.Runtime(model, tokenizer=processor, device="cpu", mm_processor_kwargs={"longest": 1}).load()


@pytest.fixture(scope="module")
def runtime() -> Iterator[gl.Runtime]:
    model, processor = random_vision_model("qwen2_5_vl")
    with gl.Runtime(model, tokenizer=processor, device="cpu", seed=0) as runtime:
        yield runtime


def test_every_kind_of_call_takes_pictures(runtime: gl.Runtime) -> None:
    prompt = question("Is it?", CAT)
    greedy = runtime.generate(prompt, max_tokens=6, temperature=0)
    several = runtime.generate(prompt, max_tokens=6, temperature=0, n=3)
    assert [one.token_ids for one in several.completions] == [greedy.token_ids] * 3
    assert "".join(one.text for one in runtime.stream(prompt, max_tokens=6, temperature=0)) == greedy.text
    assert runtime.generate(prompt, regex="[a-c]{3}x").text[-1] == "x"
    logprobs = {text: sum(runtime.score(prompt, text).logprobs) for text in ("yes", "no", "maybe")}
    chosen = runtime.select(prompt, list(logprobs), method="exact")
    assert chosen.logprobs == pytest.approx(list(logprobs.values()), abs=1e-4)
    assert runtime.generate(prompt, choices=list(logprobs), temperature=0).text in logprobs
    assert runtime.generate(prompt, max_tokens=6, temperature=0, repetition_penalty=1.3).usage.cached_tokens > 0
    report = runtime.explain(runtime.generate(question("Is it?", DOG), max_tokens=1))
    assert report.prompt_text == "<picture>Is it?" and "2 of" in str(report)
    assert report.cached_text.startswith(report.prompt_text)  # and the answer after it


@pytest.mark.parametrize("begun", [1, 2, 3, 9])
def test_questions_wait_for_a_picture_of_which_a_step_has_begun_a_few_tokens(begun: int) -> None:
    """Each picture is computed by one question: the others used to compute one again of which 1 to 3 tokens were."""
    model, processor = random_vision_model("qwen2_5_vl")
    large = random_picture(5, 140, 140)
    texts = "What is it?" + "?" * 24, "What is it?", "And now it?"  # the shortest prompts start first
    questions = [question(texts[0]), *(question(text, large) for text in texts[1:])]
    with gl.Runtime(model, tokenizer=processor) as runtime:
        first, second = (TextProcessor(runtime.tokenizer).encode(one) for one in questions[:2])
        (span,) = second.spans
        assert len(second) - 3 <= len(first) < len(second)
        step = len(first) + span.start + begun
    with gl.Runtime(model, tokenizer=processor, max_step_tokens=step) as runtime:
        done = runtime.generate(questions, max_tokens=1, temperature=0)
    assert sorted(one.usage.cached_tokens >= span.stop for one in done) == [False, False, True]


def test_a_program_forks_behind_a_picture(runtime: gl.Runtime) -> None:
    asked = runtime.generate(question("What is it?", CAT), max_tokens=6, temperature=0)

    @gl.program
    def describe(s: Any, picture: Any) -> None:
        s += gl.user(gl.image(picture) + "What is it?") + gl.assistant(gl.gen("what", max_tokens=6, temperature=0))
        for branch, other in zip(s.fork(2), (CAT, DOG), strict=True):
            branch += gl.user(gl.image(other) + "The same?")
            branch += gl.assistant(gl.select("same", ["yes", "no"]))

    state = describe.run(picture=CAT, runtime=runtime)
    assert state["what"] == asked.text and state.usage.cached_tokens > 3 * (asked.usage.prompt_tokens - 1)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (question("see <|image_pad|>", CAT), "message 0 writes '<|image_pad|>'"),
        (question("x", *[CAT] * 65), "65 images; the limit of a request is 64"),
        (question("x", b"GIF89a"), "broken GIF"),
        (
            question("x", CAT.resize((1000, 2))),
            "message 0: the model's processor refuses a picture of 1,000 x 2 pixels",
        ),
        (sized("x", CAT, min_pixel=1), "mm_processor_kwargs.min_pixel is no option of this model's pictures"),
        (
            sized("x", CAT, max_pixels=10**8),
            "make size.longest_edge 100,000,000 in a request, and the runtime's is 19,600",
        ),
        (sized("x", CAT, max_pixels=True), "make max_pixels True; give a whole number"),
        (sized("x", CAT, max_pixels=10), "make the smallest size 3,136 and the largest 10; give both"),
        (sized("x", CAT, size={"height": 9}), "size is {'height': 9}; give an object of"),
        pytest.param(
            [{"role": "user", "content": [{"type": "video", "video": [CAT, CAT]}]}],
            "reads no videos here",
            marks=pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision reads videos"),
        ),
        ([1, -2, 3], "token id -2"),
    ],
)
def test_a_bad_picture_fails_alone(runtime: gl.Runtime, prompt: Any, message: str) -> None:
    good, bad = runtime.submit_many([gl.Request(question("What is it?", CAT)), gl.Request(prompt)])
    with pytest.raises(gl.ConfigError, match=re.escape(message)):
        bad.result()
    assert good.result().usage.prompt_tokens > 0


def test_a_family_whose_pictures_differ_refuses_them_and_answers_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = random_vision_model("llava_onevision")
    monkeypatch.setattr(vision, "_flat", lambda pooled: 2 * _flat(pooled))
    expected = reference(model, processor, question("No picture"))
    with gl.Runtime(model, tokenizer=processor, device="cpu") as runtime:
        with pytest.raises(gl.ConfigError, match="a step with pictures differs from the model's own forward by"):
            runtime.generate(question("What is it?", CAT))
        assert answers(runtime, [question("No picture")]) == [expected]
        assert runtime.stats().execution.startswith("paged") and "differs" in runtime.stats().no_images


def test_pictures_longer_than_the_window_see_both_ways_within_it_in_sliding_layers_alone() -> None:
    pytest.importorskip("torchvision")
    if not hasattr(transformers, "Gemma4UnifiedConfig"):
        pytest.skip("needs transformers 5.24")
    model, processor = random_gemma4_unified()
    model.generation_config.cache_implementation = "static"
    a, b = random_picture(0), random_picture(1, 120, 60)
    prompts = [question("What?", a), question("Both?", a, b), question("No picture")]
    expected = [reference(model, processor, prompt) for prompt in prompts]
    assert expected[0][1] > 2 * model.config.text_config.sliding_window
    with gl.Runtime(model, tokenizer=processor, device="cpu") as runtime:
        assert answers(runtime, prompts) == expected == answers(runtime, prompts)


def test_pictures_of_a_step_are_encoded_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = random_vision_model("qwen2_5_vl")
    pictures = [random_picture(seed, 60 + 30 * (seed % 2), 60) for seed in range(3)]
    expected = [reference(model, processor, question("What?", one)) for one in pictures]
    counts: list[int] = []
    encode = vision.Vision.encode
    with gl.Runtime(model, tokenizer=processor, device="cpu").load() as runtime:
        monkeypatch.setattr(vision.Vision, "encode", lambda *given: counts.append(len(given[1])) or encode(*given))
        assert answers(runtime, [question("What?", one) for one in pictures]) == expected
    assert counts == [3]


def test_an_encoder_whose_batches_differ_encodes_pictures_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = random_vision_model("llava_onevision")
    get = type(model.model).get_image_features

    @functools.wraps(get)
    def neighbours(self: Any, pixel_values: Any, *given: Any, **options: Any) -> Any:
        return get(self, pixel_values + 0.1 * (len(pixel_values) - 1), *given, **options)

    monkeypatch.setattr(type(model.model), "get_image_features", neighbours)
    with gl.Runtime(model, tokenizer=processor, device="cpu").load() as runtime:
        answers(runtime, [question("What?", CAT), question("What?", DOG)])
        assert not runtime._thread.engine.runner.loaded.vision.batches
        assert runtime.stats().no_images == "" and runtime.stats().images_encoded == 2


def test_kept_features_stay_within_their_bound() -> None:
    model, processor = random_vision_model("llava_onevision")
    pictures = [random_picture(seed) for seed in range(5)]
    with gl.Runtime(model, tokenizer=processor, device="cpu", media_cache_bytes=30_000) as runtime:
        answers(runtime, [question("What?", one) for one in pictures])
        assert runtime.stats().images_encoded == 5 and 0 < runtime.stats().image_bytes <= 30_000
