"""Chats that are spoken. The model repeats the last message, and the speaker says it."""

from __future__ import annotations

import base64
from typing import Any

import openai
import pytest
import trio

from tests.api.openai.test_speech import is_at_rest, said, speaking
from tests.support.clients import client_of, events_in, use_openai
from tests.support.encoded_sound import sound_in
from tests.support.scripts import answering
from trioserve.errors import OutputError
from trioserve.testing import ScriptedBackend, ScriptedSpeaker, heard

ROUTE = "/v1/chat/completions"
ANSWER = "This is **one** sentence. Here is [another](http://x.y) one! And the end"
SPOKEN = "This is one sentence.Here is another one!And the end"


def body(**more: Any) -> dict[str, Any]:
    fields = {"messages": [{"role": "user", "content": "Hi"}], "modalities": ["text", "audio"]}
    return {**fields, "audio": {"voice": "alloy", "format": "pcm16"}, **more}


def answers(text: str, speaker: ScriptedSpeaker | None = None) -> ScriptedBackend:
    speaker = speaker or ScriptedSpeaker()
    backend = answering(text)
    backend.speaker = lambda: speaker
    return backend


async def test_an_answer_has_sound_in_place_of_content() -> None:
    async with client_of(answers(ANSWER)) as client:
        answer = (await client.post(ROUTE, json=body())).json()
        (choice,) = answer["choices"]
        message = choice["message"]
        assert message["content"] is None and choice["finish_reason"] == "stop"
        audio = message["audio"]
        assert audio["transcript"] == ANSWER and audio["id"].startswith("audio-")
        assert said(base64.b64decode(audio["data"])).replace(" ", "") == SPOKEN.replace(" ", "")
        assert answer["usage"]["completion_tokens"] == len(ANSWER) + 1


async def test_a_stream_has_transcript_and_sound() -> None:
    async with client_of(answers(ANSWER)) as client:
        answer = await client.post(ROUTE, json=body(stream=True))
        chunks = events_in(answer.text)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
        audio = [delta["audio"] for delta in deltas if "audio" in delta]
        assert len({each["id"] for each in audio}) == 1
        assert "".join(each.get("transcript", "") for each in audio) == ANSWER
        data = b"".join(base64.b64decode(each.get("data", "")) for each in audio)
        assert said(data).replace(" ", "") == SPOKEN.replace(" ", "")
        assert "expires_at" in audio[-1]
        assert not any(delta.get("content") for delta in deltas)
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stored_chat_keeps_the_transcript(stream: bool) -> None:
    async with client_of(answers(ANSWER)) as client:
        await client.post(ROUTE, json=body(stream=stream, store=True))
        (kept,) = (await client.get(ROUTE)).json()["data"]
        message = kept["choices"][0]["message"]
        assert message["content"] == ANSWER and "audio" not in message


async def test_the_first_sentence_is_spoken_before_the_answer_ends() -> None:
    """The model goes on when the first sound has come."""
    may_go_on, token = trio.Event(), trio.lowlevel.current_trio_token()
    text = "One. " + "Two goes on and on. " * 5
    backend = answers(text)

    def wait(decoding: ScriptedBackend) -> None:
        if decoding.n_decodes == 20:
            trio.from_thread.run(may_go_on.wait, trio_token=token)

    backend.on_decode = wait
    async with client_of(backend, context_shift=False) as client:
        data = bytearray()
        async with client.stream("POST", ROUTE, json=body(stream=True)) as answer:
            async for line in answer.aiter_lines():
                if '"data":"' in line and line.startswith("data: {"):
                    (event,) = events_in(f"{line}\n\n", done=False)
                    data += base64.b64decode(event["choices"][0]["delta"]["audio"]["data"])
                    may_go_on.set()
        assert heard(sound_in(bytes(data), "pcm")).startswith("One.Two goes")


async def test_openais_sdk_gets_both() -> None:
    def use(client: openai.OpenAI) -> None:
        done = client.chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": "Hi"}],
            modalities=["text", "audio"],
            audio={"voice": "alloy", "format": "wav"},
        )
        audio = done.choices[0].message.audio
        assert audio is not None and audio.transcript == "All is well."
        wav = base64.b64decode(audio.data)
        assert wav.startswith(b"RIFF") and heard(sound_in(wav, "wav")) == "All is well."
        # The whole message is sent back, as its documentation says.
        again = client.chat.completions.create(
            model="any",
            messages=[
                {"role": "user", "content": "Hi"},
                done.choices[0].message.model_dump(),  # type: ignore[list-item]
                {"role": "user", "content": "Again"},
            ],
        )
        assert again.choices[0].message.content == "All is well."
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model="any",
                messages=[
                    {"role": "user", "content": "Hi"},
                    {"role": "assistant", "audio": {"id": audio.id}},
                ],
            )
        assert caught.value.param == "messages[1].audio"

    await use_openai(answers("All is well."), use)


@pytest.mark.parametrize(
    ("fields", "param", "problem"),
    [
        ({"modalities": ["audio"]}, "modalities", 'must be ["text"] or ["text", "audio"].'),
        ({"modalities": ["text"]}, "audio", "needs 'modalities' to be"),
        ({"modalities": None}, "audio", "needs 'modalities' to be"),
        ({"n": 2}, "n", "must be 1 for answers that are spoken."),
        ({"logprobs": True}, "logprobs", "is not supported for answers that are spoken."),
        (
            {"audio": {"format": "wav"}, "stream": True},
            "audio.format",
            'must be "pcm16" in streams for answers that are spoken.',
        ),
        ({"audio": {"voice": "nobody"}}, "audio.voice", "is not known; the voices are: default."),
        ({"audio": {"voice": 7}}, "audio.voice", "must be the name of a voice, or an object"),
        ({"audio": {"format": "mp4"}}, "audio.format", 'must be "wav", "aac", "mp3", "flac",'),
    ],
)
async def test_what_is_wrong_is_named(fields: dict[str, Any], param: str, problem: str) -> None:
    async with client_of(answers(ANSWER)) as client:
        answer = await client.post(ROUTE, json=body(**fields))
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert error["message"].startswith(f"'{param}' {problem}")


async def test_a_server_without_a_speaker_names_the_field() -> None:
    async with client_of() as client:
        answer = await client.post(ROUTE, json=body())
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (501, "modalities")
        assert "`--tts`" in error["message"]


async def test_an_answer_that_cannot_be_spoken_is_text() -> None:
    async with client_of(answers("***\n\n")) as client:
        message = (await client.post(ROUTE, json=body())).json()["choices"][0]["message"]
        assert message["content"].strip() == "***" and "audio" not in message


async def test_a_speaker_that_fails_ends_the_answer() -> None:
    speaker = ScriptedSpeaker(frame_failures={ord("B"): OutputError("no sense")})
    async with client_of(answers("Bad one. Good one.", speaker)) as client:
        answer = await client.post(ROUTE, json=body())
        assert answer.status_code == 500
        assert answer.json()["error"]["message"].startswith("no sense")


async def test_a_client_that_leaves_frees_both_slots() -> None:
    speaker = ScriptedSpeaker(n_slots=1)
    async with speaking(backend=answers("This goes on and on. " * 40, speaker)) as (
        client,
        service,
    ):
        with trio.CancelScope() as scope:
            async with client.stream("POST", ROUTE, json=body(stream=True)) as answer:
                async for line in answer.aiter_lines():
                    if '"data":"' in line:
                        scope.cancel()
        assert scope.cancelled_caught
        await is_at_rest(service)
        assert len(service.server.lifecycle.services.dispatcher) == 0
