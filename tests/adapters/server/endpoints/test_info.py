"""What routers, monitors and clients ask: models, health, metrics, tokens, capacity."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

import graftlm as gl
from graftlm.core.text.processor import TextProcessor
from tests.served import Served

VLLM = {
    ("vllm:num_requests_running", "gauge"),
    ("vllm:num_requests_waiting", "gauge"),
    ("vllm:kv_cache_usage_perc", "gauge"),
    ("vllm:prefix_cache_queries", "counter"),
    ("vllm:prefix_cache_hits", "counter"),
    ("vllm:prompt_tokens", "counter"),
    ("vllm:generation_tokens", "counter"),
    ("vllm:num_preemptions", "counter"),
    ("vllm:request_success", "counter"),
    ("vllm:time_to_first_token_seconds", "histogram"),
    ("vllm:inter_token_latency_seconds", "histogram"),
    ("vllm:e2e_request_latency_seconds", "histogram"),
    ("vllm:request_queue_time_seconds", "histogram"),
    ("vllm:request_prefill_time_seconds", "histogram"),
    ("vllm:request_decode_time_seconds", "histogram"),
}


def values(server: Served) -> dict[str, float]:
    """The sum of each sample over its labels, without the buckets."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(server.get("/metrics")[1]):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                found[sample.name] += sample.value
    return dict(found)


def test_the_model_is_listed_with_its_context(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == ("sprout", 4096)
    assert client.models.retrieve("sprout").id == "sprout"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/server_info", "/get_model_info"])
def test_a_router_gets_an_answer(server: Served, path: str) -> None:
    assert server.get(path)[0] == 200


def test_capacity_is_told_to_routers(server: Served) -> None:
    told = httpx.get(f"{server.url}/server_info").json()
    assert told["model_path"] == "sprout"
    assert told["max_total_num_tokens"] > 4096
    assert told["page_size"] == 1


def test_metrics_have_the_names_and_types_of_vllm(server: Served) -> None:
    families = text_string_to_metric_families(server.get("/metrics")[1])
    assert {(family.name, family.type) for family in families} >= VLLM


def test_metrics_count_what_a_request_did(server: Served, client: openai.OpenAI) -> None:
    before = values(server)
    stream = client.completions.create(
        model="sprout", prompt="One, two, three, four", max_tokens=6, extra_body={"ignore_eos": True}, stream=True
    )
    assert len(list(stream)) > 1
    after = values(server)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["vllm:generation_tokens_total"] == 6
    assert grown["vllm:request_success_total"] == 1
    assert grown["vllm:time_to_first_token_seconds_count"] == 1
    assert grown["vllm:request_generation_tokens_sum"] == 6
    assert grown["vllm:inter_token_latency_seconds_count"] >= 1
    timed = ("request_queue_time", "request_prefill_time", "request_decode_time")
    parts = sum(grown[f"vllm:{name}_seconds_sum"] for name in timed)
    assert 0 < parts <= grown["vllm:e2e_request_latency_seconds_sum"]


def test_lm_evals_remote_tokenizer_finds_the_special_tokens_and_the_template(server: Served) -> None:
    told = httpx.get(f"{server.url}/tokenizer_info").json()
    assert told["eos_token"] == "<|im_end|>"
    asked = {"prompt": told["eos_token"], "add_special_tokens": False}
    (eos,) = httpx.post(f"{server.url}/tokenize", json=asked).json()["tokens"]
    assert eos in gl.Runtime.shared("sprout", dtype="float32").tokenizer.eos_token_ids
    assert "<|im_start|>" in told["chat_template"]


def test_tokens_go_there_and_back(server: Served) -> None:
    tokenizer = gl.Runtime.shared("sprout", dtype="float32").tokenizer
    asked = {"prompt": "Grüße aus Köln", "return_token_strs": True}
    told = httpx.post(f"{server.url}/tokenize", json=asked).json()
    assert told["tokens"] == tokenizer.encode("Grüße aus Köln")
    assert (told["count"], len(told["token_strs"])) == (len(told["tokens"]), len(told["tokens"]))
    back = httpx.post(f"{server.url}/detokenize", json={"tokens": told["tokens"]}).json()
    assert back["prompt"].endswith("Grüße aus Köln")
    messages = [{"role": "user", "content": "hello"}]
    rendered = httpx.post(f"{server.url}/tokenize", json={"messages": messages}).json()
    assert rendered["tokens"] == TextProcessor(tokenizer).encode(messages).ids.tolist()
    assert httpx.post(f"{server.url}/detokenize", json={"tokens": [10**9]}).json()["error"]["param"] == "tokens"
    assert httpx.post(f"{server.url}/tokenize", json={}).json()["error"]["param"] == "prompt"


def test_a_cancelled_request_and_each_status_are_counted(server: Served) -> None:
    before = values(server)
    body = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        next(response.iter_lines())
    httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "n": 0})
    end_s = time.monotonic() + 120
    while (after := values(server)).get("graftlm:request_failure_total", 0) == before.get(
        "graftlm:request_failure_total", 0
    ):
        assert time.monotonic() < end_s
        time.sleep(0.02)
    for name in ("vllm:e2e_request_latency_seconds_count", "vllm:request_params_n_count"):
        assert after[name] == before[name] + 1
    for name in ("vllm:request_generation_tokens_sum", "vllm:request_prompt_tokens_sum"):
        assert after[name] > before[name]
    assert after["vllm:iteration_tokens_total_count"] > before["vllm:iteration_tokens_total_count"]
    families = text_string_to_metric_families(server.get("/metrics")[1])
    samples = [sample for family in families for sample in family.samples]
    steps = {s.labels["le"]: s.value for s in samples if s.name == "vllm:iteration_tokens_total_bucket"}
    assert steps["8.0"] >= steps["1.0"] > 0
    assert steps["+Inf"] == after["vllm:iteration_tokens_total_count"]
    assert {"400", "499"} <= {s.labels["status"] for s in samples if s.name == "graftlm:http_responses_total"}
    assert "abort" in {s.labels["finished_reason"] for s in samples if s.name == "vllm:request_success_total"}


def test_the_dashboard_asks_for_metrics_that_exist(server: Served) -> None:
    """Its queries were run by Prometheus 2.42 over a server under load."""
    dashboard = json.loads((Path(__file__).parents[4] / "docs/grafana.json").read_text())
    text = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    asked = set(re.findall(r"(?:vllm:|graftlm:|process_)\w+", text))
    families = text_string_to_metric_families(server.get("/metrics")[1])
    served = {sample.name for family in families for sample in family.samples}
    assert asked - served <= {"graftlm:request_failure_total"}  # which appears with the first failure
    assert len(asked) > 20
