"""Options of the server that change which requests it takes: unknown fields, origins, aliases, templates, TLS."""

from __future__ import annotations

import json
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

import graftlm as gl
from graftlm.adapters.server import Server, ServerSettings
from graftlm.core.errors import ConfigError
from tests.served import started

APP = "https://app.example"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Mara is a baker."}], "max_tokens": 4}


@pytest.fixture(scope="module")
def open_client() -> Iterator[TestClient]:
    settings = ServerSettings(
        ignore_unknown=True,
        allowed_origins=(APP,),
        model_aliases=("gpt-4o",),
        trust_request_chat_template=True,
    )
    with gl.Runtime("sprout", dtype="float32") as runtime:
        runtime.load()
        with TestClient(Server(runtime, settings), base_url="http://localhost") as client:
            yield client


def test_unknown_fields_pass_and_are_listed(open_client: TestClient) -> None:
    body = {**BODY, "stream_options": {"include_usage": True, "x": 1}, "best_guess": 2}
    answer = open_client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert set(answer.headers["x-ignored-fields"].split(", ")) == {"stream_options.x", "best_guess"}
    assert "x-ignored-fields" not in open_client.post("/v1/chat/completions", json=BODY).headers
    wrong = open_client.post("/v1/chat/completions", json={**body, "temperature": "warm"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "temperature")


def test_pages_of_an_allowed_origin_may_use_the_server(open_client: TestClient) -> None:
    asked = {"origin": APP, "access-control-request-method": "POST", "access-control-request-headers": "x-a"}
    preflight = open_client.options("/v1/chat/completions", headers=asked)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == APP
    assert preflight.headers["access-control-allow-headers"] == "x-a"
    answer = open_client.post("/v1/chat/completions", json=BODY, headers={"origin": APP})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, APP)
    foreign = open_client.get("/v1/models", headers={"origin": "https://other.example"})
    assert foreign.status_code == 403
    assert "access-control-allow-origin" not in foreign.headers


def test_a_preflight_needs_no_key_and_an_answer_does() -> None:
    settings = ServerSettings(api_keys=("k",), allowed_origins=("*",))
    with gl.Runtime("sprout") as runtime, TestClient(Server(runtime, settings), base_url="http://localhost") as client:
        asked = {"origin": APP, "access-control-request-method": "POST"}
        assert client.options("/v1/models", headers=asked).status_code == 204
        refused = client.get("/v1/models", headers={"origin": APP})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, APP)


def test_the_model_answers_to_its_aliases_and_says_what_it_can(open_client: TestClient) -> None:
    models = open_client.get("/v1/models").json()["data"]
    assert [(model["id"], model["parent"]) for model in models] == [("sprout", None), ("gpt-4o", "sprout")]
    assert models[0]["context_length"] == 4096
    assert models[0]["capabilities"] == ["completion", "chat", "tools"]
    assert open_client.post("/v1/chat/completions", json={**BODY, "model": "gpt-4o"}).json()["model"] == "gpt-4o"


def test_a_trusted_template_renders_the_prompt(open_client: TestClient) -> None:
    template = "{% for d in documents %}{{ d.text }}{% endfor %}{{ messages[0].content }}"
    given = {**BODY, "chat_template": template, "documents": [{"text": "So: "}], "return_token_ids": True}
    used = open_client.post("/v1/chat/completions", json=given).json()["usage"]["prompt_tokens"]
    told = open_client.post("/tokenize", json={"prompt": "So: Mara is a baker."}).json()["count"]
    assert used == told


def test_the_description_has_the_schemas_of_the_bodies(open_client: TestClient) -> None:
    api = open_client.get("/openapi.json").json()
    posted = api["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = api["components"]["schemas"][posted["$ref"].rpartition("/")[2]]
    assert schema["required"] == ["messages"]
    assert schema["properties"]["bad_words"]
    references = {part.split('"')[0] for part in json.dumps(api).split("#/components/schemas/")[1:]}
    assert references <= api["components"]["schemas"].keys()
    assert "openapi.json" in open_client.get("/docs").text


def test_a_server_with_a_certificate_speaks_https(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*made, *names, *files], check=True, capture_output=True)
    given = ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
    with started(tmp_path, "sprout", *given) as served:
        trusts = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(verify=trusts) as client:
            assert client.get(f"{served.url}/version").status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{served.url.replace('https', 'http')}/version")


def test_a_certificate_or_an_origin_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"cert\.pem cannot be used as certificate and key in PEM"):
        ServerSettings(ssl_certfile=str(tmp_path / "cert.pem"))
    with pytest.raises(ConfigError, match="without ssl_certfile"):
        ServerSettings(ssl_keyfile="key.pem")
    with pytest.raises(ConfigError, match="allowed origin 'app.example' is none"):
        ServerSettings(allowed_origins=("app.example",))
