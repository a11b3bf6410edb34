"""What the dashboard shows: rows of panels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from examples.deploy.grafana.queries import (
    EACH,
    SERVERS,
    Query,
    now,
    of_each,
    quantile,
    quantiles,
    rate,
    selected,
    share,
)

_TOKENS, _PER_SECOND = "suffix: tokens/s", "suffix: /s"


class Panel(NamedTuple):
    """What one panel shows."""

    title: str
    about: str
    unit: str
    queries: Sequence[Query]
    kind: str = "timeseries"
    stacked: bool = False
    most: float | None = None  # of the axis
    warn: float | None = None  # a stat is orange from here on
    alarm: float | None = None  # and red from here on


class Row(NamedTuple):
    """A heading, and the panels below it. A closed one asks Prometheus only once it is opened."""

    title: str
    panels: Sequence[Panel]
    closed: bool = False


_ENDED = rate("trioserve:request_prompt_tokens_count")
_FAILED = f"({rate('trioserve:request_failed_total')} or vector(0))"
_COMPUTED = rate("trioserve:prompt_tokens_total")
_CACHED = rate("trioserve:prefix_cache_hits_total")
_GENERATED = rate("trioserve:generation_tokens_total")
_HIT_RATE = share(_CACHED, rate("trioserve:prefix_cache_queries_total"))
_BUSY = rate("trioserve:tick_seconds_total", EACH)


ROWS = [
    Row(
        "Now",
        [
            Panel(
                "Servers",
                "Servers whose last scrape succeeded. A router counts as one.",
                "none",
                [Query(f"sum(up{{{SERVERS}}})", "servers")],
                "stat",
            ),
            Panel(
                "Requests",
                "Requests that ended, in whatever way.",
                _PER_SECOND,
                [Query(_ENDED, "requests")],
                "stat",
            ),
            Panel(
                "Generated",
                "Tokens that were generated, of all requests together.",
                _TOKENS,
                [Query(_GENERATED, "tokens")],
                "stat",
            ),
            Panel(
                "Waiting",
                "Requests in the queues. If it stays above 0, the servers are full.",
                "none",
                [Query(now("trioserve:num_requests_waiting"), "waiting")],
                "stat",
                warn=1,
                alarm=20,
            ),
            Panel(
                "First token, p95",
                "From submission to the first token, the queue included.",
                "s",
                [Query(quantile(0.95, "trioserve:time_to_first_token_seconds"), "p95")],
                "stat",
                warn=2,
                alarm=10,
            ),
            Panel(
                "Failed",
                "The share of requests that ended with an error. Clients that left do not count.",
                "percentunit",
                [Query(share(_FAILED, _ENDED), "failed")],
                "stat",
                warn=0.01,
                alarm=0.05,
            ),
        ],
    ),
    Row(
        "Requests",
        [
            Panel(
                "Requests, by how they ended",
                "Cancelled by their clients (disconnect, caller), because they did not read "
                "(stalled_reader), or because time was up (deadline, shutdown).",
                _PER_SECOND,
                [
                    Query(rate("trioserve:request_success_total"), "finished"),
                    Query(
                        rate("trioserve:request_cancelled_total", "reason"),
                        "cancelled: {{reason}}",
                    ),
                    Query(rate("trioserve:request_failed_total"), "failed"),
                ],
                stacked=True,
            ),
            Panel(
                "Requests in slots and in the queue",
                "Running: in a slot. Waiting: in the queue, because all slots are taken or the "
                "KV cache is full.",
                "none",
                [
                    Query(now("trioserve:num_requests_running"), "running"),
                    Query(now("trioserve:num_requests_waiting"), "waiting"),
                ],
                stacked=True,
            ),
            Panel(
                "HTTP answers, by status",
                "429: a queue or a rate limit was full. 503: the server had no room, or was "
                "loading or draining. 401: no valid key.",
                _PER_SECOND,
                [Query(rate("trioserve:http_answers_total", "status"), "{{status}}")],
                stacked=True,
            ),
            Panel(
                "Running, by server",
                "Requests in slots. Where replicas get the same load, the curves lie together.",
                "none",
                [of_each(now("trioserve:num_requests_running", EACH))],
            ),
            Panel(
                "Failed, by type of the error",
                "The five types with the most requests, maybe none. The log has a line for each.",
                _PER_SECOND,
                [
                    Query(
                        f"topk(5, {rate('trioserve:request_failed_total', 'type')})",
                        "{{type}}",
                    )
                ],
            ),
            Panel(
                "Connections",
                "Open connections, also idle ones.",
                "none",
                [Query(now("trioserve:http_connections", "instance"), "{{instance}}")],
            ),
        ],
    ),
    Row(
        "Time",
        [
            Panel(
                "Time to the first token",
                "From submission to the first token, the queue included.",
                "s",
                quantiles("trioserve:time_to_first_token_seconds"),
            ),
            Panel(
                "Time between tokens",
                "One value for each request, the mean of its stream.",
                "s",
                quantiles("trioserve:request_time_per_output_token_seconds"),
            ),
            Panel(
                "Time in the queue",
                "From submission to the slot.",
                "s",
                quantiles("trioserve:request_queue_time_seconds"),
            ),
            Panel(
                "Time of a whole request",
                "From submission to the end, of requests that finished.",
                "s",
                quantiles("trioserve:e2e_request_latency_seconds"),
            ),
            Panel(
                "First tokens, by time",
                "The darker, the more requests had their first token after that time.",
                "s",
                [
                    Query(
                        "sum by (le) (increase("
                        f"{selected('trioserve:time_to_first_token_seconds_bucket')}"
                        "[$__rate_interval]))",
                        "{{le}}",
                    )
                ],
                "heatmap",
            ),
            Panel(
                "Length of prompts and outputs",
                "The histograms have three bounds for each power of ten, so this is coarse.",
                "suffix: tokens",
                [
                    Query(quantile(q, f"trioserve:request_{what}_tokens"), f"{name}, p{q * 100:g}")
                    for what, name in (("prompt", "prompt"), ("generation", "output"))
                    for q in (0.5, 0.95)
                ],
            ),
        ],
    ),
    Row(
        "Tokens and caches",
        [
            Panel(
                "Tokens",
                "Prompt tokens that were computed, those that a cache had, and those that were "
                "generated.",
                _TOKENS,
                [
                    Query(_GENERATED, "generated"),
                    Query(_COMPUTED, "prompt, computed"),
                    Query(_CACHED, "prompt, from a cache"),
                ],
            ),
            Panel(
                "Prompt tokens found in a cache",
                "The share of the prompts that was in the KV cache or in RAM. Low where prompts "
                "should share their beginning: they differ early, or the cache is too small.",
                "percentunit",
                [Query(_HIT_RATE, "found")],
                most=1,
            ),
            Panel(
                "KV cache",
                "In use: by running requests, which is what limits how many fit. Filled: also "
                "with what is kept for later prompts, which is evicted when cells are needed.",
                "percentunit",
                [
                    Query(
                        f"max({selected('trioserve:kv_cache_usage_perc')})",
                        "in use, fullest server",
                    ),
                    Query(
                        share(now("trioserve:kv_cells_used"), now("trioserve:kv_cells")),
                        "filled, all servers",
                    ),
                ],
                most=1,
            ),
            Panel(
                "Drafts accepted",
                "The share of drafted tokens that the model accepted, with speculative decoding. "
                "Empty without it.",
                "percentunit",
                [
                    Query(
                        share(
                            rate("trioserve:spec_decode_num_accepted_tokens_total"),
                            rate("trioserve:spec_decode_num_draft_tokens_total"),
                        ),
                        "accepted",
                    )
                ],
                most=1,
            ),
            Panel(
                "Drafts",
                "Drafted tokens that were checked, and those that were accepted.",
                _TOKENS,
                [
                    Query(rate("trioserve:spec_decode_num_draft_tokens_total"), "checked"),
                    Query(rate("trioserve:spec_decode_num_accepted_tokens_total"), "accepted"),
                ],
            ),
            Panel(
                "Images and sound",
                "Parts that were encoded, and how many encoders worked on average: 1 is one that "
                "never rests. Recordings are those that were transcribed.",
                "none",
                [
                    Query(rate("trioserve:media_chunks_total"), "parts/s"),
                    Query(rate("trioserve:media_seconds_total"), "encoders at work"),
                    Query(rate("trioserve:recordings_total"), "recordings/s"),
                ],
            ),
        ],
    ),
    Row(
        "Engine and process",
        [
            Panel(
                "Length of a step",
                "The mean. A stream gets at most one token in a step, so this is its pace.",
                "s",
                [of_each(share(_BUSY, rate("trioserve:ticks_total", EACH)))],
            ),
            Panel(
                "Engine at work",
                "The share of time that the inference thread spends in steps.",
                "percentunit",
                [of_each(_BUSY)],
                most=1,
            ),
            Panel(
                "Threads",
                "Threads that compute a step: with few tokens (decode), and with 32 and more "
                "(prefill). They become fewer while other programs use the cores.",
                "none",
                [
                    of_each(now("trioserve:threads", EACH), "decode"),
                    of_each(now("trioserve:threads_batch", EACH), "prefill"),
                ],
            ),
            Panel(
                "Memory",
                "Resident memory of the process. A model whose file is mapped into memory is "
                "part of it, as far as it has been read.",
                "bytes",
                [of_each(now("process_resident_memory_bytes", EACH))],
            ),
            Panel(
                "Cores in use",
                "CPU time of the process in a second.",
                "none",
                [of_each(rate("process_cpu_seconds_total", EACH))],
            ),
            Panel(
                "Descriptors in use",
                "The share of the limit. Connections need one each; 64 are kept for files.",
                "percentunit",
                [
                    of_each(
                        share(
                            now("process_open_fds", EACH),
                            now("process_max_fds", EACH),
                        )
                    )
                ],
                most=1,
            ),
            Panel(
                "Streams that can be resumed",
                "Streams that are kept for clients that come back: still running, or finished.",
                "none",
                [Query(now("trioserve:streams", "state"), "{{state}}")],
                stacked=True,
            ),
            Panel(
                "Memory of these streams",
                "What is kept of them.",
                "bytes",
                [Query(now("trioserve:stream_bytes", "instance"), "{{instance}}")],
            ),
            Panel(
                "Streams forgotten early",
                "To make room for others. Raise the limits on kept streams if this is not 0.",
                _PER_SECOND,
                [Query(rate("trioserve:streams_evicted_total", "instance"), "{{instance}}")],
            ),
        ],
    ),
    Row(
        "Router (--models-dir, --models-preset)",
        [
            Panel(
                "Requests, by model and status",
                "What clients of the router got.",
                _PER_SECOND,
                [
                    Query(
                        rate("trioserve:router_requests_total", "model,status"),
                        "{{model}}: {{status}}",
                    )
                ],
                stacked=True,
            ),
            Panel(
                "Requests that wait for a model",
                "The model is loading, or another must be unloaded first.",
                "none",
                [Query(now("trioserve:router_requests_waiting", "model"), "{{model}}")],
                stacked=True,
            ),
            Panel(
                "Models, by what they do",
                "A model that is often loaded and unloaded has too little room: raise "
                "--models-max or the limit of memory.",
                "none",
                [Query(now("trioserve:router_models", "status"), "{{status}}")],
                stacked=True,
            ),
        ],
        closed=True,
    ),
]
