"""The transcriber that runs Whisper in a child process."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import attrs
import msgspec
import trio

import trioserve.media
from trioserve.children.child import INSIDE, Child, how
from trioserve.children.frames import FrameError, FrameStream
from trioserve.concurrency import Gate
from trioserve.errors import InvalidRequestError, TranscriberError, UnsupportedFieldError
from trioserve.fair_limiter import FairLimiter
from trioserve.server.context import RequestContext
from trioserve.server.transcription.transcript import (
    Segment,
    Send,
    Summary,
    Text,
    TranscriptionParams,
    Word,
)
from trioserve.types import DecodedAudio

_PROGRAM = Path(trioserve.media.__file__).with_name("whisper.py")

#: More threads gain little, and other requests need threads, too.
_MAX_THREADS = 4

#: Bytes of an event.
_MAX_EVENT = 2**20

#: The descriptor of the process's log, and seconds for it to end by itself.
_STDERR = 2
_FAREWELL = 0.5


@attrs.frozen(kw_only=True)
class WhisperSettings:
    """Settings of the Whisper process."""

    model: str  # a directory, or a name
    offline: bool = False
    python: str = sys.executable  # an interpreter with faster-whisper


class Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An event of the process: one of its fields is set."""

    languages: frozenset[str] = frozenset()  # those of the model, which is loaded
    language: str | None = None  # that of the recording
    segment: Segment | None = None
    words: tuple[Word, ...] = ()  # those of the segment
    done: bool = False  # with the recording
    error: str = ""  # why the job has failed, or the model cannot be loaded


class WhisperChild:
    """A process with a loaded model. It runs one job at a time.

    Raises:
        TranscriberError: from methods that wait: the process has failed or ended.
    """

    def __init__(self, child: Child) -> None:
        self._child = child
        self._frames = FrameStream(child.socket, _MAX_EVENT)
        self.languages: frozenset[str] = frozenset()

    @classmethod
    async def start(cls, settings: WhisperSettings) -> Self:
        """Start a process, and wait until it has loaded its model."""
        # `-P`: do not import from the program's folder.
        arguments = {
            "model": settings.model,
            "n_threads": min(_MAX_THREADS, os.cpu_count() or 1),
            "offline": settings.offline,
        }
        command = [settings.python, "-P", str(_PROGRAM), json.dumps(arguments), INSIDE]
        try:
            started = await trio.to_thread.run_sync(partial(Child.spawn, command, log=_STDERR))
        except OSError as error:
            raise TranscriberError(f"Whisper cannot be started: {error}") from error
        child = cls(started)
        try:
            child.languages = (await child.receive()).languages
        except BaseException:
            await child.end()
            raise
        return child

    @property
    def is_alive(self) -> bool:
        """True if the process has not failed or ended yet."""
        return self._child.is_alive

    async def send(self, fields: dict[str, Any], samples: bytes) -> None:
        """Start a job."""
        for payload in (json.dumps(fields).encode(), samples):
            if not await self._frames.send(payload):
                raise await self._ended()

    async def receive(self) -> Event:
        """Wait for the next event."""
        try:
            payload = await self._frames.receive()
            if payload is None:
                raise await self._ended()
            # Python's JSON has NaN and infinity, as the program writes them.
            event = msgspec.convert(json.loads(payload), Event)
        except (FrameError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise TranscriberError(f"Whisper cannot be understood: {error}") from error
        if event.error:
            raise TranscriberError(f"Whisper failed: {event.error}")
        return event

    async def _ended(self) -> TranscriberError:
        """Make the error for a process that has ended."""
        return TranscriberError(f"The process that runs Whisper {how(await self.end(_FAREWELL))}.")

    async def end(self, patience: float = 0.0) -> int:
        """See `Child.aend`."""
        return await self._child.aend(patience)


@attrs.define(eq=False, slots=False)
class WhisperTranscriber:
    """Transcribes recordings with faster-whisper in a process, one at a time.

    The process starts with the first recording and stays. Cancelling a recording kills it, because
    the work cannot be interrupted; the next recording starts another process.
    """

    rate: ClassVar[int] = 16_000
    _settings: WhisperSettings
    _max_waiting: int  # recordings of a client

    def __attrs_post_init__(self) -> None:
        self._turn = FairLimiter(1, max_waiting=self._max_waiting)
        self._gate = Gate()
        self._child: WhisperChild | None = None

    def check(self, params: TranscriptionParams) -> None:
        """Check that Whisper supports the parameters. Raises UnsupportedFieldError."""
        if params.logprobs:
            raise UnsupportedFieldError.at(
                "include", 'must not have "logprobs": Whisper does not tell those of tokens.'
            )
        if params.max_tokens is not None:
            raise UnsupportedFieldError.at(
                "max_tokens", "is not supported: Whisper transcribes all that it hears."
            )

    async def transcribe(
        self, audio: DecodedAudio, params: TranscriptionParams, context: RequestContext, send: Send
    ) -> None:
        """See `Transcriber.transcribe`.

        Raises:
            QueueFullError: too many recordings of the client wait already.
            InvalidRequestError: the model does not support the language.
            DeadlineExceededError: the deadline has passed.
            TranscriberError: the process did not start, has failed, or has ended.
            ServerClosingError: the transcriber is closed.
        """
        with self._gate.open(), context.preparing():
            async with self._turn.place():
                child = await self._ready()
                _check_language(params, child.languages)
                try:
                    await self._work(child, audio, params, send)
                except BaseException:
                    await self._end()
                    raise

    async def _work(
        self, child: WhisperChild, audio: DecodedAudio, params: TranscriptionParams, send: Send
    ) -> None:
        await child.send(_job(params), audio.samples)
        language, has_text = params.language, False
        while not (event := await child.receive()).done:
            if (segment := event.segment) is None:
                language = event.language
                continue
            text = segment.text if has_text else segment.text.lstrip()
            has_text = has_text or bool(text)
            await send(Text(text=text))
            await send(_stripped(segment, event.words))
        await send(Summary(language="en" if params.translate else language))

    async def _ready(self) -> WhisperChild:
        """Take the running process, or start a new one."""
        if self._child is None or not self._child.is_alive:
            await self._end()
            self._child = await WhisperChild.start(self._settings)
        return self._child

    async def aclose(self) -> None:
        """End the process, even while it starts. The transcriber cannot be used afterwards."""
        self._gate.end()
        await self._gate.drained()
        await self._end()

    async def _end(self) -> None:
        if self._child is not None:
            await self._child.end()
            self._child = None


def _code(language: str | None) -> str | None:
    """Convert a language code for Whisper, which has no regions."""
    return None if language is None else language.partition("-")[0]


def _check_language(params: TranscriptionParams, known: frozenset[str]) -> None:
    if params.language is not None and _code(params.language) not in known:
        raise InvalidRequestError.at(
            "language",
            f"is {params.language!r:.40}, which the model does not know. Languages are "
            'codes such as "en".',
        )
    if params.translate and known == {"en"}:
        raise InvalidRequestError("The model knows English only, and so translates nothing.")


def _job(params: TranscriptionParams) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "language": _code(params.language),
        "task": "translate" if params.translate else "transcribe",
        "initial_prompt": params.prompt or None,
        "word_timestamps": params.words,
        "vad_filter": params.skip_silence,
    }
    # Without this, Whisper starts at 0 and increases it when the text is improbable.
    return {**fields, "temperature": params.temperature} if params.temperature else fields


def _stripped(segment: Segment, words: tuple[Word, ...]) -> Segment:
    stripped = tuple(attrs.evolve(word, text=word.text.strip()) for word in words)
    return attrs.evolve(segment, text=segment.text.strip(), words=stripped)
