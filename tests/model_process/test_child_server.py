"""A model in another process answers each call as its `Server` does."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Awaitable, Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from tests.support.media_files import image_file, wav_file
from tests.support.model_processes import OneModel, one_model
from tests.support.projectors import WordProjector
from tests.support.scripted_embedder import ScriptedEmbedder
from tests.support.scripts import HI, answering
from tests.support.waiting import until
from trioserve.chat.params import ChatParams
from trioserve.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    NotSupportedError,
    RateLimitError,
    TrioServeError,
)
from trioserve.model_process import serving
from trioserve.model_process.messages import MAX_UNREAD_SOUNDS
from trioserve.server import RequestContext
from trioserve.server.context import Tally
from trioserve.server.model_server import ModelServer
from trioserve.server.speech.speech import SpeechParams
from trioserve.server.transcription.transcript import TranscriptionParams
from trioserve.testing import ScriptedBackend, ScriptedProjector, ScriptedSpeaker, heard
from trioserve.types import AdapterInfo, Chunk, FinishReason, MediaSource, Prompt

Ask = Callable[[ModelServer], Awaitable[Any]]


async def both(one: OneModel, ask: Ask) -> Any:
    """Ask in both processes; what they answer is the same."""
    found = [await ask(server) for server in (one.process.server, one.server)]
    assert found[0] == found[1]
    return found[1]


async def error_of_both(one: OneModel, ask: Ask) -> TrioServeError:
    """Ask in both processes; what they raise is the same."""
    errors = []
    for server in (one.process.server, one.server):
        with pytest.raises(TrioServeError) as caught:
            await ask(server)
        errors.append(caught.value)
    assert type(errors[0]) is type(errors[1]) and vars(errors[0]) == vars(errors[1])
    return errors[1]


#: An image in a message.
IMAGE = {
    "type": "image_url",
    "image_url": {"url": f"data:image/png;base64,{b64encode(image_file()).decode()}"},
}


def without_times(finished: Any) -> Any:
    timings = finished.timings
    return finished.reason, timings.cache_n + timings.prompt_n, timings.predicted_n


# -- output


@pytest.mark.parametrize("n", [1, 3])
async def test_streams(n: int) -> None:
    async def read(server: ModelServer) -> Any:
        params = await server.params({"max_tokens": 5, "seed": 1})
        async with server.stream_all(["abc", "defg"], params, n=n) as streams:
            return [
                (
                    tuple(stream.prompt.tokens),
                    stream.mailbox.n_prompt,
                    (done := await stream.read()).text,
                    done.tokens,
                    without_times(done.finished),
                )
                for stream in streams
            ]

    async with one_model(answering("0123456789", n_slots=4)) as one:
        assert len(await both(one, read)) == 2 * n


async def test_probabilities_of_the_output_and_the_prompt() -> None:
    async def read(server: ModelServer) -> Any:
        fields: Any = {"max_tokens": 3, "n_probs": 4, "prompt_logprobs": 2}
        async with server.stream_complete("abcd", **fields) as stream:
            events = [event async for event in stream if isinstance(event, Chunk)]
        probs = [list(map(repr, event.probs)) for event in events]
        scores = [list(map(repr, event.scores)) for event in events if event.scores is not None]
        return [*chain.from_iterable(probs)], scores

    async with one_model(answering("0123456789")) as one:
        probs, scores = await both(one, read)
        assert len(probs) == 3 and len(scores) == 1


async def test_chats() -> None:
    async def chat(server: ModelServer) -> Any:
        done = await server.chat(HI, max_tokens=8, temperature=0)
        rendered = await server.render(HI)
        prompt = await server.chat_prompt(HI, ChatParams())
        return done.message, rendered, tuple(prompt.tokens), await server.count_tokens(HI)

    async with one_model(answering("Hello!")) as one:
        _, rendered, *_ = await both(one, chat)
        assert "Hi" in rendered


@pytest.mark.system
async def test_a_chat_with_an_image() -> None:
    content = [{"type": "text", "text": "What is it?"}, IMAGE]

    async def chat(server: ModelServer) -> Any:
        messages = [{"role": "user", "content": content}]
        done = await server.chat(messages, max_tokens=60)
        prompt = await server.chat_prompt(messages, ChatParams())
        return done.message, len(prompt), without_times(done.finished)

    async with one_model(answering("It is small.", projector=WordProjector())) as one:
        await both(one, chat)


@pytest.mark.system
async def test_media_have_their_cells_in_both_processes() -> None:
    async def length(server: ModelServer) -> Any:
        messages = [{"role": "user", "content": [IMAGE]}]
        params = await server.params({"max_tokens": 1})
        async with server.open_chats(messages, params, ChatParams(), 1, RequestContext()) as found:
            _, (stream,) = found
            kinds = [(n, chunk.kind, chunk.n_cells) for n, chunk in stream.prompt.media]
            return len(stream.prompt), stream.mailbox.n_prompt, kinds

    async with one_model(answering("a", projector=ScriptedProjector())) as one:
        n_prompt, _, kinds = await both(one, length)
        assert kinds and n_prompt > len(kinds)


@pytest.mark.system
async def test_a_transcript() -> None:
    sound = MediaSource(data=wav_file(), param="file")

    async def transcribe(server: ModelServer) -> Any:
        async with server.transcribing(sound, TranscriptionParams(), RequestContext()) as stream:
            return stream.duration, (await stream.read()).text

    async with one_model(answering("One, two.", projector=WordProjector())) as one:
        assert (await both(one, transcribe))[1] == "One, two."


async def test_speech() -> None:
    async def speak(server: ModelServer) -> Any:
        tally = Tally()
        context = RequestContext(tally=tally)
        async with server.speaking("Hello there.", SpeechParams(), context) as stream:
            speech = await stream.read()
        told = (tally.model, tally.n_prompt, tally.n_output, tally.finish)
        return heard(speech.samples), speech.rate, speech.n_prompt, speech.n_frames, told

    async with one_model(ScriptedBackend(speaker=ScriptedSpeaker)) as one:
        said, *_, told = await both(one, speak)
        assert (said, told[1:]) == ("Hello there.", (12, 12, FinishReason.EOS))
        assert one.server.model.voices == ["default"]

        async def wrong(server: ModelServer) -> Any:
            return await server.speak("Hello", voice="nobody")

        assert (await error_of_both(one, wrong)).param == "voice"
        assert (await one.server.speak("a")).seconds > 0
    async with one_model() as one:
        await error_of_both(one, wrong)


async def test_a_slow_listener_holds_up_its_own_speech_only() -> None:
    async with one_model(ScriptedBackend(speaker=ScriptedSpeaker)) as one:
        async with one.server.speaking("x" * 2000 + ".", SpeechParams()) as slow:
            await anext(slow)
            assert heard((await one.server.speak("Hello.")).samples) == "Hello."
            (call,) = one.child.line._calls.values()
            await until(lambda: len(call.sounds) == MAX_UNREAD_SOUNDS)
            assert slow.finished is None
            with trio.move_on_after(0):  # cancelling loses nothing
                await anext(slow)
            rest = [samples async for samples in slow]
            assert heard(np.concatenate(rest)).count("x") > 1900
        async with one.server.speaking("x" * 2000 + ".", SpeechParams()) as left:
            await anext(left)
        await until(lambda: not one.process._process._places)  # type: ignore[union-attr]
        await until(lambda: speaks_no_more(one))


def speaks_no_more(one: OneModel) -> bool:
    parts = one.process.server.lifecycle.services._speech
    assert parts is not None
    return all(slot.task_id is None for slot in parts.engine.status().slots)


# -- embeddings


@pytest.mark.parametrize("piece", [serving._PIECE, 7])
async def test_embeddings(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_PIECE", piece)

    async def embed(server: ModelServer) -> Any:
        made = await server.embed(["a", "bb"])
        return [each.tolist() for each in made.vectors], made.n_tokens

    async with one_model(ScriptedEmbedder(), embeddings=True) as one:
        await both(one, embed)


async def test_a_ranking() -> None:
    async def rank(server: ModelServer) -> Any:
        made = await server.rerank("q", ["a", "c", "b"])
        return made.scores, made.n_tokens, made.shares

    async with one_model(ScriptedEmbedder(pooling="rank"), reranking=True) as one:
        await both(one, rank)


# -- tokens


async def test_tokens() -> None:
    async def ask(server: ModelServer) -> Any:
        tokens = await server.tokenize("héllo", add_special=True)
        return (
            tokens,
            await server.detokenize(tokens),
            await server.detokenize(Prompt(tokens)),
            [bytes(name) for name in await server.names_of(tokens)],
            await server.biases_of((("a", 1.5), (7, False))),
        )

    async with one_model() as one:
        await both(one, ask)


# -- the model


async def test_the_model_is_known() -> None:
    async with one_model(answering("a")) as one:
        told, own = one.server.model, one.process.server.model
        for name in ("info", "names", "n_slots", "n_ctx_seq", "defaults", "modalities", "pooling"):
            assert getattr(told, name) == getattr(own, name), name
        assert told.vocab.n_tokens == own.vocab.n_tokens
        assert (await one.server.status()).slots == (await one.process.server.status()).slots
        await one.server.check_live()
        assert await one.server.idle_seconds() == float("inf")


async def test_a_model_sleeps_and_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    # It would look at all objects of the tests.
    monkeypatch.setattr("trioserve.server.lifecycle.sleep.release_memory", lambda: None)
    async with one_model(lambda _, progress=None: answering("Hello!")) as one:
        await one.server.sleep()
        with trio.fail_after(10):
            while not one.server.sleeping:
                await trio.sleep(0.001)
            assert (await one.server.chat(HI)).message.content == "Hello!"
            while one.server.sleeping:
                await trio.sleep(0.001)


async def test_slots_are_saved_restored_and_erased(tmp_path: Path) -> None:
    async with one_model(answering("a" * 20), slot_save_path=str(tmp_path)) as one:
        await one.server.complete("abcdefgh", max_tokens=3)
        slots = (await one.server.status()).slots
        used = next(slot.id for slot in slots if slot.n_past)
        saved = await one.server.save_slot(used, "one.bin")
        assert saved.n_tokens > 0
        assert await one.server.erase_slot(used) == saved.n_tokens
        assert (await one.server.restore_slot(used, "one.bin")).n_tokens == saved.n_tokens
        await error_of_both(one, lambda server: server.restore_slot(used, "none.bin"))


async def test_adapters(tmp_path: Path) -> None:
    (tmp_path / "pirate.gguf").touch()
    backend = ScriptedBackend(adapters=[AdapterInfo(path="a.gguf")])
    async with one_model(backend, lora_dir=str(tmp_path)) as one:
        await one.server.load_adapter("pirate", "pirate.gguf")
        assert one.server.adapters.named("pirate") == "pirate"
        assert one.server.adapters.scales.ids == one.process.server.adapters.scales.ids
        await one.server.set_scales({0: 0.25})
        assert list(one.server.adapters.scales.scales) == list(
            one.process.server.adapters.scales.scales
        )
        await one.server.unload_adapter("pirate")
        assert "pirate" not in one.server.adapters.paths
        await error_of_both(one, lambda server: server.unload_adapter("none"))


async def test_the_limits_of_a_client() -> None:
    async with one_model(rate_limit_requests=1) as one:
        first = await one.server.count_request("a")
        assert first.error is None and first.left()["requests"].remaining == 0
        second = await one.server.count_request("a")
        assert isinstance(second.error, RateLimitError) and second.error.retry_after


# -- errors


@pytest.mark.parametrize(
    ("ask", "kind"),
    [
        (lambda server: server.complete("x" * 5000), InvalidRequestError),
        (lambda server: server.detokenize([10**6]), InvalidRequestError),
        (lambda server: server.embed(["a"]), NotSupportedError),
        (lambda server: server.complete([-1]), InvalidRequestError),
        (lambda server: server.written_metrics(), NotSupportedError),
        (
            lambda server: server.chat([{"role": "user", "content": [{"type": "image"}]}]),
            InvalidRequestError,
        ),
    ],
)
async def test_errors_have_their_classes_and_fields(ask: Ask, kind: type[TrioServeError]) -> None:
    async with one_model(answering("a", n_ctx=1024)) as one:
        assert isinstance(await error_of_both(one, ask), kind)


async def test_a_deadline_is_kept_in_the_other_process() -> None:
    async with one_model(answering("x" * 1000)) as one:
        context = RequestContext(deadline=trio.current_time() - 1)
        params = await one.server.params({})
        with pytest.raises(DeadlineExceededError):
            async with one.server.stream_all(["a"], params, context=context) as (stream,):
                await stream.read()


async def test_a_chat_that_is_nested_too_deeply() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    async with one_model(answering("a")) as one:
        for extra in (deep, 2**70, "\ud800"):
            with pytest.raises(InvalidRequestError):
                await one.server.render(HI, template_kwargs={"extra": extra})
        assert (await one.server.chat(HI)).message.content == "a"
