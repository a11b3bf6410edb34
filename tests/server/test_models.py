"""Several models in one program."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.cancellation import CancelAtStep
from tests.support.scripted_server import complete_within, read
from trioserve.config import Config
from trioserve.errors import (
    ConfigError,
    DeadlineExceededError,
    ModelLoadError,
    ServerClosingError,
    ServerSleepingError,
)
from trioserve.server import Models, Server
from trioserve.server.lifecycle.sleep import ServerState
from trioserve.testing import ScriptedBackend, stepping


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not look at all objects of the tests again and again."""
    monkeypatch.setattr("trioserve.server.lifecycle.sleep.release_memory", lambda: None)


@attrs.define
class Library:
    """Loads models that answer with their own name."""

    loads: list[str] = attrs.field(factory=list)
    open: dict[str, ScriptedBackend] = attrs.field(factory=dict)
    most: int = 0  # that were open at the same time

    def __call__(
        self, config: Config, *, progress: Callable[[float], bool] | None = None
    ) -> ScriptedBackend:
        name = config.model or ""
        if name == "missing":
            raise ModelLoadError("no such file")
        self.loads.append(name)
        self.open = {name: one for name, one in self.open.items() if not one.closed}
        self.open[name] = ScriptedBackend(lambda prompt: f"{name}: {prompt}")
        self.most = max(self.most, len(self.open))
        return self.open[name]

    def models(self, names: str, max_loaded: int = 0) -> Models:
        """Make models with these letters for names."""
        configs = {name: Config(model=name, stream_interval_ms=0) for name in names}
        return Models(configs, max_loaded=max_loaded, load=self, drive=stepping)


async def ask(server: Server) -> str:
    return (await server.complete("hi")).text


async def test_each_is_loaded_when_it_is_needed() -> None:
    library = Library()
    async with library.models("ab") as models:
        assert list(models) == ["a", "b"]
        assert len(models) == 2
        assert library.loads == []
        assert [server.lifecycle.sleeping for server in models.values()] == [True, True]
        with pytest.raises(ServerSleepingError):
            _ = models["b"].model
        assert (await models["b"].status()).slots == ()
        assert await ask(models["b"]) == "b: hi"
        assert library.loads == ["b"]
        assert models["b"].model.info.name == "scripted"
        with pytest.raises(KeyError):
            models["c"]
        assert (await models["a"].params({"temperature": 0.5})).sampling.temperature == 0.5
        assert library.loads == ["b", "a"]
    assert all(backend.closed for backend in library.open.values())
    with pytest.raises(ServerClosingError):
        await ask(models["a"])


def test_a_name_stands_for_a_file() -> None:
    models = Models({"small": "a.gguf", "other": Config(model="b.gguf", ctx_size=512)})
    assert models["small"].config == Config(model="a.gguf")
    assert models["other"].config.ctx_size == 512


def test_a_limit_that_makes_no_sense() -> None:
    with pytest.raises(ConfigError, match="max_loaded"):
        Models({}, max_loaded=-1)


async def test_the_one_used_least_recently_makes_room(mock_clock: MockClock) -> None:
    library = Library()
    async with library.models("abc", max_loaded=2) as models:
        for name in "abacb":
            assert await ask(models[name]) == f"{name}: hi"
            mock_clock.jump(1)
        assert library.loads == ["a", "b", "c", "b"]
        assert [name for name in models if models[name].lifecycle.sleeping] == ["a"]
    assert library.most == 2


async def test_one_in_use_is_waited_for(mock_clock: MockClock) -> None:
    library = Library()

    async def ask_in_vain(server: Server) -> None:
        with pytest.raises(DeadlineExceededError):
            await complete_within(server, "hi", 3)

    async with (
        library.models("ab", max_loaded=1) as models,
        trio.open_nursery() as nursery,
        models["a"].stream_complete("hi") as stream,
    ):
        nursery.start_soon(ask_in_vain, models["b"])
        nursery.start_soon(ask, models["b"])
        await wait_all_tasks_blocked()
        mock_clock.jump(4)
        await wait_all_tasks_blocked()
        assert library.loads == ["a"]
        assert await read(stream) == "a: hi"
    assert library.loads == ["a", "b"]
    assert library.most == 1


async def test_all_who_wait_get_their_turn(mock_clock: MockClock) -> None:
    library, answers = Library(), list[str]()

    async def note(server: Server) -> None:
        answers.append(await ask(server))

    async with (
        library.models("abcd", max_loaded=1) as models,
        trio.open_nursery() as nursery,
        models["a"].stream_complete("hi") as stream,
    ):
        for name in "bcdb":
            nursery.start_soon(note, models[name])
            await wait_all_tasks_blocked()
        await read(stream)
    assert sorted(answers) == ["b: hi", "b: hi", "c: hi", "d: hi"]
    assert library.loads == ["a", "b", "c", "d"]
    assert library.most == 1


async def test_many_requests_at_random() -> None:
    library, random = Library(), Random(7)
    names = "abcdefghij"

    async def client(seed: int) -> None:
        random = Random(seed)
        for _ in range(8):
            name = random.choice(names)
            prompt = f"{random.random()}"
            assert (await models[name].complete(prompt)).text == f"{name}: {prompt}"

    async with library.models(names, max_loaded=3) as models, trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(client, random.random())
    assert library.most <= 3
    assert len(library.loads) > 10  # some were loaded again


async def test_one_that_cannot_be_loaded_takes_no_place() -> None:
    library = Library()
    configs = {name: Config(model=name, stream_interval_ms=0) for name in ("missing", "a")}
    async with Models(configs, max_loaded=1, load=library, drive=stepping) as models:
        for _ in range(2):
            with pytest.raises(ModelLoadError, match="no such file"):
                await ask(models["missing"])
            assert await ask(models["a"]) == "a: hi"


async def test_cancelled_at_every_step(mock_clock: MockClock) -> None:
    """A cancelled request that waits for room takes none."""
    library = Library()
    async with library.models("ab", max_loaded=1) as models:
        for n in range(1, 1000):
            canceller = CancelAtStep(n)
            await ask(models["a"])

            async def ask_other() -> None:
                assert await ask(models["b"]) == "b: hi"

            await canceller.run(ask_other)
            if not canceller.scope.cancelled_caught:
                break
    assert n > 3
    assert library.most == 1
    assert all(backend.closed for backend in library.open.values())


async def test_leaving_while_one_waits_for_room(mock_clock: MockClock) -> None:
    library = Library()

    async def fail(server: Server) -> None:
        with pytest.raises(ServerClosingError):
            await ask(server)

    async with (
        trio.open_nursery() as nursery,
        library.models("ab", max_loaded=1) as models,
        models["a"].stream_complete("hi"),
    ):
        nursery.start_soon(fail, models["b"])
        await wait_all_tasks_blocked()
        assert models["b"].state is ServerState.LOADING
    assert [one.state for one in models.values()] == [ServerState.CLOSED] * 2
    assert library.loads == ["a"]


async def test_a_place_is_given_back_if_it_comes_with_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def make_room(_name: str) -> None:
        try:
            await trio.sleep_forever()
        finally:
            scope.cancel()

    models = Library().models("ab", max_loaded=1)
    monkeypatch.setattr(models, "_make_room", make_room)
    with trio.CancelScope() as scope:
        async with models._room("a"):
            await trio.sleep_forever()
    assert models._places.borrowed_tokens == 0
