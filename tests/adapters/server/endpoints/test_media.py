"""Pictures in every dialect: a text model refuses them with the reason, an endpoint gets them, no path is ever read."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import graftlm as gl
from graftlm.adapters.server import ServerSettings
from graftlm.adapters.server.app import Server
from graftlm.adapters.server.settings import Limits
from graftlm.testing.random_vision import save_vision_model
from tests.core.media.test_loading import PICTURE, encoded, png
from tests.core.remote.models import answers
from tests.core.remote.server import Server as Endpoint
from tests.served import Served

PNG = encoded()
TEXT = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{TEXT}"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def body_of(path: str, content: Any) -> dict[str, Any]:
    """Return the body of a request with one message of the user."""
    if path == RESPONSES:
        return {"input": [{"role": "user", "content": content}], "max_output_tokens": 2}
    limit = {} if path.startswith("/tok") or "count" in path or "api" in path else {"max_tokens": 2}
    return {"messages": [{"role": "user", "content": content}], **limit}


def picture(url: str, **more: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url, **more}}]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, body_of(CHAT, picture(URL)), " bytes), but sprout reads text only; load a vision model, or remove it"),
    (
        CHAT,
        body_of(CHAT, picture("/etc/passwd")),
        "message 0: the picture is no data URL, and this server reads no files",
    ),
    (CHAT, body_of(CHAT, picture("file:///etc/passwd")), "this server reads no files; send data:...;base64,..."),
    (CHAT, body_of(CHAT, picture("https://example.org/a.png")), "start it with --allow-media-url HOST"),
    (CHAT, body_of(CHAT, picture("data:image/png;base64,????")), "message 0: the picture is broken base64"),
    (CHAT, body_of(CHAT, [{"type": "image", "image": [1]}]), "the picture is a list; send a data URL"),
    (CHAT, body_of(CHAT, [{"type": "video_url", "video_url": {"url": "/etc/passwd"}}]), "the video is no data URL"),
    (CHAT, body_of(CHAT, [{"type": "input_audio", "input_audio": {}}]), "message 0 holds a part of type 'input_audio'"),
    (CHAT, {**body_of(CHAT, "hi"), "mm_processor_kwargs": {"max_pixels": 9}}, "mm_processor_kwargs.max_pixels is 9"),
    (CHAT, {**body_of(CHAT, "hi"), "media_io_kwargs": {"video": {"fps": 2}}}, "known: video.num_frames"),
    ("/tokenize", body_of("/tokenize", picture("/etc/passwd")), "this server reads no files"),
    (
        "/tokenize",
        {**body_of("/tokenize", "hi"), "mm_processor_kwargs": {"max_pixels": 9}},
        "mm_processor_kwargs.max_pixels is 9, and sprout reads text only",
    ),
    (
        "/tokenize",
        {**body_of("/tokenize", "hi"), "media_io_kwargs": {"video": {"fps": 2}}},
        "known: video.num_frames",
    ),
    (
        RESPONSES,
        body_of(RESPONSES, [{"type": "input_image", "image_url": "/etc/passwd", "detail": "low"}]),
        "this server reads no files",
    ),
    (
        RESPONSES,
        body_of(RESPONSES, [{"type": "input_image", "file_id": "f1"}]),
        "input[0] names its image by the file id",
    ),
    (
        RESPONSES,
        body_of(RESPONSES, [{"type": "input_file", "file_id": "f1"}]),
        "input[0] holds a part of type 'input_file'",
    ),
    (
        MESSAGES,
        body_of(MESSAGES, [{"type": "image", "source": {"type": "url", "url": "https://a.b/"}}]),
        "this server fetches none",
    ),
    (
        MESSAGES,
        body_of(MESSAGES, [{"type": "image", "source": {"type": "file", "file_id": "f1"}}]),
        "messages[0] names its image by the file id 'f1'",
    ),
    (
        f"{MESSAGES}/count_tokens",
        body_of("count", [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": TEXT}}]),
        "reads text only",
    ),
    ("/api/chat", {"messages": [{"role": "user", "content": "see", "images": [TEXT]}]}, "reads text only"),
    ("/api/generate", {"prompt": "see", "images": [TEXT]}, "reads text only"),
]


@pytest.mark.parametrize(("path", "body", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_what_a_text_model_says(server: Served, path: str, body: dict[str, Any], message: str) -> None:
    answer = httpx.post(server.url + path, json=body, timeout=60)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert message in (error if isinstance(error, str) else error["message"])
    assert TEXT not in answer.text


@pytest.fixture
async def forwarding(tmp_path: Path) -> AsyncIterator[tuple[httpx.AsyncClient, Endpoint]]:
    """A server over an endpoint, which may read pictures of one folder."""
    with Endpoint(answers({"see": "yes"})) as endpoint, gl.Runtime("m", base_url=endpoint.url) as runtime:
        runtime.load()
        server = Server(runtime, ServerSettings(media_folders=(str(tmp_path),)))
        async with server._lifespan(None):  # type: ignore[arg-type]
            transport = httpx.ASGITransport(app=server, client=("127.0.0.1", 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
                yield client, endpoint


async def test_an_endpoint_gets_pictures_of_every_dialect(
    forwarding: tuple[httpx.AsyncClient, Endpoint], tmp_path: Path
) -> None:
    client, endpoint = forwarding
    (tmp_path / "a.jpg").write_bytes(PNG)
    source = {"type": "base64", "media_type": "image/png", "data": TEXT}
    for path, content, sent in (
        (CHAT, picture(URL, detail="low"), {"url": URL, "detail": "low"}),
        (CHAT, picture("https://example.org/a.png"), {"url": "https://example.org/a.png"}),
        (CHAT, picture(str(tmp_path / "a.jpg")), {"url": URL}),
        (RESPONSES, [{"type": "input_image", "image_url": URL, "detail": "low"}], {"url": URL, "detail": "low"}),
        (MESSAGES, [{"type": "image", "source": source}], {"url": URL}),
    ):
        (await client.post(path, json=body_of(path, content))).raise_for_status()
        parts = endpoint.requests[-1].body["messages"][-1]["content"]
        assert [part["image_url"] for part in parts if part["type"] == "image_url"] == [sent]
    ollama = {"messages": [{"role": "user", "content": "see", "images": [TEXT]}], "stream": False}
    (await client.post("/api/chat", json=ollama)).raise_for_status()
    assert endpoint.requests[-1].body["messages"][-1]["content"][0]["image_url"]["url"] == URL
    num = len(endpoint.requests)
    answer = await client.post(CHAT, json=body_of(CHAT, picture("/etc/passwd")))
    assert answer.status_code == 400 and "not below an --allowed-media-path" in answer.text
    assert len(endpoint.requests) == num


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gl.Runtime]:
    folder = save_vision_model("qwen2_5_vl", tmp_path_factory.mktemp("vision"))
    with gl.Runtime(str(folder), dtype="float32") as runtime:
        runtime.load()
        yield runtime


@contextlib.asynccontextmanager
async def served(runtime: gl.Runtime, **limits: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Server]]:
    server = Server(runtime, ServerSettings(limits=Limits(**limits)))
    async with server._lifespan(None):  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app=server, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=120) as client:
            yield client, server


async def test_a_vision_model_answers_in_every_dialect(seeing: gl.Runtime) -> None:
    """The usage counts the tokens of the picture, and all dialects have the same prompt."""
    source = {"type": "base64", "media_type": "image/png", "data": TEXT}
    see = {"type": "text", "text": "see"}
    async with served(seeing) as (client, server):

        async def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
            answer = (await client.post(path, json=body)).raise_for_status()
            found: dict[str, Any] = answer.json()
            return found

        (card,) = (await client.get("/v1/models")).json()["data"]
        assert card["capabilities"][-1] == "vision"
        chat = await ask(CHAT, body_of(CHAT, [*picture(URL)[::-1]]))
        num = chat["usage"]["prompt_tokens"]
        assert num > (await ask(CHAT, body_of(CHAT, "see")))["usage"]["prompt_tokens"]
        larger = body_of(CHAT, picture(URL)) | {"mm_processor_kwargs": {"min_pixels": 19_600}}
        assert (await ask(CHAT, larger))["usage"]["prompt_tokens"] > num + 10
        answer = await client.post(CHAT, json={**body_of(CHAT, "hi"), "mm_processor_kwargs": {"min_pixel": 9}})
        assert answer.status_code == 400 and "mm_processor_kwargs.min_pixel is no option" in answer.text
        parts = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "see"}]
        assert (await ask(RESPONSES, body_of(RESPONSES, parts)))["usage"]["input_tokens"] == num
        content = [{"type": "image", "source": source}, see]
        message = await ask(MESSAGES, body_of(MESSAGES, content))
        assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] == num
        counted = await ask(f"{MESSAGES}/count_tokens", body_of("count", content))
        tokens = await ask("/tokenize", body_of("/tokenize", picture(URL)[::-1]))
        assert counted["input_tokens"] == tokens["count"] == num
        placeholder = seeing.tokenizer.media.placeholders["image"]
        assert tokens["tokens"].count(placeholder) > 3 and min(tokens["tokens"]) >= 0
        enlarged = {**body_of("/tokenize", picture(URL)), "mm_processor_kwargs": {"min_pixels": 19_600}}
        more = await ask("/tokenize", {**enlarged, "return_token_strs": True})
        assert more["count"] == (await ask(CHAT, larger))["usage"]["prompt_tokens"] > num + 10
        assert "<|image_pad|>" in more["token_strs"]
        ollama = {"messages": [{"role": "user", "content": "see", "images": [TEXT]}], "stream": False}
        assert (await ask("/api/chat", ollama))["prompt_eval_count"] == num
        assert server.media.num_held < 1 << 20


async def test_bad_pictures_end_alone(seeing: gl.Runtime) -> None:
    """Truncated files, bombs, foreign addresses and other formats among good requests of text and pictures."""
    bad = [
        *(PNG[:cut] for cut in range(8, len(PNG) - 30, 2)),
        *(png(20_000 + i, 20_000) for i in range(10)),
        *(encoded(kind="TIFF"), b"", b"\0" * 100_000),
    ]
    urls = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in bad]
    urls += [
        "https://169.254.169.254/",
        "http://localhost/",
        "/dev/zero",
        "file:///etc/passwd",
        "data:,",
        "javascript:1",
    ]
    good = [body_of(CHAT, "hello"), body_of(CHAT, picture(URL))] * 10
    async with served(seeing) as (client, server):

        async def status(body: dict[str, Any]) -> int:
            return (await client.post(CHAT, json=body)).status_code

        statuses = await asyncio.gather(*(status(body_of(CHAT, picture(url))) for url in urls), *map(status, good))
        assert statuses == [400] * len(urls) + [200] * len(good)
        assert server.media._arriving == 0


async def test_the_bytes_of_pictures_are_bounded(seeing: gl.Runtime) -> None:
    async with served(seeing, held_media_bytes=1000) as (client, _):
        large = f"data:image/png;base64,{base64.b64encode(encoded(PICTURE.resize((90, 60)))).decode()}"
        answers = await asyncio.gather(*(client.post(CHAT, json=body_of(CHAT, picture(large))) for _ in range(4)))
        refused = [answer for answer in answers if answer.status_code == 429]
        assert refused and len(refused) < 4
        assert "pictures of open requests fill the server's 1,000 bytes" in refused[0].text
