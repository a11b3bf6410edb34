"""Chats whose answer is spoken while it is written: ``modalities`` and ``audio``."""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Literal, TypeAlias

import attrs
import trio

from trioserve.api.base import sse
from trioserve.api.base.answers import Answer
from trioserve.api.base.chat_request import RUN_TOOLS, ChatRequest
from trioserve.api.base.fields import MismatchError, Only, field, json_type, list_schema
from trioserve.api.base.generation_request import UNSUPPORTED_IN_CHAT
from trioserve.api.base.output import new_id
from trioserve.api.base.readers import voice_name
from trioserve.api.openai.events import ChatEvents, ChoiceEvents
from trioserve.chat.deltas import ContentDelta, Delta
from trioserve.concurrency import Feed, alongside
from trioserve.errors import (
    InvalidRequestError,
    MemoryFullError,
    QueueFullError,
    RateLimitError,
    TrioServeError,
)
from trioserve.fair_limiter import sound_threads
from trioserve.left_out import leave_out
from trioserve.media.encode import SoundFormat
from trioserve.server.context import RequestContext
from trioserve.server.limits.memory import MemoryReservation
from trioserve.server.model import LoadedModel
from trioserve.server.model_server import ModelServer
from trioserve.server.runs.events import RunEvent
from trioserve.server.speech.recordings import DEFAULT_VOICE
from trioserve.server.speech.speech import (
    Converted,
    Encoded,
    Encoding,
    SpeechEvent,
    SpeechParams,
    SpeechStream,
)
from trioserve.server.speech.voices import check_voice
from trioserve.server.stream import ChatChunk, ChatCompletion, ChatStream
from trioserve.types import Finished, Progress, TokenId

# -- the request


@json_type(list_schema({"enum": ["text", "audio"]}, 2))
def _modalities(value: Any) -> bool:
    """Read `modalities`: true if the answer is spoken."""
    if value not in (["text"], ["text", "audio"], ["audio", "text"]):
        raise MismatchError('["text"] or ["text", "audio"]')
    return "audio" in value


@attrs.frozen(kw_only=True)
class AudioOptions:
    """The sound of an answer."""

    voice: str = field(read=voice_name, default=DEFAULT_VOICE)
    format: Literal["wav", "aac", "mp3", "flac", "opus", "pcm16"] | None = None


_UNSUPPORTED: Mapping[str, Only] = {
    name: only for name, only in UNSUPPORTED_IN_CHAT.items() if name not in ("modalities", "audio")
}


@attrs.frozen(kw_only=True, slots=False)
class SpokenChatRequest(ChatRequest):
    """``POST /v1/chat/completions``."""

    unsupported = _UNSUPPORTED
    is_spoken: bool = field("modalities", read=_modalities, default=False)
    audio: AudioOptions | None = None

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if not self.is_spoken:
            if self.audio is not None:
                raise InvalidRequestError.at(
                    "audio", 'needs \'modalities\' to be ["text", "audio"].'
                )
            return
        for is_wrong, param, problem in (
            (self.n > 1, "n", "must be 1"),
            (self.run_tools is not None, RUN_TOOLS, "is not supported"),
            (self.logprobs or self.n_candidates, "logprobs", "is not supported"),
            (self.continuation.echo, "echo", "must be false"),
            (
                self.stream and self._options.format not in ("pcm16", None),
                "audio.format",
                'must be "pcm16" in streams',
            ),
        ):
            if is_wrong:
                raise InvalidRequestError.at(param, f"{problem} for answers that are spoken.")

    @property
    def _options(self) -> AudioOptions:
        return self.audio or AudioOptions()

    @property
    def sound_format(self) -> SoundFormat:
        """The format of the sound."""
        chosen = self._options.format or ("pcm16" if self.stream else "wav")
        return "pcm" if chosen == "pcm16" else chosen

    def voice_of(self, model: LoadedModel) -> str:
        """Find the voice of a model to speak the answer with.

        Raises:
            NotSupportedError: it does not speak; names `modalities`.
            InvalidRequestError: there is no such voice.
        """
        model.check_speaks("modalities")
        assert model.voices is not None
        return check_voice(self._options.voice, model.voices, "audio.voice")


# -- the answer

#: Events that may wait for the client. Beyond, the models wait, too.
_AHEAD = 16

#: The most seconds between attempts to get a place in the queue.
_PATIENCE = 5.0

_Event: TypeAlias = ChatChunk | Progress | Encoded | Finished


class SpokenChat:
    """The events of a chat, and among them its sound, as both come. The last one is `Finished`.

    The text is spoken sentence by sentence; what is a sentence by then is one request.
    """

    def __init__(
        self,
        server: ModelServer,
        chat: ChatStream,
        request: SpokenChatRequest,
        context: RequestContext,
    ) -> None:
        self.events: Feed[_Event] = Feed(_AHEAD)
        self._server, self._chat, self._format = server, chat, request.sound_format
        self._params = SpeechParams(voice=request.voice_of(server.model))
        self._context = attrs.evolve(context, tally=None)
        self._texts: Feed[str] = Feed()
        self._encoding: Encoding | None = None
        self._finished: Finished | None = None

    async def listen(self) -> None:
        """Read the chat, and find its sentences."""
        from trioserve.server.speech.pieces import Sentences

        sentences = Sentences()
        try:
            while not isinstance(event := await self._chat.next_event(), Finished):
                await self._put(event)
                for text in map(sentences.feed, _content_of(event)):
                    self._texts.put(text)
        except TrioServeError as error:
            self.events.end(error)
            return
        self._finished = event
        self._texts.put(sentences.rest())
        self._texts.end()

    async def speak(self) -> None:
        """Speak the sentences, one request after another."""
        from trioserve.server.speech.pieces import without_marks

        try:
            async for text in self._texts:
                while len(self._texts):
                    text += await anext(self._texts)
                if text := without_marks(text).strip():
                    await self._speak(text)
            if self._encoding is not None:
                for event in await sound_threads().run_sync(self._encoding.finish):
                    await self._put(event)
        except TrioServeError as error:
            self.events.end(error)
            return
        assert self._finished is not None
        await self._put(self._finished)

    async def _speak(self, text: str) -> None:
        async with AsyncExitStack() as stack:
            try:
                stream = await self._open(stack, text)
            except InvalidRequestError as error:  # there are only marks and symbols in it, say
                leave_out("a part of an answer that is spoken", error.message)
                return
            if self._encoding is None:
                self._encoding = Encoding(self._format, stream.rate)
                self._context = attrs.evolve(self._context, has_begun=True)
            take = Converted(stream.next_event, self._encoding.feed).take
            while isinstance(event := await take(), Encoded):
                await self._put(event)

    async def _open(self, stack: AsyncExitStack, text: str) -> SpeechStream:
        """Begin to speak. Once the answer has sound, wait for a place where there is none."""
        while True:
            speaking = self._server.speaking(text, self._params, self._context)
            try:
                return await stack.enter_async_context(speaking)
            except (QueueFullError, RateLimitError, MemoryFullError) as error:
                if self._encoding is None:
                    raise
                await trio.sleep(min(error.retry_after or _PATIENCE, _PATIENCE))

    async def _put(self, event: _Event) -> None:
        await self.events.room()
        self.events.put(event)

    def close(self) -> None:
        """Free the encoder."""
        if self._encoding is not None:
            self._encoding.close()

    async def read(self, hold: MemoryReservation) -> tuple[ChatCompletion, bytes]:
        """Read to the end; returns the answer and its sound. Reserves memory for the sound."""
        tokens, sound = list[TokenId](), bytearray()
        while not isinstance(event := await anext(self.events), Finished):
            if isinstance(event, Encoded):
                hold.grow(_KEPT * len(event.data))
                sound += event.data
            elif isinstance(event, ChatChunk):
                tokens += event.tokens
        answer = ChatCompletion(
            message=self._chat.message,
            tokens=tuple(tokens),
            probs=(),
            prompt=self._chat.prompt,
            prompt_text=self._chat.prompt_text,
            finished=event,
        )
        return answer, bytes(sound)


def _content_of(event: ChatChunk | Progress) -> list[str]:
    deltas = event.deltas if isinstance(event, ChatChunk) else ()
    return [delta.text for delta in deltas if isinstance(delta, ContentDelta)]


#: Copies of the sound of a whole answer: as it is, in base64, and in JSON.
_KEPT = 4


@asynccontextmanager
async def spoken_chat(
    server: ModelServer, chat: ChatStream, request: SpokenChatRequest, context: RequestContext
) -> AsyncIterator[SpokenChat]:
    """Speak a chat during a block. Leaving the block ends the work."""
    spoken = SpokenChat(server, chat, request, context)
    try:
        async with alongside(spoken.listen, spoken.speak):
            yield spoken
    finally:
        spoken.close()


# -- how it is written


class SpokenAnswer(Answer):
    """The sound of an answer, in base64. It is not kept: `expires_at` has passed."""

    id: str
    data: str
    transcript: str
    expires_at: int

    @classmethod
    def of(cls, sound: bytes, transcript: str) -> SpokenAnswer:
        """Write the sound of an answer."""
        data = base64.b64encode(sound).decode()
        return cls(new_id("audio"), data, transcript, int(time.time()))


class SpokenChoice(ChoiceEvents):
    """Writes the chunks of an answer that is spoken: its text is the transcript of its sound."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._audio_id = new_id("audio")
        self._has_audio = False

    def _delta(self, delta: Delta) -> str:
        if isinstance(delta, ContentDelta):
            return self._audio(transcript=delta.text)
        return super()._delta(delta)

    def sound(self, event: Encoded) -> str:
        """Write a piece of sound."""
        data = base64.b64encode(event.data).decode()
        return self.begin() + self._frame.chunk(self._choice(self._audio(data=data)))

    def end_of_sound(self) -> str:
        """Write what ends the sound, if there was any."""
        if not self._has_audio:
            return ""
        return self._frame.chunk(self._choice(self._audio(expires_at=int(time.time()))))

    def _audio(self, **fields: Any) -> str:
        self._has_audio = True
        return sse.encode({"audio": {"id": self._audio_id, **fields}})


class SpokenEvents(ChatEvents):
    """Writes the chunks of a streamed chat that is spoken."""

    _choices: Sequence[SpokenChoice]

    def kind_of_choice(self) -> type[ChoiceEvents]:
        """See `ChatEvents`."""
        return SpokenChoice

    def encode(self, index: int, event: sse.Event | RunEvent | SpeechEvent) -> bytes:
        """Write an event of the chat, or a piece of sound."""
        if isinstance(event, Encoded):
            return self._choices[index].sound(event).encode()
        end = self._choices[index].end_of_sound() if isinstance(event, Finished) else ""
        return end.encode() + super().encode(index, event)
