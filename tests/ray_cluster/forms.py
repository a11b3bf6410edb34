"""The routes that the load asks, what is sent to them, and how their answers end."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import attrs


@attrs.frozen
class Form:
    """A route.

    Attributes:
        write: makes the body of a request of a model, a text and a number of tokens.
        is_last: whether an event is the one that ends a stream that is whole.
    """

    name: str
    path: str
    write: Callable[[str, str, int], dict[str, Any]]
    is_last: Callable[[dict[str, Any]], bool]

    def judge(self, text: str) -> str:
        """Say how a stream has ended: ``done``, ``error``, or ``cut`` in the middle."""
        events = [event for line in text.split("\n") if (event := _event_in(line)) is not None]
        errors = [event for event in events if _is_error(event)]
        if not errors and events and self.is_last(events[-1]):
            return "done"
        if len(errors) == 1 and events[-1] is errors[0]:
            return "error"
        return "cut"


#: The end of OpenAI's streams of events.
_DONE = {"[DONE]": True}


def _event_in(line: str) -> dict[str, Any] | None:
    """Read a line of a stream, if it is the data of an event, or a line of Ollama's."""
    data = line.removeprefix("data: ")
    if data == "[DONE]":
        return _DONE
    if not data.startswith("{"):
        return None
    try:
        return dict(json.loads(data))
    except ValueError:  # the stream was cut in the middle of it
        return {}


def _is_error(event: dict[str, Any]) -> bool:
    return bool(event.get("error")) or event.get("type") in ("error", "response.failed")


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


CHAT = Form(
    "chat",
    "/v1/chat/completions",
    lambda model, text, n: {
        "model": model,
        "messages": _messages(text),
        "max_tokens": n,
        "ignore_eos": True,
    },
    lambda event: event is _DONE,
)

FORMS = (
    CHAT,
    Form(
        "completion",
        "/completion",
        lambda model, text, n: {
            "model": model,
            "prompt": text,
            "n_predict": n,
            "ignore_eos": True,
        },
        lambda event: event.get("stop") is True,
    ),
    Form(
        "messages",
        "/v1/messages",
        lambda model, text, n: {
            "model": model,
            "messages": _messages(text),
            "max_tokens": n,
            "ignore_eos": True,
        },
        lambda event: event.get("type") == "message_stop",
    ),
    Form(
        "responses",
        "/v1/responses",
        lambda model, text, n: {
            "model": model,
            "input": text,
            "max_output_tokens": n,
            "ignore_eos": True,
        },
        lambda event: event.get("type") in ("response.completed", "response.incomplete"),
    ),
    Form(
        "ollama",
        "/api/chat",
        lambda model, text, n: {
            "model": model,
            "messages": _messages(text),
            "options": {"num_predict": n},
        },
        lambda event: event.get("done") is True,
    ),
)
