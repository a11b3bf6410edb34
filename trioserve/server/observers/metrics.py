"""Metrics: what a server has done, in the text format of Prometheus and as one JSON object.

Two families stand side by side. ``llamacpp:`` has llama-server's names, types and help, so that its
dashboards work. ``trioserve:`` has what vLLM's dashboards show: histograms of a request's times and
tokens, how requests ended, and what the engine does now.

A request is recorded once, when it ends. Nothing is done for a token: a histogram of the library
takes a lock and 0.8 µs for each value, so the time between tokens is observed as a mean of each
request, and the engine's counters are plain numbers, which are read when metrics are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from time import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from trioserve.errors import TrioServeError
from trioserve.server.observers.observer import (
    ENDS,
    RecordingWork,
    RequestEnd,
    RequestInfo,
    ToolWork,
)
from trioserve.types import CancelReason, EngineCounters, EngineStatus, FinishReason, Timings

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0),
)
#: Tokens of a block in `cache_config_info`. The KV cache is shared token by token, and has no
#: blocks; but who reads this counts in them. It is vLLM's default.
_BLOCK_SIZE = 16

_TOKENS = tuple(float(n * 10**power) for power in range(6) for n in (1, 2, 5))

#: Names, types and help of llama-server, in its order.
# fmt: off
_LLAMACPP = (
    ("prompt_tokens_total", "counter",
     "Number of prompt tokens processed, excluding cached tokens"),
    ("prompt_tokens_cached_total", "counter", "Number of prompt tokens reused from the cache"),
    ("prompt_seconds_total", "counter", "Total time spent processing prompts"),
    ("tokens_predicted_total", "counter", "Number of generation tokens processed"),
    ("tokens_predicted_seconds_total", "counter", "Total time spent generating tokens"),
    ("n_decode_total", "counter",
     "Total number of llama_decode() calls, excluding speculative decoding and multimodal "
     "decoding"),
    ("n_tokens_max", "counter", "Largest observed sequence length (prompt + generation)"),
    ("spec_decode_num_draft_tokens_total", "counter", "Speculative: Total draft tokens generated"),
    ("spec_decode_num_accepted_tokens_total", "counter",
     "Speculative: Total draft tokens accepted by the target model"),
    ("spec_decode_num_drafts_total", "counter",
     "Speculative: Total speculative decoding verification steps"),
    ("prompt_tokens_seconds", "gauge", "Average prompt throughput in tokens/s"),
    ("predicted_tokens_seconds", "gauge", "Average generation throughput in tokens/s"),
    ("requests_processing", "gauge", "Number of requests processing"),
    ("requests_deferred", "gauge", "Number of requests deferred"),
    ("n_busy_slots_per_decode", "gauge", "Average number of busy slots per llama_decode() call"),
)
# fmt: on

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class Metrics:
    """An observer that counts, for one server; two in one process do not mix.

    Used on the event loop.
    """

    def __init__(self) -> None:
        #: When the server started, in seconds since the epoch.
        self.started = time()
        #: The label of all that is `trioserve:`; known once the model was loaded.
        self.model_name = ""
        #: The names of its LoRA adapters, in the order of their ids.
        self.adapters: Sequence[str] = ()
        self._llamacpp = _LlamaCpp()
        self._status = EngineStatus(slots=(), waiting=())
        self._first_token = _histogram(
            "time_to_first_token_seconds", "From submission to the first token", _SECONDS
        )
        self._per_token = _histogram(
            "request_time_per_output_token_seconds",
            "Between two tokens of a request, the mean of the request",
            _SECONDS,
        )
        self._queued = _histogram(
            "request_queue_time_seconds", "From submission to the slot", _SECONDS
        )
        self._whole = _histogram(
            "e2e_request_latency_seconds", "From submission to the end", _SECONDS
        )
        self._prompt = _histogram("request_prompt_tokens", "Tokens of a prompt", _TOKENS)
        self._output = _histogram(
            "request_generation_tokens", "Tokens of an output, whole or cut off", _TOKENS
        )
        self._finished = _counter("request_success", "Requests that finished", "reason")
        self._cancelled = _counter("request_cancelled", "Requests cancelled", "reason")
        self._failed = _counter("request_failed", "Requests that failed", "type")
        # Reasons begin at 0, so that a rate sees the first one.
        for finish in FinishReason:
            self._finished.labels(finish.value)
        for cancel in CancelReason:
            self._cancelled.labels(cancel.value)
        for error in _with_subclasses(TrioServeError):
            self._failed.labels(error.type)
        self._recordings = _counter("recordings", "Recordings transcribed", "end")
        for end in ENDS:
            self._recordings.labels(end)
        self._recorded_s = 0.0
        self._tool_calls = _counter("tool_calls", "Calls of tools", "tool", "outcome")
        self._tool_times = _histogram("tool_seconds", "For how long tools ran", _SECONDS)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def request_started(self, request: RequestInfo) -> None:
        """Do nothing: a request is counted when it has ended."""

    def request_ended(self, request: RequestInfo, end: RequestEnd) -> None:
        """Count a request."""
        self._prompt.observe(request.n_prompt)
        self._output.observe(end.n_output)
        if end.finish is not None:
            self._finished.labels(end.finish.value).inc()
            self._whole.observe(end.total_s)
        elif end.cancelled is not None:
            self._cancelled.labels(end.cancelled.value).inc()
        else:
            self._failed.labels(end.error_type).inc()
        if end.timings is not None:
            self._observe_times(end.timings)

    def recording_ended(self, work: RecordingWork) -> None:
        """Count a recording."""
        self._recordings.labels(work.end).inc()
        if work.end == "finished":
            self._recorded_s += work.seconds

    def tool_ended(self, work: ToolWork) -> None:
        """Count a call."""
        self._tool_calls.labels(work.tool, work.outcome).inc()
        if work.ran:
            self._tool_times.observe(work.seconds)

    def _observe_times(self, timings: Timings) -> None:
        self._llamacpp.observe(timings)
        self._queued.observe(timings.queue_ms / 1e3)
        if timings.predicted_n:
            self._first_token.observe((timings.queue_ms + timings.prompt_ms) / 1e3)
        if timings.predicted_n > 1:
            self._per_token.observe(timings.predicted_ms / 1e3 / (timings.predicted_n - 1))

    def render(self, status: EngineStatus) -> bytes:
        """Write all metrics, with a look at the engine that was taken just now."""
        self._status = status
        return self._llamacpp.render(status).encode() + generate_latest(self._registry)

    def look(self, status: EngineStatus) -> list[Metric]:
        """Give those of ours, with a look at the engine that was taken just now."""
        self._status = status
        return list(self.collect())

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics of ours. The registry calls this."""
        label = {"model_name": self.model_name}
        for family in self._families():
            family.samples = [
                one._replace(labels=label | one.labels)
                for one in family.samples
                # The library adds when each was made, which can only be turned off for a process.
                if not one.name.endswith("_created")
            ]
            yield family

    def _families(self) -> Iterator[Metric]:
        for metric in (
            *(self._first_token, self._per_token, self._queued, self._whole),
            *(self._prompt, self._output, self._finished, self._cancelled, self._failed),
            *(self._recordings, self._tool_calls, self._tool_times),
        ):
            yield from metric.collect()
        yield from self._load()
        counters = self._status.counters
        yield _gauge("kv_cells", "Cells of the KV cache", counters.n_cells)
        yield _gauge("kv_cells_used", "Cells with tokens, also kept ones", counters.n_cells_used)
        yield _total("prefix_cache_queries", "Prompt tokens admitted", counters.prompt_queries)
        yield _total("prefix_cache_hits", "Prompt tokens found in a cache", counters.cached_tokens)
        yield _total("prompt_tokens", "Prompt tokens computed", counters.prompt_tokens)
        yield _total("generation_tokens", "Tokens generated", counters.predicted_tokens)
        yield _total("spec_decode_num_drafts", "Drafts checked", counters.drafts)
        yield _total(
            "spec_decode_num_draft_tokens", "Tokens in these drafts", counters.draft_tokens
        )
        yield _total(
            "spec_decode_num_accepted_tokens", "Tokens accepted of them", counters.accepted_tokens
        )
        yield _total("ticks", "Steps of the engine", counters.steps)
        yield _total("tick_seconds", "Time in steps", counters.step_s)
        yield _gauge("threads", "Threads of steps with few tokens", counters.threads)
        yield _gauge("threads_batch", "Threads of steps with many", counters.threads_batch)
        yield _total("thread_changes", "Changes of these numbers", counters.thread_changes)
        yield _total("media_chunks", "Parts of images and sound encoded", counters.media_chunks)
        yield _total("media_seconds", "Time in which the encoder worked", counters.media_s)
        yield _total("recording_seconds", "Length of the recordings finished", self._recorded_s)

    def _load(self) -> Iterator[Metric]:
        """What a router of requests chooses servers by, in the form of vLLM."""
        counters = self._status.counters
        running = [slot for slot in self._status.slots if slot.task_id is not None]
        waiting = self._status.waiting
        yield _gauge("num_requests_running", "Requests in a slot", len(running))
        yield _gauge("num_requests_waiting", "Requests in the queue", len(waiting))
        yield _gauge(
            "kv_cache_usage_perc",
            "Share of the KV cache that requests in slots use; 1 is all of it",
            _ratio(counters.n_cells_running, counters.n_cells),
        )
        blocks = {
            "block_size": str(_BLOCK_SIZE),
            "num_gpu_blocks": str(counters.n_cells // _BLOCK_SIZE),
        }
        yield _info("cache_config_info", "Tokens of a block of the KV cache, and blocks", blocks, 1)
        used = {id_ for one in running if one.task for id_, _ in one.task.root.adapters}
        wanted = {id_ for one in waiting for id_, _ in one.adapters}
        adapters = {
            "max_lora": str(len(self.adapters)),
            "running_lora_adapters": self._names_of(used),
            "waiting_lora_adapters": self._names_of(wanted - used),
        }
        # Of several series, a reader takes the newest that names an adapter.
        looked = time() if used or wanted else 0.0
        yield _info("lora_requests_info", "LoRA adapters in use, and when", adapters, looked)

    def _names_of(self, adapters: set[int]) -> str:
        return ",".join(self.adapters[id_] for id_ in sorted(adapters))


def _with_subclasses(error: type[TrioServeError]) -> Iterator[type[TrioServeError]]:
    yield error
    for one in error.__subclasses__():
        yield from _with_subclasses(one)


def _histogram(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
    return Histogram(f"trioserve:{name}", text, buckets=bounds, registry=None)


def _counter(name: str, text: str, *labels: str) -> Counter:
    text = f"{text}, by {' and '.join(labels)}"
    return Counter(f"trioserve:{name}", text, labels, registry=None)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"trioserve:{name}", text, value=value)


def _info(name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(f"trioserve:{name}", text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _total(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"trioserve:{name}", text, value=value)


class _LlamaCpp:
    """llama-server's metrics. It has counters whose names the client library would change."""

    def __init__(self) -> None:
        self._predicted_s = 0.0
        self._steps, self._steps_s = 0, 0.0  # since the last look
        self._before = EngineCounters()

    def observe(self, timings: Timings) -> None:
        """Count the times of a request that finished."""
        seconds = timings.predicted_ms / 1e3
        self._predicted_s += seconds
        self._steps += max(timings.predicted_n - 1, 0)
        self._steps_s += seconds

    def render(self, status: EngineStatus) -> str:
        """Write them. Speeds are means since the last look, as in llama-server."""
        now, before = status.counters, self._before
        running = sum(slot.task_id is not None for slot in status.slots)
        n_prompt = now.prompt_tokens - before.prompt_tokens
        prompt_s = now.prompt_s - before.prompt_s
        values = {
            "prompt_tokens_total": now.prompt_tokens,
            "prompt_tokens_cached_total": now.cached_tokens,
            "prompt_seconds_total": now.prompt_s,
            "tokens_predicted_total": now.predicted_tokens,
            "tokens_predicted_seconds_total": self._predicted_s,
            "n_decode_total": now.decodes,
            "n_tokens_max": now.n_tokens_max,
            "spec_decode_num_draft_tokens_total": now.draft_tokens,
            "spec_decode_num_accepted_tokens_total": now.accepted_tokens,
            "spec_decode_num_drafts_total": now.drafts,
            "prompt_tokens_seconds": _ratio(n_prompt, prompt_s),
            "predicted_tokens_seconds": _ratio(self._steps, self._steps_s),
            "requests_processing": running,
            "requests_deferred": len(status.waiting),
            "n_busy_slots_per_decode": now.busy_slots / max(now.decodes, 1),
        }
        self._before, self._steps, self._steps_s = now, 0, 0.0
        return "".join(
            f"# HELP llamacpp:{name} {text}\n# TYPE llamacpp:{name} {kind}\n"
            f"llamacpp:{name} {values[name]:.15g}\n"
            for name, kind, text in _LLAMACPP
        )


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else 0.0


def snapshot(metrics: Metrics, status: EngineStatus) -> dict[str, Any]:
    """Describe a server, with a look at the engine that was taken just now. Times are in seconds.

    Quantiles are estimates, by the buckets of the histograms.
    """
    families = {one.name.removeprefix("trioserve:"): one for one in metrics.look(status)}
    now, counters = time(), status.counters
    running = sum(slot.task_id is not None for slot in status.slots)
    return {
        "object": "metrics",
        "model": metrics.model_name,
        "started": int(metrics.started),
        "uptime_s": round(now - metrics.started, 3),
        "requests": {
            "running": running,
            "waiting": len(status.waiting),
            "finished": _by_label(families["request_success"]),
            "cancelled": _by_label(families["request_cancelled"]),
            "failed": _by_label(families["request_failed"]),
        },
        "slots": {"total": len(status.slots), "busy": running},
        "tokens": {
            "prompt": counters.prompt_queries,
            "cached": counters.cached_tokens,
            "computed": counters.prompt_tokens,
            "generated": counters.predicted_tokens,
        },
        "latency_s": {
            "queue": _summary(families["request_queue_time_seconds"]),
            "time_to_first_token": _summary(families["time_to_first_token_seconds"]),
            "time_per_output_token": _summary(families["request_time_per_output_token_seconds"]),
            "total": _summary(families["e2e_request_latency_seconds"]),
        },
        "kv_cache": {
            "cells": counters.n_cells,
            "used": counters.n_cells_used,
            "running": counters.n_cells_running,
        },
        "drafts": {
            "checked": counters.drafts,
            "tokens": counters.draft_tokens,
            "accepted": counters.accepted_tokens,
        },
        "media": {"chunks": counters.media_chunks, "encoding_s": round(counters.media_s, 6)},
        "engine": {
            "ticks": counters.steps,
            "ticks_s": round(counters.step_s, 6),
            "decodes": counters.decodes,
            "threads": counters.threads,
            "threads_batch": counters.threads_batch,
        },
    }


def _by_label(family: Metric) -> dict[str, int]:
    """Read a counter that has one label beside the name of the model."""
    return {
        text: int(sample.value)
        for sample in family.samples
        for name, text in sample.labels.items()
        if name != "model_name"
    }


def _summary(family: Metric) -> dict[str, int | float | None]:
    """Read a histogram: how many values, their mean, and quantiles; null where there is none."""
    buckets = [
        (float(sample.labels["le"]), sample.value)
        for sample in family.samples
        if sample.name.endswith("_bucket")
    ]
    (total,) = [sample.value for sample in family.samples if sample.name.endswith("_sum")]
    count = buckets[-1][1]
    quantiles = {name: quantile(buckets, share) for name, share in _QUANTILES.items()}
    mean = round(total / count, 6) if count else None
    return {"count": int(count), "mean": mean, **quantiles}


def quantile(buckets: list[tuple[float, float]], share: float) -> float | None:
    """Estimate a quantile as Prometheus does: values are spread evenly within a bucket.

    Args:
        buckets: upper bounds, the last one infinite, each with how many values are not above it.
        share: which quantile, from 0 to 1.

    Returns:
        the highest finite bound for what is above all of them; None where there are no values.
    """
    rank = share * buckets[-1][1]
    low, n_below = 0.0, 0.0
    for bound, n_up_to in buckets:
        if math.isinf(bound):
            break
        if n_up_to >= rank and n_up_to > n_below:
            return round(low + (bound - low) * (rank - n_below) / (n_up_to - n_below), 6)
        low, n_below = bound, n_up_to
    return low if buckets[-1][1] else None


def render_process() -> bytes:
    """Write what the process uses now; nothing where there is no ``/proc``, as on macOS.

    This counts the open descriptors: with thousands of connections, it takes milliseconds.
    """
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    return generate_latest(registry)
