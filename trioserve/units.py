"""Sizes, rates, counts and durations, in the one form that people read everywhere."""

from __future__ import annotations

_BYTES = ("bytes", "KiB", "MiB", "GiB", "TiB")
_SECONDS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def bytes_text(size: float) -> str:
    """Format a number of bytes, such as ``4.1 GiB``."""
    unit = 0
    while size >= 1024 and unit < len(_BYTES) - 1:
        size /= 1024
        unit += 1
    digits = 0 if unit == 0 or size >= 100 else 1
    return f"{size:.{digits}f} {_BYTES[unit]}"


def rate_text(rate: float, unit: str = "") -> str:
    """Format a rate, such as ``31.4 tokens/s``; without a unit of bytes, as ``12.3 MiB/s``."""
    if not unit:
        return f"{bytes_text(rate)}/s"
    return f"{rate:.{0 if rate >= 100 else 1}f} {unit}/s"


def count_text(number: float) -> str:
    """Format a large number in three digits, such as ``268 M``."""
    for unit in ("", " K", " M", " B"):
        if number < 1000 or unit == " B":
            break
        number /= 1000
    return f"{number:.3g}{unit}"


def duration_text(seconds: float) -> str:
    """Format a duration in its two largest units, such as ``4 min 12 s``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    rest, parts = round(seconds), list[str]()
    for size, unit in _SECONDS:
        number, rest = divmod(rest, size)
        if number or parts:
            parts.append(f"{number} {unit}" if number else "")
        if len(parts) == 2:
            break
    return " ".join(filter(None, parts))
