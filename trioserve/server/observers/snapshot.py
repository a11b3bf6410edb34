"""The metrics as one JSON object, for a look at a server without Prometheus."""

from __future__ import annotations

import math
from time import time
from typing import Any

from prometheus_client.core import Metric

from trioserve.server.observers.metrics import Metrics
from trioserve.types import EngineStatus

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


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
