"""A server without its model in memory: what it still answers and keeps."""

from __future__ import annotations

import gc
import weakref

import pytest

from tests.support.scripted_embedder import ScriptedEmbedder
from tests.support.scripted_server import ScriptedLoader
from tests.support.sleepers import n_loads, no_collection, wake
from trioserve.config import Config
from trioserve.errors import InvalidRequestError, NotSupportedError, ServerSleepingError
from trioserve.server import Server
from trioserve.server.limits.memory import release_memory
from trioserve.testing import ScriptedBackend, stepping
from trioserve.types import AdapterInfo

__all__ = ["no_collection"]


async def test_what_is_known_while_it_sleeps() -> None:
    loader = ScriptedLoader(lambda: ScriptedBackend(chat_template="{{ messages[0].content }}"))
    async with loader.serve() as server:
        before = server.model
        await server.sleep()
        assert server.model.info == before.info
        assert server.model.template.source == before.template.source
        assert server.model.vocab.n_tokens == before.vocab.n_tokens
        assert (await server.params({"temperature": 0.5})).sampling.temperature == 0.5
        server.lifecycle.check_ready()
        with pytest.raises(ServerSleepingError):
            await server.erase_slot(0)
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
            lambda: server.count_tokens(chat),
            lambda: server.params({"logit_bias": (("h", 1.0),)}),
        ):
            await server.sleep()
            await call()
            assert not server.lifecycle.sleeping
    assert n_loads(loader) == 5


async def test_a_server_of_embeddings_sleeps_too() -> None:
    loads: list[ScriptedEmbedder] = []

    def load(config: Config, *, progress: object = None) -> ScriptedEmbedder:
        loads.append(ScriptedEmbedder())
        return loads[-1]

    async with Server(Config(embeddings=True), load=load, drive=stepping) as server:
        first = await server.embed(["one", "two"])
        await server.sleep()
        with pytest.raises(NotSupportedError, match="generates no text"):
            await server.complete("a")
        assert server.lifecycle.sleeping
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
        await wake(server)
        after = (await server.status()).counters
    assert asleep.counters.predicted_tokens == 6  # with the one that ends it
    assert again.predicted_tokens == 19
    assert again.prompt_tokens == 17
    assert again.n_tokens_max == after.n_tokens_max == 25
    assert after.predicted_tokens == 19
    assert after.steps == again.steps
    assert after.n_cells == again.n_cells  # it is no count


async def test_scales_ids_and_limits_last() -> None:
    info = AdapterInfo(path="a.gguf", scale=1.0)
    loader = ScriptedLoader(lambda: ScriptedBackend(adapters=[info]))
    async with loader.serve(rate_limit_requests=5) as server:
        server.adapters.scales.set({0: 0.25})
        server.resources.rate_limits.admit("me")
        async with server.stream_complete("a") as stream:
            first = stream.task_id
        await server.sleep()
        async with server.stream_complete("a") as stream:
            assert stream.task_id > first
        assert server.adapters.scales.scales == (0.25,)
        assert server.resources.rate_limits.remaining("me")["requests"].remaining == 4


async def test_nothing_of_an_engine_is_left() -> None:
    loader = ScriptedLoader()
    async with loader.serve() as server:
        await server.complete("hello")
        left = [
            weakref.ref(one)
            for one in (
                loader.backends.pop(),
                server.lifecycle.services,
                server.lifecycle.services.loop,
                server.model,
            )
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
