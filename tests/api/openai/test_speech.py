"""OpenAI's routes for speech, as its SDK and other clients use them. The speaker has a script."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import openai
import pytest
import trio

from tests.support.clients import client_and_service, error_body, use_openai
from tests.support.encoded_sound import sound_in
from tests.support.waiting import until
from trioserve.api.service import Service
from trioserve.errors import OutputError
from trioserve.testing import ScriptedBackend, ScriptedSpeaker, heard

ROUTE = "/v1/audio/speech"
TEXT = "Hello there, this is a text."


def with_voice(speaker: ScriptedSpeaker | None = None) -> ScriptedBackend:
    speaker = speaker or ScriptedSpeaker(n_slots=8)
    return ScriptedBackend(speaker=lambda: speaker)


@asynccontextmanager
async def speaking(
    speaker: ScriptedSpeaker | None = None, *, backend: ScriptedBackend | None = None, **config: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Service]]:
    async with client_and_service(backend or with_voice(speaker), **config) as both:
        yield both


def said(data: bytes) -> str:
    return heard(sound_in(data, "pcm"))


async def is_at_rest(service: Service) -> None:
    """Wait until no slot of the speaker is taken, and no memory is held."""
    parts = service.server.lifecycle.services._speech
    assert parts is not None
    await until(lambda: not len(parts.dispatcher) and not service.server.memory.n_held)
    status = await parts.dispatcher.call(parts.engine.status)
    assert {slot.state for slot in status.slots} == {"idle"}


async def test_openais_sdk_gets_sound() -> None:
    def use(client: openai.OpenAI) -> None:
        create = partial(client.audio.speech.create, model="tts-1", voice="alloy", input=TEXT)
        assert said(create(response_format="pcm").content) == TEXT
        mp3 = create()
        assert mp3.response.headers["content-type"] == "audio/mpeg"
        assert len(sound_in(mp3.content, "mp3")) / 24_000 == pytest.approx(28 / 12.5, abs=0.2)
        fast = create(response_format="wav", speed=2.0, instructions="Whisper.")
        assert len(sound_in(fast.content, "wav")) / 24_000 == pytest.approx(28 / 25, abs=0.1)
        with client.audio.speech.with_streaming_response.create(
            model="tts-1", voice={"id": "default"}, input=TEXT, response_format="pcm"
        ) as response:
            assert said(b"".join(response.iter_bytes())) == TEXT
        with pytest.raises(openai.BadRequestError) as caught:
            create(voice="anna")
        assert caught.value.param == "voice"
        with pytest.raises(openai.BadRequestError, match="'input' has nothing to say"):
            create(input=" ")

    await use_openai(with_voice(), use)


async def test_events_have_sound_and_usage() -> None:
    async with speaking() as (client, service):
        body = {"input": TEXT, "stream_format": "sse", "response_format": "pcm"}
        answer = await client.post(ROUTE, json=body)
        assert answer.headers["content-type"] == "text/event-stream"
        lines = [line for line in answer.text.split("\n\n") if line]
        *deltas, done = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
        assert len(deltas) > 3
        data = b"".join(base64.b64decode(delta["audio"]) for delta in deltas)
        assert said(data) == TEXT
        n = len(TEXT)
        usage = {"input_tokens": n, "output_tokens": n, "total_tokens": 2 * n}
        assert done == {"type": "speech.audio.done", "usage": usage}
        await is_at_rest(service)


@pytest.mark.parametrize("format", ["mp3", "opus", "aac", "flac", "wav", "pcm"])
async def test_all_formats(format: str) -> None:
    async with speaking() as (client, _):
        answer = await client.post(ROUTE, json={"input": TEXT, "response_format": format})
        assert answer.status_code == 200
        kind = {"mp3": "mpeg", "opus": "ogg"}.get(format, format)
        assert answer.headers["content-type"] == f"audio/{kind}"
        assert len(sound_in(answer.content, format)) / 24_000 == pytest.approx(28 / 12.5, abs=0.2)


async def test_sound_is_sent_before_all_is_spoken() -> None:
    """The speaker goes on when its first sound has come to the client."""
    may_go_on, n_sounds = trio.Event(), 0
    token = trio.lowlevel.current_trio_token()

    def on_sound(_task: object) -> None:
        nonlocal n_sounds
        n_sounds += 1
        if n_sounds == 2:
            trio.from_thread.run(may_go_on.wait, trio_token=token)

    async with speaking(ScriptedSpeaker(on_sound=on_sound)) as (client, _):
        body = {"input": TEXT, "response_format": "pcm"}
        async with client.stream("POST", ROUTE, json=body) as answer:
            parts = answer.aiter_raw()
            first = await anext(parts)
            assert said(first) == "He"
            may_go_on.set()
            assert said(first + b"".join([part async for part in parts])) == TEXT


async def test_a_client_that_leaves_frees_the_slot() -> None:
    async with speaking(ScriptedSpeaker(n_slots=1)) as (client, service):
        body = {"input": "This goes on. " * 200, "response_format": "pcm"}
        for more in ({}, {"stream_format": "sse"}):
            with trio.CancelScope() as scope:
                async with client.stream("POST", ROUTE, json={**body, **more}) as answer:
                    async for _part in answer.aiter_raw():
                        scope.cancel()
            assert scope.cancelled_caught
            await is_at_rest(service)
        assert said((await client.post(ROUTE, json={**body, "input": "Next."})).content) == "Next."


async def test_a_speaker_that_fails_at_once_has_a_status() -> None:
    failures = dict.fromkeys(b"AB", OutputError("no sense"))
    async with speaking(ScriptedSpeaker(frame_failures={**failures})) as (client, service):
        for text, more in (("A.", {}), ("B.", {"stream_format": "sse"})):
            answer = await client.post(ROUTE, json={"input": text, **more})
            assert answer.status_code == 500
            assert answer.json()["error"]["message"].startswith("no sense")
        await is_at_rest(service)


async def test_a_speaker_that_fails_later_cuts_the_sound_off() -> None:
    text = "x" * 49 + ". Bad."
    for more in ({}, {"stream_format": "sse"}):
        speaker = ScriptedSpeaker(frame_failures={ord("B"): OutputError("no sense")})
        async with speaking(speaker) as (client, service):
            body = {"input": text, "response_format": "pcm", **more}
            if more:
                answer = await client.post(ROUTE, json=body)
                assert '"message":"no sense' in answer.text.split("\n\n")[-2]
            else:
                with pytest.raises(httpx.TransportError):
                    await client.post(ROUTE, json=body)
            await is_at_rest(service)
            assert (
                said(
                    (
                        await client.post(
                            ROUTE, json={**body, "input": "ok", "stream_format": "audio"}
                        )
                    ).content
                )
                == "ok"
            )


async def test_eight_clients_are_served_at_once() -> None:
    speaker = ScriptedSpeaker(n_slots=8)
    async with speaking(speaker) as (client, service):
        spoken = dict[str, str]()

        async def ask(text: str) -> None:
            body = {"input": text, "response_format": "pcm"}
            spoken[text] = said((await client.post(ROUTE, json=body)).content)

        texts = [f"Client number {i} has something to say." for i in range(8)]
        async with trio.open_nursery() as nursery:
            for text in texts:
                nursery.start_soon(ask, text)
        assert spoken == {text: text for text in texts}
        await is_at_rest(service)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": ""}, "input", "has nothing to say."),
        ({"input": None}, "input", "is required."),
        ({"input": ["a"]}, "input", "must be a string of at most 4096 characters."),
        ({"input": "a" * 4097}, "input", "must be a string of at most 4096 characters."),
        ({"voice": 5}, "voice", "must be the name of a voice, or an object with the name as its"),
        ({"voice": "nobody"}, "voice", "is not known; the voices are: default."),
        ({"language": "tlh"}, "language", "is not spoken by this model; it speaks de, en."),
        ({"response_format": "m4b"}, "response_format", 'must be "mp3", "opus",'),
        ({"stream_format": "ws"}, "stream_format", 'must be "audio" or "sse".'),
        ({"speed": 0.1}, "speed", "must be between 0.25 and 4."),
        ({"speed": 5}, "speed", "must be between 0.25 and 4."),
        ({"priority": 101}, "priority", "must be"),
        ({"top_p": 2}, "top_p", "must be between 0 and 1."),
    ],
)
async def test_what_is_wrong_is_named(fields: dict[str, Any], param: str, message: str) -> None:
    async with speaking() as (client, _):
        answer = await client.post(ROUTE, json={"input": "Hi.", **fields})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert f"'{param}' " in error["message"] and message in error["message"]


async def test_odd_texts_are_spoken_or_refused() -> None:
    async with speaking() as (client, service):
        for text in (
            "\x00\x07\x1b[31m",
            "😀😀😀",
            "a" * 4096,
            "." * 4096,
            "\u202e\u0301",
            "\ud800",
        ):
            body = {"input": text, "response_format": "pcm"}
            answer = await client.post(ROUTE, content=json.dumps(body))
            assert answer.status_code in (200, 400), answer.text
        await is_at_rest(service)


async def test_a_huge_text_is_refused_before_any_work() -> None:
    async with speaking() as (client, service):
        content = b'{"input": "' + b"x" * 100_000_000 + b'"}'
        answer = await client.post(ROUTE, content=content)
        assert answer.status_code in (400, 413)
        assert answer.json()["error"]["message"]
        await is_at_rest(service)


async def test_a_timeout_ends_the_speech() -> None:
    released, token = trio.Event(), trio.lowlevel.current_trio_token()

    def hang(_task: object) -> None:
        trio.from_thread.run(released.wait, trio_token=token)

    async with speaking(ScriptedSpeaker(on_sound=hang)) as (client, service):
        answer = await client.post(ROUTE, json={"input": TEXT, "timeout": 0.2})
        released.set()
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        await is_at_rest(service)


async def test_voices_are_listed() -> None:
    async with speaking() as (client, _):
        for path in ("/v1/audio/voices", "/audio/voices?model=any"):
            answer = await client.get(path)
            voices = [{"id": "default", "name": "default"}]
            assert answer.json() == {"object": "list", "voices": voices}
        assert (await client.get("/props")).json()["endpoint_speech"] is True
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert model["architecture"]["output_modalities"] == ["text", "audio"]


async def test_a_server_without_a_speaker_says_so() -> None:
    message = "This server does not speak. Start it with `--tts`, which names a model that does"
    async with client_and_service() as (client, _):
        answers = [
            await client.post(ROUTE, json={"input": "Hi."}),
            await client.get("/v1/audio/voices"),
        ]
        assert [answer.status_code for answer in answers] == [501, 501]
        assert all(answer.json() == error_body(message, None, status=501) for answer in answers)
        assert (await client.get("/props")).json()["endpoint_speech"] is False


async def test_keys_and_limits_count_the_speech() -> None:
    async with speaking(api_keys=("one",), rate_limit_requests=2) as (client, service):
        client.headers["Authorization"] = "Bearer one"
        body = {"input": "Hi.", "response_format": "pcm"}
        assert [(await client.post(ROUTE, json=body)).status_code for _ in range(3)] == [
            200,
            200,
            429,
        ]
        await is_at_rest(service)
        (used,) = service.server.resources.usage.totals.values()
        assert (used.requests, used.input_tokens, used.output_tokens) == (2, 6, 6)
