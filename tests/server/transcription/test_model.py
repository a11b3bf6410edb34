"""The loaded model transcribes, window by window."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import trio

from tests.support.media_files import float_wav
from tests.support.projectors import WordProjector
from tests.support.scripts import ENDLESS, answering
from trioserve.chat.messages import Audio
from trioserve.config import Config
from trioserve.errors import (
    DeadlineExceededError,
    InvalidMediaError,
    InvalidRequestError,
    NotSupportedError,
    QueueFullError,
    ServerClosingError,
    UnsupportedFieldError,
)
from trioserve.server import RequestContext, Server
from trioserve.server.transcription.transcript import (
    Segment,
    Summary,
    Transcript,
    TranscriptionParams,
    TranscriptStream,
)
from trioserve.testing import scripted
from trioserve.types import MediaSource

pytestmark = pytest.mark.system

RATE = 16_000


def speech(*parts: tuple[float, float]) -> MediaSource:
    """A recording of noise; each part has its seconds and its loudness."""
    random = np.random.default_rng(0)
    samples = [loud * random.uniform(-1, 1, round(seconds * RATE)) for seconds, loud in parts]
    return MediaSource(kind="audio", data=float_wav(np.concatenate(samples)), param="file")


SHORT = speech((1, 0.5))
#: Two windows, and a third one where times matter.
LONG = speech((20, 0.5), (0.5, 0.0), (19, 0.5))


class Heard:
    """Answers each prompt with the next text, and keeps the prompts."""

    def __init__(self, *texts: str) -> None:
        self.prompts: list[str] = []
        self._texts = list(texts)

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        return self._texts.pop(0) if self._texts else "more"


@asynccontextmanager
async def hearing(script: Any, **settings: Any) -> AsyncIterator[Server]:
    backend_settings = {
        name: settings.pop(name) for name in ("n_slots", "chat_template") if name in settings
    }
    backend = answering(script, projector=WordProjector(), **backend_settings)
    config = Config(stream_interval_ms=0, **settings)
    async with Server(config, load=scripted(backend)) as server:
        yield server
        assert server.memory.n_held == 0


async def transcript_of(server: Server, source: MediaSource, **params: Any) -> Transcript:
    async with opened(server, source, **params) as stream:
        return await stream.read()


def opened(server: Server, source: MediaSource, **params: Any) -> Any:
    context = params.pop("context", RequestContext())
    return server.transcribing(source, TranscriptionParams(**params), context)


async def test_a_short_recording_is_one_chat() -> None:
    script = Heard(" Hello there.\n")
    async with hearing(script) as server:
        transcript = await transcript_of(server, SHORT)
    assert transcript.text == "Hello there."
    (segment,) = transcript.segments
    assert (segment.text, segment.start, segment.end) == ("Hello there.", 0, 1)
    assert len(segment.tokens) == len(" Hello there.\n") + 1  # and the end of the text
    usage = transcript.summary.usage
    assert usage is not None and usage.n_output == len(segment.tokens)
    (prompt,) = script.prompts
    assert "Transcribe audio to text(sound 1.0s)" in prompt


async def test_a_long_one_has_several_windows_and_one_text() -> None:
    script = Heard("One,\n", " two.", " Three.")
    async with hearing(script) as server:
        transcript = await transcript_of(server, LONG)
        timed = await transcript_of(server, LONG, timed=True)
    assert transcript.text == "One, two."
    assert [each.text for each in transcript.segments] == ["One,", "two."]
    assert transcript.segments[0].end == pytest.approx(20, abs=0.05)
    assert transcript.segments[1].start == pytest.approx(20.5, abs=0.05)
    assert len(timed.segments) > 3
    assert all(each.end - each.start <= 10 for each in timed.segments)
    assert all(each.avg_logprob <= 0 for each in timed.segments)


async def test_silence_asks_nobody() -> None:
    script = Heard()
    async with hearing(script) as server:
        transcript = await transcript_of(server, speech((3, 0.0)))
    assert (transcript.text, transcript.segments, script.prompts) == ("", (), [])
    assert transcript.duration == 3


async def test_what_is_asked_is_in_the_prompt() -> None:
    script = Heard()
    async with hearing(script, transcription_prompt="Write it down") as server:
        await transcript_of(server, SHORT, language="de", prompt="Zoë, Kirke")
        await transcript_of(server, SHORT, translate=True)
    first, second = script.prompts
    assert (
        "Write it down (language: de)\nThese words may occur in it, or come before it: Zoë, Kirke\n"
        "(sound 1.0s)"
    ) in first
    assert "Translate the speech in the audio to English text(sound 1.0s)" in second


async def test_models_that_the_system_tells_what_to_do() -> None:
    template = (
        "{#<|tool_list_start|>#}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    script = Heard()
    async with hearing(script, chat_template=template) as server:
        await transcript_of(server, SHORT)
    assert script.prompts == ["<system>Perform ASR.<user>(sound 1.0s)"]


@pytest.mark.parametrize("settings", [{}, {"reasoning_format": "none"}])
async def test_thinking_does_not_leak(settings: dict[str, Any]) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
        "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    )
    script = Heard("<think>It is a voice.</think>\n\nHello.")
    async with hearing(script, chat_template=template, **settings) as server:
        transcript = await transcript_of(server, SHORT)
    assert transcript.text.endswith("Hello.")
    assert "voice" not in transcript.text
    assert script.prompts[0].endswith("<think>\n\n</think>\n\n")


async def test_the_number_of_tokens_is_bounded() -> None:
    script = Heard("x" * ENDLESS, "y" * ENDLESS)
    async with hearing(script) as server:
        transcript = await transcript_of(server, SHORT)
        assert len(transcript.text) == 64 + 32  # for one second
        few = await transcript_of(server, LONG, max_tokens=7)
    assert few.text == "yyyyyyy"
    assert len(script.prompts) == 2  # the second window was not asked for


async def test_logprobs_are_those_of_the_tokens() -> None:
    async with hearing(Heard("Hi")) as server:
        transcript = await transcript_of(server, SHORT, logprobs=True)
    assert b"".join(each.chosen.piece for each in transcript.probs).startswith(b"Hi")


async def test_leaving_early_frees_the_slot() -> None:
    async with hearing(Heard("x" * ENDLESS), n_slots=1) as server:
        async with opened(server, LONG) as stream:
            assert isinstance(stream, TranscriptStream)
            await anext(stream)
        again = await transcript_of(server, SHORT)
    assert again.text == "more"


async def test_a_deadline_is_kept_between_windows_and_in_them() -> None:
    async with hearing(Heard("x" * ENDLESS)) as server:
        past = RequestContext(deadline=trio.current_time())
        with pytest.raises(DeadlineExceededError):
            await transcript_of(server, SHORT, context=past)


async def test_once_begun_it_waits_while_the_queue_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Heard("One,", "two.")
    async with hearing(script) as server:
        chats = server.lifecycle.services.text
        opened, refusals = chats.open_chats, iter([False, True, True, False])

        async def refusing(*args: Any, **rest: Any) -> Any:
            if next(refusals):
                raise QueueFullError("The queue is full.", retry_after=0.01)
            return await opened(*args, **rest)

        monkeypatch.setattr(chats, "open_chats", refusing)
        assert (await transcript_of(server, LONG)).text == "One, two."
        refusals = iter([True])
        with pytest.raises(QueueFullError):
            await transcript_of(server, LONG)


async def test_what_is_refused() -> None:
    async with hearing(Heard()) as server:
        with pytest.raises(UnsupportedFieldError) as caught:
            await transcript_of(server, SHORT, words=True)
        assert caught.value.param == "timestamp_granularities"
        broken = attrs.evolve(SHORT, data=b"RIFFxxxxWAVE")
        with pytest.raises(InvalidMediaError) as refused:
            await transcript_of(server, broken)
        assert refused.value.param == "file"


async def test_events_come_as_they_are_heard() -> None:
    async with hearing(Heard("One,", "two.")) as server, opened(server, LONG) as stream:
        events = []
        while not events or not isinstance(events[-1], Summary):
            events.append(await anext(stream))
    assert "".join(each.text for each in events if hasattr(each, "probs")) == "One, two."
    assert sum(isinstance(each, Segment) for each in events) == 2


async def test_a_program_gives_paths_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "call.wav"
    assert SHORT.data is not None
    path.write_bytes(SHORT.data)
    script = Heard("One.", "Two.", "Three.")
    async with hearing(script) as server:
        texts = [
            (await server.transcribe(given, language="en")).text
            for given in (path, SHORT.data, Audio(str(path)))
        ]
        with pytest.raises(InvalidRequestError) as caught:
            await server.transcribe(path, volume=11)
        assert caught.value.param == "volume"
        with pytest.raises(InvalidMediaError) as refused:
            await server.transcribe(tmp_path / "missing.wav")
        assert refused.value.param == "recording"
    assert texts == ["One.", "Two.", "Three."]
    assert all("(language: en)" in prompt for prompt in script.prompts)
    async with Server(Config(), load=scripted(answering("deaf"))) as deaf:
        with pytest.raises(NotSupportedError, match="does not support audio input"):
            await deaf.transcribe(path)


async def test_what_has_begun_is_finished_while_the_server_drains() -> None:
    async with hearing(Heard("One,", "two.")) as server, trio.open_nursery() as nursery:
        async with opened(server, LONG) as stream:
            first = await anext(stream)
            nursery.start_soon(server.drain)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(ServerClosingError):
                await transcript_of(server, SHORT)
            rest = await stream.read()
        assert first.text + rest.text == "One, two."
        assert len(rest.segments) == 2
