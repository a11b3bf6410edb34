"""``GET /metrics``, for Prometheus."""

from __future__ import annotations

from quart import Blueprint
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base import metrics as base
from trioserve.api.base.intake import current_intake
from trioserve.api.base.service import current_server
from trioserve.errors import NotSupportedError

blueprint = Blueprint("metrics", __name__)


@blueprint.get("/metrics")
async def metrics() -> Response:
    """Write what the server has done so far, in Prometheus's text format."""
    server = current_server()
    if server.metrics is None:
        raise NotSupportedError(
            "This server does not support metrics endpoint. Start it with `--metrics`"
        )
    status = await server.status()
    return Response(
        server.metrics.render(status) + await base.render(current_intake()),
        headers={"Process-Start-Time-Unix": str(int(server.metrics.started))},
        content_type=base.CONTENT_TYPE,
    )
