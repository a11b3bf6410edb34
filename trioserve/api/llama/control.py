"""``POST /v1/chat/completions/control``: acts on an answer while it is being streamed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import attrs
from quart import Blueprint, current_app
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base.body import read_body
from trioserve.api.base.fields import structure
from trioserve.api.base.openapi import takes
from trioserve.api.base.request import json_response
from trioserve.api.base.service import current_server
from trioserve.errors import InvalidRequestError
from trioserve.server.stream import ChatStream

blueprint = Blueprint("control", __name__)

_NAME = "trioserve.control"  # in `app.extensions`

_NOT_RUNNING = "no active completion for this id"
_NOT_ENABLED = "reasoning control not enabled for this completion"


@attrs.frozen(kw_only=True)
class ControlRequest:
    """``POST /v1/chat/completions/control``."""

    id: str = ""
    action: str = ""


@attrs.frozen
class _Running:
    """A response that is being streamed."""

    streams: tuple[ChatStream, ...]
    reasoning: bool  # whether the request allows that its reasoning is ended


@contextmanager
def running(id_: str, streams: Sequence[ChatStream], *, reasoning: bool) -> Iterator[None]:
    """Have the route find a response by its id, as long as the block runs.

    Args:
        id_: the id in the chunks of the response.
        streams: its choices.
        reasoning: whether the reasoning may be ended.
    """
    found = _found()
    found[id_] = _Running(tuple(streams), reasoning)
    try:
        yield
    finally:
        del found[id_]


def _found() -> dict[str, _Running]:
    found: dict[str, _Running] = current_app.extensions.setdefault(_NAME, {})
    return found


@blueprint.post("/v1/chat/completions/control")
@takes(ControlRequest)
async def control() -> Response:
    """End the reasoning of a running answer, or the answer."""
    request = structure(ControlRequest, await read_body())
    if not request.id:
        raise InvalidRequestError("missing completion id", param="id")
    if request.action not in ("reasoning_end", "cancel"):
        raise InvalidRequestError("unknown control action", param="action")
    found = _found().get(request.id)
    live = [one for one in found.streams if not one.mailbox.ended] if found is not None else []
    if found is None or not live:
        return _refuse(_NOT_RUNNING)
    server = current_server()
    if request.action == "cancel":
        for stream in live:
            server.cancel(stream)
        return json_response({"success": True})
    if not found.reasoning:
        return _refuse(_NOT_ENABLED)
    if any([await server.end_reasoning(stream) for stream in live]):
        return json_response({"success": True})
    ended = all(stream.mailbox.ended for stream in live)  # meanwhile; else the model has none
    return _refuse(_NOT_RUNNING if ended else _NOT_ENABLED)


def _refuse(message: str) -> Response:
    return json_response({"success": False, "message": message})
