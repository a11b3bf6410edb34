"""Transcribes the recordings of requests, with whatever transcriber the server has."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager
from functools import partial

import trio

from trioserve.errors import DeadlineExceededError, ServerClosingError, TrioServeError
from trioserve.server.admission import let_finish
from trioserve.server.concurrency import alongside
from trioserve.server.context import RequestContext
from trioserve.server.media import MediaLoader, Wanted
from trioserve.server.memory import Hold, MemoryBudget
from trioserve.server.observers.observer import RecordingWork, observed_recording
from trioserve.server.requests import Requests
from trioserve.server.transcription.transcript import (
    Segment,
    Summary,
    Text,
    Transcriber,
    Transcript,
    TranscriptEvent,
    TranscriptionParams,
)
from trioserve.types import DecodedAudio, MediaSource, TokenProbs


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

    async def next(self) -> TranscriptEvent:
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
        while not isinstance(event := await self.next(), Summary):
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
        memory: what requests may hold.
        requests: counts them.
        observers: are told of them.
    """

    def __init__(
        self,
        transcriber: Transcriber,
        loader: MediaLoader,
        memory: MemoryBudget,
        requests: Requests,
        observers: Iterable[object] = (),
    ) -> None:
        self._observers = observers
        self._transcriber = transcriber
        self._loader = loader
        self._memory = memory
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
        with self._requests.counted(), self._memory.hold(context.client) as hold:
            audio = await self._decode(source, hold, context)
            # No buffer: who does not read holds up the work.
            into, out = trio.open_memory_channel[TranscriptEvent | TrioServeError](0)
            with observed_recording(self._observers, audio.seconds) as noted:
                work = partial(self._transcribe, audio, params, context, into, noted)
                async with alongside(work):
                    yield TranscriptStream(audio.seconds, out)

    async def aclose(self) -> None:
        """End what the transcriber runs."""
        await self._transcriber.aclose()

    async def _decode(
        self, source: MediaSource, hold: Hold, context: RequestContext
    ) -> DecodedAudio:
        wanted = Wanted(kinds=frozenset({"audio"}), rate=self._transcriber.rate)
        with trio.move_on_at(context.deadline):
            (audio,) = await self._loader.load([source], wanted, hold)
            assert isinstance(audio, DecodedAudio)
            return audio
        raise DeadlineExceededError("The request's deadline has passed.")

    async def _transcribe(
        self,
        audio: DecodedAudio,
        params: TranscriptionParams,
        context: RequestContext,
        into: trio.MemorySendChannel[TranscriptEvent | TrioServeError],
        noted: RecordingWork,
    ) -> None:
        admission = self._requests.admission
        let_finish()
        try:
            async with aclosing(self._transcriber.transcribe(audio, params, context)) as events:
                async for event in events:
                    noted.is_finished = isinstance(event, Summary)
                    await into.send(event)
        except TrioServeError as error:
            noted.error = ServerClosingError() if admission.closed else error
            await into.send(noted.error)
