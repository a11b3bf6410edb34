"""Sums up values: percentiles, medians with their bounds, and ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

import attrs
import numpy as np


def percentile(values: Iterable[float], share: float) -> float:
    """Return the value below which that share lies, interpolated; NaN without values."""
    given = list(values)
    return float(np.quantile(given, share)) if given else math.nan


@attrs.frozen
class Spread:
    """The median of some values, with the least and the greatest."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread | None:
    """Return median and bounds, or None when there is nothing."""
    if not values:
        return None
    return Spread(statistics.median(values), min(values), max(values))


def ratio_of(values: Sequence[float], base: Sequence[float]) -> Spread | None:
    """Return the ratio of the medians, with the bounds of the ratios of each round."""
    ours, theirs = spread(values), spread(base)
    if ours is None or theirs is None or theirs.median == 0:
        return None
    pairs = [a / b for a, b in zip(values, base, strict=False) if b]
    value = ours.median / theirs.median
    return Spread(value, min(pairs, default=value), max(pairs, default=value))
