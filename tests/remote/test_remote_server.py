"""A model of another server, as a program uses it: a real app with a scripted backend."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from tests.support import fake_whisper
from tests.support.cancellation import CancelAtStep
from tests.support.fake_fleet import routed
from tests.support.http_server import serving_at, serving_script, slots_in_use
from tests.support.media_files import image_file, wav_file
from tests.support.projectors import WordProjector
from tests.support.scripted_embedder import ScriptedEmbedder
from tests.support.waiting import patiently
from trioserve.api.service import Service
from trioserve.chat.deltas import ContentDelta, Message, ToolCall
from trioserve.chat.messages import Audio, Image
from trioserve.errors import (
    AuthenticationError,
    DeadlineExceededError,
    InvalidMediaError,
    InvalidRequestError,
    NotFoundError,
    NotSupportedError,
    PermissionDeniedError,
    TooManyRequestsError,
    TrioServeError,
    UnavailableError,
    UnsupportedFieldError,
)
from trioserve.remote import client
from trioserve.remote.answers import AnswerEvent
from trioserve.remote.client import ServerAnswer, ServerEvents
from trioserve.remote.server import AnyServer, RemoteServer, RemoteStream, _chat
from trioserve.server.prompts.media import MixedPrompt
from trioserve.server.stream import ChatChunk, ChatCompletion
from trioserve.server.transcription.transcript import Word
from trioserve.testing import ScriptedBackend, ScriptedSpeaker, heard
from trioserve.types import Chunk, FinishReason, Grammar, Timings

HI = [{"role": "user", "content": "Hi"}]


@asynccontextmanager
async def remote(
    make: Callable[[], Any] = ScriptedBackend, **config: Any
) -> AsyncIterator[tuple[RemoteServer, Service]]:
    """A server, and the same over HTTP."""
    async with (
        serving_script(make(), **config) as (url, service),
        RemoteServer(url) as server,
    ):
        yield server, service


async def test_a_prompt_is_continued() -> None:
    async with remote() as (server, _):
        async with server.stream_complete("hello", max_tokens=4) as stream:
            events = [event async for event in stream]
        assert "".join(each.text for each in events if isinstance(each, Chunk)) == "HELL"
        assert stream.finished is not None
        assert stream.finished.reason is FinishReason.LIMIT
        assert stream.finished.timings.predicted_n == 4
        assert stream.prompt_text == "hello"
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        done = await server.complete([104, 105])
        assert (done.text, done.tokens[:2]) == ("HI", (72, 73))
        assert done.finished.reason is FinishReason.EOS


async def test_a_chat_is_answered() -> None:
    def make() -> ScriptedBackend:
        return ScriptedBackend(
            lambda prompt: "<think>\nhm\n</think>\n\nGrüße.",
            chat_template="{{ messages[0].content }}{# writes <think>…</think> #}",
        )

    async with remote(make) as (server, _):
        answer = await server.chat(HI, temperature=0.0)
        assert answer.message.content == "Grüße."
        assert answer.message.reasoning_content == "hm"
        assert answer.prompt_text == "Hi"
        assert answer.finished.reason is FinishReason.EOS
        async with server.stream_chat(HI) as stream:
            chunks = [event async for event in stream if isinstance(event, ChatChunk)]
            deltas = [delta for chunk in chunks for delta in chunk.deltas]
        assert "".join(d.text for d in deltas if isinstance(d, ContentDelta)) == "Grüße."
        assert stream.message == answer.message


async def test_leaving_a_stream_frees_the_slot() -> None:
    def make() -> ScriptedBackend:
        return ScriptedBackend(lambda prompt: "x" * 10_000, n_ctx=20_000)

    async with remote(make) as (server, service):
        async with server.stream_complete("a") as stream:
            await anext(stream)
            assert await slots_in_use(service) == 1
        with patiently():
            while await slots_in_use(service):
                await trio.lowlevel.checkpoint()


async def test_cancelled_at_any_await_a_request_leaves_nothing() -> None:
    async with serving_script() as (url, service):
        open_before = len(os.listdir("/proc/self/fd"))
        for n in range(1, 1000):
            canceller = CancelAtStep(n)

            async def chat() -> None:
                async with RemoteServer(url) as server:
                    await server.chat(HI, max_tokens=3)

            await canceller.run(chat)
            if not canceller.scope.cancelled_caught:
                break
        else:
            raise AssertionError("it never ends")
        assert n > 5
        with patiently():
            while await slots_in_use(service) or len(os.listdir("/proc/self/fd")) > open_before:
                await trio.lowlevel.checkpoint()
            async with RemoteServer(url) as server:
                assert (await server.complete("a")).text == "A"


async def test_a_program_uses_either_server() -> None:
    async def use(server: AnyServer) -> list[object]:
        async with server.stream_complete("ab", max_tokens=1, temperature=0.0) as completion:
            text = [piece async for piece in completion.text()]
        async with server.stream_chat(HI, template_kwargs={"mood": 1}) as answer:
            said = [piece async for piece in answer.text()]
        message = (await answer.read()).message if answer.finished is None else None
        chat = await server.chat(HI, max_tokens=3, logit_bias=[(65, -1.0)], stop=["x"])
        return [
            text, "".join(said), message, chat.message.content, chat.finished.reason,
            await server.tokenize("hi"), await server.detokenize([104, 105]),
            await server.render(HI, add_generation_prompt=False), await server.count_tokens(HI),
        ]  # fmt: skip

    async with remote() as (server, service):
        assert await use(server) == await use(service.server)


async def test_grammars_and_what_cannot_be_sent() -> None:
    async with remote(lambda: ScriptedBackend(lambda prompt: "7")) as (server, _):
        grammar = Grammar("json_schema", '{"type": "integer"}')
        assert (await server.complete("a", grammar=grammar, max_tokens=1)).text == "7"
        assert (await server.complete("a", grammar=Grammar("regex", "7"))).text == "7"
        with pytest.raises(UnsupportedFieldError, match="'client' has no effect"):
            await server.complete("a", client="anna")


async def test_embeddings() -> None:
    async with remote(ScriptedEmbedder, embeddings=True) as (server, service):
        vectors = (await server.embed(["one", "two"])).vectors
        own = await service.server.embed(["one", "two"])
        assert len(vectors) == 2
        for vector, expected in zip(vectors, own.vectors, strict=True):
            assert vector == pytest.approx(expected)
        with pytest.raises(NotSupportedError):
            await server.complete("a")


@pytest.mark.system
async def test_embeddings_of_images(tmp_path: Path) -> None:
    path = tmp_path / "red.png"
    path.write_bytes(image_file(size=(8, 4)))
    make = partial(ScriptedEmbedder, pooling="last", n_ctx=200, projector=WordProjector())
    async with remote(make, embeddings=True) as (server, service):
        texts = [MixedPrompt(["See ", Image(file), "!"]) for file in (path, path.read_bytes())]
        one, same, plain = (await server.embed([*texts, "See !"])).vectors
        own = await service.server.embed(texts)
        for vector in (one, same):
            assert vector == pytest.approx(own.vectors[0])
        assert one != pytest.approx(plain)
        with pytest.raises(InvalidMediaError, match="cannot be read"):
            await server.embed([MixedPrompt([Image(tmp_path / "none.png")])])


async def test_ranking() -> None:
    make = partial(ScriptedEmbedder, pooling="rank")
    async with remote(make, reranking=True) as (server, service):
        ranking = await server.rerank("a", ["b", "ccc"])
        assert ranking.scores == pytest.approx(
            (await service.server.rerank("a", ["b", "ccc"])).scores
        )


@pytest.mark.system
async def test_recordings(tmp_path: Path) -> None:
    heard: list[str] = []

    def make() -> ScriptedBackend:
        def answer(prompt: str) -> str:
            heard.append(prompt)
            return "Grüße."

        return ScriptedBackend(answer, projector=WordProjector())

    path = tmp_path / "call.wav"
    path.write_bytes(wav_file(1.0))
    async with remote(make) as (server, service):
        own = await service.server.transcribe(path, language="de", timed=True)
        for recording in (path, str(path), path.read_bytes(), Audio(path)):
            found = await server.transcribe(recording, language="de")
            assert (found.text, found.segments, found.duration) == (
                "Grüße.", own.segments, own.duration,
            )  # fmt: skip
            assert found.summary.language == own.summary.language
        assert all("(language: de)" in prompt for prompt in heard)
        await server.transcribe(path, translate=True)
        assert "English" in heard[-1]
        with pytest.raises(InvalidMediaError, match="cannot be read"):
            await server.transcribe(tmp_path / "none.wav")
        with pytest.raises(InvalidRequestError) as caught:
            await server.transcribe(b"no sound")
        assert caught.value.param == "file"
        with pytest.raises(UnsupportedFieldError, match="'timed' has no effect"):
            await server.transcribe(path, timed=True)


@pytest.mark.system
async def test_times_of_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_whisper.install(tmp_path, monkeypatch)
    wav = wav_file(1.0)
    async with remote(transcription_model="tiny") as (server, _):
        plain = await server.transcribe(wav)
        assert plain.words == [] and len(plain.segments) == 3
        timed = await server.transcribe(wav, words=True)
        assert plain.summary.language == timed.summary.language == "de"
        word = Word(text="pid", start=0.0, end=0.5)
        assert timed.segments[0].words == (word,) * 3  # the fake gives each segment the same
        assert timed.segments[0].no_speech_prob == 0.25


async def test_speech() -> None:
    async with remote(partial(ScriptedBackend, speaker=ScriptedSpeaker)) as (server, _):
        speech = await server.speak("Hello there.", language="de", priority=1)
        assert heard(speech.samples) == "Hello there."
        assert (speech.rate, speech.seconds) == (24_000, pytest.approx(12 / 12.5))
        fast = await server.speak("Hello there.", speed=2.0)
        assert fast.seconds == pytest.approx(speech.seconds / 2, rel=0.1)
        with pytest.raises(InvalidRequestError, match="is not known") as caught:
            await server.speak("Hello", voice="nobody")
        assert caught.value.param == "voice"
        with pytest.raises(UnsupportedFieldError, match="'param' has no effect"):
            await server.speak("Hello", param="x")
    async with remote() as (server, _):
        with pytest.raises(NotSupportedError, match="--tts"):
            await server.speak("Hello")


async def test_errors_have_their_classes() -> None:
    async with remote(max_queue=0, rate_limit_requests=3) as (server, _):
        with pytest.raises(InvalidRequestError) as caught:
            await server.complete("a", temperature="hot")
        assert caught.value.param == "temperature"
        with pytest.raises(InvalidRequestError, match="context"):
            await server.complete("a" * 5000)
        with pytest.raises(UnsupportedFieldError, match="'n' has no effect"):
            await server.complete("a", n=2)
        with pytest.raises(NotSupportedError):
            await server.embed("a")
        with pytest.raises(TooManyRequestsError, match="Rate limit"):
            for _ in range(4):
                await server.complete("a")


async def test_a_server_on_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    server = RemoteServer("http://localhost/", socket_path=str(path))
    with pytest.raises(RuntimeError, match="inside its block"):
        await server.complete("a")
    async with server:
        with pytest.raises(UnavailableError, match=f"No server answers at {path}"):
            await server.complete("a")
        async with serving_at(path):
            assert (await server.complete("a")).text == "A"


@pytest.mark.parametrize("url", ["localhost:1", "http://127.0.0.1:1", "http://a b"])
async def test_an_address_without_a_server(url: str) -> None:
    async with RemoteServer(url) as server:
        with pytest.raises(UnavailableError, match=f"No server answers at {url}"):
            await server.tokenize("a")


async def test_a_server_with_keys_and_several_models() -> None:
    models = {name: ScriptedBackend(lambda prompt, name=name: name) for name in ("one", "two")}
    async with routed(models, api_keys=("secret",)) as router:
        async with RemoteServer(router.url, model="two", api_key="secret") as two:
            assert (await two.chat(HI)).message.content == "two"
            assert await two.tokenize("hi") == (104, 105)
        async with RemoteServer(router.url, model="two") as refused:
            with pytest.raises(AuthenticationError, match=f"The server at {router.url} says"):
                await refused.detokenize([104])


# -- what a server writes


class Written:
    """An answer that was written before, in pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = list(pieces)

    async def receive(self) -> bytes:
        await trio.lowlevel.checkpoint()
        return self.pieces.pop(0) if self.pieces else b""


def stream_of(*pieces: bytes) -> RemoteStream[ChatCompletion]:
    return RemoteStream(ServerEvents(cast(ServerAnswer, Written(*pieces)), AnswerEvent), _chat)


def delta(**fields: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": fields}]}).encode() + b"\n\n"


@pytest.mark.parametrize("pieces", [[b"data: {"], [b"x\n", b"\ny"]], ids=["event", "comment"])
async def test_lines_and_answers_without_an_end(
    pieces: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_MAX_EVENT", 50_000)
    long = [*pieces, *[b"x" * 1000] * 100]
    with pytest.raises(UnavailableError, match="event that is too long"):
        await stream_of(*long).read()
    with pytest.raises(UnavailableError, match="answer that is too long"):
        await client.receive_all(cast(ServerAnswer, Written(*long)), 50_000)


async def test_tool_calls() -> None:
    stream = stream_of(
        delta(role="assistant", content=None),
        delta(tool_calls=[{"index": 0, "id": "c1", "function": {"name": "f", "arguments": ""}}]),
        b": a comment\n\n" + delta(tool_calls=[{"index": 0, "function": {"arguments": "{}"}}])[:30],
        delta(tool_calls=[{"index": 0, "function": {"arguments": "{}"}}])[30:],
    )
    with pytest.raises(UnavailableError, match="no end"):
        await stream.read()
    assert stream.message == Message(tool_calls=(ToolCall("c1", "f", "{}"),))


async def test_a_server_that_does_not_tell_how_an_answer_has_ended() -> None:
    timings = {"prompt_n": 3, "predicted_n": 1, "predicted_ms": 2}
    end = {"choices": [{"finish_reason": "length"}], "timings": timings}
    stream = stream_of(delta(content="a"), b"data:" + json.dumps(end).encode() + b"\n\n")
    answer = await stream.read()
    assert (answer.message.content, answer.prompt_text) == ("a", "")
    assert answer.finished.reason is FinishReason.LIMIT
    assert answer.finished.timings == Timings(prompt_n=3, predicted_n=1, predicted_ms=2)


@pytest.mark.parametrize("index", [-1, 1])
@pytest.mark.parametrize("name", [None, "f"])
async def test_tool_calls_in_no_order(index: int, name: str | None) -> None:
    call = {"index": index, "id": "c", "function": {"name": name, "arguments": "{}"}}
    with pytest.raises(UnavailableError, match="in no order"):
        await stream_of(delta(tool_calls=[call])).read()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"type": "server_error", "message": "m", "param": None}, TrioServeError),
        ({"type": "unavailable_error", "message": "m", "param": None}, UnavailableError),
        ({"type": "rate_limit_error", "message": "m", "param": None}, TooManyRequestsError),
        ({"type": "permission_error", "message": "m", "param": None}, PermissionDeniedError),
        ({"type": "not_found_error", "message": "m", "param": None}, NotFoundError),
        ({"type": "timeout_error", "message": "m", "param": None}, DeadlineExceededError),
        ({"type": "exceed_context_size_error", "message": "m", "param": "prompt"},
         InvalidRequestError),
    ],
)  # fmt: skip
async def test_an_error_ends_a_stream(error: Any, kind: type[TrioServeError]) -> None:
    last = b"data: " + json.dumps({"error": error}).encode() + b"\n\n"
    stream = stream_of(delta(content="a") + last)
    with pytest.raises(kind) as caught:
        await stream.read()
    assert type(caught.value) is kind
    assert caught.value.message == "m"
    assert caught.value.param == error["param"]


@pytest.mark.system
async def test_an_image_of_a_program_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "red.png"
    path.write_bytes(image_file(size=(8, 4)))
    text = {"type": "text", "text": "What is it?"}

    def make() -> ScriptedBackend:
        return ScriptedBackend(lambda prompt: prompt.upper(), projector=WordProjector())

    async with remote(make) as (server, _):
        answer = await server.chat([{"role": "user", "content": [Image(path), text]}])
        assert "(IMAGE 8X4)WHAT IS IT?" in answer.message.content
        with pytest.raises(InvalidMediaError, match="cannot be read"):
            await server.chat([{"role": "user", "content": [Image(tmp_path / "none.png")]}])
        with pytest.raises(UnsupportedFieldError, match="MixedPrompt"):
            await server.complete(MixedPrompt([Image(path)]))  # type: ignore[arg-type]
