"""A server that frees its model's memory while nobody needs it.

The engine is ticking on the event loop. Time stands still unless a test moves it: loading is in a
thread, during which a clock that jumps would jump.
"""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support import tiny_models
from tests.support.cancellation import CancelAtStep
from tests.support.scripted_embedder import ScriptedEmbedder
from tests.support.scripted_server import ScriptedLoader, assert_at_rest, read
from trioserve.chat.params import ChatParams
from trioserve.config import Config
from trioserve.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    ModelLoadError,
    NotSupportedError,
    QueueFullError,
    ServerClosingError,
    ServerSleepingError,
    TrioServeError,
)
from trioserve.models import BUNDLED
from trioserve.server import RequestContext, Server
from trioserve.server.keeper import ServerState
from trioserve.server.memory import release_memory
from trioserve.testing import ScriptedBackend, ticking
from trioserve.types import AdapterInfo, GenerationParams


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not look at all objects of the tests again and again."""
    monkeypatch.setattr("trioserve.server.life.release_memory", lambda: None)


async def until(server: Server, state: ServerState) -> None:
    await server.state.wait_value(state)


def n_loads(loader: ScriptedLoader) -> int:
    return len(loader.backends)


# -- when it sleeps


async def test_it_sleeps_when_it_was_idle_for_long_enough(mock_clock: MockClock) -> None:
    loader = ScriptedLoader()
    async with loader.serve(sleep_idle_seconds=10) as server:
        mock_clock.jump(9)
        assert (await server.complete("hi")).text == "HI"
        mock_clock.jump(9.9)
        await wait_all_tasks_blocked()
        assert not server.sleeping
        assert server.ready
        mock_clock.jump(0.2)
        await until(server, ServerState.SLEEPING)
        assert server.sleeping
        assert not server.ready
        assert loader.backends[0].closed
        assert (await server.complete("ho")).text == "HO"
        assert not server.sleeping
        assert n_loads(loader) == 2
        await assert_at_rest(server)
    assert loader.backends[1].closed


async def test_the_log_says_when_it_sleeps_and_wakes() -> None:
    with capture_logs() as logs:
        async with ScriptedLoader().serve() as server:
            assert logs == []
            await server.sleep()
            assert [one["event"] for one in logs] == ["asleep"]
            await server.wake()
        assert [one["event"] for one in logs] == ["asleep", "awake"]  # and nothing at its end
    assert {one["model"] for one in logs} == {"scripted"}


async def test_by_default_it_does_not(mock_clock: MockClock) -> None:
    async with ScriptedLoader().serve() as server:
        mock_clock.jump(10**9)
        await wait_all_tasks_blocked()
        assert not server.sleeping


async def test_it_sleeps_even_if_nobody_ever_comes(mock_clock: MockClock) -> None:
    async with ScriptedLoader().serve(sleep_idle_seconds=0.5) as server:
        mock_clock.jump(0.6)
        await until(server, ServerState.SLEEPING)


@pytest.mark.parametrize("seconds", [0, -0.5, -2, math.inf])
def test_what_is_no_time_to_sleep_after(seconds: float) -> None:
    with pytest.raises(ConfigError, match="sleep_idle_seconds"):
        Config(sleep_idle_seconds=seconds)


async def test_requests_in_flight_are_not_cut(mock_clock: MockClock) -> None:
    loader = ScriptedLoader()
    async with loader.serve(sleep_idle_seconds=1, stall_timeout=1e6) as server:
        async with server.stream("hello") as stream:
            mock_clock.jump(100)
            await wait_all_tasks_blocked()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.sleep)
                await wait_all_tasks_blocked()
                assert await read(stream) == "HELLO"
                await wait_all_tasks_blocked()
                assert not server.sleeping  # the stream is still open
                nursery.cancel_scope.cancel()
        assert n_loads(loader) == 1


async def test_what_is_opened_below_the_server_is_not_cut_either(mock_clock: MockClock) -> None:
    loader = ScriptedLoader()
    async with loader.serve(sleep_idle_seconds=1, stall_timeout=1e6) as server:
        opened = server.completions.stream(["hello"], GenerationParams(), RequestContext())
        async with opened as (stream,):
            mock_clock.jump(100)
            await wait_all_tasks_blocked()
            assert await read(stream) == "HELLO"
        assert n_loads(loader) == 1


async def test_a_program_keeps_it_awake(mock_clock: MockClock) -> None:
    async with ScriptedLoader().serve(sleep_idle_seconds=1) as server:
        async with server.awake():
            mock_clock.jump(100)
            await wait_all_tasks_blocked()
            assert server.detokenize([104, 105]) == "hi"
        mock_clock.jump(2)
        await until(server, ServerState.SLEEPING)
        async with server.awake(timeout=5):
            assert server.detokenize([104, 105]) == "hi"
        with pytest.raises(InvalidRequestError, match="'temperature' is not a parameter"):
            async with server.awake(temperature=1):
                raise AssertionError("unreachable")


async def test_a_look_at_it_does_not_count(mock_clock: MockClock) -> None:
    async with ScriptedLoader().serve(sleep_idle_seconds=10) as server:
        for _ in range(3):
            mock_clock.jump(3)
            await server.status()
            assert not server.sleeping
        mock_clock.jump(1.1)
        await until(server, ServerState.SLEEPING)


# -- told to sleep, and to wake


async def test_it_is_told_to_sleep_and_to_wake(mock_clock: MockClock) -> None:
    loader = ScriptedLoader()
    async with loader.serve() as server:
        await server.sleep()
        assert server.sleeping
        await server.sleep()
        await server.wake()
        assert not server.sleeping
        await server.wake()
        assert n_loads(loader) == 2
    await server.sleep()  # the memory is free


async def test_it_sleeps_when_what_runs_is_done(mock_clock: MockClock) -> None:
    async with ScriptedLoader().serve() as server, trio.open_nursery() as nursery:
        async with server.stream("hello") as stream:
            nursery.start_soon(server.sleep)
            await wait_all_tasks_blocked()
            assert (await server.complete("others may come")).text == "OTHERS MAY COME"
            assert await read(stream) == "HELLO"
            assert not server.sleeping
        await until(server, ServerState.SLEEPING)


async def test_sleep_that_is_cancelled_leaves_it_awake(mock_clock: MockClock) -> None:
    async with ScriptedLoader().serve() as server:
        async with server.stream("hello") as stream:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.sleep)
                await wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
            await read(stream)
        mock_clock.jump(100)
        await wait_all_tasks_blocked()
        assert not server.sleeping


# -- keep_alive


async def test_a_request_says_how_long_it_stays_awake(mock_clock: MockClock) -> None:
    loader = ScriptedLoader()
    async with loader.serve(sleep_idle_seconds=10) as server:
        await server.complete("a", keep_alive=100)
        await server.complete("b")  # as the last one said
        mock_clock.jump(99)
        await wait_all_tasks_blocked()
        assert not server.sleeping
        mock_clock.jump(2)
        await until(server, ServerState.SLEEPING)
        await server.chat([{"role": "user", "content": "c"}])  # and now as the configuration says
        mock_clock.jump(11)
        await until(server, ServerState.SLEEPING)
    assert n_loads(loader) == 2


async def test_it_sleeps_right_after_a_request(mock_clock: MockClock) -> None:
    async with ScriptedLoader().serve() as server:
        assert (await server.complete("a", keep_alive=0)).text == "A"
        await until(server, ServerState.SLEEPING)


@pytest.mark.parametrize("seconds", [-1, -0.5, math.inf])
async def test_it_stays_awake_for_ever(mock_clock: MockClock, seconds: float) -> None:
    async with ScriptedLoader().serve(sleep_idle_seconds=1) as server:
        await server.wake(keep_alive=seconds)
        mock_clock.jump(10**9)
        await wait_all_tasks_blocked()
        assert not server.sleeping


# -- those who wait for it to wake


@asynccontextmanager
async def falling_awake(**config: object) -> AsyncIterator[tuple[Server, ScriptedLoader]]:
    """A server that is asleep, and wakes for as long as `may_go_on` is not set."""
    loader = ScriptedLoader(lambda: ScriptedBackend(n_slots=1, n_seqs=1))
    async with loader.serve(**config) as server:
        await server.sleep()
        loader.may_go_on.clear()
        try:
            yield server, loader
        finally:
            loader.may_go_on.set()


async def test_all_who_wait_share_one_load_and_go_on_in_order(mock_clock: MockClock) -> None:
    order: list[str] = []

    async def ask(prompt: str) -> None:
        order.append((await server.complete(prompt)).text)

    async with falling_awake() as (server, loader), trio.open_nursery() as nursery:
        for prompt in "abcdefghij":
            nursery.start_soon(ask, prompt)
            await wait_all_tasks_blocked()
        assert server.sleeping
        assert server.state.value is ServerState.LOADING
        loader.may_go_on.set()
    assert "".join(order) == "ABCDEFGHIJ"
    assert n_loads(loader) == 2


async def test_a_deadline_holds_while_it_wakes(mock_clock: MockClock) -> None:
    async with falling_awake() as (server, loader), trio.open_nursery() as nursery:
        nursery.start_soon(server.wake)

        async def ask() -> None:
            with pytest.raises(DeadlineExceededError):
                await server.complete("a", timeout=5)
            loader.may_go_on.set()

        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        mock_clock.jump(5.1)
    assert n_loads(loader) == 2


async def test_who_is_cancelled_does_not_take_it_from_the_others(mock_clock: MockClock) -> None:
    async with falling_awake() as (server, loader), trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            nursery.start_soon(cancel_when_blocked, scope)
            await server.complete("a")
        assert scope.cancelled_caught
        nursery.start_soon(server.complete, "b")
        await wait_all_tasks_blocked()
        loader.may_go_on.set()
    assert n_loads(loader) == 2
    assert loader.n_begun == 2


async def cancel_when_blocked(scope: trio.CancelScope) -> None:
    await wait_all_tasks_blocked()
    scope.cancel()


async def test_too_many_wait(mock_clock: MockClock) -> None:
    config = {"max_queue": 1, "parallel": 1}
    async with falling_awake(**config) as (server, loader), trio.open_nursery() as nursery:
        nursery.start_soon(server.complete, "a")
        nursery.start_soon(server.complete, "b")
        await wait_all_tasks_blocked()
        with pytest.raises(QueueFullError, match="2 requests wait for the model") as caught:
            await server.complete("c")
        assert caught.value.retry_after > 0
        loader.may_go_on.set()


async def test_when_it_cannot_wake_all_are_told_and_the_next_one_tries_again(
    mock_clock: MockClock,
) -> None:
    errors: list[TrioServeError] = []

    async def fail() -> None:
        with pytest.raises(ModelLoadError, match="no such file") as caught:
            await server.complete("a")
        errors.append(caught.value)

    async with falling_awake() as (server, loader):
        with capture_logs() as logs:
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(fail)
                await wait_all_tasks_blocked()
                loader.failure = "no such file"
                loader.may_go_on.set()
        assert len(set(map(id, errors))) == 3  # no two tasks raise the same object
        assert loader.n_begun == 2
        assert server.sleeping
        assert [one["event"] for one in logs] == ["the model cannot be loaded again"]
        await fail()
        assert loader.n_begun == 3
        loader.failure = ""
        assert (await server.complete("a")).text == "A"
        await assert_at_rest(server)


async def test_cancelled_at_every_step(mock_clock: MockClock) -> None:
    """Whenever a request is cancelled that wakes the server, the next one is served."""
    loader = ScriptedLoader()
    async with loader.serve() as server:
        for n in range(1, 1000):
            await server.sleep()
            canceller = CancelAtStep(n)

            async def ask() -> None:
                assert (await server.complete("hi")).text == "HI"

            await canceller.run(ask)
            assert (await server.complete("ho")).text == "HO"
            await assert_at_rest(server)
            if not canceller.scope.cancelled_caught:
                break
    assert n > 3
    assert len(loader.backends) == loader.n_begun == n + 1
    assert all(backend.closed for backend in loader.backends)


async def test_sleep_cancelled_at_every_step(mock_clock: MockClock) -> None:
    loader = ScriptedLoader()
    async with loader.serve() as server:
        for n in range(1, 1000):
            canceller = CancelAtStep(n)
            await canceller.run(server.sleep)
            assert (await server.complete("hi")).text == "HI"
            await assert_at_rest(server)
            if not canceller.scope.cancelled_caught:
                break
    assert n > 1
    assert all(backend.closed for backend in loader.backends)


# -- what lasts


async def test_what_is_known_while_it_sleeps() -> None:
    loader = ScriptedLoader(lambda: ScriptedBackend(chat_template="{{ messages[0].content }}"))
    async with loader.serve() as server:
        before = server.model
        await server.sleep()
        assert server.model.info == before.info
        assert server.model.template.source == before.template.source
        assert server.model.vocab.n_tokens == before.vocab.n_tokens
        assert (await server.params({"temperature": 0.5})).sampling.temperature == 0.5
        server.check_ready()
        for look in (lambda: server.parts, lambda: server.detokenize([1]), lambda: server.chats):
            with pytest.raises(ServerSleepingError):
                look()
        for call in (server.model.vocab.tokenize, server.model.vocab.detokenize):
            with pytest.raises(ServerSleepingError):
                call("a")  # type: ignore[operator]
        assert n_loads(loader) == 1


async def test_what_is_wrong_does_not_wake_it() -> None:
    loader = ScriptedLoader()
    async with loader.serve() as server:
        await server.sleep()
        with pytest.raises(InvalidRequestError, match="temperatur"):
            await server.complete("a", temperatur=1)
        with pytest.raises(NotSupportedError, match="--embeddings"):
            await server.embed("a")
        with pytest.raises(NotSupportedError, match="--reranking"):
            await server.rerank("a", "b")
    assert loader.n_begun == 1


async def test_what_needs_the_vocabulary_wakes_it() -> None:
    chat = [{"role": "user", "content": "hi"}]
    loader = ScriptedLoader()
    async with loader.serve() as server:
        for call in (
            lambda: server.tokenize("hi"),
            lambda: server.render(chat),
            lambda: server.count_tokens(chat, ChatParams()),
            lambda: server.params({"logit_bias": (("h", 1.0),)}),
        ):
            await server.sleep()
            await call()
            assert not server.sleeping
    assert n_loads(loader) == 5


async def test_a_server_of_embeddings_sleeps_too() -> None:
    loads: list[ScriptedEmbedder] = []

    def load(config: Config, *, progress: object = None) -> ScriptedEmbedder:
        loads.append(ScriptedEmbedder())
        return loads[-1]

    async with Server(Config(embeddings=True), load=load, drive=ticking) as server:
        first = await server.embed(["one", "two"])
        await server.sleep()
        with pytest.raises(NotSupportedError, match="generates no text"):
            await server.complete("a")
        assert server.sleeping
        again = await server.embed(["one", "two"])
        assert [each.tolist() for each in again.vectors] == [
            each.tolist() for each in first.vectors
        ]
    assert len(loads) == 2


async def test_counters_go_on() -> None:
    async with ScriptedLoader().serve(metrics_endpoint=True) as server:
        assert server.metrics is not None
        await server.complete("hello")
        awake = await server.status()
        text = server.metrics.render(awake)
        text = server.metrics.render(await server.status())  # speeds are since the last look
        await server.sleep()
        asleep = await server.status()
        assert asleep.counters == awake.counters
        assert [slot.state for slot in asleep.slots] == ["idle", "idle"]
        assert [slot.task for slot in asleep.slots] == [None, None]
        assert server.metrics.render(asleep) == text
        await server.complete("hello, world")
        again = (await server.status()).counters
        await server.sleep()
        await server.wake()
        after = (await server.status()).counters
    assert asleep.counters.predicted_tokens == 6  # with the one that ends it
    assert again.predicted_tokens == 19
    assert again.prompt_tokens == 17
    assert again.n_tokens_max == after.n_tokens_max == 25
    assert after.predicted_tokens == 19
    assert after.ticks == again.ticks
    assert after.n_cells == again.n_cells  # it is no count


async def test_scales_ids_and_limits_last() -> None:
    info = AdapterInfo(path="a.gguf", scale=1.0)
    loader = ScriptedLoader(lambda: ScriptedBackend(adapters=[info]))
    async with loader.serve(rate_limit_requests=5) as server:
        server.parts.adapters.set({0: 0.25})
        server.common.rate_limits.admit("me")
        async with server.stream("a") as stream:
            first = stream.task_id
        await server.sleep()
        async with server.stream("a") as stream:
            assert stream.task_id > first
        assert server.parts.adapters.scales == (0.25,)
        assert server.parts.requests.rate_limits.remaining("me")["requests"].remaining == 4


async def test_nothing_of_an_engine_is_left() -> None:
    loader = ScriptedLoader()
    async with loader.serve() as server:
        await server.complete("hello")
        left = [
            weakref.ref(one)
            for one in (loader.backends.pop(), server.parts, server.parts.loop, server.model)
        ]
        await server.sleep()
        release_memory()
        assert [one() for one in left] == [None] * 4


def test_what_was_exempt_from_collection_is_collected_too() -> None:
    class Circle:
        def __init__(self) -> None:
            self.me = self

    circle = Circle()
    left = weakref.ref(circle)
    gc.collect()
    gc.freeze()
    try:
        del circle
        gc.collect()
        assert left() is not None
        release_memory()
        assert left() is None
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


# -- the end


async def test_drain_while_it_sleeps() -> None:
    loader = ScriptedLoader()
    async with loader.serve() as server:
        await server.sleep()
        await server.drain(10)
        assert server.draining
        for call in (lambda: server.complete("a"), server.wake):
            with pytest.raises(ServerClosingError):
                await call()
        with pytest.raises(ServerClosingError):
            server.check_ready()
    assert loader.n_begun == 1
    with pytest.raises(ServerClosingError):
        await server.status()
    with pytest.raises(ServerClosingError):
        _ = server.parts


async def test_drain_while_it_wakes(mock_clock: MockClock) -> None:
    async def ask() -> None:
        with pytest.raises(ServerClosingError):
            await server.complete("a")

    async with falling_awake() as (server, loader):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            await server.drain(10)
        loader.may_go_on.set()
        await until(server, ServerState.READY)
        await ask()


async def test_leaving_it_while_it_wakes_gives_up_loading(mock_clock: MockClock) -> None:
    async def ask(server: Server) -> None:
        with pytest.raises(ServerClosingError):
            await server.complete("a")

    loader = ScriptedLoader()
    async with trio.open_nursery() as nursery:
        async with loader.serve() as server:
            await server.sleep()
            loader.may_go_on.clear()
            nursery.start_soon(ask, server)
            await wait_all_tasks_blocked()
        assert server.state.value is ServerState.CLOSED
    assert (loader.n_begun, n_loads(loader)) == (2, 1)


async def test_the_failure_of_a_later_engine_is_seen() -> None:
    loader = ScriptedLoader()
    async with loader.serve() as server:
        await server.sleep()
        await server.wake()

        def fail(backend: ScriptedBackend) -> None:
            raise ZeroDivisionError

        loader.backends[1].on_decode = fail
        with pytest.raises(EngineError):
            await server.complete("a")
        assert isinstance((await server.wait_failure()).__cause__, ZeroDivisionError)
        # Another engine is another chance.
        await server.sleep()
        assert (await server.complete("a")).text == "A"


async def test_an_unexpected_failure_to_wake_ends_the_block() -> None:
    loads = 0

    def load(config: Config, *, progress: object = None) -> ScriptedBackend:
        nonlocal loads
        loads += 1
        return ScriptedBackend() if loads == 1 else {}["a mistake"]  # type: ignore[index]

    with pytest.RaisesGroup(pytest.RaisesExc(KeyError), flatten_subgroups=True):
        async with Server(Config(), load=load, drive=ticking) as server:
            await server.sleep()
            with pytest.raises((ServerClosingError, trio.Cancelled)) as caught:
                await server.complete("a")
            raise caught.value
    with pytest.raises(ServerClosingError):
        await server.complete("a")


# -- with a real model


async def test_a_file_that_is_gone_damaged_or_another_one(tmp_path: Path) -> None:
    """The model is loaded from what is there then; what cannot be loaded fails requests alone."""
    path, data = tmp_path / "a.gguf", BUNDLED.read_bytes()
    path.write_bytes(data)
    async with Server(Config(model=str(path), ctx_size=256, threads=1)) as server:
        first = await server.complete("Once", max_tokens=4, temperature=0.0)
        own = server.model.info.n_vocab
        await server.sleep()
        path.unlink()
        with pytest.raises(ModelLoadError):
            await server.complete("Once")
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(ModelLoadError):
            await server.complete("Once")
        tiny_models.write_generating(tmp_path, "llama").rename(path)
        await server.wake()
        assert server.model.info.n_vocab != own
        await server.sleep()
        path.write_bytes(data)
        again = await server.complete("Once", max_tokens=4, temperature=0.0)
        assert again.text == first.text


def resident() -> int:
    """Bytes of memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


#: In a process of its own, with malloc as the command has it: what other tests have left in the
#: heaps of many threads comes and goes by itself.
_SLEEPER = """
import sys
import trio
from tests.server.test_sleep import resident
from trioserve import Config, Server
from trioserve.cli.malloc import limit_arenas

async def main() -> None:
    config = Config(
        ctx_size=2**17, cache_ram=0, threads=1, flash_attn="off", log_level="off",
    )
    async with Server(config) as server:
        first = await server.complete("Once upon a time", max_tokens=8, temperature=0.0)
        awake = resident()
        await server.sleep()
        asleep = resident()
        again = await server.complete("Once upon a time", max_tokens=8, temperature=0.0)
        assert again.text == first.text
        later = []
        for _ in range(4):
            await server.sleep()
            later.append(resident())
            await server.wake()
        print("resident:", awake, asleep, min(later), file=sys.stderr)

limit_arenas()
trio.run(main)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is in /proc")
def test_the_memory_of_a_model_is_free_while_it_sleeps() -> None:
    done = subprocess.run([sys.executable, "-c", _SLEEPER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    last = done.stderr.splitlines()[-1]
    awake, asleep, later = map(int, last.removeprefix("resident:").split())
    assert awake - asleep > 150e6
    assert later - asleep < 20e6
