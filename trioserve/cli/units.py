"""Numbers for people."""

from __future__ import annotations

_BYTES = ("bytes", "KiB", "MiB", "GiB", "TiB")


def bytes_text(size: float) -> str:
    """Format a number of bytes, such as ``4.1 GiB``."""
    unit = 0
    while size >= 1024 and unit < len(_BYTES) - 1:
        size /= 1024
        unit += 1
    digits = 0 if unit == 0 or size >= 100 else 1
    return f"{size:.{digits}f} {_BYTES[unit]}"


def count_text(number: float) -> str:
    """Format a large number in three digits, such as ``268 M``."""
    for unit in ("", " K", " M", " B"):
        if number < 1000 or unit == " B":
            break
        number /= 1000
    return f"{number:.3g}{unit}"


def duration_text(seconds: float) -> str:
    """Format a length of time in its largest unit, such as ``4 minutes``."""
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            number = round(seconds / size)
            return f"{number} {unit}{'s' if number > 1 else ''}"
    number = round(seconds)
    return f"{number} second{'s' if number != 1 else ''}"
