"""What a router reads of a request that it forwards: the model, and how the request may wait."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import attrs
from quart import request

from trioserve.api.base import limits
from trioserve.api.base.body import parse_json, read_whole
from trioserve.api.base.fields import MismatchError
from trioserve.api.base.forms import Form, boundary_of, is_form, parse_form
from trioserve.api.base.readers import keep_alive, seconds
from trioserve.api.base.request import TIMEOUT_HEADER, current_request
from trioserve.api.ollama.events import BODIES, Writer
from trioserve.api.ollama.lines import CONTENT_TYPE
from trioserve.api.router.places import Say, comment_on
from trioserve.api.router.service import current_router
from trioserve.errors import InvalidRequestError

_YES, _NO = frozenset({"true", "1"}), frozenset({"false", "0"})


@attrs.frozen
class Asked:
    """A request that is to be forwarded."""

    body: bytes
    model: str | None  # the name that it gives
    autoload: bool  # whether its model may be loaded for it
    deadline: float  # until when it may wait (`trio.current_time`)
    #: Seconds of silence before a ping; infinite when the answer is no stream.
    ping_interval: float
    tells_place: bool  # as soon as it waits
    content_type: str  # of its answer, if that is a stream
    say: Say  # writes a ping
    #: The answer where the model is not loaded; none: it has to be loaded for an answer.
    if_unloaded: Mapping[str, Any] | None = None


async def read() -> Asked:
    """Read the current request. What is wrong with other fields is for the child to say.

    Raises:
        InvalidRequestError: the body is not JSON, or a value cannot be used.
        TrioServeError: the body is too large.
    """
    body, fields = await read_whole(_fields_of)
    config = current_router().config
    model, lines = _model(fields), BODIES.get(request.path)
    stream = fields.get("stream")
    streams = stream is True if lines is None else stream in (None, True)
    interval = _ping_interval(fields, config.sse_ping_interval) if streams else math.inf
    writer = None if lines is None else Writer(model=model or "", body=lines)
    return Asked(
        body=body,
        model=model,
        autoload=_flag("autoload", default=config.models_autoload),
        deadline=_deadline(fields),
        ping_interval=interval,
        tells_place=streams and fields.get("queue_comments") is True,
        content_type="text/event-stream" if lines is None else CONTENT_TYPE,
        say=comment_on if writer is None else _empty_parts(writer),
        if_unloaded=writer.nothing("unload") if writer and _only_unloads(fields) else None,
    )


def _empty_parts(writer: Writer) -> Say:
    return lambda _waiting: writer.empty()


def _only_unloads(fields: Mapping[str, Any]) -> bool:
    """Whether a request to one of Ollama's routes asks for nothing but the model's memory back."""
    if any(fields.get(name) for name in ("messages", "prompt", "suffix")):
        return False
    try:
        return keep_alive(fields.get("keep_alive")) == 0
    except MismatchError:  # or it is not there
        return False


def _fields_of(body: bytes) -> Mapping[str, Any]:
    """Parse the body, as far as it is an object, or a form with files."""
    content_type = request.headers.get("Content-Type", "")
    if not body:
        return {}
    if is_form(content_type):
        return _fields_of_form(parse_form(body, boundary_of(content_type)))
    value = parse_json(body)
    return value if isinstance(value, dict) else {}


def _fields_of_form(form: Form) -> Mapping[str, Any]:
    """The fields of a form that are read here, as they are in JSON."""
    fields: dict[str, Any] = {name: values[-1] for name, values in form.fields.items()}
    with suppress(KeyError, ValueError):  # it is not there, or the child will refuse it
        fields["timeout"] = float(fields["timeout"])
    return {**fields, "stream": form.flag("stream")}


def _model(fields: Mapping[str, Any]) -> str | None:
    name = fields.get("model", request.args.get("model"))
    if name is None and request.path.startswith("/api/"):
        name = fields.get("name")  # as older clients of Ollama call it
    if name is not None and not isinstance(name, str):
        raise InvalidRequestError("'model' must be a string.", param="model")
    return name or None


def _flag(name: str, *, default: bool) -> bool:
    value = request.args.get(name, "")
    if value and value not in _YES | _NO:
        raise InvalidRequestError(f"'{name}' must be true or false, not {value!r:.40}.", param=name)
    return value in _YES if value else default


def _deadline(fields: Mapping[str, Any]) -> float:
    """When the time of the request is up. What is no time is refused by the child."""
    given = fields.get("timeout")
    try:
        if given is None:
            given = float(request.headers.get(TIMEOUT_HEADER, "inf"))
        return current_request().arrived + seconds(given)
    except (MismatchError, ValueError):
        return math.inf


def _ping_interval(fields: Mapping[str, Any], default: float) -> float:
    given = fields.get("sse_ping_interval")
    interval = given if isinstance(given, int | float) and not isinstance(given, bool) else default
    return max(interval, limits.MIN_PING_INTERVAL) if interval > 0 else math.inf
