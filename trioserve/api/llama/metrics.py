"""``GET /metrics``, for Prometheus."""

from __future__ import annotations

from quart import Blueprint
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base import metrics as base
from trioserve.api.base.intake import current_intake
from trioserve.api.base.request import json_response
from trioserve.api.base.service import current_server
from trioserve.errors import NotSupportedError
from trioserve.server import Server
from trioserve.server.observers.metrics import Metrics, snapshot

blueprint = Blueprint("metrics", __name__)


@blueprint.get("/metrics")
async def metrics() -> Response:
    """Write what the server has done so far, in Prometheus's text format."""
    server, metrics = _current()
    status = await server.status()
    return Response(
        metrics.render(status) + await base.render(current_intake()),
        headers={"Process-Start-Time-Unix": str(int(metrics.started))},
        content_type=base.CONTENT_TYPE,
    )


@blueprint.get("/v1/metrics")
async def metrics_as_json() -> Response:
    """Tell what the server has done so far and what it does now, as one JSON object."""
    server, metrics = _current()
    return json_response(snapshot(metrics, await server.status()))


def _current() -> tuple[Server, Metrics]:
    """The server and its metrics. Raises NotSupportedError where there are none."""
    server = current_server()
    if server.metrics is None:
        raise NotSupportedError(
            "This server does not support metrics endpoint. Start it with `--metrics`"
        )
    return server, server.metrics
