"""One question about one picture, asked through every framework: one prompt, one answer, and the picture's KV again."""

from __future__ import annotations

import base64
import io
import string
from collections.abc import Callable, Iterator
from typing import Any

import dspy
import guidance
import numpy as np
import pytest
from dspy import lm15
from langchain_core.messages import HumanMessage
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock

import graftlm as gl
from graftlm.adapters.dspy import GraftLM
from graftlm.adapters.guidance import GraftModel
from graftlm.adapters.langchain import ChatGraftLM
from graftlm.adapters.llama_index import GraftLLM
from graftlm.core.errors import ConfigError
from graftlm.testing.random_vision import random_picture, random_vision_model, save_vision_model

PICTURE = random_picture(3)
_file = io.BytesIO()
PICTURE.save(_file, "PNG")
PNG = _file.getvalue()
TEXT = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{TEXT}"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gl.Runtime]:
    folder = save_vision_model("llava", tmp_path_factory.mktemp("vision"))
    with gl.Runtime(str(folder), dtype="float32") as runtime:
        yield runtime


def native(runtime: gl.Runtime, image: Any, text: str = "what?") -> gl.Completion:
    content = [{"type": "image", "image": image}, {"type": "text", "text": text}]
    completion: gl.Completion = runtime.generate([{"role": "user", "content": content}], **GREEDY)
    return completion


def langchain(block: dict[str, Any]) -> Callable[[gl.Runtime], tuple[str, int]]:
    def ask(runtime: gl.Runtime) -> tuple[str, int]:
        content: Any = [block, {"type": "text", "text": "what?"}]
        answer = ChatGraftLM(runtime=runtime, **GREEDY).invoke([HumanMessage(content)])
        assert answer.usage_metadata is not None
        return str(answer.content), answer.usage_metadata["input_tokens"]

    return ask


def llama_index(runtime: gl.Runtime) -> tuple[str, int]:
    message = ChatMessage(blocks=[ImageBlock(image=PNG), TextBlock(text="what?")])
    answer = GraftLLM(runtime=runtime, **GREEDY).chat([message])
    return str(answer.message.content), answer.raw["usage"]["prompt_tokens"]


def program(runtime: gl.Runtime) -> tuple[str, int]:
    @gl.program
    def ask(s: Any) -> None:
        s += gl.user(gl.image(PNG) + "what?")
        forks = s.fork(2)
        for fork in forks:
            fork += gl.assistant(gl.gen("a", max_tokens=6))
        s["a"] = [fork["a"] for fork in forks]

    state = ask.run(runtime=runtime, temperature=0)
    first, second = state["a"]
    assert first == second
    return first, state.usage.prompt_tokens // 2


def dspy_call(runtime: gl.Runtime) -> tuple[str, int]:
    parts = (lm15.ImagePart(data=TEXT, media_type="image/png"), lm15.TextPart("what?"))
    lm, message = GraftLM(runtime=runtime), lm15.Message(role="user", parts=parts)
    answer = lm(lm15.Request(model=lm.model, messages=(message,), config=lm15.Config(**GREEDY)))
    return answer.message.parts[0].text, answer.usage.input_tokens


CALLS: dict[str, Callable[[gl.Runtime], tuple[str, int]]] = {
    "langchain": langchain({"type": "image", "base64": TEXT, "mime_type": "image/png"}),
    "langchain, openai's": langchain({"type": "image_url", "image_url": {"url": URL, "detail": "low"}}),
    "langchain, anthropic's": langchain(
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": TEXT}}
    ),
    "llama_index": llama_index,
    "program": program,
    "dspy": dspy_call,
}


@pytest.mark.parametrize("name", CALLS)
def test_every_framework_asks_the_same(runtime: gl.Runtime, name: str) -> None:
    expected = native(runtime, PNG)
    assert native(runtime, PICTURE).text == native(runtime, np.asarray(PICTURE)).text == expected.text
    assert native(runtime, random_picture(4)).text != expected.text
    before = runtime.stats()
    assert CALLS[name](runtime) == (expected.text, expected.usage.prompt_tokens)
    computed = runtime.stats().computed_tokens - before.computed_tokens
    assert computed <= 4  # the tokens of the picture came from the cache


def test_guidance_puts_pictures_between_its_tokens(runtime: gl.Runtime) -> None:
    """The prompt is that of the chat; a grammar, several gens and copies work on it."""
    expected = native(runtime, PNG)
    lm = GraftModel(runtime=runtime, echo=False)
    with guidance.user():
        lm += guidance.image(PNG) + "what?"
    with guidance.assistant():
        lm += guidance.select(["yes", "no"], name="a")
        chosen = lm + ", " + guidance.gen("b", regex="[0-9]{3}")
    assert lm["a"] in ("yes", "no") and chosen["b"].isdigit()
    assert lm._get_usage().input_tokens >= expected.usage.prompt_tokens
    other = GraftModel(runtime=runtime, echo=False)
    with guidance.user():
        other += "what?" + guidance.image(PNG)
        with pytest.raises(ConfigError, match="broken PNG"):
            other += guidance.image(PNG[:50])
    streamed = [
        str(part)
        for part in GraftModel(runtime=runtime, echo=False).stream() + guidance.image(PNG) + guidance.gen(max_tokens=3)
    ]
    assert streamed


def test_a_gen_of_guidance_is_what_transformers_writes_under_its_grammar(runtime: gl.Runtime) -> None:
    model, processor = random_vision_model("llava")
    lm = GraftModel(runtime=runtime, echo=False)
    with guidance.user():
        lm += guidance.image(PNG) + "what?"
    with guidance.assistant():
        lm += guidance.gen("a", regex="[a-z]{8}")
    letters = [processor.tokenizer.convert_tokens_to_ids(letter) for letter in string.ascii_lowercase]
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    text = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    batch = processor(images=[PICTURE], text=[text], return_tensors="pt")
    ids = model.generate(**batch, max_new_tokens=8, do_sample=False, prefix_allowed_tokens_fn=lambda *_: letters)
    assert lm["a"] == processor.tokenizer.decode(ids[0, batch["input_ids"].shape[1] :])


def test_dspy_image_fields(runtime: gl.Runtime) -> None:
    with dspy.context(lm=GraftLM(runtime=runtime, max_tokens=64, temperature=0), adapter=dspy.JSONAdapter()):
        found = dspy.Predict("picture: dspy.Image -> count: int")(picture=dspy.Image(url=URL))
    assert isinstance(found.count, int)


def test_langchain_counts_pictures_and_says_what_it_reads(runtime: gl.Runtime) -> None:
    llm = ChatGraftLM(runtime=runtime, **GREEDY)
    assert llm.profile is not None and llm.profile["image_inputs"]
    assert ChatGraftLM(model="sprout").profile["image_inputs"] is False
    content: Any = [{"type": "image", "base64": TEXT, "mime_type": "image/png"}, {"type": "text", "text": "what?"}]
    counted = llm.get_num_tokens_from_messages([HumanMessage(content)])
    assert counted == native(runtime, PNG).usage.prompt_tokens


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image", "image": PNG[:50]}], "message 1: the picture is a broken PNG of 50 bytes"),
        (
            [{"type": "image", "image": "https://a.b/c"}],
            "message 1: the picture is the URL 'https://a.b/c'",
        ),
        ([{"type": "image", "image": PNG}, "<image>"], "message 1 writes '<image>', which stands for a picture"),
        (
            [{"type": "image", "image": PNG}] * 65,
            "message 1 holds number 65 of 65 images; the limit of a request is",
        ),
    ],
)
def test_errors_name_the_message(runtime: gl.Runtime, content: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        runtime.generate([{"role": "system", "content": "x"}, {"role": "user", "content": content}], **GREEDY)
