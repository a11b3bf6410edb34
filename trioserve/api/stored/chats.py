"""Stored chats: those with ``"store": true``, and the routes for them.

The record of a chat has what a list chooses by: its model and metadata. The answer is a part, and
so is each message of the request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import attrs
from msgspec import UNSET
from msgspec.structs import replace

from trioserve.api.base import sse
from trioserve.api.base.answers import Answer
from trioserve.api.base.body import Incoming
from trioserve.api.base.caller import Caller
from trioserve.api.base.fields import RequestBody, field, json_type, labels, named, or_null
from trioserve.api.base.reply import LONG, Json, Reply, Stream
from trioserve.api.base.routes import Query, Responder, Routes
from trioserve.api.openai.chat import ChatCompletion, whole_chat, whole_run
from trioserve.api.openai.events import ChatEvents
from trioserve.api.openapi import gives, takes
from trioserve.api.service import AppState
from trioserve.api.stored.items import INPUT, OUTPUT
from trioserve.api.stored.listing import QUERY, DeletedRecord, Page, PageOf, deleted, page_of
from trioserve.api.stored.shelf import PER_NUMBER, Shelf, decoded, missing
from trioserve.chat.deltas import MessageBuilder
from trioserve.errors import InvalidRequestError, TrioServeError
from trioserve.fair_limiter import offload
from trioserve.server.dispatch import size_of
from trioserve.server.limits.memory import MemoryReservation
from trioserve.server.runs.events import RunEnded, RunEvent, StepChunk, StepStarted
from trioserve.server.stream import ChatChunk, ChatCompletion as ReadChat
from trioserve.store import Part, Record, Records, check_sizes, new_id
from trioserve.types import Finished, Prompt

routes = Routes()

KIND = "chat.completion"

_METADATA = re.compile(r"metadata\[(.{1,64})\]", re.DOTALL)


@attrs.frozen(kw_only=True)
class _Storing(RequestBody):
    """The fields of a request that are about storing its answer."""

    store: bool = False
    metadata: dict[str, str] = attrs.field(factory=dict)


# -- storing


def stored(app: AppState, answer: Responder) -> Responder:
    """Have the answers of a route for chats stored, as requests ask for it."""

    async def begin(
        incoming: Incoming, caller: Caller, values: Mapping[str, str], **more: Any
    ) -> Reply:
        fields = await incoming.fields()
        if not fields.get("store"):
            return await answer(incoming, caller, values, **more)
        options = await incoming.aside(partial(_Storing.parse, fields))
        # Now: what the messages name by ids takes the place of these.
        messages = await incoming.aside(partial(_parts_of, fields.get("messages")))
        check_sizes(0, sum(len(each.body) for each in messages))
        shelf = Shelf.of(caller, app)
        keep = _Keeping(shelf, options.metadata, messages)
        return await keep.reply(await answer(incoming, caller, values, **more))

    return begin


def _parts_of(messages: Any) -> list[Part]:
    """Make parts of a request's messages, each with an id. Skips all but JSON objects."""
    given = messages if isinstance(messages, list) else ()
    made = [(new_id("msg"), each) for each in given if isinstance(each, dict)]
    return [Part.of(n, id_, _shown(id_, each)) for n, (id_, each) in enumerate(made)]


def _shown(id_: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as the list of them has it: parts are in a field for themselves."""
    content = message.get("content")
    if not isinstance(content, list):
        return {"content": None, **message, "id": id_, "content_parts": None}
    return {**message, "id": id_, "content": None, "content_parts": content}


@attrs.frozen
class _Keeping:
    """A chat whose answer is to be stored."""

    shelf: Shelf
    metadata: Mapping[str, str]
    messages: Sequence[Part]

    async def reply(self, reply: Reply) -> Reply:
        """Have a reply stored: a whole one now, and a stream before its end is sent.

        Raises:
            TrioServeError: it cannot be stored.
        """
        if reply.status != 200:
            return reply
        if isinstance(reply, Stream):
            reply.at_end = partial(self._at_end, reply, _Kept(reply, self.shelf.held))
            return reply
        assert isinstance(reply, Json)
        whole = await offload(reply.make, size := PER_NUMBER * reply.size, LONG)
        await self._add(_as_text(whole), size)
        return attrs.evolve(reply, make=lambda: whole)

    async def _at_end(self, reply: Stream[Any], kept: _Kept, data: bytes) -> bytes:
        """Store the chat that has ended. Gives what is sent last: that, or an error."""
        if not kept.is_complete:
            return data
        try:
            whole = await offload(kept.whole, kept.size, LONG)
            await self._add(whole, kept.size)
        except TrioServeError as error:
            return data.removesuffix(sse.DONE) + reply.on_error(error)
        return data

    async def _add(self, whole: ChatCompletion, size: int) -> None:
        data = await offload(lambda: sse.encode(whole).encode(errors="replace"), size, LONG)
        id_, body = whole.id, {"model": whole.model, "metadata": self.metadata}
        parts, own, answer = (INPUT, self.messages), self.shelf.owner, [Part(0, "", data)]
        then = partial(Records.append, id=id_, side=OUTPUT, parts=answer)
        await self.shelf.store.add(id_, KIND, own, body, parts=parts, then=then)


def _as_text(whole: ChatCompletion) -> ChatCompletion:
    """Put the transcript of a spoken answer in place of its sound."""
    (choice, *_), audio = whole.choices, whole.choices[0].message.audio
    if audio is UNSET:
        return whole
    message = replace(choice.message, content=audio.transcript, audio=UNSET)
    return replace(whole, choices=[replace(choice, message=message)])


class _Kept:
    """Keeps what a stream brings: the whole answer is made of it.

    Args:
        reply: the stream, whose events are kept from now on as they are taken.
        held: the memory of the request, which candidates for tokens count in.
    """

    def __init__(self, reply: Stream[Any], held: MemoryReservation) -> None:
        assert isinstance(reply.writer, ChatEvents)
        self._events, self._held = reply.writer, held
        self._builders: dict[int, MessageBuilder] = {}
        self._chunks: dict[int, list[ChatChunk]] = {}
        self._finished: dict[int, Finished] = {}
        self._run: RunEnded | None = None
        self.size = 0  # roughly, in characters
        source = reply.source

        async def take() -> tuple[int, Any]:
            index, event = await source.next()
            self._keep(index, event)
            return index, event

        for each in reply.first:
            self._keep(*each)
        reply.source = attrs.evolve(source, next=take)

    def _keep(self, index: int, event: sse.Event | RunEvent) -> None:
        """Keep an event. Raises what `MemoryBudget.take` raises."""
        if isinstance(event, StepStarted):
            self._builders.clear()
            self._chunks.clear()
        elif isinstance(event, RunEnded):
            self._run = event
        elif isinstance(event, Finished):
            self._finished[index] = event
        chunk = event.chunk if isinstance(event, StepChunk) else event
        if not isinstance(chunk, ChatChunk):
            return
        builder = self._builders.setdefault(index, MessageBuilder())
        for delta in chunk.deltas:
            builder.add(delta)
            self.size += len(getattr(delta, "text", ""))
        if chunk.probs:
            n_bytes = 2 * size_of(chunk.probs)  # as a value, and as JSON
            self._held.grow(n_bytes)
            self.size += n_bytes
            self._chunks.setdefault(index, []).append(chunk)

    @property
    def is_complete(self) -> bool:
        """True if all choices have ended."""
        return self._run is not None or len(self._finished) == self._events.n

    def whole(self) -> ChatCompletion:
        """Make the answer of its parts, which takes a while if it is long."""
        events, run = self._events, self._run
        if run is not None:
            answer = run.answer
            last = attrs.evolve(answer.finished, timings=answer.timings)
            chat = self._chat(0, answer.prompt, last)
            written = whole_run(events.writer, events.request, events.params, answer, chat)
        else:
            assert events.prompt is not None
            chats = [self._chat(i, events.prompt, self._finished[i]) for i in range(events.n)]
            written = whole_chat(events.writer, events.request, events.params, chats)
        written.id = events.id
        return written

    def _chat(self, index: int, prompt: Prompt, finished: Finished) -> ReadChat:
        return ReadChat(
            message=self._builders.get(index, MessageBuilder()).build(),
            tokens=(),
            probs=(),
            prompt=prompt,
            prompt_text="",
            finished=finished,
            chunks=tuple(self._chunks.get(index, ())),
        )


# -- routes


class StoredChat(ChatCompletion, kw_only=True):
    """A stored chat."""

    metadata: dict[str, str]


class StoredChats(PageOf):
    """Some chats."""

    data: Sequence[StoredChat]


class StoredMessage(Answer, kw_only=True):
    """A message of a request, of any role. Its other fields are those of the request."""

    is_open = True
    id: str
    role: str
    content: str | None
    content_parts: list[dict[str, Any]] | None


class StoredMessages(PageOf):
    """Some messages."""

    data: Sequence[StoredMessage]


@json_type(properties={"metadata": or_null(labels.json_schema)})  # type: ignore[attr-defined]
def _metadata(body: Mapping[str, Any]) -> dict[str, str]:
    """Read the new metadata, which null empties."""
    if "metadata" not in body:
        raise InvalidRequestError.at("metadata", "is required.")
    return named(labels, body["metadata"] or {}, "metadata")


@attrs.frozen(kw_only=True)
class ChatChange(RequestBody):
    """``POST /v1/chat/completions/{id}``."""

    metadata: dict[str, str] = field(whole=_metadata)


async def _reply(shelf: Shelf, chats: Sequence[Record], more: bool | None = None) -> Json:
    """Answer with chats: a page of them, without those deleted meanwhile, or one alone."""
    answers, left = list[bytes](), list[Record]()
    for each in chats:
        parts = await shelf.look_up(partial(Records.some, id=each.id, side=OUTPUT))
        if not parts and more is None:
            raise missing(KIND, each.id)
        answers += [part.body for part in parts]
        left += [each for _ in parts]

    def make() -> Any:
        pairs = zip(decoded(answers), left, strict=True)
        whole = [{**answer, "metadata": chat.body["metadata"]} for answer, chat in pairs]
        return whole[0] if more is None else page_of(whole, more=more)

    return await shelf.reply(answers, make)


@routes.get("/v1/chat/completions")
@takes(
    None,
    query={
        **QUERY,
        "model": "list only chats with this model",
        "metadata[NAME]": "list only chats with this value in their metadata",
    },
)
@gives(StoredChats)
async def list_chats(query: Query, caller: Caller, app: AppState) -> Reply:
    """List the stored chats of the client, the oldest first."""
    page, shelf, model = Page.of(query, order="asc"), Shelf.of(caller, app), query.get("model")
    wanted = {
        found[1]: value for name, value in query.items() if (found := _METADATA.fullmatch(name))
    }

    def is_wanted(chat: Record) -> bool:
        body = chat.body
        return model in (None, body["model"]) and wanted.items() <= body["metadata"].items()

    return await _reply(shelf, *await page.found(shelf, KIND, is_wanted))


@routes.get("/v1/chat/completions/<id_>")
@gives(StoredChat)
async def show(query: Query, caller: Caller, app: AppState, id_: str) -> Reply:
    """Give a stored chat."""
    shelf = Shelf.of(caller, app)
    return await _reply(shelf, [await shelf.find(KIND, id_)])


@routes.post("/v1/chat/completions/<id_>")
@takes(ChatChange)
@gives(StoredChat)
async def change(request: ChatChange, caller: Caller, app: AppState, id_: str) -> Reply:
    """Replace the metadata of a stored chat."""
    shelf = Shelf.of(caller, app)
    return await _reply(shelf, [await shelf.change(KIND, id_, metadata=request.metadata)])


@routes.delete("/v1/chat/completions/<id_>")
@gives(DeletedRecord)
async def delete(query: Query, caller: Caller, app: AppState, id_: str) -> Reply:
    """Delete a stored chat."""
    await Shelf.of(caller, app).delete(KIND, id_)
    return deleted("chat.completion.deleted", id_)


@routes.get("/v1/chat/completions/<id_>/messages")
@takes(None, query=QUERY)
@gives(StoredMessages)
async def messages(query: Query, caller: Caller, app: AppState, id_: str) -> Reply:
    """List the messages of the request of a stored chat, the first one first."""
    shelf = Shelf.of(caller, app)

    def find(records: Records) -> list[tuple[str, str]]:
        return [(shelf.found(records, KIND, id_).id, INPUT)]

    return await Page.of(query, order="asc").items(shelf, find)
