"""GraftLM's own programs on transformers: the same answers as on GraftLM's engine, float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import graftlm as gl
from graftlm.ab.engines.frameworks import named_engines
from graftlm.core.model.embedded import sprout_folder
from graftlm.plugins import manager
from graftlm.testing.random_vision import random_picture, save_vision_model
from tests.models import byte_tokenizer, tiny_model
from tests.vision import question

PROMPTS = ["The same beginning, and this", "The same beginning, and that", "Another"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", autouse=True)
def without_the_plugin() -> Iterator[None]:
    yield
    manager.load().remove("graftlm-ab")


@pytest.fixture(scope="module")
def ours(folder: str) -> Iterator[gl.Runtime]:
    with gl.Runtime(folder) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def plain(folder: str) -> Iterator[gl.Runtime]:
    with named_engines("native", 16)["hf"](folder) as runtime:
        yield runtime


def test_greedy_answers_are_equal_and_every_prompt_token_is_computed(ours: gl.Runtime, plain: gl.Runtime) -> None:
    options = {"max_tokens": 6, "temperature": 0}
    assert [a.token_ids for a in plain.generate(PROMPTS, **options)] == [
        a.token_ids for a in ours.generate(PROMPTS, **options)
    ]
    stats = plain.stats()
    assert stats.requests == 3 and stats.computed_tokens == stats.prompt_tokens == sum(map(len, PROMPTS))


def test_text_goes_on_after_the_end_token_where_that_is_asked_for() -> None:
    asked, prompt = {"max_tokens": 24, "temperature": 0}, [{"role": "user", "content": "Ada is a baker. What is Ada?"}]
    with named_engines("native", 16)["hf"](str(sprout_folder())) as plain, gl.Runtime("sprout") as ours:
        brief = plain.generate(prompt, **asked)
        long = [runtime.generate(prompt, ignore_eos=True, **asked).token_ids for runtime in (plain, ours)]
        assert (brief.text, brief.finish_reason) == ("baker", "stop")
        assert [len(ids) for ids in long] == [24, 24] and long[0][:4] == long[1][:4]


def test_a_prefix_is_not_computed_ahead_where_nothing_is_kept(plain: gl.Runtime) -> None:
    plain.reset_stats()
    plain.warm("The same beginning")
    assert plain.stats().requests == plain.stats().computed_tokens == 0


def test_a_scored_text_counts_the_same_prompt_tokens(ours: gl.Runtime, plain: gl.Runtime) -> None:
    assert ours.score("Is it?", " no").usage.prompt_tokens == plain.score("Is it?", " no").usage.prompt_tokens


@pytest.mark.parametrize(
    "options", [{"regex": "[a-f]{3}[0-9]"}, {"choices": ["yes", "no"]}, {"stop": ["e", "a", "i", "o", "\x00"]}]
)
def test_constraints_and_stop_strings_hold(ours: gl.Runtime, plain: gl.Runtime, options: dict[str, object]) -> None:
    asked = {"max_tokens": 8, "temperature": 0, **options}
    assert plain.generate("A word: ", **asked).text == ours.generate("A word: ", **asked).text


def test_what_the_engine_does_not_know_is_an_error(plain: gl.Runtime) -> None:
    with pytest.raises(gl.EngineError, match="does not know n=3, top_p=0.5; leave them out"):
        plain.generate("A", n=3, top_p=0.5)


def test_select_and_score_agree(ours: gl.Runtime, plain: gl.Runtime) -> None:
    assert plain.select("Is it?", ["yes", "no"]).choice == ours.select("Is it?", ["yes", "no"]).choice
    assert plain.score("Is it?", " no").logprobs == pytest.approx(ours.score("Is it?", " no").logprobs, abs=1e-4)


def test_a_program_runs_unchanged(ours: gl.Runtime, plain: gl.Runtime) -> None:
    @gl.program
    def judged(s: gl.ProgramState) -> None:
        s += "A text."
        parts = s.fork(2)
        for i, part in enumerate(parts):
            part += f" Part {i}: " + gl.gen("mark", regex="[0-9]", temperature=0)
        s += " Marks: " + ", ".join(part["mark"] for part in parts) + gl.select("grade", ["A", "B"])

    states = [judged.run(runtime=runtime) for runtime in (ours, plain)]
    assert states[0].text == states[1].text


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava", "gemma3"])
def test_a_vision_model_reads_pictures_with_both(family: str, tmp_path: Path) -> None:
    folder = str(save_vision_model(family, tmp_path))
    pictures = random_picture(0), random_picture(1)
    prompts: list[Any] = [question("What?", pictures[0]), question("What?", pictures[1]), question("Both?", *pictures)]
    prompts.append(question("No picture"))
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    with gl.Runtime(folder) as ours, named_engines("native", 16)["hf"](folder) as plain:
        expected: Any = [answer.token_ids for answer in ours.generate(prompts, **options)]
        assert [answer.token_ids for answer in plain.generate(prompts, **options)] == expected
        assert plain.generate(prompts[0], **options).usage.cached_tokens == 0
        texts = [answer.text for answer in plain.generate(prompts[:2], **options)]
    chat = named_engines("langchain", 8)["hf"](folder)
    assert [answer.content for answer in chat.batch(prompts[:2])] == texts
