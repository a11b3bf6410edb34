"""OpenAI's routes for recordings, as its SDK and other clients use them. Whisper is a stand-in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trio

from tests.support import fake_whisper
from tests.support.clients import client_and_service, client_of, error_body, events_in, use_openai
from tests.support.media_files import wav_file
from tests.support.projectors import WordProjector
from tests.support.scripts import answering
from tests.support.waiting import patiently, until
from trioserve.api.service import Service
from trioserve.config import Config
from trioserve.errors import ConfigError
from trioserve.testing import ScriptedBackend

pytestmark = pytest.mark.system

WAV = wav_file(seconds=1.0)
FILE = {"file": ("any.wav", WAV)}
ROUTE = "/v1/audio/transcriptions"


@pytest.fixture(autouse=True)
def _fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_whisper.install(tmp_path, monkeypatch)


@asynccontextmanager
async def whisper(**config: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Service]]:
    async with client_and_service(ScriptedBackend(), transcription_model="tiny", **config) as both:
        yield both


async def none_held(service: Service) -> None:
    """Wait until requests hold no memory any more: their answers arrive before they have ended."""
    await until(lambda: not service.server.memory.n_held)


async def test_openais_sdk_transcribes() -> None:
    def use(client: openai.OpenAI) -> None:
        create = client.audio.transcriptions.create
        plain = create(file=("any.wav", WAV), model="any")
        assert "samples 16000 [" in plain.text
        assert plain.usage is not None and plain.usage.type == "duration"
        assert plain.usage.seconds == 1
        assert create(file=("a", WAV), model="any", response_format="text").endswith(")]\n")  # type: ignore[attr-defined]
        srt = create(file=("a", WAV), model="any", response_format="srt")
        assert "\n2\n00:00:01,000 --> 00:00:02,000\nsamples 16000\n\n" in str(srt)
        verbose = create(
            file=("a", WAV),
            model="any",
            response_format="verbose_json",
            timestamp_granularities=["word", "segment"],
            language="en",
        )
        assert verbose.duration == 1.0 and verbose.language == "de"
        assert verbose.words is not None and verbose.words[0].word == "pid"
        assert verbose.segments is not None and verbose.segments[1].text == "samples 16000"
        events = list(create(file=("a", WAV), model="any", stream=True))
        deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
        assert len(deltas) == 3
        assert events[-1].type == "transcript.text.done"
        assert events[-1].text == "".join(deltas)
        with pytest.deprecated_call():  # by OpenAI, not here
            english = client.audio.translations.create(file=("a", WAV), model="any", prompt="Zoë")
        assert "('task', 'translate')" in english.text
        with pytest.raises(openai.BadRequestError) as caught:
            create(file=("a", b"no sound"), model="any")
        assert caught.value.param == "file" and caught.value.code == "invalid_media"
        with pytest.raises(openai.BadRequestError, match="does not know"):
            create(file=("a", WAV), model="any", language="fr")

    await use_openai(ScriptedBackend(), use, transcription_model="tiny")


async def test_a_stream_has_pings_and_ends_with_the_whole_text() -> None:
    async with whisper(sse_ping_interval=0.1) as (client, service):
        answer = await client.post(ROUTE, data={"stream": "true"}, files=FILE)
        assert answer.headers["content-type"] == "text/event-stream"
        events = events_in(answer.text.replace(":\n\n", ""))
        assert [event["type"] for event in events] == [
            *["transcript.text.delta"] * 3,
            "transcript.text.done",
        ]
        form = {"stream": "true", "prompt": "hang", "timeout": "1"}
        begun = await client.post(ROUTE, data=form, files=FILE)
        assert begun.status_code == 200
        delta, *pings, failure, rest = begun.text.lstrip(":\n").split("\n\n")
        assert "transcript.text.delta" in delta
        assert set(pings) == {":"} and rest == ""
        assert '"code":"deadline_exceeded"' in failure
        await none_held(service)


async def test_failures_have_a_status() -> None:
    async with whisper() as (client, service):
        for prompt in ("fail", "die"):
            form = {"stream": "true", "prompt": prompt}
            answer = await client.post(ROUTE, data=form, files=FILE)
            assert answer.status_code == 500
            assert answer.json()["error"]["message"].startswith("The transcriber failed.")
        late = await client.post(ROUTE, data={"prompt": "hang", "timeout": "1"}, files=FILE)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        await none_held(service)


async def test_a_client_that_leaves_ends_the_work() -> None:
    async with whisper() as (client, service):
        with trio.move_on_after(1):
            await client.post(ROUTE, data={"prompt": "hang"}, files=FILE)
        with patiently():  # as soon as the server knows
            assert (await client.post(ROUTE, files=FILE)).status_code == 200
        await none_held(service)


async def test_wrong_requests_are_refused() -> None:
    async with whisper(max_body_size=200_000) as (client, _):
        answer = await client.post(ROUTE, json={"file": "any"})
        assert answer.status_code == 400
        assert "must be a form" in answer.json()["error"]["message"]
        answer = await client.post(ROUTE, data={"language": "en"}, files={"other": b"any"})
        assert answer.json() == error_body("'file' is required.", "file")
        answer = await client.post(ROUTE, files={"file": wav_file(seconds=10)})
        assert answer.status_code == 413
        answer = await client.post(ROUTE, data={"include[]": "logprobs"}, files=FILE)
        assert answer.json()["error"]["param"] == "include"
        # On the routes without /v1, too.
        for route in ("/audio/transcriptions", "/audio/translations"):
            assert (await client.post(route, files={"other": b"any"})).status_code == 400


async def test_the_sdk_has_the_loaded_model_transcribe() -> None:
    def use(client: openai.OpenAI) -> None:
        create = client.audio.transcriptions.create
        whole = create(file=("a", WAV), model="any", include=["logprobs"])
        assert whole.text == "Hello there."
        assert whole.usage is not None and whole.usage.type == "tokens"
        assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
        assert whole.logprobs is not None
        assert "".join(each.token or "" for each in whole.logprobs).startswith(" Hello there.")
        events = list(create(file=("a", WAV), model="any", stream=True, language="en"))
        deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
        assert "".join(deltas) == "Hello there."
        assert events[-1].type == "transcript.text.done"
        assert events[-1].text == "Hello there."
        assert events[-1].usage is not None and events[-1].usage.output_tokens > 10
        verbose = create(file=("a", WAV), model="any", response_format="verbose_json")
        assert verbose.segments is not None and verbose.segments[0].end == 1.0
        with pytest.raises(openai.BadRequestError, match="--transcription-model"):
            create(
                file=("a", WAV),
                model="any",
                response_format="verbose_json",
                timestamp_granularities=["word"],
            )

    await use_openai(answering(" Hello there.\n", projector=WordProjector()), use)


async def test_a_stream_of_a_transcript_can_be_resumed() -> None:
    backend = answering("Hello there.", projector=WordProjector())
    named = {"X-Conversation-Id": "call-1"}
    async with client_of(backend) as client:
        stream = await client.post(ROUTE, data={"stream": "true"}, files=FILE, headers=named)
        again = await client.get("/v1/stream?conv_id=call-1&from=0")
        assert again.content == stream.content
        assert b'"text":"Hello there."' in stream.content
        whole = await client.post(ROUTE, files=FILE, headers=named)  # is not to be a stream
        assert whole.json()["text"] == "Hello there."
        later = await client.post(ROUTE, files=FILE, headers={"Prefer": "respond-async, wait=0"})
        assert later.status_code == 202
        read = await client.get(later.headers["Location"])
        assert b'"text":"Hello there."' in read.content


async def test_without_audio_input_transcription_is_not_supported() -> None:
    async with client_of(ScriptedBackend()) as client:
        answer = await client.post(ROUTE, files=FILE)
    assert answer.status_code == 501
    assert answer.json()["error"]["message"].startswith(
        "The current model does not support audio input."
    )


def test_whisper_has_to_be_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert Config(transcription_model="tiny").transcription_model == "tiny"
    with pytest.raises(ConfigError, match="not a directory"):
        Config(transcription_model=str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"trioserve\[whisper\]"):
        Config(transcription_model="tiny")
