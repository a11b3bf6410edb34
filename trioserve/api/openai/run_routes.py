"""``POST …/{id}/approve`` and ``…/{id}/stop``: act on a call of a tool in a running answer."""

from __future__ import annotations

import attrs
from quart import Blueprint
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base.body import read_body_as
from trioserve.api.base.fields import structure
from trioserve.api.base.openapi import takes
from trioserve.api.base.registry import NOT_RUNNING
from trioserve.api.base.request import current_request, json_response
from trioserve.api.base.service import current_responses
from trioserve.errors import NotFoundError
from trioserve.server.runs.run import Run

blueprint = Blueprint("runs", __name__)


@attrs.frozen(kw_only=True)
class ApproveRequest:
    """``POST …/{id}/approve``."""

    call_id: str
    approve: bool
    reason: str = ""


@attrs.frozen(kw_only=True)
class StopRequest:
    """``POST …/{id}/stop``."""

    call_id: str


@blueprint.post("/v1/chat/completions/<id_>/approve")
@blueprint.post("/v1/responses/<id_>/approve")
@takes(ApproveRequest)
async def approve(id_: str) -> Response:
    """Let a call through that waits for a person, or refuse it. `reason` is told to the model."""
    asked = await read_body_as(lambda body: structure(ApproveRequest, body))
    run = _find(id_)
    if asked.approve:
        run.approve(asked.call_id)
    else:
        run.deny(asked.call_id, asked.reason)
    return json_response({"success": True})


@blueprint.post("/v1/chat/completions/<id_>/stop")
@blueprint.post("/v1/responses/<id_>/stop")
@takes(StopRequest)
async def stop(id_: str) -> Response:
    """Stop a call that waits or runs. The model is told that a person has stopped it."""
    asked = await read_body_as(lambda body: structure(StopRequest, body))
    _find(id_).stop(asked.call_id)
    return json_response({"success": True})


def _find(id_: str) -> Run:
    """Find the run of an answer. Raises NotFoundError: there is none, or it is another client's."""
    response = current_responses().find(id_, current_request().api_key)
    if response is None or response.run is None:
        raise NotFoundError(NOT_RUNNING, param="id")
    return response.run
