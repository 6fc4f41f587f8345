"""Prometheus metrics: vLLM's names, which its dashboards and routers read, and GraftLM's own."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from graftlm.core.errors import RequestCancelled
from graftlm.core.metrics import STEP_BOUNDS, Stats
from graftlm.core.request import Completion

if TYPE_CHECKING:
    from graftlm.adapters.server.intake import Answer
    from graftlm.core.runtime import Runtime

SHORT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
LONG_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("from a request's arrival to its first token", SHORT_S),
    "e2e_request_latency_seconds": ("from a request's arrival to its end", LONG_S),
    "request_queue_time_seconds": ("before a request's first step", LONG_S),
    "request_prefill_time_seconds": ("from the first step to the first token", LONG_S),
    "request_decode_time_seconds": ("from the first token to the last", LONG_S),
    "request_inference_time_seconds": ("from the first step to the last token", LONG_S),
    "request_time_per_output_token_seconds": ("time between two tokens of a request, on average", SHORT_S),
    "request_params_n": ("answers that a request asks for", (1, 2, 5, 10, 20)),
    "request_params_max_tokens": ("limit of a request's tokens, where it sets one", TOKENS),
    "request_prompt_tokens": ("prompt tokens of a request", TOKENS),
    "request_generation_tokens": ("generated tokens of a request", TOKENS),
    "request_max_num_generation_tokens": ("generated tokens of a request's longest answer", TOKENS),
    "request_prefill_kv_computed_tokens": ("prompt tokens of a request that were not in the cache", TOKENS),
}

NUM_RECENT = 1_000
"""Requests whose times to the first token the page shows."""

_Read = tuple[str, Callable[[Stats], float]]

_GAUGES: dict[str, _Read] = {
    "vllm:num_requests_running": ("sequences that run", lambda s: s.running),
    "vllm:num_requests_waiting": ("sequences that wait", lambda s: s.waiting),
    "vllm:kv_cache_usage_perc": ("share of the KV slots in use, 0 to 1", lambda s: _share(s.slots_in_use, s)),
    "graftlm:replicas": ("replicas that live; 0 without any", lambda s: s.replicas),
    "graftlm:kv_cached_perc": ("share of the KV slots that hold prefixes, 0 to 1", lambda s: _share(s.slots_cached, s)),
}

_COUNTERS: dict[str, _Read] = {
    "vllm:prefix_cache_queries": ("prompt tokens that were looked up", lambda s: s.prompt_tokens),
    "vllm:prefix_cache_hits": ("prompt tokens that were in the cache", lambda s: s.cached_tokens),
    "vllm:prompt_tokens": ("prompt tokens", lambda s: s.prompt_tokens),
    "vllm:generation_tokens": ("generated tokens", lambda s: s.completion_tokens),
    "vllm:num_preemptions": ("requests that gave up their slots to older ones", lambda s: s.retracted),
    "graftlm:computed_tokens": ("prompt tokens that were run", lambda s: s.computed_tokens),
    "graftlm:forced_tokens": ("generated tokens that a grammar forced", lambda s: s.forced_tokens),
    "graftlm:drafted_tokens": ("draft tokens that were run", lambda s: s.drafted_tokens),
    "graftlm:accepted_tokens": ("draft tokens that were accepted", lambda s: s.accepted_tokens),
    "vllm:spec_decode_num_draft_tokens": ("draft tokens that were run", lambda s: s.drafted_tokens),
    "vllm:spec_decode_num_accepted_tokens": ("draft tokens that were accepted", lambda s: s.accepted_tokens),
    "graftlm:failed_steps": ("steps that raised an error", lambda s: s.failed_steps),
    "graftlm:steps": ("steps of the engine", lambda s: s.steps),
    "graftlm:replica_restarts": ("replicas started in place of dead ones", lambda s: s.restarts),
}


class Metrics(Collector):
    """A collector that counts the server's requests, and reads the engine's counters at each scrape."""

    def __init__(self, runtime: Runtime, model_name: str) -> None:
        self._runtime = runtime
        self._labels = [model_name]
        self.registry = CollectorRegistry()
        self._histograms = {
            name: Histogram(f"vllm:{name}", told, ["model_name"], registry=self.registry, buckets=bounds).labels(
                model_name
            )
            for name, (told, bounds) in _HISTOGRAMS.items()
        }
        labels = ["model_name", "finished_reason"]
        self._ended = Counter("vllm:request_success", "requests that ended", labels, registry=self.registry)
        labels = ["model_name", "error"]
        self._failed = Counter("graftlm:request_failure", "requests that failed", labels, registry=self.registry)
        labels = ["model_name", "status"]
        self._answered = Counter("graftlm:http_responses", "responses by status", labels, registry=self.registry)
        self._num_answered: dict[int, int] = {}
        self._first_s: deque[float] = deque(maxlen=NUM_RECENT)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._between = [0] * (len(SHORT_S) + 1)  # gaps between two chunks, by bound
        self._between_s = 0.0
        self.registry.register(self)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def written(self, since_last_s: float) -> None:
        """Count a chunk after its stream's first. Runs for every chunk; it takes a fifth of a Histogram's time."""
        self._between[bisect_left(SHORT_S, since_last_s)] += 1
        self._between_s += since_last_s

    def ended(self, answer: Answer, completion: Completion, now_s: float) -> None:
        """Count a request that ended with a completion."""
        seen, usage, timing = self._histograms, completion.usage, completion.timing
        seen["e2e_request_latency_seconds"].observe(now_s - answer.arrived_s)
        seen["request_prompt_tokens"].observe(usage.prompt_tokens)
        seen["request_generation_tokens"].observe(usage.completion_tokens)
        longest = max(len(one.token_ids) for one in completion.completions or [completion])
        seen["request_max_num_generation_tokens"].observe(longest)
        seen["request_prefill_kv_computed_tokens"].observe(usage.prompt_tokens - usage.cached_tokens)
        self._asked(answer)
        if timing is not None:
            self._first_s.append(timing.queue_s + timing.prefill_s)
            seen["request_inference_time_seconds"].observe(timing.prefill_s + timing.decode_s)
            if (num := len(completion.token_ids)) > 1:
                seen["request_time_per_output_token_seconds"].observe(timing.decode_s / (num - 1))
            seen["time_to_first_token_seconds"].observe(timing.queue_s + timing.prefill_s)
            seen["request_queue_time_seconds"].observe(timing.queue_s)
            seen["request_prefill_time_seconds"].observe(timing.prefill_s)
            seen["request_decode_time_seconds"].observe(timing.decode_s)
        for one in completion.completions or [completion]:
            self._ended.labels(*self._labels, one.finish_reason).inc()

    def _asked(self, answer: Answer) -> None:
        sampling = answer.requests[0].sampling
        self._histograms["request_params_n"].observe(sampling.n)
        if sampling.max_tokens is not None:
            self._histograms["request_params_max_tokens"].observe(sampling.max_tokens)

    def answered(self, status: int) -> None:
        """Count a response; 499 for a client that has gone."""
        self._answered.labels(*self._labels, status).inc()
        self._num_answered[status] = self._num_answered.get(status, 0) + 1

    def responses(self) -> dict[str, int]:
        """Return the numbers of responses with an error and, apart from these, of refusals with status 429."""
        errors = sum(num for status, num in list(self._num_answered.items()) if status >= 400)
        too_many, gone = (self._num_answered.get(status, 0) for status in (429, 499))
        return {"errors": errors - too_many - gone, "too_many": too_many}

    def first_token_s(self) -> dict[str, float | None]:
        """Return the median and the 99th percentile of the last requests' times to their first token, in seconds."""
        times = sorted(self._first_s)
        return {
            "p50": times[len(times) // 2] if times else None,
            "p99": times[min(len(times) - 1, 99 * len(times) // 100)] if times else None,
        }

    def failed(self, answer: Answer, number: int, error: BaseException, now_s: float) -> None:
        """Count request `number` of an answer, which ended with an error; a cancelled one is in the histograms too."""
        if isinstance(error, RequestCancelled):
            seen = self._histograms
            seen["e2e_request_latency_seconds"].observe(now_s - answer.arrived_s)
            seen["request_generation_tokens"].observe(answer.generated[number])
            if (num := answer.requests[number].num_prompt_tokens) is not None:
                seen["request_prompt_tokens"].observe(num)
            self._asked(answer)
            self._ended.labels(*self._labels, "abort").inc()
        self._failed.labels(*self._labels, type(error).__name__).inc()

    def collect(self) -> Iterable[Metric]:
        """Yield the current gauges and counters of the engine."""
        stats = self._runtime.stats()
        for name, (told, read) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, told, labels=["model_name"])
            gauge.add_metric(self._labels, read(stats))
            yield gauge
        for name, (told, read) in _COUNTERS.items():
            counter = CounterMetricFamily(name, told, labels=["model_name"])
            counter.add_metric(self._labels, read(stats))
            yield counter
        gaps = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds", "between two chunks of a stream", labels=["model_name"]
        )
        below = zip((*map(str, SHORT_S), "+Inf"), accumulate(self._between), strict=True)
        gaps.add_metric(self._labels, list(below), self._between_s)
        yield gaps
        tokens = HistogramMetricFamily("vllm:iteration_tokens_total", "tokens of a step", labels=["model_name"])
        *steps, num_tokens = stats.step_tokens
        below = zip((*map(str, map(float, STEP_BOUNDS)), "+Inf"), accumulate(steps), strict=True)
        tokens.add_metric(self._labels, list(below), num_tokens)
        yield tokens
        memory = GaugeMetricFamily("graftlm:device_memory_bytes", "memory of a GPU", labels=["device", "kind"])
        for device, used, total in device_memory():
            memory.add_metric([device, "used"], used)
            memory.add_metric([device, "total"], total)
        yield memory
        page = self._runtime.config.cache.page_size
        sizes = {"block_size": str(page), "num_gpu_blocks": str(stats.slots_total // page), "cache_dtype": stats.kv}
        yield InfoMetricFamily("vllm:cache_config", "the KV pool", value=sizes)


def device_memory() -> list[tuple[str, int, int]]:
    """Return the name, the used and the total bytes of each GPU that this process uses; [] without any."""
    torch = sys.modules.get("torch")  # an engine of another process leaves torch out of this one
    if torch is None or not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        if torch.cuda.memory_reserved(index):
            free, total = torch.cuda.mem_get_info(index)
            found.append((f"cuda:{index} {torch.cuda.get_device_name(index)}", total - free, total))
    return found


def _share(num_slots: int, stats: Stats) -> float:
    return num_slots / stats.slots_total if stats.slots_total else 0.0
