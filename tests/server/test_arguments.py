"""Arguments of a server's methods: objects, single fields by name, and several outputs."""

from __future__ import annotations

import asyncio
import math
from typing import Any, get_type_hints

import attrs
import pytest
import trio
from trio.testing import MockClock

from trioserve.chat.params import ChatParams
from trioserve.config import Config
from trioserve.errors import DeadlineExceededError, InvalidRequestError
from trioserve.server import RequestContext, Server
from trioserve.server.generation.text import best_of
from trioserve.server.keywords import (
    ChatFields,
    CompletionFields,
    ContextFields,
    RenderFields,
    SpeechFields,
    TranscriptionFields,
)
from trioserve.server.runs.params import RunFields, RunParams
from trioserve.server.speech.speech import SpeechParams
from trioserve.server.stream import read_all
from trioserve.server.transcription.transcript import TranscriptionParams
from trioserve.testing import ScriptedBackend, scripted, stepping
from trioserve.types import GenerationParams, SamplingParams

HI = [{"role": "user", "content": "Hi"}]


def serve(backend: ScriptedBackend | None = None) -> Server:
    backend = backend or ScriptedBackend()
    return Server(Config(stream_interval_ms=0), load=scripted(backend), drive=stepping)


def opened(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, RequestContext]]:
    """Note the tasks and contexts that come to be opened."""
    seen: list[tuple[Any, RequestContext]] = []
    original = server.lifecycle.services.requests.open

    def note(task: Any, context: RequestContext, operation: str) -> Any:
        seen.append((task, context))
        return original(task, context, operation)

    monkeypatch.setattr(server.lifecycle.services.requests, "open", note)
    return seen


async def test_each_class_takes_its_fields(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with serve() as server:
        seen = opened(server, monkeypatch)
        await server.chat(HI, client="anna", max_tokens=2, temperature=0.0, top_k=3)
        await server.complete("a", client="bert")
    (chat, of_chat), (text, of_text) = seen
    assert (chat.params.max_tokens, chat.params.sampling.top_k) == (2, 3)
    assert chat.params.sampling.temperature == 0.0
    assert (of_chat.client, of_chat.deadline) == ("anna", math.inf)
    assert (of_text.client, text.client) == ("bert", "bert")


def test_the_keywords_are_the_fields_of_the_classes() -> None:
    apis = {"arrived", "deadline", "has_begun", "limited_as", "on_cancel", "tally"}
    context = fields_of(RequestContext) - apis
    completion = (fields_of(GenerationParams) | fields_of(SamplingParams)) - {"sampling"}
    chat = fields_of(ChatParams)
    expected = {
        ContextFields: context,
        CompletionFields: context | completion,
        RenderFields: chat,
        ChatFields: context | completion | chat,
        RunFields: context | completion | chat - {"tools"} | fields_of(RunParams),
        TranscriptionFields: context | fields_of(TranscriptionParams),
        SpeechFields: context | fields_of(SpeechParams),
    }
    for keywords, names in expected.items():
        assert set(get_type_hints(keywords)) == names, keywords


@pytest.mark.parametrize(
    "cls", [RequestContext, GenerationParams, SamplingParams, ChatParams, RunParams]
)
def test_the_types_of_keywords_are_those_of_the_classes(cls: type) -> None:
    hints = {**get_type_hints(RunFields), **get_type_hints(ChatFields)}
    converted = {"dry_sequence_breakers", "logit_bias", "lora", "samplers", "stop"}
    types = get_type_hints(cls)
    for name in fields_of(cls) & hints.keys() - converted:
        assert hints[name] == types[name], name


def fields_of(cls: type) -> set[str]:
    return set(attrs.fields_dict(cls))


async def test_fields_of_a_chat_are_those_of_its_parameters() -> None:
    template = "{{ messages[0].content }}{{ mood }}{% if add_generation_prompt %}:{% endif %}"
    async with serve(ScriptedBackend(chat_template=template)) as server:
        chat: RenderFields = {"template_kwargs": {"mood": "!"}, "add_generation_prompt": False}
        assert await server.render(HI, **chat) == "Hi!"
        assert await server.render(HI, template_kwargs={"mood": "!"}) == "Hi!:"
        assert await server.count_tokens(HI, **chat) == 3
        assert (await server.chat(HI, **chat)).prompt_text == "Hi!"


@pytest.mark.parametrize("name", ["tools", "nothing"])
async def test_fields_that_belong_elsewhere_are_refused(name: str) -> None:
    async with serve() as server:
        with pytest.raises(InvalidRequestError) as caught:
            await server.complete("a", **{name: 1})
        assert caught.value.param == name
        with pytest.raises(InvalidRequestError, match="temperature"):
            await server.render(HI, temperature=0)


async def test_no_work_is_begun_without_time(autojump_clock: MockClock) -> None:
    late = RequestContext(deadline=trio.current_time())
    async with serve() as server:
        params = await server.params({})
        for call in (
            server.stream_all(["a"], params, context=late),
            server.stream_chats(HI, params, ChatParams(), context=late),
        ):
            with pytest.raises(DeadlineExceededError):
                async with call:
                    raise AssertionError("unreachable")


async def test_a_bias_may_name_text() -> None:
    async with serve() as server:
        params = await server.params({"logit_bias": {"ab": 2.0, 7: -1.0}})
        assert params.sampling.logit_bias == ((ord("a"), 2.0), (ord("b"), 2.0), (7, -1.0))
        with pytest.raises(InvalidRequestError, match="the vocabulary ends at"):
            await server.params({"logit_bias": ((10**6, 1.0),)})


async def test_several_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve(ScriptedBackend(n_slots=3)) as server:
        seen = opened(server, monkeypatch)
        params = await server.params({"seed": 5, "n_probs": 1})
        outputs = await read_all(server.stream_all(["a", "b"], params, n=2))
        assert [each.text for each in outputs] == ["A", "A", "B", "B"]
        assert [task.params.sampling.seed for task, _ in seen] == [5, 6, 5, 6]
        assert len(best_of(outputs, 2, 1)) == 2
        chats = await read_all(server.stream_chats(HI, params, ChatParams(), n=3))
        assert len({each.message.content for each in chats}) == 1
        with pytest.raises(InvalidRequestError, match="between 1 and 256"):
            await server.params({}, n=257)


def test_a_server_under_asyncio_names_trio() -> None:
    async def enter() -> None:
        async with serve():
            raise AssertionError("unreachable")

    with pytest.raises(RuntimeError, match="a Server needs Trio"):
        asyncio.run(enter())


async def test_a_server_that_is_not_open_says_so() -> None:
    for use in (lambda server: server.model, lambda server: server.complete("a")):
        with pytest.raises(RuntimeError, match="not open"):
            await use(serve())
