"""The server on the scripted backend: streams, cancellation, slow readers, drain.

The engine is stepping on the event loop, and time is virtual.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock, wait_all_tasks_blocked

import trioserve
from tests.support.cancellation import CancelAtStep
from tests.support.scripted_server import assert_at_rest, completing, read, serve
from trioserve.config import Config
from trioserve.errors import (
    ContextLengthExceededError,
    DeadlineExceededError,
    DecodeError,
    InvalidRequestError,
    QueueFullError,
    RequestEndedError,
    StalledReaderError,
    TemplateError,
)
from trioserve.server import RequestContext, Server
from trioserve.server.stream import ChatChunk, _merge
from trioserve.testing import ScriptedBackend, scripted, stepping
from trioserve.types import (
    CancelReason,
    Candidates,
    Chunk,
    Finished,
    FinishReason,
    GenerationParams,
    Progress,
    Timings,
    TokenProb,
    TokenProbs,
)


async def test_a_stream_from_start_to_end() -> None:
    async with serve() as server:
        async with server.stream_complete("hello") as stream:
            events = [event async for event in stream]
        assert "".join(event.text for event in events if isinstance(event, Chunk)) == "HELLO"
        assert stream.finished is not None
        assert stream.finished.reason is FinishReason.EOS
        assert stream.prompt.tokens == tuple(b"hello")
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await assert_at_rest(server)


async def test_complete_returns_everything() -> None:
    async with serve() as server:
        completion = await server.complete("hello", max_tokens=3, n_probs=1)
    assert completion.text == "HEL"
    assert completion.tokens == tuple(b"HEL")
    assert [probs.chosen.piece for probs in completion.probs] == [b"H", b"E", b"L"]
    assert completion.finished.reason is FinishReason.LIMIT


async def test_chat_takes_the_output_apart() -> None:
    backend = ScriptedBackend(
        lambda prompt: "<think>\nhm\n</think>\n\nHi.",
        chat_template="{{ messages[0].content }}{# writes <think>…</think> #}",
    )
    async with serve(backend) as server:
        messages = [{"role": "user", "content": "Hello"}]
        reply = await server.chat(messages)
        assert "Hello" in reply.prompt_text
        async with server.stream_chat(messages) as stream:
            events = [event async for event in stream]
    assert reply.message.content == "Hi."
    assert reply.message.reasoning_content == "hm"
    assert stream.message == reply.message
    assert isinstance(events[0], ChatChunk)
    assert stream.finished is not None


async def test_five_streams_interleave_and_more_wait_their_turn() -> None:
    order: list[int] = []

    async def follow(server: Server, name: int) -> None:
        async with server.stream_complete(f"this is stream number {name}") as stream:
            async for event in stream:
                if isinstance(event, Chunk):
                    order.append(name)
        assert stream.finished is not None

    async with serve(ScriptedBackend(n_slots=5)) as server, trio.open_nursery() as nursery:
        for name in range(8):
            nursery.start_soon(follow, server, name)
    running = list(dict.fromkeys(order))[:5]
    first = [order.index(name) for name in running]
    last = [len(order) - 1 - order[::-1].index(name) for name in running]
    assert max(first) < min(last)
    assert set(order) == set(range(8))


async def a_moment() -> None:
    """Let a few steps pass, in which no reader is found to stall."""
    for _ in range(10):
        await trio.lowlevel.checkpoint()


# -- cancellation


async def test_a_stream_is_cancelled_from_another_task(autojump_clock: MockClock) -> None:
    async with serve(ScriptedBackend(lambda prompt: "x" * 500)) as server:
        with capture_logs() as logs, pytest.raises(RequestEndedError):
            async with server.stream_complete("a") as stream:
                await anext(stream)
                stream.cancel()
                await read(stream)
        assert logs[-1]["cancelled"] == "caller"
        await assert_at_rest(server)


@pytest.mark.parametrize("stage", ["queued", "prefill", "decode"])
async def test_leaving_the_block_frees_the_slot(stage: str) -> None:
    backend = ScriptedBackend(lambda prompt: "x" * 500, n_slots=2, n_batch=8)
    async with serve(backend) as server, trio.open_nursery() as nursery:
        if stage == "queued":
            nursery.start_soon(_fill_slots, server)
            await a_moment()
        with trio.CancelScope() as scope:
            async with server.stream_complete("y" * 64 if stage == "prefill" else "y") as stream:
                if stage == "decode":
                    await anext(stream)
                elif stage == "prefill":
                    await _decodes(backend, 3)
                else:
                    await a_moment()
                before = await server.status()
                scope.cancel()
                await read(stream)
        steps = backend.n_decodes
        after = await server.status()
        assert scope.cancelled_caught
        mine = [slot.state for slot in before.slots if slot.task_id == stream.task_id]
        assert mine == ([] if stage == "queued" else [stage])
        queue = [one.task_id for one in before.waiting]
        assert queue == ([stream.task_id] if stage == "queued" else [])
        assert stream.task_id not in [slot.task_id for slot in after.slots]
        assert after.waiting == ()
        assert after.counters.steps <= steps + 1
        nursery.cancel_scope.cancel()
    assert backend.n_samplers == 0


async def _fill_slots(server: Server) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(server.model.n_slots):
            nursery.start_soon(_hold_a_slot, server)


async def _hold_a_slot(server: Server) -> None:
    async with server.stream_complete("busy"):
        await trio.sleep_forever()


async def _decodes(backend: ScriptedBackend, n: int) -> None:
    """Wait until a backend begins its n-th decode."""
    reached = trio.Event()

    def count(backend: ScriptedBackend) -> None:
        if backend.n_decodes >= n:
            reached.set()

    backend.on_decode = count
    await reached.wait()


async def _complete(server: Server) -> None:
    await server.complete("some text", max_tokens=4)


async def _chat(server: Server) -> None:
    await server.chat([{"role": "user", "content": "some text"}], max_tokens=4)


async def _long_prompt(server: Server) -> None:
    await server.complete("tokenized in a thread, " * 200, max_tokens=2)


async def _read_after_the_end(server: Server) -> None:
    async with server.stream_complete("some text", max_tokens=4) as stream:
        await wait_all_tasks_blocked()
        await read(stream)


@pytest.mark.parametrize("request_path", [_complete, _chat, _long_prompt, _read_after_the_end])
@pytest.mark.parametrize("drive", ["thread", "stepping"])
async def test_cancellation_at_every_await_leaves_nothing(
    request_path: Callable[[Server], object], drive: str
) -> None:
    backend = ScriptedBackend(n_ctx=8192, n_batch=512)
    driver = {"drive": stepping} if drive == "stepping" else {}
    async with Server(Config(), load=scripted(backend), **driver) as server:
        for n in range(1, 10_000):
            instrument = CancelAtStep(n)

            await instrument.run(partial(request_path, server))
            await assert_at_rest(server)
            assert backend.n_samplers == 0
            if not instrument.scope.cancel_called:
                break
        assert n > 3
        assert (await server.complete("still here")).text == "STILL HERE"


# -- readers that are slow, or gone


async def test_a_reader_that_stops_is_paused_then_cancelled(autojump_clock: MockClock) -> None:
    backend = ScriptedBackend(lambda prompt: prompt.upper() * 900, n_slots=2)
    async with serve(backend, unread_tokens=50, stall_timeout=7) as server:
        async with server.stream_complete("a") as stream:
            await trio.sleep(6)
            assert 50 <= stream.mailbox.n_unread <= 60
            status = await server.status()
            assert [slot.paused for slot in status.slots].count(True) == 1
            assert (await server.complete("b", max_tokens=40)).text == "B" * 40
            await trio.sleep(2)
            with pytest.raises(StalledReaderError, match="unread for 7 seconds"):
                await read(stream)
        await assert_at_rest(server)


async def test_readers_that_stop_make_way_for_others(autojump_clock: MockClock) -> None:
    backend = ScriptedBackend(lambda prompt: prompt.upper() * 300, n_slots=4)
    async with serve(backend, unread_tokens=50, stall_timeout=30) as server:
        async with AsyncExitStack() as stack:
            prompts = [chr(ord("a") + i) for i in range(26)]
            stalled = [
                await stack.enter_async_context(server.stream_complete(each)) for each in prompts
            ]
            start = trio.current_time()
            assert (await server.complete("1", max_tokens=40)).text == "1" * 40
            assert trio.current_time() - start < 5
            assert server.lifecycle.services.dispatcher.queued.n_requests == len(stalled) - 3
            await trio.sleep(20)
            # Those who read again have another turn, and miss nothing.
            for prompt, stream in zip(prompts[:13], stalled, strict=False):
                assert await read(stream) == prompt.upper() * 300
            await trio.sleep(12)
            for stream in stalled[13:]:
                with pytest.raises(StalledReaderError, match="unread for 30 seconds"):
                    await read(stream)
        await assert_at_rest(server)


def test_events_that_pile_up_are_joined_to_a_bounded_size() -> None:
    top = tuple(TokenProb(i, b"x", -1.0) for i in range(100))
    probs = (TokenProbs(top[0], Candidates.of(*top)),)
    chunks = [Chunk(1, "ab", (1,), probs) for _ in range(300)]
    last = Finished(task_id=1, reason=FinishReason.EOS, timings=Timings())
    *joined, finished = _merge([Progress(1, 9, 0, 9, 1.0), *chunks, last])
    assert finished is last
    sizes = [len(one.probs) for one in joined if isinstance(one, Chunk)]
    assert sum(sizes) == 300
    assert max(sizes) * 100 * 150 < 1.1 * 2**20
    assert "".join(one.text for one in joined if isinstance(one, Chunk)) == "ab" * 300


def test_tokens_with_candidates_stay_apart() -> None:
    top = TokenProb(1, b"x", -1.0)
    with_probs = [Chunk(1, "ab", (1,), (TokenProbs(top, (top,)),)) for _ in range(3)]
    plain = [Chunk(1, "ab", (1,)) for _ in range(3)]
    assert _merge(list(with_probs)) == with_probs
    assert _merge(list(plain)) == [Chunk(1, "ababab", (1, 1, 1))]
    assert len(_merge([*plain, *with_probs, *plain])) == 5


async def test_a_slow_reader_gets_everything(autojump_clock: MockClock) -> None:
    backend = ScriptedBackend(lambda prompt: "x" * 500)
    async with (
        serve(backend, unread_tokens=20, stall_timeout=10) as server,
        server.stream_complete("a") as stream,
    ):
        text = ""
        async for event in stream:
            if isinstance(event, Chunk):
                text += event.text
                assert len(event.tokens) <= 30
                await trio.sleep(9)
    assert text == "x" * 500


# -- the queue, and deadlines


def endless(prompt: str) -> str:
    return "x" * 900


async def _hold(server: Server, prompt: str = "busy", **options: object) -> None:
    async with server.stream_complete(prompt, **options):
        await trio.sleep_forever()


async def test_a_queue_is_bounded_in_tokens() -> None:
    async with (
        serve(ScriptedBackend(endless, n_slots=1), max_queue_tokens=20) as server,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(_hold, server, "this one runs, so it does not count")
        await a_moment()
        nursery.start_soon(_hold, server, "fifteen letters")
        await a_moment()
        with pytest.raises(QueueFullError, match="21 prompt tokens"):
            await server.complete("six to")
        nursery.cancel_scope.cancel()


async def test_clients_and_priorities_decide_whose_turn_it_is() -> None:
    done: list[str] = []

    async def ask(server: Server, name: str, priority: int = 0) -> None:
        await server.complete(name, client=name[0], priority=priority, max_tokens=3)
        done.append(name)

    backend = ScriptedBackend(endless, n_slots=1)
    async with serve(backend) as server, trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            async with server.stream_complete("x"):
                await a_moment()
                for name, priority in (("a1", 0), ("a2", 0), ("b1", 0), ("c1", 1)):
                    nursery.start_soon(ask, server, name, priority)
                    await a_moment()
                scope.cancel()
                await trio.sleep_forever()
    assert done == ["c1", "a1", "b1", "a2"]


@pytest.mark.parametrize("stage", ["queued", "decode", "unread"])
async def test_a_deadline_is_reported_as_one(stage: str, autojump_clock: MockClock) -> None:
    backend = ScriptedBackend(endless, n_slots=1)
    async with serve(backend, unread_tokens=10, stall_timeout=60) as server:
        async with trio.open_nursery() as nursery:
            if stage == "queued":
                nursery.start_soon(_hold, server)
                await wait_all_tasks_blocked()
            began = trio.current_time()
            with capture_logs() as logs, pytest.raises(DeadlineExceededError):
                async with completing(server, "a", 3) as stream:
                    if stage == "unread":
                        await trio.sleep(5)
                    async for _ in stream:
                        await trio.sleep(1)
            assert trio.current_time() - began == pytest.approx(5 if stage == "unread" else 3)
            assert logs[-1]["cancelled"] == "deadline"
            nursery.cancel_scope.cancel()
        await assert_at_rest(server)


# -- bad requests and bad luck


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"max_tokens": -2}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"no_such_thing": 1}, "no_such_thing"),
        ({"stop": [1]}, "stop"),
        ({"logit_bias": [[1]]}, "logit_bias"),
        ({"id_slot": 99}, "id_slot"),
    ],
)
async def test_a_bad_setting_is_named(settings: dict[str, object], param: str) -> None:
    async with serve() as server:
        with pytest.raises(InvalidRequestError) as caught:
            await server.complete("x", **settings)
        assert caught.value.param == param
        await assert_at_rest(server)


async def test_a_prompt_that_is_too_long() -> None:
    async with serve() as server:
        with pytest.raises(ContextLengthExceededError) as caught:
            await server.complete("x" * 1024)
    assert (caught.value.n_prompt_tokens, caught.value.n_ctx) == (1024, 1024)


async def test_settings_change_single_options() -> None:
    async with serve(n_predict=5) as server:
        assert (await server.params({})).max_tokens == 5
        fields = {"temperature": 0.0, "stop": "x"}
        params = await server.params(fields, GenerationParams(max_tokens=9))
    assert (params.max_tokens, params.stop) == (9, ("x",))
    assert params.sampling.temperature == 0.0
    assert params.sampling.top_k == 40


async def test_a_failed_decode_is_raised_to_its_reader() -> None:
    backend = ScriptedBackend()
    async with serve(backend) as server:
        backend.fail_next = DecodeError("bad luck")
        with capture_logs() as logs, pytest.raises(DecodeError, match="bad luck"):
            await server.complete("x")
        assert (await server.complete("x")).text == "X"
    assert logs[-1]["event"] == "request failed"


async def test_a_reader_that_asks_again_gets_the_failure_again() -> None:
    backend = ScriptedBackend()
    async with serve(backend) as server:
        backend.fail_next = DecodeError("bad luck")
        async with server.stream_complete("x") as stream:
            for _ in range(2):
                with trio.fail_after(10), pytest.raises(DecodeError, match="bad luck"):
                    await anext(stream)


async def test_the_log_tells_the_story() -> None:
    async with serve() as server:
        with capture_logs() as logs:
            await server.complete("hello")
            with trio.CancelScope() as scope:
                context = RequestContext(on_cancel=CancelReason.DISCONNECT)
                params = await server.params({})
                async with server.stream_all(["hello"], params, context=context):
                    scope.cancel()
                    await trio.sleep_forever()
    started, ended, _, cancelled = logs
    assert started["event"] == "request started"
    assert started["prompt_tokens"] == 5
    assert ended["completion_tokens"] == 6
    assert ended["finish"] == "eos"
    assert {"ttft_ms", "total_ms", "prefill_tokens_per_s", "decode_tokens_per_s"} < set(ended)
    assert cancelled["cancelled"] == "disconnect"


async def test_text_goes_both_ways() -> None:
    async with serve() as server:
        assert await server.detokenize(await server.tokenize("häßlich")) == "häßlich"
        assert await server.detokenize([0xC3]) == "\ufffd"
        with pytest.raises((TemplateError, InvalidRequestError)):
            await server.render([{"role": "user"}])


def test_only_this_package_reaches_behind_a_server() -> None:
    """Routes and programs use the public names of `Server`: its services are the package's own."""
    package = Path(trioserve.__file__).parent
    outside = [path for path in package.rglob("*.py") if package / "server" not in path.parents]
    reaching = [
        f"{path.relative_to(package)}:{node.lineno}"
        for path in outside
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "services"
    ]
    assert reaching == []
