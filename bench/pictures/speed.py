"""python -m bench.pictures.speed ENGINE FOLDER: questions about pictures on one GPU, by graftlm or vllm; or `text`.

    python -m bench.pictures.model FOLDER     # the shape of Qwen2.5-VL-7B, without weights

Each engine fills in random weights and answers greedily with 64 tokens. Pictures are JPEGs of 1,024 x 768, new ones for
each round; a question has 32 tokens. The fastest of three rounds counts. Sections:

    cold       64 questions about 8 new pictures, all at once
    warm       the same again
    different  64 new pictures, one question each
    chats      8 chats of 4 turns about one new picture each
    new, known, text   milliseconds until one token alone: for a new picture, for the same again, without one

`text` compares texts alone on the vision model with the same texts on its decoder as a text model.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import statistics
import string
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

Ids = list[int]
ROUNDS = 3


class Sizes(NamedTuple):
    """The sizes of the sections."""

    questions: int = 64
    pictures: int = 8
    different: int = 64
    chats: int = 8
    turns: int = 4
    new: int = 64
    sides: tuple[int, int] = (1024, 768)


TINY = Sizes(6, 2, 3, 2, 2, 4, (80, 60))


class Asked(NamedTuple):
    """A question. history: ids of the tokens after the picture's turn, in later turns"""

    picture: bytes | None
    text: str
    history: Ids


class Engine(Protocol):
    """One engine under test."""

    def ask(self, asked: Sequence[Asked], max_tokens: int) -> list[tuple[Ids, int]]:
        """Answer all questions at once. -> ids and cached prompt tokens of each"""
        ...

    def report(self) -> dict[str, Any]: ...


def jpeg(seed: int, sides: tuple[int, int]) -> bytes:
    """Return a photograph-like picture: smooth noise."""
    import numpy as np
    from PIL import Image

    width, height = sides
    noise = np.random.default_rng(seed).integers(0, 256, (max(height // 16, 1), max(width // 16, 1), 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize(sides, Image.Resampling.BICUBIC).save(file, "JPEG", quality=85)
    return file.getvalue()


class GraftLM:
    def __init__(self, folder: str | None) -> None:
        import torch

        import graftlm as gl
        from bench.pictures.model import random_weights

        self.model, self.processor = random_weights(folder)
        self.open = lambda **more: gl.Runtime(self.model, tokenizer=self.processor, **more).load()
        options: dict[str, Any] = {"max_model_len": 16_384} if torch.cuda.is_available() else {}
        self.runtime = self.open(**options)

    def ask(self, asked: Sequence[Asked], max_tokens: int) -> list[tuple[Ids, int]]:
        import graftlm as gl

        prompts = [self._with_history(one) if one.history else _messages(one) for one in asked]
        params = gl.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        done = self.runtime.submit_many([gl.Request(prompt, params) for prompt in prompts])
        answers = [one.result() for one in done]
        return [(list(c.token_ids), c.usage.cached_tokens) for c in answers]

    def _with_history(self, asked: Asked) -> Any:
        from graftlm.core.chat.messages import ImagePart

        ids = [*turn(self.processor.tokenizer, asked, with_picture=True), *asked.history]
        return self.runtime.tokenizer.media.between(ids, [ImagePart(asked.picture)])

    def report(self) -> dict[str, Any]:
        stats = self.runtime.stats()
        return {"images_encoded": stats.images_encoded, "execution": stats.execution, "no_images": stats.no_images}


def _messages(asked: Asked) -> list[dict[str, Any]]:
    picture = [{"type": "image", "image": asked.picture}] if asked.picture is not None else []
    return [{"role": "user", "content": [*picture, {"type": "text", "text": asked.text}]}]


class VLLM:
    def __init__(self, folder: str | None) -> None:
        import vllm
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.pool = ThreadPoolExecutor(8)
        self.llm = vllm.LLM(
            model=str(folder),
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=16_384,
            max_num_seqs=256,
            gpu_memory_utilization=0.85,
            enable_prefix_caching=True,
            limit_mm_per_prompt={"image": 8, "video": 0},
            mm_processor_cache_gb=4,
        )

    def ask(self, asked: Sequence[Asked], max_tokens: int) -> list[tuple[Ids, int]]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        pictures = dict.fromkeys(one.picture for one in asked if one.picture is not None)
        decoded = dict(zip(pictures, self.pool.map(_decode, pictures), strict=True))
        prompts: list[dict[str, Any]] = []
        for one in asked:
            ids = [*turn(self.tokenizer, one, with_picture=one.picture is not None), *one.history]
            data = {"multi_modal_data": {"image": [decoded[one.picture]]}} if one.picture is not None else {}
            prompts.append({"prompt_token_ids": ids, **data})
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [(list(o.outputs[0].token_ids), o.num_cached_tokens or 0) for o in outputs]

    def report(self) -> dict[str, Any]:
        import vllm

        return {"version": vllm.__version__}


def _decode(picture: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(picture)).convert("RGB")


def turn(tokenizer: Any, asked: Asked, *, with_picture: bool) -> Ids:
    """Return the ids of the first turn with its header of the answer; the placeholder once."""
    picture = "<|vision_start|><|image_pad|><|vision_end|>" if with_picture else ""
    text = f"<|user|>{picture}{asked.text}<|end|><|assistant|>"
    found: Ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


class Rounds:
    """The sections, each with pictures and questions of its own."""

    def __init__(self, engine: Engine, tokenizer: Any, sizes: Sizes) -> None:
        self.engine, self.tokenizer, self.sizes = engine, tokenizer, sizes
        self.rng, self.seed = random.Random(0), 0

    def pictures(self, count: int) -> list[bytes]:
        """Return pictures that no section has had."""
        self.seed += count
        return [jpeg(self.seed - i, self.sizes.sides) for i in range(count)]

    def text(self) -> str:
        return "".join(self.rng.choices(string.ascii_lowercase, k=32))

    def timed(self, asked: Sequence[Asked]) -> tuple[float, float]:
        """Return requests a second, and the share of requests with cached tokens."""
        started = time.perf_counter()
        found = self.engine.ask(asked, self.sizes.new)
        seconds = time.perf_counter() - started
        assert all(len(ids) == self.sizes.new for ids, _ in found)
        return len(asked) / seconds, sum(cached > 32 for _, cached in found) / len(asked)

    def cold_and_warm(self) -> dict[str, float]:
        pictures = self.pictures(self.sizes.pictures)
        asked = [Asked(pictures[i % len(pictures)], self.text(), []) for i in range(self.sizes.questions)]
        cold, hits = self.timed(asked)
        return {"cold": cold, "cold hits": hits, "warm": self.timed(asked)[0]}

    def different(self) -> dict[str, float]:
        asked = [Asked(picture, self.text(), []) for picture in self.pictures(self.sizes.different)]
        return {"different": self.timed(asked)[0]}

    def chats(self) -> dict[str, float]:
        asked = [Asked(picture, self.text(), []) for picture in self.pictures(self.sizes.chats)]
        texts = [[self.text() for _ in range(self.sizes.turns)] for _ in asked]
        started = time.perf_counter()
        for number in range(self.sizes.turns):
            found = self.engine.ask(asked, self.sizes.new)
            for i, (ids, _) in enumerate(found):
                more = turn(self.tokenizer, Asked(None, texts[i][number], []), with_picture=False)
                history = [*asked[i].history, *ids, *more]
                asked[i] = asked[i]._replace(history=history)
        return {"chats": self.sizes.chats * self.sizes.turns / (time.perf_counter() - started)}

    def alone(self) -> dict[str, float]:
        (picture,) = self.pictures(1)
        cases = {"new ms": picture, "known ms": picture, "text ms": None}
        found = {}
        for name, one in cases.items():
            asked = Asked(one, self.text(), [])
            started = time.perf_counter()
            self.engine.ask([asked], 1)
            found[name] = (time.perf_counter() - started) * 1e3
        return found


def measure(engine: Engine, tokenizer: Any, sizes: Sizes) -> dict[str, float]:
    """Return the best figure of each section: requests a second, or milliseconds."""
    rounds = Rounds(engine, tokenizer, sizes)
    sections: list[Callable[[], dict[str, float]]] = [rounds.cold_and_warm, rounds.different, rounds.chats]
    best: dict[str, float] = {}
    for section in (*sections, rounds.alone):
        for _ in range(ROUNDS + 1):  # the first warms up
            for name, value in section().items():
                better = min if name.endswith("ms") else max
                best[name] = better(best.get(name, value), value)
        print(json.dumps({k: round(v, 2) for k, v in best.items()}), flush=True)
    return best


def texts_beside_a_text_model(folder: str | None) -> None:
    """Print the seconds of texts on the vision model, and relative to its text model; rounds take turns."""
    import torch

    import graftlm as gl
    from bench.pictures.model import random_weights, text_model

    model, processor = random_weights(folder)
    options: dict[str, Any] = {"max_model_len": 4096, "cache": gl.CacheConfig(max_tokens=65_536)}
    vision = gl.Runtime(model, tokenizer=processor, **options).load()
    text = gl.Runtime(text_model(model), tokenizer=processor.tokenizer, **options).load()
    rng = random.Random(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"texts on {device}: {vision.stats().execution}; text model: {text.stats().execution}", flush=True)
    for count, length, new in ((1, 512, 128), (64, 512, 64), (8, 4000, 1)) if folder else ((1, 20, 8), (4, 20, 4)):
        seconds: dict[str, list[float]] = {"vision": [], "text": []}
        for _ in range(7):
            prompts = [[rng.randrange(32, 120) for _ in range(length)] for _ in range(count)]
            for name, runtime in (("vision", vision), ("text", text)):
                runtime.clear_cache()
                started = time.perf_counter()
                runtime.generate(prompts, max_tokens=new, temperature=0, ignore_eos=True)
                seconds[name].append(time.perf_counter() - started)
        of_vision, of_text = (statistics.median(of[1:]) for of in seconds.values())
        print(
            f"{count} x {length} + {new}: {of_vision:.4f} s, {of_vision / of_text:.3f}x of the text model", flush=True
        )


def main() -> None:
    """Measure one engine, and write its figures as JSON beside the printed ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("graftlm", "vllm", "text"))
    parser.add_argument("folder", nargs="?", help="of the shape; a tiny one if left out")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.engine == "text":
        texts_beside_a_text_model(given.folder)
        return
    started = time.perf_counter()
    engine: Any = (GraftLM if given.engine == "graftlm" else VLLM)(given.folder)
    print(f"{given.engine} starts in {time.perf_counter() - started:.1f} s", flush=True)
    tokenizer = engine.processor.tokenizer if given.engine == "graftlm" else engine.tokenizer
    best = measure(engine, tokenizer, Sizes() if given.folder else TINY)
    print(given.engine, engine.report(), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(best, indent=1) + "\n")


if __name__ == "__main__":
    main()
