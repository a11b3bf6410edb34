"""Whisper in a child process: its orders, its answers, and its end."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from structlog.testing import capture_logs

from tests.support import fake_whisper
from tests.support.media_files import wav_file
from tests.support.waiting import patiently, until
from trioserve.children import inside
from trioserve.concurrency import Feed, alongside
from trioserve.config import Config
from trioserve.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    QueueFullError,
    ServerClosingError,
    TranscriberError,
    UnsupportedFieldError,
)
from trioserve.server import RequestContext, Server
from trioserve.server.transcription.transcript import (
    Segment,
    Summary,
    Text,
    TranscriptEvent,
    TranscriptionParams,
    Word,
)
from trioserve.server.transcription.whisper import WhisperChild, WhisperSettings, WhisperTranscriber
from trioserve.testing import ScriptedBackend, scripted
from trioserve.types import DecodedAudio, MediaSource

pytestmark = pytest.mark.system

AUDIO = DecodedAudio(rate=16_000, samples=np.zeros(40_000, np.float32).tobytes(), id="any")


@pytest.fixture(autouse=True)
def _fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_whisper.install(tmp_path, monkeypatch)


@asynccontextmanager
async def whisper(
    model: str = "tiny", *, max_waiting: int = 1
) -> AsyncIterator[WhisperTranscriber]:
    transcriber = WhisperTranscriber(WhisperSettings(model=model), max_waiting=max_waiting)
    try:
        yield transcriber
    finally:
        await transcriber.aclose()


async def transcribe(
    transcriber: WhisperTranscriber, context: RequestContext | None = None, **params: Any
) -> list[TranscriptEvent]:
    events = list[TranscriptEvent]()

    async def send(event: TranscriptEvent) -> None:
        events.append(event)

    asked = TranscriptionParams(**params)
    await transcriber.transcribe(AUDIO, asked, context or RequestContext(), send)
    return events


@asynccontextmanager
async def transcribing(
    transcriber: WhisperTranscriber, **params: Any
) -> AsyncIterator[Feed[TranscriptEvent]]:
    """The events of a transcript, one by one, as they come."""
    events = Feed[TranscriptEvent](1)

    async def send(event: TranscriptEvent) -> None:
        events.put(event)
        await events.room()

    async def work() -> None:
        asked = TranscriptionParams(**params)
        await transcriber.transcribe(AUDIO, asked, RequestContext(), send)
        events.end()

    async with alongside(work):
        yield events


def pid_in(events: list[TranscriptEvent]) -> int:
    assert isinstance(events[0], Text)
    return int(events[0].text.removeprefix("pid "))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_segments_come_with_their_text() -> None:
    async with whisper() as transcriber:
        events = await transcribe(transcriber, words=True, language="en-us", temperature=0.5)
    pid = pid_in(events)
    assert not is_running(pid)
    settings = (
        "[('language', 'en'), ('task', 'transcribe'), ('temperature', 0.5), ('vad_filter', False), "
        "('word_timestamps', True)]"
    )
    assert [each.text for each in events if isinstance(each, Text)] == [
        f"pid {pid}",
        " samples 40000",
        f" {settings}",
    ]
    assert events[1] == Segment(
        text=f"pid {pid}",
        start=0.0,
        end=1.0,
        tokens=(1, 2),
        words=(Word(text="pid", start=0.0, end=0.5),),
        avg_logprob=-0.5,
        no_speech_prob=0.25,
    )
    assert events[-1] == Summary(language="de")


async def test_without_a_temperature_whisper_chooses_it() -> None:
    async with whisper() as transcriber:
        events = await transcribe(transcriber, translate=True, skip_silence=True)
    told = events[-2]
    assert isinstance(told, Segment)
    assert "temperature" not in told.text
    assert "('task', 'translate'), ('vad_filter', True)" in told.text
    assert events[-1] == Summary(language="en")


async def test_the_process_stays_for_the_next_one() -> None:
    async with whisper() as transcriber:
        pid = pid_in(await transcribe(transcriber))
        with pytest.raises(InvalidRequestError, match="'language' is 'xx'"):
            await transcribe(transcriber, language="xx")
        assert pid_in(await transcribe(transcriber)) == pid


async def test_cancelling_ends_the_process_and_the_next_one_has_another() -> None:
    async with whisper() as transcriber:
        async with transcribing(transcriber, prompt="hang") as events:
            first = [await anext(events)]
            await anext(events)
            with trio.CancelScope() as scope:
                scope.cancel()
                await anext(events)
            assert scope.cancelled_caught
        assert not is_running(pid_in(first))
        assert pid_in(await transcribe(transcriber)) != pid_in(first)


async def test_leaving_early_ends_the_process() -> None:
    async with whisper() as transcriber:
        async with transcribing(transcriber) as events:
            first = [await anext(events)]
        assert not is_running(pid_in(first))


async def test_a_deadline_is_kept() -> None:
    async with whisper() as transcriber:
        with pytest.raises(DeadlineExceededError):
            await transcribe(transcriber, RequestContext(deadline=trio.current_time()))
        pid = pid_in(await transcribe(transcriber))
        soon = RequestContext(deadline=trio.current_time() + 0.1)
        with pytest.raises(DeadlineExceededError):
            await transcribe(transcriber, soon, prompt="hang")
        assert not is_running(pid)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("fail", "Whisper failed: ValueError: cannot do it"),
        ("die", "The process that runs Whisper ended with exit code 3."),
    ],
)
async def test_a_failure_is_told_and_the_next_one_works(prompt: str, message: str) -> None:
    async with whisper() as transcriber:
        with pytest.raises(TranscriberError) as caught:
            await transcribe(transcriber, prompt=prompt)
        assert caught.value.message == message
        assert caught.value.public == "The transcriber failed."
        assert isinstance((await transcribe(transcriber))[-1], Summary)


async def test_a_process_that_has_died_meanwhile_is_replaced() -> None:
    async with whisper() as transcriber:
        pid = pid_in(await transcribe(transcriber))
        os.kill(pid, 9)
        child = transcriber._child
        assert child is not None
        await until(lambda: not child.is_alive)
        assert pid_in(await transcribe(transcriber)) != pid


async def test_a_model_that_is_not_there() -> None:
    async with whisper("missing") as transcriber:
        with pytest.raises(TranscriberError, match="RuntimeError: there is no such model"):
            await transcribe(transcriber)


async def test_a_python_that_is_not_there(tmp_path: Path) -> None:
    settings = WhisperSettings(model="tiny", python=str(tmp_path / "python"))
    transcriber = WhisperTranscriber(settings, max_waiting=0)
    with pytest.raises(TranscriberError, match="cannot be started"):
        await transcribe(transcriber)


async def test_recordings_take_turns_and_few_may_wait(nursery: trio.Nursery) -> None:
    async with whisper(max_waiting=1) as transcriber:
        waited: list[list[TranscriptEvent]] = []

        async def wait() -> None:
            waited.append(await transcribe(transcriber))

        async with transcribing(transcriber) as running:
            first = [await anext(running)]
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(QueueFullError, match="1 running and 1 waiting"):
                await transcribe(transcriber)
            first += [event async for event in running]
        await until(lambda: waited)
        assert pid_in(waited[0]) == pid_in(first)


@pytest.mark.parametrize(
    ("params", "param"), [({"logprobs": True}, "include"), ({"max_tokens": 5}, "max_tokens")]
)
async def test_what_whisper_cannot_do_is_refused(params: dict[str, Any], param: str) -> None:
    async with whisper() as transcriber:
        with pytest.raises(UnsupportedFieldError) as caught:
            transcriber.check(TranscriptionParams(**params))
    assert caught.value.param == param


async def test_the_process_ends_with_the_one_that_has_started_it() -> None:
    child = await WhisperChild.start(WhisperSettings(model="tiny"))
    try:
        fields = {"initial_prompt": "hang", "word_timestamps": False}
        await child.send(fields, b"\0" * 4)
        for _ in range(2):  # the language and a segment: then it sends nothing
            await child.receive()
        child._child.close()  # as when the parent dies, in the middle of the work
        await until(lambda: not child.is_alive)
    finally:
        await child.end()
    assert child._child.code == 0


@pytest.mark.parametrize(
    "said",
    [
        "os.write(0, b'garbage')",
        "parent.send(b'garbage')",
        """parent.send(b'{"type": "ready"}')""",
        "parent.send(b'[' * 100_000)",
        """parent.send(b'{"languages": 1}')""",
        "parent.send(bytes(2**21))",
    ],
)
async def test_one_that_speaks_nonsense_is_ended(tmp_path: Path, said: str) -> None:
    python = tmp_path / "python"
    folder = Path(inside.__file__).parent
    python.write_text(
        f"#!{sys.executable}\nimport os, sys, time\nsys.path.append({str(folder)!r})\n"
        f"import inside\nparent = inside.Parent()\n{said}\ntime.sleep(1000)\n"
    )
    python.chmod(0o755)
    with pytest.raises(TranscriberError, match="Whisper cannot be understood"):
        await WhisperChild.start(WhisperSettings(model="tiny", python=str(python)))


@pytest.mark.needs("WHISPER")
async def test_whisper_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH")
    python, model = os.environ["WHISPER"].split(":")
    settings = WhisperSettings(model=model, python=python, offline=True)
    transcriber = WhisperTranscriber(settings, max_waiting=0)
    try:
        with patiently():
            events = await transcribe(transcriber, words=True, language="en")
    finally:
        await transcriber.aclose()
    assert events[-1] == Summary(language="en")
    segments = [event for event in events if isinstance(event, Segment)]
    assert all(each.start <= each.end <= 30 for each in segments)  # of silence


async def test_a_server_that_drains_waits_for_it_but_not_for_ever() -> None:
    config = Config(transcription_model="tiny")
    async with Server(config, load=scripted(ScriptedBackend())) as server:
        parts = server.lifecycle.services
        source = MediaSource(kind="audio", data=wav_file(1.0), param="file")
        params = TranscriptionParams(prompt="hang")
        async with parts.transcriptions.stream(source, params, RequestContext()) as stream:
            await anext(stream)
            await server.drain(0.1)
            with trio.move_on_after(0) as waiting:
                await server.lifecycle.gate.drained()
            assert waiting.cancelled_caught
            await parts.close()
            with pytest.raises(ServerClosingError):
                while True:
                    await anext(stream)


async def test_a_transcript_ends() -> None:
    config = Config(transcription_model="tiny")
    source = MediaSource(kind="audio", data=wav_file(1.0), param="file")
    async with Server(config, load=scripted(ScriptedBackend())) as server:
        opened = server.transcribing(source, TranscriptionParams(), RequestContext())
        async with opened as stream:
            events = [event async for event in stream]
    assert isinstance(events[-1], Summary)


async def test_a_process_that_is_starting_ends_with_the_transcriber(
    nursery: trio.Nursery,
) -> None:
    async with whisper() as transcriber:
        refused: list[ServerClosingError] = []

        async def ask() -> None:
            with pytest.raises(ServerClosingError) as caught:
                await transcribe(transcriber)
            refused.append(caught.value)

        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()  # until the process is ready
        await transcriber.aclose()
        await until(lambda: refused)
        assert transcriber._child is None


async def test_recordings_are_counted_and_logged() -> None:
    config = Config(transcription_model="tiny", metrics_endpoint=True)
    wav = wav_file(2.0)
    with capture_logs() as lines:
        async with Server(config, load=scripted(ScriptedBackend())) as server:
            await server.transcribe(wav)
            with pytest.raises(TranscriberError):
                await server.transcribe(wav, prompt="fail")
            with pytest.raises(InvalidRequestError):
                await server.transcribe(b"no sound")  # refused, so nothing has begun
            source = MediaSource(kind="audio", data=wav)
            opened = server.transcribing(
                source, TranscriptionParams(prompt="hang"), RequestContext()
            )
            async with opened as stream:
                await anext(stream)
            assert server.metrics is not None
            written = server.metrics.render(await server.status()).decode()
    label = 'model_name="scripted"'
    for end in ("finished", "failed", "cancelled"):
        assert f'trioserve:recordings_total{{end="{end}",{label}}} 1.0' in written
    assert f"trioserve:recording_seconds_total{{{label}}} 2.0" in written
    told = [line for line in lines if line["event"].startswith("recording")]
    assert [(line["event"], line.get("end")) for line in told] == [
        ("recording ended", "finished"),
        ("recording failed", None),
        ("recording ended", "cancelled"),
    ]
    assert all(line["seconds"] == 2.0 and line["total_ms"] > 0 for line in told)
    assert "cannot do it" in told[1]["error"]
