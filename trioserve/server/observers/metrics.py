"""Metrics of a server, in the text format of Prometheus and as one JSON object.

There are two families. ``llamacpp:`` has llama-server's names, types and help, so that its
dashboards work. ``trioserve:`` has the metrics of vLLM's dashboards: histograms of the times and
tokens of requests, how requests ended, and the current state of the engine. Each metric is declared
once, with its key in the JSON object, if it has one: `Metrics.__init__` has the metrics that events
update, and `_read` those that are read from the engine.

A request is recorded once, when it ends, and never for each token: a histogram of the library takes
a lock and 0.8 µs for each value. The time between tokens is therefore the mean of each request, and
the engine's counters are plain numbers, which are read when metrics are requested.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from time import time
from typing import Any, TypeAlias

import attrs
from prometheus_client import Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from trioserve.errors import TrioServeError
from trioserve.server.observers.observer import (
    SPEECH,
    TRANSCRIPTION_ENDS,
    Event,
    RequestEnd,
    RequestRecord,
    ToolRecord,
    TranscriptionRecord,
)
from trioserve.types import CancelReason, EngineCounters, EngineStatus, FinishReason

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0),
)
#: Tokens of a block in `cache_config_info`. The KV cache has no blocks, but readers of this metric
#: expect them. It is vLLM's default.
_BLOCK_SIZE = 16

_TOKENS = tuple(float(n * 10**power) for power in range(6) for n in (1, 2, 5))

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

#: A value, or a value for each tuple of label values.
Value: TypeAlias = float | Mapping[Any, float]


def gauge(name: str, text: str, value: Value, *labels: str) -> Metric:
    """Make a metric that goes up and down; `labels` are the names of its labels."""
    return _filled(GaugeMetricFamily(f"trioserve:{name}", text, labels=labels), value)


def total(name: str, text: str, value: Value, *labels: str) -> Metric:
    """Make a metric that only goes up."""
    return _filled(CounterMetricFamily(f"trioserve:{name}", text, labels=labels), value)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, value: Value) -> Metric:
    for labels, number in (value if isinstance(value, Mapping) else {(): value}).items():
        family.add_metric(labels, number)
    return family


@attrs.frozen
class _Families:
    families: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.families


def prometheus_text(families: Iterable[Metric]) -> bytes:
    """Format metrics as Prometheus text."""
    return generate_latest(_Families(families))


def render_process() -> bytes:
    """Format the metrics of the process; empty without ``/proc``, as on macOS.

    This counts the open descriptors, which takes milliseconds with thousands of connections.
    """
    return prometheus_text(ProcessCollector(registry=None).collect())


class Metrics:
    """An observer that counts events, for one server. Several servers in a process do not mix.

    Used on the event loop.
    """

    def __init__(self) -> None:
        #: When the server started, in seconds since the epoch.
        self.started = time()
        #: The label of all ``trioserve:`` metrics; set when the model was loaded.
        self.model_name = ""
        #: The names of the LoRA adapters, in the order of their ids.
        self.adapters: Sequence[str] = ()
        self._counted: list[tuple[Histogram | Counter, str]] = []  # and their places in the JSON
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From submission to the first token",
            key="latency_s.time_to_first_token",
        )  # fmt: skip
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Between two tokens of a request, the mean of the request",
            key="latency_s.time_per_output_token",
        )
        self._queued = self._histogram(
            "request_queue_time_seconds", "From submission to the slot", key="latency_s.queue"
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "From submission to the end", key="latency_s.total"
        )
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt", _TOKENS)
        self._output = self._histogram(
            "request_generation_tokens", "Tokens of an output, whole or cut off", _TOKENS
        )
        # Start each reason at 0, so that a rate includes the first one.
        self._finished = self._counter(
            "request_success", "Requests that finished", "reason",
            begins_with=[finish.value for finish in FinishReason], key="requests.finished",
        )  # fmt: skip
        self._cancelled = self._counter(
            "request_cancelled", "Requests cancelled", "reason",
            begins_with=[cancel.value for cancel in CancelReason], key="requests.cancelled",
        )  # fmt: skip
        self._failed = self._counter(
            "request_failed", "Requests that failed", "type",
            begins_with=[error.type for error in _with_subclasses(TrioServeError)],
            key="requests.failed",
        )  # fmt: skip
        self._recordings = self._counter(
            "recordings", "Recordings transcribed", "end", begins_with=TRANSCRIPTION_ENDS
        )
        self._recorded_s = 0.0
        self._speeches = self._counter(
            "speeches", "Texts spoken", "end", begins_with=TRANSCRIPTION_ENDS
        )
        self._first_sound = self._histogram(
            "time_to_first_sound_seconds", "From the submission of a text to its first frame"
        )
        self._n_frames = 0
        self._tool_calls = self._counter("tool_calls", "Calls of tools", "tool", "outcome")
        self._tool_times = self._histogram("tool_seconds", "For how long tools ran")
        self._predicted_s = 0.0
        # Since the last request of llama-server's metrics:
        self._steps, self._steps_s = 0, 0.0
        self._before = EngineCounters()

    def _histogram(
        self, name: str, text: str, bounds: tuple[float, ...] = _SECONDS, *, key: str = ""
    ) -> Histogram:
        histogram = Histogram(f"trioserve:{name}", text, buckets=bounds, registry=None)
        self._counted.append((histogram, key))
        return histogram

    def _counter(
        self, name: str, text: str, *labels: str, begins_with: Iterable[str] = (), key: str = ""
    ) -> Counter:
        text = f"{text}, by {' and '.join(labels)}"
        counter = Counter(f"trioserve:{name}", text, labels, registry=None)
        for value in begins_with:
            counter.labels(value)
        self._counted.append((counter, key))
        return counter

    def on_event(self, event: Event) -> None:
        """Count a request, a tool call or a recording that has ended."""
        match event:
            case RequestRecord() if event.request.operation == SPEECH:
                self._count_speech(event.end)
            case RequestRecord():
                self._count_request(event)
            case ToolRecord():
                self._tool_calls.labels(event.tool, event.outcome).inc()
                if event.ran:
                    self._tool_times.observe(event.seconds)
            case TranscriptionRecord():
                self._recordings.labels(event.end).inc()
                if event.end == "finished":
                    self._recorded_s += event.seconds

    def _count_request(self, record: RequestRecord) -> None:
        end = record.end
        self._prompt.observe(record.request.n_prompt)
        self._output.observe(end.n_output)
        if end.finish is not None:
            self._finished.labels(end.finish.value).inc()
            self._whole.observe(end.total_s)
        elif end.cancelled is not None:
            self._cancelled.labels(end.cancelled.value).inc()
        else:
            self._failed.labels(end.error_type).inc()
        if (timings := end.timings) is None:
            return
        seconds = timings.predicted_ms / 1e3
        self._predicted_s += seconds
        self._steps += max(timings.predicted_n - 1, 0)
        self._steps_s += seconds
        self._queued.observe(timings.queue_ms / 1e3)
        if timings.predicted_n:
            self._first_token.observe((timings.queue_ms + timings.prompt_ms) / 1e3)
        if timings.predicted_n > 1:
            self._per_token.observe(seconds / (timings.predicted_n - 1))

    def _count_speech(self, end: RequestEnd) -> None:
        is_cancelled = end.cancelled is not None
        how = "finished" if end.finish is not None else "cancelled" if is_cancelled else "failed"
        self._speeches.labels(how).inc()
        self._n_frames += end.n_output
        if (timings := end.timings) is not None:
            self._first_sound.observe((timings.queue_ms + timings.prompt_ms) / 1e3)

    def render(self, status: EngineStatus) -> bytes:
        """Format all metrics, with a fresh status of the engine."""
        llamacpp = "".join(self._llamacpp(status))
        return llamacpp.encode() + prometheus_text(family for family, _ in self._families(status))

    def snapshot(self, status: EngineStatus) -> dict[str, Any]:
        """Describe the server as JSON, with a fresh status of the engine.

        Times are in seconds. Quantiles are estimated from the buckets of the histograms.
        """
        counters = status.counters
        groups: dict[str, dict[str, Any]] = {
            "requests": {},
            "slots": {"total": len(status.slots), "busy": _n_running(status)},
            "tokens": {},
            "latency_s": {},
            "kv_cache": {"running": counters.n_cells_running},
            "cache": {},
            "drafts": {},
            "media": {},
            "engine": {"decodes": counters.decodes},
        }
        for family, key in self._families(status):
            if key:
                group, _, name = key.partition(".")
                groups[group][name] = _in_json(family)
        return {
            "object": "metrics",
            "model": self.model_name,
            "started": int(self.started),
            "uptime_s": round(time() - self.started, 3),
            **groups,
        }

    def _families(self, status: EngineStatus) -> Iterator[tuple[Metric, str]]:
        """The ``trioserve:`` metrics, each with its key in the JSON object, if it has one."""
        counted = ((one, key) for each, key in self._counted for one in each.collect())
        for family, key in (*counted, *self._read(status)):
            family.samples = [
                one._replace(labels={"model_name": self.model_name, **one.labels})
                for one in family.samples
                # Drop the creation times that the library adds; it can disable them only globally.
                if not one.name.endswith("_created")
            ]
            yield family, key

    def _read(self, status: EngineStatus) -> Iterator[tuple[Metric, str]]:
        """The metrics that are read from the engine."""
        now, n_running, n_waiting = status.counters, _n_running(status), len(status.waiting)
        share = _ratio(now.n_cells_running, now.n_cells)
        for make, name, text, value, key in (
            # In the form of vLLM, for routers that choose a server by load:
            (gauge, "num_requests_running", "Requests in a slot", n_running, "requests.running"),
            (gauge, "num_requests_waiting", "Requests in the queue", n_waiting,
             "requests.waiting"),
            (gauge, "kv_cache_usage_perc",
             "Share of the KV cache that requests in slots use; 1 is all of it", share, ""),
            (gauge, "kv_cells", "Cells of the KV cache", now.n_cells, "kv_cache.cells"),
            (gauge, "kv_cells_used", "Cells with tokens, also kept ones", now.n_cells_used,
             "kv_cache.used"),
            (gauge, "kv_cells_copied", "Cells with copies, beside those with tokens",
             now.n_cells_copied, "kv_cache.copied"),
            (total, "prefix_cache_queries", "Prompt tokens admitted", now.prompt_queries,
             "tokens.prompt"),
            (total, "prefix_cache_hits", "Prompt tokens found in a cache", now.cached_tokens,
             "tokens.cached"),
            (total, "prefix_cache_ram_hits", "Of these, tokens that came from RAM",
             now.ram_tokens, "tokens.cached_ram"),
            (total, "prefix_cache_disk_hits", "Of these, tokens that came from disk",
             now.disk_tokens, "tokens.cached_disk"),
            (gauge, "kv_cache_bytes", "Bytes that sequences hold in the KV cache", now.kv_bytes,
             "cache.kv_bytes"),
            (gauge, "ram_cache_bytes", "Bytes of sequences and checkpoints in RAM", now.ram_bytes,
             "cache.ram_bytes"),
            (gauge, "disk_cache_bytes", "Bytes of the files of --cache-disk", now.disk_bytes,
             "cache.disk_bytes"),
            (total, "disk_cache_read_bytes", "Bytes read from them", now.disk_read_bytes,
             "cache.disk_read_bytes"),
            (total, "disk_cache_written_bytes", "Bytes written to them", now.disk_written_bytes,
             "cache.disk_written_bytes"),
            (total, "prompt_tokens", "Prompt tokens computed", now.prompt_tokens,
             "tokens.computed"),
            (total, "generation_tokens", "Tokens generated", now.predicted_tokens,
             "tokens.generated"),
            (total, "spec_decode_num_drafts", "Drafts checked", now.drafts, "drafts.checked"),
            (total, "spec_decode_num_draft_tokens", "Tokens in these drafts", now.draft_tokens,
             "drafts.tokens"),
            (total, "spec_decode_num_accepted_tokens", "Tokens accepted of them",
             now.accepted_tokens, "drafts.accepted"),
            (total, "ticks", "Steps of the engine", now.steps, "engine.ticks"),
            (total, "tick_seconds", "Time in steps", now.step_s, "engine.ticks_s"),
            (gauge, "threads", "Threads of steps with few tokens", now.threads, "engine.threads"),
            (gauge, "threads_batch", "Threads of steps with many", now.threads_batch,
             "engine.threads_batch"),
            (total, "thread_changes", "Changes of these numbers", now.thread_changes, ""),
            (total, "media_chunks", "Parts of images and sound encoded", now.media_chunks,
             "media.chunks"),
            (total, "media_seconds", "Time in which the encoder worked", now.media_s,
             "media.encoding_s"),
            (total, "recording_seconds", "Length of the recordings finished", self._recorded_s, ""),
            (total, "speech_frames", "Frames of speech", self._n_frames, ""),
        ):  # fmt: skip
            yield make(name, text, value), key
        blocks = (str(_BLOCK_SIZE), str(now.n_cells // _BLOCK_SIZE))
        text = "Tokens of a block of the KV cache, and blocks"
        yield gauge("cache_config_info", text, {blocks: 1}, "block_size", "num_gpu_blocks"), ""
        yield self._adapters_in_use(status), ""

    def _adapters_in_use(self, status: EngineStatus) -> Metric:
        """The adapters of running and waiting requests with a timestamp, in the form of vLLM."""
        tasks = [slot.task for slot in status.slots if slot.task_id is not None]
        used = {id_ for task in tasks if task for id_, _ in task.root.adapters}
        wanted = {id_ for one in status.waiting for id_, _ in one.adapters} - used
        running, waiting = (
            ",".join(self.adapters[id_] for id_ in sorted(ids)) for ids in (used, wanted)
        )
        # A reader uses the newest series that names an adapter.
        looked = time() if used or wanted else 0.0
        return gauge(
            "lora_requests_info",
            "LoRA adapters in use, and when",
            {(str(len(self.adapters)), running, waiting): looked},
            *("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )

    def _llamacpp(self, status: EngineStatus) -> Iterator[str]:
        """Format llama-server's metrics, with its names, types, help and order.

        The client library would change the names of some counters. Speeds are means since the last
        request, as in llama-server.
        """
        now, before = status.counters, self._before
        n_prompt = now.prompt_tokens - before.prompt_tokens
        for kind, name, text, value in (
            ("counter", "prompt_tokens_total",
             "Number of prompt tokens processed, excluding cached tokens", now.prompt_tokens),
            ("counter", "prompt_tokens_cached_total",
             "Number of prompt tokens reused from the cache", now.cached_tokens),
            ("counter", "prompt_seconds_total", "Total time spent processing prompts",
             now.prompt_s),
            ("counter", "tokens_predicted_total", "Number of generation tokens processed",
             now.predicted_tokens),
            ("counter", "tokens_predicted_seconds_total", "Total time spent generating tokens",
             self._predicted_s),
            ("counter", "n_decode_total",
             "Total number of llama_decode() calls, excluding speculative decoding and multimodal "
             "decoding", now.decodes),
            ("counter", "n_tokens_max",
             "Largest observed sequence length (prompt + generation)", now.n_tokens_max),
            ("counter", "spec_decode_num_draft_tokens_total",
             "Speculative: Total draft tokens generated", now.draft_tokens),
            ("counter", "spec_decode_num_accepted_tokens_total",
             "Speculative: Total draft tokens accepted by the target model", now.accepted_tokens),
            ("counter", "spec_decode_num_drafts_total",
             "Speculative: Total speculative decoding verification steps", now.drafts),
            ("gauge", "prompt_tokens_seconds", "Average prompt throughput in tokens/s",
             _ratio(n_prompt, now.prompt_s - before.prompt_s)),
            ("gauge", "predicted_tokens_seconds", "Average generation throughput in tokens/s",
             _ratio(self._steps, self._steps_s)),
            ("gauge", "requests_processing", "Number of requests processing", _n_running(status)),
            ("gauge", "requests_deferred", "Number of requests deferred", len(status.waiting)),
            ("gauge", "n_busy_slots_per_decode",
             "Average number of busy slots per llama_decode() call",
             now.busy_slots / max(now.decodes, 1)),
        ):  # fmt: skip
            yield f"# HELP llamacpp:{name} {text}\n# TYPE llamacpp:{name} {kind}\n"
            yield f"llamacpp:{name} {value:.15g}\n"
        self._before, self._steps, self._steps_s = now, 0, 0.0


def _with_subclasses(error: type[TrioServeError]) -> Iterator[type[TrioServeError]]:
    yield error
    for one in error.__subclasses__():
        yield from _with_subclasses(one)


def _n_running(status: EngineStatus) -> int:
    return sum(slot.task_id is not None for slot in status.slots)


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else 0.0


def _in_json(family: Metric) -> Any:
    """Convert a metric to a number, numbers by label, or a summary of a histogram."""
    if family.type == "histogram":
        return _summary(family)
    if family.type == "counter" and len(family.samples[0].labels) > 1:
        return {list(one.labels.values())[-1]: int(one.value) for one in family.samples}
    return round(family.samples[0].value, 6)


def _summary(family: Metric) -> dict[str, int | float | None]:
    """The count, mean and quantiles of a histogram; null without values."""
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
    """Estimate a quantile as Prometheus does, with values spread evenly in each bucket.

    Args:
        buckets: upper bounds, the last one infinite, each with the number of values up to it.

    Returns:
        The highest finite bound if the quantile is above it; None without values.
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
