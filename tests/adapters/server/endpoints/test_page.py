"""The page at `/`: by its contents, and in a headless browser where one is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import httpx
import openai
import pytest

from tests.served import Served

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


def test_the_page_needs_nothing_from_elsewhere(server: Served) -> None:
    answer = httpx.get(f"{server.url}/")
    assert answer.headers["content-type"].startswith("text/html")
    links = re.findall(r"""(?:src|href)=["'](?!data:)([^"']+)""", answer.text)
    assert links == ["metrics", "docs", "v1/models"]
    assert all(httpx.get(f"{server.url}/{link}").status_code == 200 for link in links)
    assert "http://www.w3.org" in answer.text.replace("https://", "")
    assert len(re.findall(r"https?://", answer.text)) == 1  # the name of SVG


def test_stats_tell_what_runs_with_its_cached_share(server: Served, client: openai.OpenAI) -> None:
    prompt = "Once upon a time there was a small house by the sea. " * 8
    client.completions.create(model="sprout", prompt=prompt, max_tokens=1)
    with client.completions.create(
        model="sprout", prompt=prompt, max_tokens=2000, extra_body={"ignore_eos": True}, stream=True
    ) as stream:
        next(iter(stream))
        told = httpx.get(f"{server.url}/stats").json()
        (one,) = told["open"]
        assert one["request_id"] == stream.response.headers["x-request-id"]
        cancelled = httpx.post(f"{server.url}/stats/cancel", json={"request_id": one["request_id"]}).json()
        assert cancelled == {"cancelled": 1}
        with pytest.raises(openai.APIError, match="the operator of the server has cancelled"):
            list(stream)
    assert one["cached_tokens"] == one["prompt_tokens"] - 1
    assert (told["model"], told["state"], told["counters"]["running"]) == ("sprout", "ready", 1)
    assert told["history"][-1].keys() == {
        *("time", "hit_rate", "tokens_per_s", "running", "waiting"),
        *("errors_per_s", "too_many_per_s"),
    }
    assert told["first_token_s"]["p99"] >= told["first_token_s"]["p50"] > 0
    assert told["memory_bytes"] > 1 << 20


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_browser_shows_the_model_and_the_running_request(
    server: Served, client: openai.OpenAI, tmp_path: Path
) -> None:
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--dump-dom"]
    with client.completions.create(
        model="sprout", prompt="The sea is", n=8, max_tokens=4000, extra_body={"ignore_eos": True}, stream=True
    ) as stream:
        next(iter(stream))
        shown = subprocess.run(
            [*command, "--virtual-time-budget=5000", f"{server.url}/"], capture_output=True, text=True, timeout=120
        )
    assert '<h1 id="model">sprout</h1>' in shown.stdout, shown.stderr[-2000:]
    assert "ready · GraftLM" in shown.stdout
    assert re.search(r'<b>[1-8]</b><span class="soft">running</span>', shown.stdout)
    assert 'class="bar"' in shown.stdout
    assert "<polyline" in shown.stdout
