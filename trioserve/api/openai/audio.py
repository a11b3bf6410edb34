"""OpenAI's routes for recordings: ``/v1/audio/transcriptions`` and ``/v1/audio/translations``."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator

import trio
from quart import Blueprint
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base import errors, sse
from trioserve.api.base.connection import Beat
from trioserve.api.base.forms import read_form
from trioserve.api.base.keepalive import PING
from trioserve.api.base.openapi import takes
from trioserve.api.base.request import current_context, current_request, long_response
from trioserve.api.base.service import current_server, keep_awake
from trioserve.api.openai import transcripts
from trioserve.api.openai.audio_request import TranscriptionRequest, TranslationRequest
from trioserve.api.openai.transcripts import TranscriptEvents
from trioserve.server.transcription import Summary, TranscriptEvent, TranscriptStream
from trioserve.types import MediaSource

blueprint = Blueprint("audio", __name__)

#: The size of a segment in a long answer, as `long_response` counts.
_SEGMENT_SIZE = 128


@blueprint.post("/v1/audio/transcriptions")
@blueprint.post("/audio/transcriptions")
@takes(TranscriptionRequest, content="multipart/form-data")
async def transcriptions() -> Response:
    """Write down what is spoken in a recording, at once or as a stream."""
    return await _answer(TranscriptionRequest)


@blueprint.post("/v1/audio/translations")
@blueprint.post("/audio/translations")
@takes(TranslationRequest, content="multipart/form-data")
async def translations() -> Response:
    """Write in English what is spoken in a recording."""
    return await _answer(TranslationRequest)


async def _answer(request_class: type[TranslationRequest]) -> Response:
    request = request_class.parse(await read_form())
    server = current_server(request.model)
    (await server.known_model()).check_transcribes()
    context = current_context(request.timeout, request.keep_alive)
    await keep_awake(server, context)
    source = MediaSource(kind="audio", data=request.file, param="file")
    opened = server.parts.transcriptions().stream(source, request.params, context)
    stream = await current_request().resources.enter_async_context(opened)
    if isinstance(request, TranscriptionRequest) and request.stream:
        encoder = TranscriptEvents(with_logprobs=bool(request.include))
        return await _respond_events(stream, server.config.sse_ping_interval, encoder)
    transcript = await stream.read()
    wanted = request.response_format
    if (write := transcripts.AS_TEXT.get(wanted)) is not None:
        return Response(write(transcript), content_type=transcripts.CONTENT_TYPES[wanted])
    as_json = transcripts.as_verbose_json if wanted == "verbose_json" else transcripts.as_json
    size = _SEGMENT_SIZE * len(transcript.segments) + len(transcript.probs)
    return await long_response(lambda: as_json(transcript, request), size)


async def _respond_events(
    stream: TranscriptStream, ping_interval: float, encoder: TranscriptEvents
) -> Response:
    """Make the response that streams a transcript. An error before any text has its own status."""
    interval = ping_interval if ping_interval > 0 else math.inf
    first: TranscriptEvent | None = None
    with trio.move_on_after(interval):
        first = await stream.next()
    current_request().beat = Beat(interval, _ping)
    return Response(
        _events(stream, first, encoder), headers=sse.HEADERS, content_type=sse.CONTENT_TYPE
    )


async def _ping() -> bytes:
    return PING


async def _events(
    stream: TranscriptStream, event: TranscriptEvent | None, encoder: TranscriptEvents
) -> AsyncGenerator[bytes, None]:
    # An async generator, so no nursery or cancel scope may be open at a `yield`.
    try:
        while not isinstance(event, Summary):
            if event is not None and (data := encoder.encode(event)):
                yield data
            event = await stream.next()
        yield encoder.encode(event)
    except Exception as error:  # the status is sent: an event has to say it
        yield errors.last_event(error)
