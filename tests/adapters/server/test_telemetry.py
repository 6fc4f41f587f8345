"""OpenTelemetry spans of a runtime and a server, through the SDK's own exporter in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.testclient import TestClient

import graftlm as gl
from graftlm.adapters.server.app import Server
from graftlm.testing import ScriptedModel

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    made, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(made))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)  # it can be set only once
    return made


@pytest.fixture
def runtime() -> Iterator[gl.Runtime]:
    with ScriptedModel(lambda prompt: "Dorvik").runtime() as made:
        made.load()
        yield made


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    return span


def test_a_request_has_one_span_with_the_attributes_of_the_conventions(
    exporter: InMemorySpanExporter, runtime: gl.Runtime
) -> None:
    prompt = "Where does Mara live?"
    runtime.generate(prompt, max_tokens=20, temperature=0)
    exporter.clear()
    with trace.get_tracer("test").start_as_current_span("caller") as caller:
        done = runtime.generate(prompt, max_tokens=20, temperature=0)
        span = only(exporter)
    assert span.name == "text_completion scripted" and span.status.is_unset
    assert span.parent is not None and span.parent.span_id == caller.get_span_context().span_id
    assert done.usage.cached_tokens > 0
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "graftlm",
        "gen_ai.request.model": "scripted",
        "gen_ai.request.max_tokens": 20,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": done.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": done.usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": done.usage.cached_tokens,
    }
    assert expected.items() <= dict(span.attributes or {}).items()


def test_a_request_that_fails_ends_its_span_with_the_error(exporter: InMemorySpanExporter, runtime: gl.Runtime) -> None:
    with pytest.raises(gl.RequestTooLong):
        runtime.generate("x" * 20_000)
    span = only(exporter)
    assert not span.status.is_ok and (span.attributes or {})["error.type"] == "RequestTooLong"


def test_a_server_continues_the_trace_of_the_header(exporter: InMemorySpanExporter, runtime: gl.Runtime) -> None:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    with TestClient(Server(runtime), base_url="http://localhost") as client:
        answer = client.post("/v1/chat/completions", json=body, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    assert answer.status_code == 200
    span = only(exporter)
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert span.parent.is_remote


def test_without_a_provider_a_request_has_no_span(runtime: gl.Runtime) -> None:
    assert gl.Request("hello").span_context is None
    assert runtime.generate("hello", max_tokens=8).text == "Dorvik"
