"""Pictures and videos reach an endpoint once encoded, with their own bytes, type and detail, from every framework."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dspy
import guidance
import numpy as np
import pytest
from langchain_core.messages import HumanMessage
from llama_index.core.llms import ChatMessage, ImageBlock as Picture, TextBlock as Text, VideoBlock as Video
from PIL import Image

import graftlm as gl
from graftlm.adapters.dspy import GraftLM
from graftlm.adapters.guidance import GraftModel
from graftlm.adapters.langchain import ChatGraftLM
from graftlm.adapters.llama_index import GraftLLM
from graftlm.adapters.llama_index.errors import GraftCallError
from graftlm.core.errors import ConfigError
from tests.core.remote.models import answers
from tests.core.remote.server import Server

_file = io.BytesIO()
Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).save(_file, "JPEG")
JPEG = _file.getvalue()
TEXT = base64.b64encode(JPEG).decode()
SENT = f"data:image/jpeg;base64,{TEXT}"
FILM = b"\0\0\0\x18ftypisom" + b"\0" * 20
WEB = "https://example.org/cat.png"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(answers({"": "[[ ## answer ## ]]\nyes\n\n[[ ## completed ## ]]"})) as server:
        yield server


def media(server: Server) -> list[dict[str, Any]]:
    """Return the parts of the last request that are no text."""
    contents = [message["content"] for message in server.requests[-1].body["messages"]]
    return [part for content in contents if not isinstance(content, str) for part in content if part["type"] != "text"]


def picture(url: str, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


LANGCHAIN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"type": "image", "base64": TEXT, "mime_type": "image/jpeg"}, picture(SENT)),
    ({"type": "image", "url": WEB}, picture(WEB)),
    ({"type": "image", "source_type": "base64", "data": TEXT, "mime_type": "image/jpeg"}, picture(SENT)),
    ({"type": "image", "source_type": "url", "url": WEB}, picture(WEB)),
    ({"type": "image_url", "image_url": {"url": SENT, "detail": "low"}}, picture(SENT, detail="low")),
    ({"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": TEXT}}, picture(SENT)),
    ({"type": "image", "source": {"type": "url", "url": WEB}}, picture(WEB)),
    ({"type": "video", "url": WEB}, {"type": "video_url", "video_url": {"url": WEB}}),
]


@pytest.mark.parametrize(("block", "sent"), LANGCHAIN)
def test_blocks_of_langchain(server: Server, block: dict[str, Any], sent: dict[str, Any]) -> None:
    llm = ChatGraftLM(model="m", base_url=server.url)
    llm.invoke([HumanMessage([{"type": "text", "text": "see"}, block])])
    assert media(server) == [sent]


def test_blocks_of_llama_index(server: Server, tmp_path: Path) -> None:
    llm, path, film = GraftLLM(model="m", base_url=server.url), tmp_path / "photo", tmp_path / "film.mp4"
    path.write_bytes(JPEG)
    film.write_bytes(FILM)
    shown = [Picture(image=JPEG, detail="low"), Picture(image=io.BytesIO(JPEG)), Picture(path=path), Picture(url=WEB)]
    llm.chat([ChatMessage(blocks=[Text(text="see"), *shown, Picture(url=SENT), Video(path=film), Video(video=FILM)])])
    moving = {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{base64.b64encode(FILM).decode()}"}}
    still = [picture(SENT, detail="low"), picture(SENT), picture(SENT), picture(WEB), picture(SENT)]
    assert media(server) == [*still, moving, moving]
    with pytest.raises(GraftCallError, match="message 0 holds an empty ImageBlock; give its bytes, path or url"):
        llm.chat([ChatMessage(blocks=[Picture()])])


def test_images_of_dspy(server: Server) -> None:
    with dspy.context(lm=GraftLM(model="m", base_url=server.url), adapter=dspy.ChatAdapter()):
        ask = dspy.Predict("image: dspy.Image -> answer")
        ask(image=dspy.Image(url=SENT))
        assert media(server) == [picture(SENT)]
        ask(image=dspy.Image(Image.open(io.BytesIO(JPEG))))
    (sent,) = media(server)
    assert base64.b64decode(sent["image_url"]["url"].split(",")[1])[:4] in (JPEG[:4], b"\x89PNG")


def test_objects_of_the_runtime(server: Server, tmp_path: Path) -> None:
    """Bytes and files as they are, whatever their name; pixels as a PNG; a file's own type before the stated one."""
    path = tmp_path / "photo.png"
    path.write_bytes(JPEG)
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    image = [{"type": "image", "image": one} for one in (JPEG, path, str(path), pixels, Image.fromarray(pixels))]
    with gl.Runtime("m", base_url=server.url) as runtime:
        runtime.generate([{"role": "user", "content": [*image, {"type": "image", "image": JPEG, "mime_type": "a/b"}]}])
        *urls, stated = [part["image_url"]["url"] for part in media(server)]
        assert urls[:3] == [SENT] * 3 and stated == SENT
        for url in urls[3:]:
            decoded = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,"))))
            assert (np.asarray(decoded) == pixels).all()
        for part, message in (
            ({"type": "image", "image": "/nowhere.png"}, r"message 0 \(user\): the picture '/nowhere.png' is no file"),
            ({"type": "image", "image": b"?"}, "1 bytes of an unknown type; state its mime_type"),
            ({"type": "video", "video": [pixels]}, "a video for an endpoint is a file; give its path, bytes or URL"),
            ({"type": "video", "video": WEB, "num_frames": 4}, "an endpoint chooses them itself; leave num_frames out"),
            ({"type": "audio", "base64": TEXT}, "message 0 holds a part of type 'audio'"),
        ):
            with pytest.raises(ConfigError, match=message):
                runtime.generate([{"role": "user", "content": [part]}])


def test_pictures_in_programs(server: Server) -> None:
    """Between the texts of a user's turn, in each of its forks; an error elsewhere."""

    @gl.program
    def ask(s: Any) -> None:
        s += gl.user("look at " + gl.image(JPEG) + " and " + gl.image(WEB) + "?")
        for branch in s.fork(2):
            branch += gl.assistant(gl.gen("answer", max_tokens=4))

    @gl.program
    def wrong(s: Any) -> None:
        s += gl.user("look") + gl.assistant(gl.image(JPEG) + gl.gen("answer"))

    text = [{"type": "text", "text": text} for text in ("look at ", " and ", "?")]
    turn = {"role": "user", "content": [text[0], picture(SENT), text[1], picture(WEB), text[2]]}
    with gl.Runtime("m", base_url=server.url) as runtime:
        state = ask.run(runtime=runtime)
        assert state.messages == [turn] and state.error is None
        assert [request.body["messages"] for request in server.requests[-2:]] == [[turn]] * 2
        with pytest.raises(ConfigError, match="a picture stands outside of a user's turn; put it into gl.user"):
            raise wrong.run(runtime=runtime).error or AssertionError


def test_images_of_guidance(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "photo"
    path.write_bytes(JPEG)
    lm = GraftModel("m", base_url=server.url, echo=False)
    with guidance.user():
        lm += "look at " + guidance.image(path) + guidance.image(WEB) + "?"
    with guidance.assistant():
        lm += guidance.gen("answer", max_tokens=4)
    assert media(server) == [picture(SENT), picture(WEB)] and lm["answer"]
