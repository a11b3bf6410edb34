"""Log lines for people: the time, the level, what happened, and the few fields that matter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from structlog.typing import EventDict

#: Fields that have another place in a line, or are for programs.
_HIDDEN = frozenset(
    {"timestamp", "level", "event", "logger", "exception", "stack", "request_id", "task"}
)

#: Codes of the terminal: of levels, and of what is not the message.
_COLORS = {"debug": "2", "info": "32", "warning": "33", "error": "31", "critical": "31"}
_DIM = "2"

#: A terminal would obey these, and a line is to stay one line.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")

_BARE = re.compile(r"[^\s\"'=]+")


class Console:
    """Makes the text of a line. The id of a request is on lines that are about a problem."""

    def __init__(self, *, colors: bool) -> None:
        self._colors = colors

    def __call__(self, _logger: Any, _method: str, event: EventDict) -> str:
        level = event.get("level", "")
        parts = [self._paint(_DIM, str(event["timestamp"]))] if "timestamp" in event else []
        if level:
            parts.append(self._paint(_COLORS.get(level, ""), f"{level:<7}"))
        is_request = event.get("event") == "request"
        parts.append(_safe(_request_in(event) if is_request else str(event.get("event", ""))))
        fields = _about_request(event) if is_request else _fields_of(event, level)
        parts += [f"{self._paint(_DIM, f'{name}=')}{_written(value)}" for name, value in fields]
        return " ".join(parts) + _problem_in(event)

    def _paint(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colors and code else text


def _fields_of(event: Mapping[str, Any], level: str) -> Iterator[tuple[str, Any]]:
    """The fields of a line about anything but the end of a request."""
    yield from ((name, value) for name, value in event.items() if name not in _HIDDEN)
    if level in ("warning", "error", "critical") and "request_id" in event:
        yield "request_id", event["request_id"]


def _request_in(event: Mapping[str, Any]) -> str:
    return " ".join(str(event[name]) for name in ("method", "path", "status") if name in event)


#: Fields of a request that are shown as they are.
_SHOWN = ("key", "finish", "cancelled", "stream", "batch", "error", "code")


def _about_request(event: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of a request, the most important first."""
    if "model" in event:
        yield "model", event["model"]
    if "prompt_tokens" in event:
        yield "tokens", f"{event['prompt_tokens']}+{event['completion_tokens']}"
        if event["cached_tokens"]:
            yield "cached", event["cached_tokens"]
    for name, shown in (("queue_ms", "queued"), ("ttft_ms", "first"), ("total_ms", "total")):
        if (ms := event.get(name)) is not None and (name != "queue_ms" or ms >= 1):
            yield shown, f"{ms / 1e3:.1f}s" if ms >= 1e3 else f"{ms:.0f}ms"
    yield from ((name, event[name]) for name in _SHOWN if name in event)
    if "client" in event:
        yield "client", "/".join(str(event[one]) for one in ("client", "agent") if one in event)
    if event.get("level") in ("warning", "error") and "request_id" in event:
        yield "request_id", event["request_id"]


def _written(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return _safe(text if _BARE.fullmatch(text) else '"' + text.replace('"', '\\"') + '"')


def _safe(text: str) -> str:
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _problem_in(event: Mapping[str, Any]) -> str:
    """The traceback of a line, below it."""
    return "".join(f"\n{event[name]}" for name in ("stack", "exception") if event.get(name))
