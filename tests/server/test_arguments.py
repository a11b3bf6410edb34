"""What a program passes to a server: objects, single fields by name, and several outputs."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from trioserve.chat.params import ChatParams
from trioserve.config import Config
from trioserve.errors import DeadlineExceededError, InvalidRequestError
from trioserve.server import RequestContext, Server
from trioserve.server.generation.text import best_of
from trioserve.server.stream import read_all
from trioserve.testing import ScriptedBackend, scripted, stepping
from trioserve.types import GenerationParams, SamplingParams

HI = [{"role": "user", "content": "Hi"}]


def serve(backend: ScriptedBackend | None = None) -> Server:
    backend = backend or ScriptedBackend()
    return Server(Config(stream_interval_ms=0), load=scripted(backend), drive=stepping)


def opened(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, RequestContext]]:
    """Note the tasks and contexts that come to be opened."""
    seen: list[tuple[Any, RequestContext]] = []
    original = server._core.lifecycle.services.requests.open

    def note(task: Any, context: RequestContext, operation: str) -> Any:
        seen.append((task, context))
        return original(task, context, operation)

    monkeypatch.setattr(server._core.lifecycle.services.requests, "open", note)
    return seen


async def test_single_fields_win_over_objects(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    params = GenerationParams(max_tokens=9, sampling=SamplingParams(top_k=3))
    context = RequestContext(client="anna", deadline=trio.current_time() + 5)
    async with serve() as server:
        seen = opened(server, monkeypatch)
        await server.chat(HI, params, context=context, max_tokens=2, temperature=0.0)
        await server.complete("a", params, context=context, timeout=60, client="bert")
    (chat, of_chat), (text, of_text) = seen
    assert (chat.params.max_tokens, chat.params.sampling.top_k) == (2, 3)
    assert chat.params.sampling.temperature == 0.0
    assert of_chat == context
    assert text.params == params
    assert (of_text.client, text.client) == ("bert", "bert")
    assert of_text.deadline == pytest.approx(trio.current_time() + 60, abs=1)


async def test_fields_of_a_chat_are_those_of_its_parameters() -> None:
    template = "{{ messages[0].content }}{{ mood }}{% if add_generation_prompt %}:{% endif %}"
    async with serve(ScriptedBackend(chat_template=template)) as server:
        chat = ChatParams(template_kwargs={"mood": "!"}, add_generation_prompt=False)
        assert await server.render(HI, chat) == "Hi!"
        assert await server.render(HI, chat, add_generation_prompt=True) == "Hi!:"
        assert await server.count_tokens(HI, chat) == 3
        assert (await server.chat(HI, chat=chat)).prompt_text == "Hi!"


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
        for call in (server.complete("a", context=late), server.chat(HI, context=late)):
            with pytest.raises(DeadlineExceededError):
                await call


async def test_a_bias_may_name_text() -> None:
    async with serve() as server:
        params = await server._core.params({"logit_bias": {"ab": 2.0, 7: -1.0}})
        assert params.sampling.logit_bias == ((ord("a"), 2.0), (ord("b"), 2.0), (7, -1.0))
        with pytest.raises(InvalidRequestError, match="the vocabulary ends at"):
            await server._core.params({"logit_bias": ((10**6, 1.0),)})


async def test_several_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve(ScriptedBackend(n_slots=3)) as server:
        seen = opened(server, monkeypatch)
        params = await server._core.params({"seed": 5, "n_probs": 1})
        outputs = await read_all(server._core.stream_all(["a", "b"], params, n=2))
        assert [each.text for each in outputs] == ["A", "A", "B", "B"]
        assert [task.params.sampling.seed for task, _ in seen] == [5, 6, 5, 6]
        assert len(best_of(outputs, 2, 1)) == 2
        chats = await read_all(server._core.stream_chats(HI, params, context=RequestContext(), n=3))
        assert len({each.message.content for each in chats}) == 1
        with pytest.raises(InvalidRequestError, match="number of slots"):
            await read_all(server._core.stream_all(["a"], params, context=RequestContext(), n=4))


async def test_the_old_ways_to_several_outputs_work_for_one_release_more() -> None:
    async with serve(ScriptedBackend(n_slots=3)) as server:
        params, context = await server._core.params({}), RequestContext()
        with pytest.warns(DeprecationWarning, match="stream_all"):
            completions = server.completions
        outputs = await completions.complete(["a"], params, context, n=2)
        assert [each.text for each in outputs] == ["A", "A"]
        with pytest.warns(DeprecationWarning, match="stream_chats"):
            chats = server.chats
        assert len(await chats.answer(HI, params, ChatParams(), context, n=2)) == 2
        async with chats.stream(HI, params, ChatParams(), context) as (stream,):
            assert (await stream.read()).message.content


async def test_what_has_moved_is_found_under_its_old_name() -> None:
    async with serve() as server:
        with pytest.warns(DeprecationWarning, match=r"Server.ready is now Server.lifecycle.ready"):
            assert server.ready
        with pytest.raises(AttributeError, match="nothing_like_this"):
            _ = server.nothing_like_this
