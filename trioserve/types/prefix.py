"""How much two texts, or two lists of cells, have in common at their beginning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def shared_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Count the leading items that two sequences of one type have in common."""
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    low, high = 0, limit - 1  # comparing slices is quick: halve until the difference is found
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
