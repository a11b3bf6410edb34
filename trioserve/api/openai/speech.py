"""OpenAI's routes for speech: ``/v1/audio/speech``, and the voices that there are."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import attrs

from trioserve.api.base import errors, limits, readers, reply, sse
from trioserve.api.base.answers import Answer, Bytes
from trioserve.api.base.caller import Caller
from trioserve.api.base.fields import (
    MismatchError,
    Only,
    RequestBody,
    field,
    integer_in,
    json_type,
    number,
)
from trioserve.api.base.models import Models
from trioserve.api.base.reply import Pieces, Reply
from trioserve.api.base.routes import Query, Routes, tells
from trioserve.api.openapi import gives, takes
from trioserve.media.encode import CONTENT_TYPES, SPEEDS, SoundFormat
from trioserve.server.speech.recordings import DEFAULT_VOICE
from trioserve.server.speech.speech import (
    Converted,
    Encoded,
    Encoding,
    SpeechEvent,
    SpeechParams,
    SpeechStream,
)


def _between(low: float, high: float) -> Callable[[Any], float]:
    """Make a reader of numbers."""

    @json_type({"type": "number", "minimum": low, "maximum": high})
    def read(value: Any) -> float:
        if not low <= number(value) <= high:
            raise MismatchError(f"between {low:g} and {high:g}")
        return float(value)

    return read


_UNSUPPORTED: Mapping[str, Only] = {
    "instructions": Only(harmless="models that speak take no instructions here")
}


@attrs.frozen(kw_only=True, slots=False)
class SpeechRequest(RequestBody):
    """``POST /v1/audio/speech``."""

    unsupported = _UNSUPPORTED
    input: str = field(read=readers.text_of(limits.MAX_SPEECH))
    model: str | None = field(read=readers.model_name, default=None)
    voice: str = field(read=readers.voice_name, default=DEFAULT_VOICE)
    language: str = field(read=readers.text_of(limits.MAX_LANGUAGE), default="")
    response_format: SoundFormat = "mp3"
    speed: float = field(read=_between(*SPEEDS), default=1.0)
    stream_format: Literal["audio", "sse"] = "audio"
    seed: int = field(read=readers.seed, default=-1)
    top_k: int = field(read=integer_in(0, 2**31 - 1), default=0)
    top_p: float = field(read=_between(0, 1), default=0.0)
    priority: int = field(read=integer_in(-100, 100), default=0)
    timeout: float | None = field(read=readers.seconds, default=None)
    keep_alive: float | None = field(read=readers.keep_alive, default=None)
    sse_ping_interval: float | None = field(read=readers.ping_interval, default=None)

    @property
    def params(self) -> SpeechParams:
        """The parameters of the speech."""
        names = attrs.fields_dict(SpeechParams).keys() & attrs.fields_dict(type(self)).keys()
        return SpeechParams(**{name: getattr(self, name) for name in names})


class SpeechUsage(Answer):
    """The tokens of a text, and the frames of its sound."""

    input_tokens: int
    output_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, stream: SpeechStream) -> SpeechUsage:
        """Count what a stream that has ended took."""
        assert stream.finished is not None
        n_frames = stream.finished.n_frames
        return cls(stream.n_prompt, n_frames, stream.n_prompt + n_frames)


class SpeechEvents(sse.EventWriter[SpeechEvent]):
    """Writes speech as events."""

    def __init__(self, stream: SpeechStream) -> None:
        self._stream = stream

    def encode(self, index: int, event: SpeechEvent) -> bytes:
        """Write a piece of sound, or the end."""
        if isinstance(event, Encoded):
            data = base64.b64encode(event.data).decode()
            return sse.event({"type": "speech.audio.delta", "audio": data})
        return sse.event({"type": "speech.audio.done", "usage": SpeechUsage.of(self._stream)})


async def _pieces(
    first: SpeechEvent, take: Callable[[], Awaitable[SpeechEvent]]
) -> AsyncIterator[bytes]:
    event = first
    while isinstance(event, Encoded):
        yield event.data
        event = await take()


# -- routes


routes = Routes(of_model=True)


@routes.post("/v1/audio/speech", "/audio/speech")
@takes(SpeechRequest)
@tells(gives={"200": {"audio/*": Bytes, sse.CONTENT_TYPE: str}})
async def speech(request: SpeechRequest, caller: Caller, models: Models) -> Reply:
    """Speak a text. The sound is sent as it is made: as a file, or as server-sent events."""
    server = await models.use(request.model, caller)
    (await server.known_model()).check_speaks()
    context = await caller.counted(server, request.timeout, request.keep_alive)
    await caller.keep_awake(server, context)
    stream = await caller.open(server.speaking(request.input, request.params, context))
    encoding = Encoding(request.response_format, stream.rate)
    caller.resources.callback(encoding.close)
    take = Converted(stream.next_event, encoding.encode).take
    if request.stream_format == "sse":
        interval = request.sse_ping_interval
        keep_alive = reply.KeepAlive.every(
            server.config.sse_ping_interval if interval is None else interval
        )
        return await reply.stream(
            reply.EventSource.of(take),
            SpeechEvents(stream),
            reply.Pings(keep_alive.interval),
            partial(errors.last_event, caller.path),
        )
    first = await take()  # so that an error before it has a status
    return Pieces(
        pieces=_pieces(first, take),
        headers=dict(sse.HEADERS),
        content_type=CONTENT_TYPES[request.response_format],
    )


class _Voice(Answer):
    id: str
    name: str


class VoiceList(Answer):
    """The voices of a model."""

    object: Literal["list"]
    voices: Sequence[_Voice]


@routes.get("/v1/audio/voices", "/audio/voices")
@takes(None, query={"model": "of many models, the voices of this one"})
@gives(VoiceList)
async def voices(query: Query, caller: Caller, models: Models) -> Reply:
    """List the voices that `voice` may name."""
    model = await (await models.use(query.get("model"), caller)).known_model()
    model.check_speaks()
    return reply.json(VoiceList("list", [_Voice(name, name) for name in model.voices or ()]))
