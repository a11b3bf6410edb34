"""``POST /infill``: fill the gap between two texts."""

from __future__ import annotations

from quart import Blueprint
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base.generation import admit
from trioserve.api.base.openapi import takes
from trioserve.api.base.service import read_for_model
from trioserve.api.llama.completion import answer
from trioserve.api.llama.request import InfillRequest
from trioserve.server.infill import Gap, check_infill

blueprint = Blueprint("infill", __name__)


@blueprint.post("/infill")
@takes(InfillRequest)
async def fill() -> Response:
    """Fill the gap between two texts."""
    request, _ = await read_for_model(
        InfillRequest.parse, lambda server: check_infill(server.model)
    )
    server, params, context = await admit(request)
    gap = Gap(
        prefix=request.input_prefix,
        suffix=request.input_suffix,
        extra=request.input_extra,
        beginning=request.prompt,
    )
    prompt = await server.parts.infill.prompt_for(gap, params.max_tokens)
    return await answer(server, request, [prompt], params, context)
