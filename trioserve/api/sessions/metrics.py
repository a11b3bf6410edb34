"""Metrics of the streams that can be resumed, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from trioserve.api.sessions.sessions import Sessions


def render(sessions: Sessions) -> bytes:
    """Write what there is now."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Now(sessions))
    return generate_latest(registry)


class _Now:
    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def collect(self) -> Iterator[Metric]:
        streams = list(self._sessions)
        n_finished = sum(each.ring.closed for each in streams)
        by_state = GaugeMetricFamily(
            "trioserve:streams", "Streams that can be resumed", labels=["state"]
        )
        by_state.add_metric(["running"], len(streams) - n_finished)
        by_state.add_metric(["finished"], n_finished)
        yield by_state
        n_readers = sum(each.n_readers for each in streams)
        yield GaugeMetricFamily("trioserve:stream_readers", "Connections that read them", n_readers)
        yield GaugeMetricFamily(
            "trioserve:stream_bytes", "Bytes that are kept of them", self._sessions.n_bytes
        )
        yield CounterMetricFamily(
            "trioserve:streams_evicted",
            "Streams that were forgotten early, to make room",
            self._sessions.n_evicted,
        )
