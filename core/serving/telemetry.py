"""OpenTelemetry: one span for each request of a runtime, by the semantic conventions for generative AI.

Spans exist where the process has configured a tracer provider. Without one, the cost of a request is a look-up of a
module. Prompts and answers are not recorded.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graftlm.core.request import Chunk, Completion, Listener, Request

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""Variables with the address of a collector."""

_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")

log = logging.getLogger("graftlm.engine")


def current_span() -> Any:
    """Return the context of the caller's span, which a request's span gets as its parent; None without one."""
    trace = _configured()
    context = trace and trace.get_current_span().get_span_context()
    return context if context and context.is_valid else None


@contextmanager
def span_of(headers: Mapping[bytes, bytes]) -> Iterator[None]:
    """Make the span that the headers of an HTTP request name (`traceparent`) the current one inside the block."""
    if _configured() is None:
        yield
        return
    from opentelemetry import context, propagate

    found = propagate.extract({name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()})
    token = context.attach(found)
    try:
        yield
    finally:
        context.detach(token)


def traced(request: Request, listener: Listener, model: str, *, remote: bool) -> Listener:
    """Return a listener that ends the request's span, which begins here; `listener` itself without a provider."""
    trace = _configured()
    if trace is None:
        return listener
    sampling, operation = request.sampling, "chat" if _is_chat(request.prompt) else "text_completion"
    values = {f"gen_ai.request.{name}": getattr(sampling, name) for name in _SAMPLING}
    values |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "graftlm", "gen_ai.request.model": model}
    if sampling.stop:
        values["gen_ai.request.stop_sequences"] = sampling.stop
    if sampling.n > 1:
        values["gen_ai.request.choice.count"] = sampling.n
    parent = None
    if request.span_context is not None:
        parent = trace.set_span_in_context(trace.NonRecordingSpan(request.span_context))
    span = trace.get_tracer("graftlm").start_span(
        f"{operation} {model}",
        context=parent,
        kind=trace.SpanKind.CLIENT if remote else trace.SpanKind.INTERNAL,
        attributes={name: value for name, value in values.items() if value is not None},
    )
    return TracedListener(listener, span, model)


class TracedListener:
    """A listener that ends a span with the request."""

    def __init__(self, listener: Listener, span: Any, model: str) -> None:
        self._listener = listener
        self._span = span
        self._model = model

    def on_chunk(self, chunk: Chunk) -> None:
        self._listener.on_chunk(chunk)

    def on_finish(self, completion: Completion) -> None:
        usage, answers = completion.usage, completion.completions or [completion]
        self._span.set_attributes(
            {
                "gen_ai.response.model": self._model,
                "gen_ai.response.finish_reasons": [answer.finish_reason for answer in answers],
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            }
        )
        self._span.end()
        self._listener.on_finish(completion)

    def on_error(self, error: BaseException) -> None:
        self.end(error)
        self._listener.on_error(error)

    def end(self, error: BaseException) -> None:
        """End the span of a request that has failed."""
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("error.type", type(error).__qualname__)
        self._span.set_status(StatusCode.ERROR, str(error))
        self._span.end()


def export_spans() -> None:
    """Send spans to the collector that the environment names, in a process that has configured no provider itself."""
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        log.warning("spans are not sent, as a package is missing: %s; pip install 'graftlm[otel]'", error)
        return
    if _configured() is None:
        os.environ.setdefault("OTEL_SERVICE_NAME", "graftlm")
        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        trace.set_tracer_provider(provider)


def _configured() -> Any:
    """Return the module `opentelemetry.trace` if the process has a tracer provider; else None."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None or isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None
    return trace


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and not isinstance(prompt[0], int)
