"""The transcriber that runs Whisper in a child process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar, Self

import attrs
import trio

import trioserve.media
from trioserve.children.lines import LineReader
from trioserve.concurrency import Gate
from trioserve.errors import (
    InvalidRequestError,
    TranscriberError,
    UnsupportedFieldError,
)
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


@attrs.frozen(kw_only=True)
class WhisperSettings:
    """Settings of the Whisper process."""

    model: str  # a directory, or a name
    offline: bool = False
    python: str = sys.executable  # an interpreter with faster-whisper


class WhisperChild:
    """A process with a loaded model. It runs one job at a time.

    Raises:
        TranscriberError: from methods that wait: the process has failed or ended.
    """

    def __init__(self, process: trio.Process) -> None:
        assert process.stdout is not None
        self._process = process
        self._lines = LineReader(process.stdout)
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
        command = [settings.python, "-P", str(_PROGRAM), json.dumps(arguments)]
        try:
            process = await trio.lowlevel.open_process(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # no Ctrl+C: the server ends the process
            )
        except OSError as error:
            raise TranscriberError(f"Whisper cannot be started: {error}") from error
        child = cls(process)
        try:
            ready = await child.receive()
            child.languages = frozenset(ready["ready"]["languages"])
        except BaseException:
            await child.kill()
            raise
        return child

    @property
    def is_alive(self) -> bool:
        """Whether the process has not failed or ended yet."""
        return self._process.poll() is None

    async def send(self, fields: dict[str, Any], samples: bytes) -> None:
        """Start a job."""
        assert self._process.stdin is not None
        head = json.dumps({**fields, "n_bytes": len(samples)}) + "\n"
        try:
            await self._process.stdin.send_all(head.encode())
            await self._process.stdin.send_all(samples)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise await self._end() from error

    async def receive(self) -> dict[str, Any]:
        """Wait for the next event."""
        line = await self._lines.next()
        if line is None:
            raise await self._end()
        event: dict[str, Any] = json.loads(line)
        if "error" in event:
            raise TranscriberError(f"Whisper failed: {event['error']}")
        return event

    async def _end(self) -> TranscriberError:
        """Make the error for a process that has ended."""
        await self.kill()
        return TranscriberError(
            f"The process that runs Whisper has ended, with exit code {self._process.returncode}."
        )

    async def kill(self) -> None:
        """Kill the process. It has ended when this returns, even when cancelled."""
        self._process.kill()
        with trio.CancelScope(shield=True):
            await self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                await pipe.aclose()


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
        while "done" not in (event := await child.receive()):
            if "language" in event:
                language = event["language"]
                continue
            fields = event["segment"]
            text = fields["text"] if has_text else fields["text"].lstrip()
            has_text = has_text or bool(text)
            await send(Text(text=text))
            await send(_segment(fields))
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
            await self._child.kill()
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


def _segment(fields: dict[str, Any]) -> Segment:
    words = tuple(Word(**{**word, "text": word["text"].strip()}) for word in fields.pop("words"))
    tokens = tuple(fields.pop("tokens"))
    return Segment(**{**fields, "text": fields["text"].strip()}, tokens=tokens, words=words)
