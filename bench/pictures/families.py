"""python -m bench images [FAMILY ...]: pictures and videos in every family of vision models, beside transformers.

Random models in float32 answer the same questions through transformers' `generate` and through a runtime: one by one
(two pictures in both orders among them), in a batch, warm, over three turns, in steps of 1, 7 and 64 tokens, with a
picture whose keys and values are half evicted, from a small pool, and about videos that texts and pictures follow. The
last columns are 24 questions about 3 pictures at once: cached prompt tokens relative to the same questions one by one,
which is the best possible, encoder runs, and the time of a further question about a known picture beside the first.
"""

from __future__ import annotations

import argparse
import random
import time
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import torch

import graftlm as gl
from graftlm.core.text.processor import TextProcessor
from graftlm.testing.random_vision import END, random_picture, random_vision_model, vision_families

Messages = list[dict[str, Any]]
Answer = tuple[list[int], int]

COLUMNS = ("alone", "batch", "warm", "turns", "steps 1", "steps 7", "steps 64", "evicted", "mixed", "video")

_POOL_TOKENS = 1 << 15
"""Tokens of the cache: families that are compared at once share a card."""

_LARGE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"), {"max_pixels": 1024 * 768}),
    **dict.fromkeys(("idefics3", "smolvlm", "mistral3"), {"size": {"longest_edge": 1024}}),
    "internvl": {"max_patches": 12},
}
"""Options for a picture of 1,024 x 768 as real models read it; the others' encoders have one size, of a few tokens."""

_EVICTIONS = 6
"""Evictions of as many lengths at most, some of which end within the picture."""


def main(arguments: Sequence[str]) -> int:
    """Print a row for each family; return 1 if any answer differs from that of transformers."""
    parser = argparse.ArgumentParser("python -m bench images", description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", help="all that can be built here, if none is named")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    print(f"{'':16}" + "".join(f"{name:>10}" for name in (*COLUMNS, "cached", "encoded", "further")))
    failed = False
    for family in given.families or vision_families():
        try:
            cells = _Family(family, given.device).row()
        except Exception as error:
            traceback.print_exc(limit=3)
            cells = [f"{type(error).__name__}: {str(error)[:160]}"]
        failed |= any("/" in cell and len(set(cell.split("/"))) > 1 for cell in cells) or len(cells) < len(COLUMNS)
        print(f"{family:16}" + "".join(f"{cell:>10}" for cell in cells), flush=True)
    return int(failed)


def ask(text: str, *pictures: Any, kind: str = "image") -> Messages:
    """Return one user message with pictures or videos before its text."""
    return [{"role": "user", "content": [*({"type": kind, kind: one} for one in pictures), _text(text)]}]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


class _Family:
    def __init__(self, family: str, device: str) -> None:
        model, self.processor = random_vision_model(family)
        self.model, self.device, self.family = model.to(device), device, family
        self.a, self.b = random_picture(0), random_picture(1, 60, 90)

    def runtime(self, **options: Any) -> gl.Runtime:
        options = {"cache": gl.CacheConfig(max_tokens=_POOL_TOKENS)} | options
        return gl.Runtime(self.model, tokenizer=self.processor, device=self.device, seed=0, **options)

    def row(self) -> list[str]:
        """Return a cell for each column: equal answers of all answers."""
        prompts, turns = self.prompts(), self.turns()
        expected = [self.own(prompt) for prompt in prompts]
        cells: list[str] = []
        with self.runtime() as runtime:
            cells.append(_same([_answer(runtime, [p])[0] for p in prompts], expected))
            runtime.clear_cache()
            cells.append(_same(_answer(runtime, prompts), expected))
            cells.append(_same(_answer(runtime, prompts), expected))
            cells.append(_same([_answer(runtime, [prompt])[0] for prompt, _ in turns], [answer for _, answer in turns]))
            video = self.video()
            videos = [_answer(runtime, [prompt], 6)[0] for prompt, _ in video]
        for step in (1, 7, 64):
            with self.runtime(max_step_tokens=step) as runtime:
                cells.append(_same([_answer(runtime, [p])[0] for p in prompts[1:5]], expected[1:5]))
        cells.append(self.evicted())
        mixed, expected_mixed = self.mixed()
        small = gl.CacheConfig(max_tokens=512)
        with self.runtime(max_model_len=512, max_batch=4, max_step_tokens=48, cache=small) as runtime:
            cells.append(_same(_answer(runtime, mixed, 5), expected_mixed))
        cells.append(_same(videos, [answer for _, answer in video]) if video else "-")
        return [*cells, *self.reuse()]

    def prompts(self) -> list[Messages]:
        a, b = self.a, self.b
        prompts = [ask("What is it?", a), ask("And its colour?", a), ask("What is it?", b), ask("Compare", a, b)]
        return [*prompts, ask("Compare", b, a), ask("Twice", a, a), ask("No picture")]

    def evicted(self) -> str:
        """Ask again about a picture after texts of several lengths have evicted the end of its keys and values."""
        picture = random_picture(30, 360, 120)  # three tiles of InternVL
        questions = [ask(text, picture) for text in ("What is it?", "And now?")]
        expected = [self.own(question) for question in questions]
        size = max(count for _, count in expected) + 64
        found, within = [], 0
        with self.runtime(cache=gl.CacheConfig(max_tokens=size), max_model_len=size) as runtime:
            spans = TextProcessor(runtime.tokenizer).encode(questions[0]).spans
            first, last = spans[0].start, spans[-1].stop
            for length in range(size - last, size - first, -(-(last - first) // _EVICTIONS)):
                runtime.clear_cache()
                found += _answer(runtime, [questions[0]])
                runtime.generate([1] * length, max_tokens=1, temperature=0)
                done = runtime.generate(questions[1], max_tokens=8, temperature=0)
                found.append((_before_end(done.token_ids), done.usage.prompt_tokens))
                within += first < done.usage.cached_tokens < last
            if "state" in runtime.stats().execution:
                within = 1  # a cached prefix ends at a checkpoint
        return _same(found, expected * (len(found) // 2)) + ("" if within else " (never within)")

    def own(self, messages: Messages, max_tokens: int = 8) -> Answer:
        """Return the tokens that transformers generates, and the number of the prompt's tokens."""
        parts = [part for m in messages if not isinstance(m["content"], str) for part in m["content"]]
        pictures = [part["image"] for part in parts if part["type"] == "image"]
        videos = [part["video"] for part in parts if part["type"] == "video"]
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        nested = type(self.processor).__name__ in ("Idefics3Processor", "SmolVLMProcessor", "LlavaOnevisionProcessor")
        given: dict[str, Any] = {"text": [text], "return_tensors": "pt"}
        if pictures:
            given["images"] = [pictures] if nested else pictures
        if videos:
            given |= {"videos": videos, "videos_kwargs": {"do_sample_frames": False, "return_metadata": True}}
            given["videos_kwargs"]["video_metadata"] = [_metadata(video) for video in videos]
        batch = self.processor(**given)
        batch.pop("video_metadata", None)
        if hasattr(getattr(self.model, "model", None), "rope_deltas"):
            self.model.model.rope_deltas = None
        batch = batch.to(self.device, dtype=self.model.dtype)  # Llama 4's processor makes bfloat16
        num_prompt = batch["input_ids"].shape[1]
        with torch.no_grad():
            ids = self.model.generate(**batch, max_new_tokens=max_tokens, do_sample=False)[0, num_prompt:].tolist()
        return _before_end(ids), num_prompt

    def turns(self) -> list[tuple[Messages, Answer]]:
        """Return three turns of a chat with their answers; the third has a second picture."""
        messages, found = ask("What is it?", self.a), []
        for turn in range(3):
            answer = self.own(messages)
            found.append((list(messages), answer))
            said = "".join(chr(65 + token % 26) for token in answer[0])
            content = [*([{"type": "image", "image": self.b}] if turn == 1 else []), _text(f"And {turn}?")]
            messages = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": content}]
        return found

    def mixed(self) -> tuple[list[Messages], list[Answer]]:
        """Return random questions about pictures of one size with equal texts, among them some without a picture."""
        rng = random.Random(0)
        pictures = [random_picture(seed, 60, 60) for seed in range(5)]
        prompts = [
            ask(rng.choice(["What?", "Tell"]), *(rng.choice(pictures) for _ in range(rng.randrange(3))))
            for _ in range(24)
        ]
        return prompts, [self.own(prompt, 5) for prompt in prompts]

    def video(self) -> list[tuple[Messages, Answer]]:
        """Return questions about a video, then with text and a picture; none if the family reads none here."""
        if getattr(self.processor, "video_processor", None) is None or self.family == "smolvlm":
            return []
        import numpy as np

        frames = np.stack([np.asarray(random_picture(100 + i, 84, 56)) for i in range(8)])
        asked = ask("What happens?", frames, kind="video")
        prompts = [asked, ask("And then?", frames, kind="video")]
        mores = [_text("What else?")], [{"type": "image", "image": self.a}, _text("Is this in it?")]
        answered = [*asked, {"role": "assistant", "content": "A"}]
        prompts += [[*answered, {"role": "user", "content": more}] for more in mores]
        return [(prompt, self.own(prompt, 6)) for prompt in prompts]

    def reuse(self) -> list[str]:
        pictures = [random_picture(seed, 320, 240) for seed in range(10, 13)]
        with self.runtime() as runtime:
            _answer(runtime, [ask("Warm up", self.a)])
            runtime.reset_stats()
            questions = [ask(f"{i}?", pictures[i % 3]) for i in range(24)]
            runtime.generate(questions, max_tokens=4, temperature=0)
            stats = runtime.stats()
            encoded = stats.images_encoded - 1
            runtime.clear_cache()
            runtime.reset_stats()
            for question in questions:
                runtime.generate(question, max_tokens=4, temperature=0)
            cached = stats.cached_tokens / max(runtime.stats().cached_tokens, 1)
        return [f"{cached:.0%}", str(encoded), self.further()]

    def further(self) -> str:
        """Return the time of further questions about a large picture beside the first."""
        seconds, new = [], random_picture(20, 1024, 768)
        with self.runtime(mm_processor_kwargs=_LARGE.get(self.family)) as runtime:
            _answer(runtime, [ask("Warm up", random_picture(21, 1000, 760))])
            for i in range(6):
                started = time.perf_counter()
                done = runtime.generate(ask(f"What {i}?", new), max_tokens=1, temperature=0)
                seconds.append(time.perf_counter() - started)
        return f"{min(seconds[1:]) / seconds[0]:.3f}x ({done.usage.prompt_tokens} tokens)"


def _metadata(video: Any) -> Any:
    from transformers.video_utils import VideoMetadata

    count, height, width, _ = video.shape
    return VideoMetadata(
        total_num_frames=count,
        fps=24.0,
        width=width,
        height=height,
        duration=count / 24.0,
        frames_indices=list(range(count)),
    )


def _answer(runtime: gl.Runtime, prompts: list[Messages], max_tokens: int = 8) -> list[Answer]:
    done = runtime.generate(prompts, max_tokens=max_tokens, temperature=0)
    return [(_before_end(one.token_ids), one.usage.prompt_tokens) for one in done]


def _before_end(ids: Sequence[int]) -> list[int]:
    found = list(ids)
    return found[: found.index(END)] if END in found else found


def _same(found: list[Answer], expected: list[Answer]) -> str:
    return f"{sum(one == other for one, other in zip(found, expected, strict=True))}/{len(expected)}"
