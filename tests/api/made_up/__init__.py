"""A vendor that there is not: its one chat route, and what the rest of the server has to know."""

from __future__ import annotations

import attrs

from trioserve.api.base import readers
from trioserve.api.base.answers import Answer
from trioserve.api.base.caller import Caller
from trioserve.api.base.fields import PromptFields, RequestBody, field
from trioserve.api.base.models import Models
from trioserve.api.base.reply import Data, Reply, json
from trioserve.api.base.routes import Query, Routes, Waiting, while_unloaded
from trioserve.api.base.vendors import ErrorShape, RateLimitHeaders, Vendor
from trioserve.api.openapi import gives, takes
from trioserve.chat.params import ChatParams
from trioserve.errors import InvalidRequestError

PATH = "/made-up/chat"
CONTENT_TYPE = "text/x-made-up"

routes, own = Routes(of_model=True), Routes()


@attrs.frozen(kw_only=True)
class Question(RequestBody):
    """``POST /made-up/chat``."""

    model_names = ("engine",)
    prompt_fields = PromptFields(turns=("question",))
    question: str | None = None
    engine: str | None = field(read=readers.model_name, default=None)
    stream: bool = False


class MadeUpAnswer(Answer):
    """An answer."""

    answer: str


class Engines(Answer):
    """The engines."""

    engines: list[str]


@routes.post(PATH)
@while_unloaded(Waiting(ping=lambda model: f"{model}?\n".encode()))
@takes(Question, streams=CONTENT_TYPE)
@gives(MadeUpAnswer)
async def chat(request: Question, caller: Caller, models: Models) -> Reply:
    """Answer a question."""
    if request.question is None:
        raise InvalidRequestError("There is no question.", param="question")
    server = await models.use(request.engine, caller)
    await caller.keep_awake(server)
    messages = [{"role": "user", "content": request.question}]
    opened = server.stream_chats(
        messages, await server.params({}), ChatParams(), context=await caller.counted(server)
    )
    async with opened as (stream,):
        answer = (await stream.read()).message.content
    if request.stream:
        return Data(body=f"{answer}\n".encode(), content_type=CONTENT_TYPE)
    return json(MadeUpAnswer(answer))


@own.get("/made-up/engines")
@gives(Engines)
async def engines(query: Query, caller: Caller, models: Models) -> Reply:
    """List the engines."""
    return json(Engines([card.name for card in await models.cards(caller)]))


VENDOR = Vendor(
    name="made_up",
    paths=("/made-up",),
    routes=(routes, own),
    errors=ErrorShape(
        body=lambda error, request_id: {"oh": error.message},
        event=lambda body, n_before: f"oh: {body['oh']}\n".encode(),
        content_type=CONTENT_TYPE,
    ),
    rate_limits=RateLimitHeaders("Made-Up-{kind}-{part}"),
)
