"""``GET /metrics``, for Prometheus."""

from __future__ import annotations

import trio
from quart import Blueprint
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base.intake import current_intake
from trioserve.api.base.service import current_server
from trioserve.api.sessions import metrics as streams
from trioserve.errors import NotSupportedError
from trioserve.server.observers import process

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
    own = await trio.to_thread.run_sync(process.render)
    return Response(
        server.metrics.render(status) + streams.render(current_intake().streams) + own,
        headers={"Process-Start-Time-Unix": str(int(server.metrics.started))},
        content_type="text/plain; version=0.0.4; charset=utf-8",
    )
