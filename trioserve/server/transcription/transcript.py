"""Parameters and results of transcription, and the stream that a request reads."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol, TypeAlias

import attrs

from trioserve.concurrency import Feed, alongside
from trioserve.errors import TrioServeError
from trioserve.server.context import RequestContext
from trioserve.server.generation.requests import Requests
from trioserve.server.media.loader import MediaLoader, Wanted
from trioserve.server.observers.observer import TranscriptionRecord, observed_recording
from trioserve.types import DecodedAudio, MediaSource, TokenId, TokenProbs


@attrs.frozen(kw_only=True)
class TranscriptionParams:
    """How to transcribe a recording."""

    #: Translate to English from any language.
    translate: bool = False
    #: The spoken language, as a code such as "en"; None: detect it.
    language: str | None = None
    #: Words that may occur, or the text before the recording.
    prompt: str = ""
    temperature: float = 0.0
    #: The most tokens in the whole transcript.
    max_tokens: int | None = None
    #: Skip silence even if the transcriber would process it.
    skip_silence: bool = False
    #: Make segments shorter, because their times matter.
    timed: bool = False
    #: True if to include the times of each word.
    words: bool = False
    #: True if to include the log probability of each token.
    logprobs: bool = False


@attrs.frozen(kw_only=True)
class Word:
    """A word, with its start and end in seconds."""

    text: str
    start: float
    end: float


@attrs.frozen(kw_only=True)
class Text:
    """The next piece of a transcript, which may be empty. The pieces joined are the whole text."""

    text: str
    probs: tuple[TokenProbs, ...] = ()


@attrs.frozen(kw_only=True)
class Segment:
    """A transcribed part of the recording. `Text` events have sent its text before."""

    text: str
    start: float  # seconds
    end: float
    tokens: tuple[TokenId, ...] = ()
    words: tuple[Word, ...] = ()
    temperature: float = 0.0
    #: The mean log probability of its tokens.
    avg_logprob: float = 0.0
    #: The probability that it has no speech; 0 if the transcriber does not report it.
    no_speech_prob: float = 0.0


@attrs.frozen(kw_only=True)
class Summary:
    """The end of a transcript."""

    #: The spoken language, as a code; None: the transcriber does not report it.
    language: str | None = None
    #: Prompt tokens, including those of sound, and generated tokens. None: the transcriber does not
    #: count tokens.
    usage: TranscriptUsage | None = None


@attrs.frozen(kw_only=True)
class TranscriptUsage:
    """The tokens used by a transcript."""

    n_text: int = 0  # in prompts
    n_audio: int = 0  # in prompts
    n_output: int = 0


TranscriptEvent: TypeAlias = Text | Segment | Summary

#: Sends an event to the reader, and waits until it is read.
Send: TypeAlias = Callable[[TranscriptEvent], Awaitable[None]]


class Transcriber(Protocol):
    """Transcribes samples of sound."""

    @property
    def rate(self) -> int:
        """The sample rate of its input, in Hz."""

    def check(self, params: TranscriptionParams) -> None:
        """Check that it supports the parameters. Raises InvalidRequestError with the field."""

    async def transcribe(
        self, audio: DecodedAudio, params: TranscriptionParams, context: RequestContext, send: Send
    ) -> None:
        """Transcribe a recording. The last event is a `Summary`. Cancelling it ends the work.

        Raises:
            TrioServeError: the work failed, or the deadline has passed.
        """

    async def aclose(self) -> None:
        """End all work. No further recordings can be transcribed."""


@attrs.frozen(kw_only=True)
class Transcript:
    """The whole transcript of a recording."""

    text: str
    segments: tuple[Segment, ...]
    probs: tuple[TokenProbs, ...]
    duration: float  # of the recording, in seconds
    summary: Summary

    @property
    def words(self) -> list[Word]:
        """The words of all segments."""
        return [word for segment in self.segments for word in segment.words]


class TranscriptStream(Feed[TranscriptEvent]):
    """The events of a transcript as they arrive. Cancelling a call loses no events.

    The last event is a `Summary`.

    Raises:
        TrioServeError: from each call: the recording could not be transcribed.
    """

    def __init__(self, duration: float) -> None:
        super().__init__(1)  # a slow reader delays the work
        self.duration = duration  # of the recording, in seconds

    async def read(self) -> Transcript:
        """Read the rest, and return the whole transcript."""
        texts: list[str] = []
        probs: list[TokenProbs] = []
        segments: list[Segment] = []
        while not isinstance(event := await anext(self), Summary):
            if isinstance(event, Text):
                texts.append(event.text)
                probs += event.probs
            else:
                segments.append(event)
        return Transcript(
            text="".join(texts),
            segments=tuple(segments),
            probs=tuple(probs),
            duration=self.duration,
            summary=event,
        )


@attrs.define(eq=False, slots=False)
class Transcriptions:
    """Decodes and transcribes recordings."""

    _transcriber: Transcriber  # transcribes the sound
    _loader: MediaLoader  # decodes the files
    _requests: Requests  # counts open requests

    @asynccontextmanager
    async def stream(
        self, source: MediaSource, params: TranscriptionParams, context: RequestContext
    ) -> AsyncIterator[TranscriptStream]:
        """Transcribe a recording during a block.

        Leaving the block before the end cancels the work.

        Raises:
            InvalidRequestError: the recording cannot be read, or a parameter is not supported.
            DeadlineExceededError: the deadline has passed.
            UnavailableError: no memory is available now, or the server drains. A transcript that
                has started continues while the server drains.
        """
        requests = self._requests
        self._transcriber.check(params)
        # A server that closes ends the decoder and the transcriber.
        counted = requests.resources.gate.open(lambda _error: None)
        with counted, requests.resources.memory.hold(context.client) as hold:
            wanted = Wanted(kinds=frozenset({"audio"}), rate=self._transcriber.rate)
            with context.preparing():
                (audio,) = await self._loader.load([source], wanted, hold)
            assert isinstance(audio, DecodedAudio)
            stream = TranscriptStream(audio.seconds)
            with observed_recording(requests.resources.observers, audio.seconds) as record:
                work = partial(self._transcribe, audio, params, context, stream, record)
                async with alongside(work):
                    yield stream

    async def aclose(self) -> None:
        """End the work of the transcriber."""
        await self._transcriber.aclose()

    async def _transcribe(
        self,
        audio: DecodedAudio,
        params: TranscriptionParams,
        context: RequestContext,
        stream: TranscriptStream,
        record: TranscriptionRecord,
    ) -> None:
        async def send(event: TranscriptEvent) -> None:
            record.is_finished = isinstance(event, Summary)
            stream.put(event)
            await stream.room()

        try:
            with self._requests.resources.gate.inside(has_begun=True):
                await self._transcriber.transcribe(audio, params, context, send)
        except TrioServeError as error:
            record.error = error
            stream.end(error)
        else:
            stream.end()
