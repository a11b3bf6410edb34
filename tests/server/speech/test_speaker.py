"""Tests of a server that speaks, on a scripted speaker."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from tests.support.media_files import wav_file
from tests.support.scripted_server import ScriptedLoader, serve, within
from trioserve.concurrency import all_of
from trioserve.errors import (
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    ModelLoadError,
    NotSupportedError,
    OutputError,
    QueueFullError,
    ServerClosingError,
)
from trioserve.server import RequestContext, Server
from trioserve.server.observers.observer import RequestRecord
from trioserve.server.speech.speech import SpeechParams
from trioserve.testing import ScriptedBackend, ScriptedSpeaker, heard
from trioserve.types import CancelReason, DecodedAudio, FinishReason, SpeechTask, Voice


def speaking(speaker: ScriptedSpeaker | None = None, **config: Any) -> Server:
    speaker = speaker or ScriptedSpeaker()
    return serve(ScriptedBackend(speaker=lambda: speaker), **config)


class Mute(ScriptedSpeaker):
    def take_voice(self, recording: DecodedAudio) -> Voice:
        raise NotSupportedError("no voices")


async def is_at_rest(server: Server) -> bool:
    """True once no slot of the speaker is taken."""
    await trio.testing.wait_all_tasks_blocked()
    parts = server.lifecycle.services._speech
    assert parts is not None
    status = parts.engine.status()
    return {slot.state for slot in status.slots} == {"idle"} and not len(parts.dispatcher)


async def test_a_text_is_spoken() -> None:
    async with speaking() as server:
        speech = await server.speak("Hello there.")
        assert heard(speech.samples) == "Hello there."
        assert (speech.rate, speech.n_frames, speech.n_prompt) == (24_000, 12, 12)
        assert speech.seconds == pytest.approx(12 / 12.5)
        assert speech.samples.dtype == np.float32
        assert server.model.voices == ["default"]
        assert await is_at_rest(server)


async def test_sound_comes_while_the_text_is_spoken() -> None:
    async with speaking() as server:
        async with server.speaking("Hello there.", SpeechParams()) as stream:
            first = await anext(stream)
            assert heard(first) == "He"  # half a window
            rest = [samples async for samples in stream]
            assert heard(np.concatenate([first, *rest])) == "Hello there."
        assert stream.finished is not None
        assert stream.finished.reason is FinishReason.EOS
        assert (await stream.next_event()) is stream.finished


async def test_a_long_text_is_spoken_in_pieces() -> None:
    text = "This is a sentence. " * 20 + "And this has no end"
    tasks = list[SpeechTask]()
    async with speaking(ScriptedSpeaker(on_sound=tasks.append)) as server:
        speech = await server.speak(text)
    pieces = [bytes(piece.tokens).decode() for piece in tasks[0].pieces]
    assert max(map(len, pieces)) <= 50
    assert all(piece.endswith(".") for piece in pieces[:-1])
    assert " ".join(pieces) == text
    assert heard(speech.samples) == "".join(pieces)


async def test_the_speed_changes_the_length() -> None:
    async with speaking() as server:
        slow = await server.speak("Hello there.", speed=0.5)
        fast = await server.speak("Hello there.", speed=2.0)
        assert slow.seconds == pytest.approx(2 * 12 / 12.5, abs=0.1)
        assert fast.seconds == pytest.approx(12 / 12.5 / 2, abs=0.1)
        assert fast.n_frames == 12


async def test_eight_texts_are_spoken_at_once() -> None:
    speaker = ScriptedSpeaker(n_slots=8)
    async with speaking(speaker) as server:
        texts = [f"Text number {i}." for i in range(8)]
        spoken = await all_of([partial(server.speak, text) for text in texts])
        assert [heard(each.samples) for each in spoken] == texts
    assert max(speaker.batches) >= 8  # together


async def test_leaving_frees_the_slot() -> None:
    async with speaking(ScriptedSpeaker(n_slots=1)) as server:
        async with server.speaking("Some text that is long. " * 5, SpeechParams()) as stream:
            await anext(stream)
        assert await is_at_rest(server)
        assert heard((await server.speak("Next.")).samples) == "Next."


async def test_a_cancelled_call_frees_the_slot() -> None:
    async with speaking(ScriptedSpeaker(n_slots=1)) as server:
        with trio.CancelScope() as scope:
            async with server.speaking("Some text. " * 9, SpeechParams()) as stream:
                async for _samples in stream:
                    scope.cancel()
        assert scope.cancelled_caught
        assert await is_at_rest(server)


async def test_a_speaker_that_fails_fails_alone() -> None:
    speaker = ScriptedSpeaker(frame_failures={ord("B"): OutputError("no sense")})
    async with speaking(speaker) as server:
        with pytest.raises(EngineError, match="no sense"):
            await server.speak("Bad.")
        assert heard((await server.speak("Good.")).samples) == "Good."
        assert await is_at_rest(server)


class Broken(ScriptedSpeaker):
    """Has a defect: its engine breaks."""

    def utterance(self, task: SpeechTask) -> Any:
        raise RuntimeError("a defect")


async def test_a_broken_engine_of_speech_leaves_chats_alone() -> None:
    async with speaking(Broken()) as server:
        for _ in range(2):
            with pytest.raises(EngineError):
                await server.speak("Good.")
        assert (await server.complete("a", max_tokens=2)).text
        assert server.lifecycle.failure.value is None


async def test_a_slow_reader_pauses_its_speaker() -> None:
    speaker = ScriptedSpeaker(n_ctx_seq=2**14, max_piece=2**12)
    async with (
        speaking(speaker) as server,
        server.speaking("x" * 2000, SpeechParams()) as stream,
    ):
        await trio.testing.wait_all_tasks_blocked()
        status = server.lifecycle.services._speech.engine.status()  # type: ignore[union-attr]
        assert 100 < status.counters.predicted_tokens < 200  # 1 MiB is unread
        samples = np.concatenate([each async for each in stream])
        assert heard(samples) == "x" * 2000


async def test_what_cannot_be_spoken_is_refused() -> None:
    async with speaking(tts_lang="de") as server:
        for text in ("", "  \n "):
            with pytest.raises(InvalidRequestError, match="'input' has nothing to say"):
                await server.speak(text)
        with pytest.raises(
            InvalidRequestError, match="'voice' is not known; the voices are: default"
        ):
            await server.speak("Hi.", voice="anna")
        with pytest.raises(InvalidRequestError, match=r"'language' is not spoken .* de, en"):
            await server.speak("Hi.", language="fr")
        for language in ("en", "EN-us", "german"):
            assert heard((await server.speak("Hi.", language=language)).samples) == "Hi."
        await server.speak("Hi.", voice="alloy")


async def test_a_server_without_a_speaker_says_so() -> None:
    async with serve() as server:
        assert server.model.voices is None
        with pytest.raises(NotSupportedError, match="`--tts`"):
            await server.speak("Hi.")


async def test_a_deadline_ends_the_work(autojump_clock: trio.testing.MockClock) -> None:
    speaker = ScriptedSpeaker()
    async with speaking(speaker) as server:
        with pytest.raises(DeadlineExceededError):
            async with server.speaking("x" * 2000, SpeechParams(), within(1.0)) as stream:
                await trio.sleep(2)
                async for _samples in stream:
                    pass
        assert await is_at_rest(server)


async def test_a_full_queue_refuses() -> None:
    async with (
        speaking(ScriptedSpeaker(n_slots=1), max_queue=1) as server,
        server.speaking("x" * 500, SpeechParams()) as one,
        server.speaking("Two.", SpeechParams()),
    ):
        await anext(one)
        with pytest.raises(QueueFullError):
            await server.speak("Three.")
        async with server.speaking("Four.", SpeechParams(), RequestContext(has_begun=True)):
            pass


async def test_what_has_begun_is_not_refused() -> None:
    begun = RequestContext(has_begun=True)
    async with (
        speaking(ScriptedSpeaker(n_slots=1)) as server,
        server.speaking("x" * 500, SpeechParams()) as one,
        trio.open_nursery() as nursery,
    ):
        await anext(one)
        nursery.start_soon(server.drain)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(ServerClosingError):
            await server.speak("Two.")
        async with server.speaking("Three.", SpeechParams(), begun) as three:
            await one.read()
            assert heard((await three.read()).samples) == "Three."
        nursery.cancel_scope.cancel()


async def test_a_model_that_cannot_be_loaded_ends_the_start() -> None:
    def fail() -> ScriptedSpeaker:
        raise ModelLoadError("no such model")

    with pytest.raises(ModelLoadError, match="no such model"):
        async with serve(ScriptedBackend(speaker=fail)):
            raise AssertionError("it has started")


async def test_a_language_that_is_not_spoken_ends_the_start() -> None:
    with pytest.raises(ModelLoadError, match="'tts_lang' is not spoken"):
        async with speaking(tts_lang="fr"):
            raise AssertionError("it has started")


async def test_the_speaker_sleeps_and_wakes_with_the_model() -> None:
    made = list[ScriptedSpeaker]()

    def make() -> ScriptedSpeaker:
        made.append(ScriptedSpeaker())
        return made[-1]

    loader = ScriptedLoader(make=lambda: ScriptedBackend(speaker=make))
    async with loader.serve() as server:
        await server.speak("One.")
        await server.sleep()
        assert [each.closed for each in made] == [True]
        assert server.model.voices == ["default"]
        assert heard((await server.speak("Two.")).samples) == "Two."
        assert [each.closed for each in made] == [True, False]


async def test_requests_are_observed() -> None:
    events = list[Any]()

    class Kept:
        def on_event(self, event: Any) -> None:
            events.append(event)

    async with speaking() as server:
        server.observers.append(Kept())
        await server.speak("Hello.")
        async with server.speaking("Hello there, you.", SpeechParams()) as stream:
            await anext(stream)
    whole, left = [each for each in events if isinstance(each, RequestRecord)]
    assert (whole.request.operation, whole.request.n_prompt) == ("speech", 6)
    assert (whole.end.n_output, whole.end.finish) == (6, FinishReason.EOS)
    assert left.end.cancelled is CancelReason.CALLER
    assert 0 < left.end.n_output < 17


async def test_metrics_count_speech_apart_from_text() -> None:
    speaker = ScriptedSpeaker(frame_failures={ord("B"): OutputError("no sense")})
    async with speaking(speaker, metrics_endpoint=True) as server:
        await server.speak("Hello.")
        with pytest.raises(OutputError):
            await server.speak("Bad.")
        async with server.speaking("Hello there, you.", SpeechParams()) as stream:
            await anext(stream)
        written = await server.written_metrics()
    for end in ("finished", "cancelled", "failed"):
        assert f'speeches_total{{end="{end}",model_name="scripted"}} 1' in written
    assert 'time_to_first_sound_seconds_count{model_name="scripted"} 1' in written
    frames = re.search(r"speech_frames_total\{.*\} ([\d.]+)", written)
    assert frames is not None and 6 < float(frames[1]) < 6 + 17
    assert 'request_success_total{model_name="scripted",reason="eos"} 0' in written


@pytest.mark.system
async def test_voices_are_taken_from_recordings(tmp_path: Path) -> None:
    (tmp_path / "anna.wav").write_bytes(wav_file(seconds=1.5))
    (tmp_path / "nova.wav").write_bytes(wav_file(seconds=0.5))
    (tmp_path / "notes.txt").write_text("no recording")
    async with speaking(tts="a.gguf", tts_voices=str(tmp_path)) as server:
        assert server.model.voices == ["anna", "default", "nova"]
        plain = await server.speak("Hi.")
        anna = await server.speak("Hi.", voice="anna")
        assert heard(anna.samples) == "Hi." and (anna.samples < 0).all()
        assert (plain.samples > 0).all()
    with pytest.raises(ModelLoadError, match="The voice anna cannot be used: no voices"):
        async with speaking(Mute(), tts="a.gguf", tts_voices=str(tmp_path)):
            raise AssertionError("it has started")
