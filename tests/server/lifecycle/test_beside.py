"""Embeddings beside text: a second context, made at the first request, and freed when idle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from tests.support.scripted_embedder import ScriptedEmbedder
from tests.support.scripted_server import serve
from tests.support.scripts import HI
from tests.support.served_model import served
from trioserve import llama
from trioserve.config import Config
from trioserve.errors import (
    DecodeError,
    EngineError,
    ModelLoadError,
    NotSupportedError,
    ServerClosingError,
    UnavailableError,
)
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.embedding import pooling_beside
from trioserve.server.lifecycle.beside import IDLE_SECONDS
from trioserve.testing import ScriptedBackend


class Made:
    """Makes embedders, and keeps them."""

    def __init__(self) -> None:
        self.all: list[ScriptedEmbedder] = []
        self.failure: Exception | None = None
        self.backend = ScriptedBackend(embedding_pooling="last", embedder=self)

    def __call__(self) -> ScriptedEmbedder:
        if self.failure is not None:
            raise self.failure
        self.all.append(ScriptedEmbedder(pooling="last"))
        return self.all[-1]


async def test_it_is_made_once_and_freed_when_it_is_idle(autojump_clock: MockClock) -> None:
    made = Made()
    async with serve(made.backend) as server:
        assert (await server.complete("ab")).text == "AB"
        assert not made.all
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(server.embed, ["one", "two"])
        assert (await server.complete("ab")).text == "AB"
        (first,) = made.all
        await trio.sleep(IDLE_SECONDS - 1)
        await server.embed("three")
        await trio.sleep(IDLE_SECONDS - 1)
        assert not first.closed
        await trio.sleep(2)
        assert first.closed and not made.backend.closed
        assert len((await server.embed("four")).vectors) == 1
    assert len(made.all) == 2
    assert all(one.closed for one in made.all) and made.backend.closed


@pytest.mark.parametrize(
    "failure", [ModelLoadError("Out of memory."), MemoryError("Out of memory.")], ids=repr
)
async def test_one_that_cannot_be_made_fails_its_requests_only(
    failure: Exception, autojump_clock: MockClock
) -> None:
    made = Made()
    made.failure = failure
    async with serve(made.backend) as server:
        for _ in range(2):
            with pytest.raises(UnavailableError, match="Out of memory"):
                await server.embed("one")
        assert (await server.complete("ab")).text == "AB"
        await server.check_live()
        made.failure = None
        await server.embed("one")
    assert len(made.all) == 1


async def test_one_that_fails_is_made_again(autojump_clock: MockClock) -> None:
    made = Made()
    async with serve(made.backend) as server:
        await server.embed("one")
        made.all[0].failures = [DecodeError("broken")]
        with pytest.raises(DecodeError):
            await server.embed("two")
        await server.embed("one")
        assert len(made.all) == 1

        def fail() -> None:
            raise RuntimeError("worse")

        made.all[0].meanwhile = fail
        with pytest.raises(EngineError, match="engine failed"):
            await server.embed("two")
        await server.check_live()
        assert (await server.complete("ab")).text == "AB"
        await server.embed("three")
        assert made.all[0].closed and len(made.all) == 2


async def test_a_server_without_it_says_so() -> None:
    async with serve(ScriptedBackend()) as server:
        with pytest.raises(NotSupportedError, match="Start it with `--embeddings`"):
            await server.embed("one")


def test_its_embeddings_are_those_of_a_server_for_embeddings() -> None:
    body = {"input": ["The cat sits.", "A dog runs. " * 60], "encoding_format": "float"}
    vectors = []
    for fields in ({}, {"embeddings": True, "pooling": "last"}):
        with served(Config(threads=1, ctx_size=512, parallel=2, **fields)) as server:
            answer = server.post("/v1/embeddings", body)
            vectors.append([one["embedding"] for one in answer["data"]])
            if not fields:
                chat = {"messages": HI, "max_tokens": 4}
                assert server.post("/v1/chat/completions", chat)["choices"]
    assert np.abs(np.subtract(*vectors)).max() < 1e-4


def test_the_context_keeps_the_weights() -> None:
    with llama.load(Config(threads=1, ctx_size=256, parallel=1)) as backend:
        assert isinstance(backend, LlamaBackend)
        embedder = backend.embedder()
    embedder.batch.extend(embedder.vocab.tokenize("The cat"), 0, 0)
    embedder.compute()
    assert embedder.pooled(0).shape == (1, embedder.width)
    for _ in range(2):
        embedder.close()
    with pytest.raises(ServerClosingError):
        backend.embedder()


@pytest.mark.parametrize(
    ("said", "config", "pooling"),
    [
        ("", {}, "last"),
        ("0", {}, "last"),
        ("1", {}, "mean"),
        ("3", {}, "last"),
        ("9", {}, "last"),
        ("1", {"pooling": "cls"}, "cls"),
        ("", {"pooling": "none"}, "none"),
    ],
)
def test_the_pooling_is_as_the_model_says(said: str, config: dict[str, Any], pooling: str) -> None:
    class Model:
        arch = "llama"
        metadata = {"llama.pooling_type": said} if said else {}

    model: Any = Model
    assert pooling_beside(model, Config(**config)) == pooling
