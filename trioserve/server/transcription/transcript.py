"""What is asked of a transcriber, what it makes, and how a request gets it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Protocol, TypeAlias

import attrs
import trio

from trioserve.alongside import alongside
from trioserve.errors import ServerClosingError, TrioServeError
from trioserve.server.concurrency import deadline_scope
from trioserve.server.context import RequestContext
from trioserve.server.generation.requests import Requests
from trioserve.server.limits.admission import let_finish
from trioserve.server.limits.memory import MemoryReservation
from trioserve.server.media.loader import MediaLoader, Wanted
from trioserve.server.observers.observer import TranscriptionRecord, observed_recording
from trioserve.types import DecodedAudio, MediaSource, TokenId, TokenProbs


@attrs.frozen(kw_only=True)
class TranscriptionParams:
    """How a recording is to be transcribed."""

    #: Write it in English, whatever is spoken.
    translate: bool = False
    #: What is spoken, as a code such as "en"; None: the transcriber finds out.
    language: str | None = None
    #: Words that may occur, or the text that comes before the recording.
    prompt: str = ""
    temperature: float = 0.0
    #: The most tokens of the whole transcript.
    max_tokens: int | None = None
    #: Whether silence is left out even where the transcriber would listen to it.
    skip_silence: bool = False
    #: Whether the times of segments matter: they are shorter then.
    timed: bool = False
    #: Whether each word is to have its times.
    words: bool = False
    #: Whether each token is to have its probability.
    logprobs: bool = False


@attrs.frozen(kw_only=True)
class Word:
    """A word, and the seconds at which it begins and ends."""

    text: str
    start: float
    end: float


@attrs.frozen(kw_only=True)
class Text:
    """The next piece of a transcript, which may be empty. All of them joined are the whole."""

    text: str
    probs: tuple[TokenProbs, ...] = ()


@attrs.frozen(kw_only=True)
class Segment:
    """A part of the recording that has been transcribed. Its text has been told before."""

    text: str
    start: float  # seconds
    end: float
    tokens: tuple[TokenId, ...] = ()
    words: tuple[Word, ...] = ()
    temperature: float = 0.0
    #: The mean of the logprobs of its tokens.
    avg_logprob: float = 0.0
    #: How probable it is that nobody speaks; 0 where the transcriber does not tell.
    no_speech_prob: float = 0.0


@attrs.frozen(kw_only=True)
class Summary:
    """The end of a transcript."""

    #: What was spoken, as a code; None: the transcriber does not tell.
    language: str | None = None
    #: Tokens of the prompts, those of sound among them, and tokens that were generated. None:
    #: the transcriber does not count tokens.
    usage: TranscriptUsage | None = None


@attrs.frozen(kw_only=True)
class TranscriptUsage:
    """The tokens that a transcript took."""

    n_text: int = 0  # of the prompts
    n_audio: int = 0  # of the prompts
    n_output: int = 0


TranscriptEvent: TypeAlias = Text | Segment | Summary


class Transcriber(Protocol):
    """What turns sound into text."""

    @property
    def rate(self) -> int:
        """Samples a second of the sound that it takes."""

    def check(self, params: TranscriptionParams) -> None:
        """Refuse what it cannot do. Raises InvalidRequestError, which names the field."""

    def transcribe(
        self, audio: DecodedAudio, params: TranscriptionParams, context: RequestContext
    ) -> AsyncGenerator[TranscriptEvent, None]:
        """Transcribe a recording. The last event is a `Summary`.

        Closing the generator, or cancelling an iteration, ends the work.

        Raises:
            TrioServeError: from the iteration: it failed, or the deadline has passed.
        """

    async def aclose(self) -> None:
        """End what it runs. Nothing is transcribed any more."""


@attrs.frozen(kw_only=True)
class Transcript:
    """A whole transcript."""

    text: str
    segments: tuple[Segment, ...]
    probs: tuple[TokenProbs, ...]
    duration: float  # of the recording, in seconds
    summary: Summary

    @property
    def words(self) -> list[Word]:
        """The words of all segments."""
        return [word for segment in self.segments for word in segment.words]


class TranscriptStream:
    """The events of a transcript as they come. Cancelling a call loses nothing but its wait.

    Raises:
        TrioServeError: from each call: the recording could not be transcribed.
    """

    def __init__(
        self,
        duration: float,
        events: trio.MemoryReceiveChannel[TranscriptEvent | TrioServeError],
    ) -> None:
        self.duration = duration  # of the recording, in seconds
        self._events = events

    def __aiter__(self) -> TranscriptStream:
        return self

    async def __anext__(self) -> TranscriptEvent:
        """Wait for the next event. The last one is a `Summary`."""
        event = await self._events.receive()
        if isinstance(event, TrioServeError):
            raise event
        return event

    async def read(self) -> Transcript:
        """Read all of it."""
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


class Transcriptions:
    """Decodes recordings, and has them transcribed.

    Args:
        transcriber: turns them into text.
        loader: decodes them.
        requests: counts them.
    """

    def __init__(
        self,
        transcriber: Transcriber,
        loader: MediaLoader,
        requests: Requests,
    ) -> None:
        self._transcriber = transcriber
        self._loader = loader
        self._requests = requests

    @asynccontextmanager
    async def stream(
        self, source: MediaSource, params: TranscriptionParams, context: RequestContext
    ) -> AsyncIterator[TranscriptStream]:
        """Transcribe a recording for as long as a block lasts.

        Leaving the block before the end cancels the work.

        Raises:
            InvalidRequestError: the recording cannot be read, or a parameter cannot be obeyed.
            DeadlineExceededError: there is no time left.
            UnavailableError: there is no memory for it now, or the server drains. A transcript that
                has begun is finished all the same.
        """
        self._requests.admission.check_open()
        self._transcriber.check(params)
        context.check_time()
        with self._requests.counted(), self._requests.resources.memory.hold(context.client) as hold:
            audio = await self._decode(source, hold, context)
            # No buffer: who does not read holds up the work.
            into, out = trio.open_memory_channel[TranscriptEvent | TrioServeError](0)
            with observed_recording(self._requests.resources.observers, audio.seconds) as noted:
                work = partial(self._transcribe, audio, params, context, into, noted)
                async with alongside(work):
                    yield TranscriptStream(audio.seconds, out)

    async def aclose(self) -> None:
        """End what the transcriber runs."""
        await self._transcriber.aclose()

    async def _decode(
        self, source: MediaSource, hold: MemoryReservation, context: RequestContext
    ) -> DecodedAudio:
        wanted = Wanted(kinds=frozenset({"audio"}), rate=self._transcriber.rate)
        with deadline_scope(context.deadline):
            (audio,) = await self._loader.load([source], wanted, hold)
            assert isinstance(audio, DecodedAudio)
            return audio

    async def _transcribe(
        self,
        audio: DecodedAudio,
        params: TranscriptionParams,
        context: RequestContext,
        into: trio.MemorySendChannel[TranscriptEvent | TrioServeError],
        record: TranscriptionRecord,
    ) -> None:
        admission = self._requests.admission
        let_finish()
        try:
            async with aclosing(self._transcriber.transcribe(audio, params, context)) as events:
                async for event in events:
                    record.is_finished = isinstance(event, Summary)
                    await into.send(event)
        except TrioServeError as error:
            record.error = ServerClosingError() if admission.closed else error
            await into.send(record.error)
