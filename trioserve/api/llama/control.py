"""``POST /v1/chat/completions/control``: acts on an answer while it is being streamed."""

from __future__ import annotations

import attrs
from quart import Blueprint
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base.body import read_body
from trioserve.api.base.fields import structure
from trioserve.api.base.openapi import takes
from trioserve.api.base.registry import NOT_RUNNING
from trioserve.api.base.request import current_request, json_response
from trioserve.api.base.service import current_responses, current_server
from trioserve.errors import InvalidRequestError

blueprint = Blueprint("control", __name__)

_NOT_ENABLED = "reasoning control not enabled for this completion"


@attrs.frozen(kw_only=True)
class ControlRequest:
    """``POST /v1/chat/completions/control``."""

    id: str = ""
    action: str = ""


@blueprint.post("/v1/chat/completions/control")
@takes(ControlRequest)
async def control() -> Response:
    """End the reasoning of a running answer, or the answer."""
    request = structure(ControlRequest, await read_body())
    if not request.id:
        raise InvalidRequestError("missing completion id", param="id")
    if request.action not in ("reasoning_end", "cancel"):
        raise InvalidRequestError("unknown control action", param="action")
    response = current_responses().find(request.id, current_request().api_key)
    if response is None or response.has_ended:
        return _refuse(NOT_RUNNING)
    if request.action == "cancel":
        response.cancel()
        return json_response({"success": True})
    if not response.reasoning_control:
        return _refuse(_NOT_ENABLED)
    server, live = current_server(), response.live
    if any([await server.end_reasoning(stream) for stream in live]):
        return json_response({"success": True})
    ended = all(stream.mailbox.ended for stream in live)  # meanwhile; else the model has none
    return _refuse(NOT_RUNNING if ended else _NOT_ENABLED)


def _refuse(message: str) -> Response:
    return json_response({"success": False, "message": message})
