"""``POST /infill``: fill the gap between two texts."""

from __future__ import annotations

from quart import Blueprint
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base.body import read_body_as
from trioserve.api.base.generation import admit
from trioserve.api.base.openapi import takes
from trioserve.api.base.service import current_server
from trioserve.api.llama.completion import answer
from trioserve.api.llama.request import InfillRequest
from trioserve.server.infill import Gap

blueprint = Blueprint("infill", __name__)


@blueprint.post("/infill")
@takes(InfillRequest)
async def fill() -> Response:
    """Fill the gap between two texts."""
    current_server().parts.infill.check()  # whatever the body says
    request = await read_body_as(InfillRequest.parse)
    server, params, context = await admit(request)
    gap = Gap(
        prefix=request.input_prefix,
        suffix=request.input_suffix,
        extra=request.input_extra,
        begun=request.prompt,
    )
    prompt = await server.parts.infill.prompt_for(gap, params.max_tokens)
    return await answer(server, request, [prompt], params, context)
