"""Metrics of answers, connections, streams and the process: those of a server and of a router."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import trio
from prometheus_client import Metric

from trioserve.api.base.caller import Caller
from trioserve.api.sessions import Sessions
from trioserve.config import Config
from trioserve.errors import NotSupportedError
from trioserve.server.observers.metrics import gauge, prometheus_text, render_process, total
from trioserve.server.usage import Usage

if TYPE_CHECKING:
    from trioserve.api.service import AppState

#: The type of what `render` writes.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def check(config: Config) -> None:
    """Raise NotSupportedError if clients may not see metrics."""
    if not config.metrics_endpoint:
        raise NotSupportedError(
            "This server does not support metrics endpoint. Start it with `--metrics`"
        )


async def render(state: AppState, caller: Caller) -> bytes:
    """Write those that the API key of a caller may see, in Prometheus' text format."""
    own = await trio.to_thread.run_sync(render_process)
    families = (*_answers(state), *_streams(state.streams), *_usage(state.usage, caller.own_name))
    return prometheus_text(families) + own


def _answers(state: AppState) -> Iterator[Metric]:
    answers = {(route, str(status)): n for (route, status), n in sorted(state.n_answers.items())}
    yield total("http_answers", "HTTP answers, when they begin", answers, "route", "status")
    yield gauge("http_connections", "Open connections", state.n_connections)


def _usage(usage: Usage, key: str | None) -> Iterator[Metric]:
    """Usage by a key, or by all."""
    totals = {
        labels: used
        for labels, used in sorted(usage.totals.items())
        if key is None or labels[0] == key
    }
    for field, text in (
        ("requests", "Requests"),
        ("input_tokens", "Tokens of prompts"),
        ("cached_input_tokens", "Tokens of prompts that were in a cache"),
        ("output_tokens", "Tokens generated"),
        ("seconds", "Seconds of requests, from submission to the end"),
    ):
        values = {labels: getattr(used, field) for labels, used in totals.items()}
        yield total(f"usage_{field}", f"{text}, by API key and model", values, "key", "model")


def _streams(sessions: Sessions) -> Iterator[Metric]:
    streams = list(sessions)
    n_finished = sum(each.ring.closed for each in streams)
    n_running, n_readers = len(streams) - n_finished, sum(each.n_readers for each in streams)
    by_state = {("running",): n_running, ("finished",): n_finished}
    yield gauge("streams", "Streams that can be resumed", by_state, "state")
    yield gauge("stream_readers", "Connections that read them", n_readers)
    yield gauge("stream_bytes", "Bytes that are kept of them", sessions.n_bytes)
    text = "Streams that were forgotten early, to make room"
    yield total("streams_evicted", text, sessions.n_evicted)
