"""A vendor that there is not: its one chat route, and what the rest of the server has to know."""

from __future__ import annotations

from quart import Blueprint
from quart_trio.wrappers import TrioResponse as Response
from trioserve.api.base.http import current_context, json_response

from trioserve.api.base.answers import Answer
from trioserve.api.base.body import read_body
from trioserve.api.base.vendors import (
    ErrorShape,
    PromptFields,
    RateLimitHeaders,
    StreamForm,
    Vendor,
)
from trioserve.api.openapi import gives
from trioserve.api.service import awake_server
from trioserve.chat.params import ChatParams
from trioserve.errors import InvalidRequestError

PATH = "/made-up/chat"
CONTENT_TYPE = "text/x-made-up"

blueprint = Blueprint("made_up", __name__)


class _Said(Answer):
    answer: str


@blueprint.post(PATH)
@gives(_Said)
async def chat() -> Response:
    """Answer a question."""
    body = await read_body()
    if not isinstance(body.get("question"), str):
        raise InvalidRequestError("There is no question.", param="question")
    server = await awake_server(body.get("engine"))
    messages = [{"role": "user", "content": body["question"]}]
    opened = server.stream_chats(
        messages, await server.params({}), ChatParams(), context=current_context(None)
    )
    async with opened as (stream,):
        answer = (await stream.read()).message.content
    if body.get("live"):
        return Response(f"{answer}\n", content_type=CONTENT_TYPE)
    return json_response(_Said(answer))


VENDOR = Vendor(
    paths=("/made-up",),
    routes=(blueprint,),
    errors=ErrorShape(
        body=lambda error, request_id: {"oh": error.message},
        event=lambda body, n_before: f"oh: {body['oh']}\n".encode(),
        status=lambda error: 418,
    ),
    rate_limits=RateLimitHeaders("Made-Up-{kind}-{part}"),
    streams=StreamForm(
        content_type=CONTENT_TYPE,
        is_asked=lambda path, fields: fields.get("live") is True,
        ping=lambda path, model: f"{model}?\n".encode(),
    ),
    model_fields=("engine",),
    prompts={PATH: PromptFields(turns=("question",))},
    lists={"/made-up/engines": lambda name: {"engines": [name]}},
)
