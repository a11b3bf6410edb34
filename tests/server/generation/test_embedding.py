"""`Server.embed` and `Server.rerank` on small models with random weights."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from gguf import PoolingType
from numpy.typing import NDArray
from structlog.testing import capture_logs

from tests.support.gguf_models import (
    CLS,
    HEADS,
    LAYERS,
    SEP,
    WIDTH,
    WORD_PIECES,
    Bert,
    write_bert,
    write_decoder,
)
from tests.support.plain_loop import EXACT
from tests.support.scripted_embedder import ScriptedEmbedder
from tests.support.scripted_server import within
from trioserve.config import Config
from trioserve.config.parse import parse
from trioserve.errors import (
    ConfigError,
    DeadlineExceededError,
    InputTooLongError,
    InvalidRequestError,
    ModelLoadError,
    NotSupportedError,
    QueueFullError,
    ServerClosingError,
)
from trioserve.server import Server
from trioserve.testing import stepping
from trioserve.types import EmbeddingTask

Array = NDArray[np.float32]

TEXTS = ["the cat sits on the mat", "what is a panda?", "the dog runs", "mat", "", "x1 y2 bear."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def mean(folder: Path) -> Bert:
    return write_bert(folder / "mean.gguf")


@pytest.fixture(scope="module")
def ranker(folder: Path) -> Bert:
    return write_bert(folder / "rank.gguf", pooling=PoolingType.RANK, labels=["relevant"], seed=2)


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Path:
    return write_decoder(folder / "last.gguf")


@pytest.fixture(scope="module")
def causal_ranker(folder: Path) -> Path:
    return write_decoder(
        folder / "judge.gguf",
        pooling=PoolingType.RANK,
        labels=["yes", "no"],
        rerank_template="Q: {query}\nD: {document}\nA:",
    )


@asynccontextmanager
async def serving(model: Path, **settings: Any) -> AsyncIterator[Server]:
    settings.setdefault("embeddings", not settings.get("reranking"))
    async with Server(Config(model=str(model), threads=1, **EXACT, **settings)) as server:
        yield server


# -- against a computation of our own


def bert(model: Bert, tokens: tuple[int, ...]) -> Array:
    """The vectors of the tokens, computed with numpy. Shape (tokens, width)."""
    w = model.weights

    def norm(x: Array, name: str) -> Array:
        centred = x - x.mean(axis=1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-6)
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: Array, name: str) -> Array:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = w["token_embd.weight"][list(tokens)] + w["token_types.weight"][0]
    x = norm(x + w["position_embd.weight"][: len(tokens)], "token_embd_norm")
    for layer in range(LAYERS):
        name = f"blk.{layer}"
        q, k, v = (
            linear(x, f"{name}.attn_{part}").reshape(len(tokens), HEADS, -1).swapaxes(0, 1)
            for part in "qkv"
        )
        weights = q @ k.swapaxes(1, 2) / math.sqrt(WIDTH / HEADS)
        weights = np.exp(weights - weights.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        seen = (weights @ v).swapaxes(0, 1).reshape(len(tokens), WIDTH)
        x = norm(x + linear(seen, f"{name}.attn_output"), f"{name}.attn_output_norm")
        up = linear(x, f"{name}.ffn_up")
        up = 0.5 * up * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        x = norm(x + linear(up, f"{name}.ffn_down"), f"{name}.layer_output_norm")
    return x


def pieces(*words: str) -> tuple[int, ...]:
    return tuple(WORD_PIECES.index("\u2581" + word) for word in words)


CAT = (CLS, *pieces("the", "cat", "sits"), SEP)


async def test_a_mean(mean: Bert) -> None:
    async with serving(mean.path) as server:
        done = await server.embed("The cat sits", normalize=-1)
        assert len(done.vectors) == 1
        wanted = bert(mean, CAT).mean(axis=0)
        np.testing.assert_allclose(done.vectors[0], wanted, atol=3e-3)
        assert done.n_tokens == (len(CAT),)
        assert server.model.info.n_embd == WIDTH


async def test_every_token(mean: Bert) -> None:
    async with serving(mean.path, pooling="none") as server:
        done = await server.embed(["the cat sits", CAT])
        for vectors in done.vectors:
            np.testing.assert_allclose(vectors, bert(mean, CAT), atol=3e-3)
        for settings in ({"normalize": 2}, {"dimensions": 3}):
            with pytest.raises(InvalidRequestError):
                await server.embed(["a"], **settings)


async def test_a_score(ranker: Bert) -> None:
    tokens = (CLS, *pieces("what"), SEP, SEP, *pieces("the", "cat"), SEP)
    w = ranker.weights
    pooled = np.tanh(w["cls.weight"] @ bert(ranker, tokens)[0] + w["cls.bias"])
    wanted = w["cls.output.weight"] @ pooled + w["cls.output.bias"]
    async with serving(ranker.path, reranking=True) as server:
        done = await server.rerank("what", "the cat")
        assert done.n_tokens == (len(tokens),)
        assert done.scores[0] == pytest.approx(wanted[0], abs=5e-3)


# -- properties


@pytest.mark.parametrize("pooling", ["mean", "last"])
async def test_many_at_once_are_as_one_by_one(mean: Bert, decoder: Path, pooling: str) -> None:
    # GELU is looked up by a half-precision number, so a rounding may show.
    for path, tolerance in ((mean.path, 1e-4), (decoder, 1e-5)):
        async with serving(path, pooling=pooling, ubatch_size=64) as server:
            texts = [text or "a" for text in TEXTS] * 40
            together = await server.embed(texts)
            assert len(together.vectors) == 240
            for i, text in enumerate(TEXTS):
                alone = await server.embed([text or "a"])
                for copy in range(i, 240, 60):
                    np.testing.assert_allclose(
                        together.vectors[copy], alone.vectors[0], atol=tolerance, rtol=0
                    )


@pytest.mark.parametrize("pooling", ["none", "last"])
async def test_a_long_text_of_a_causal_model_comes_in_parts(decoder: Path, pooling: str) -> None:
    text = "bad ce " * 100
    results = []
    for size in (512, 64):
        async with serving(decoder, pooling=pooling, ubatch_size=size) as server:
            done = await server.embed(["short", text, "short"])
            assert done.n_tokens[1] > 64
            results.append(done.vectors)
    for whole, parts in zip(*results, strict=True):
        np.testing.assert_allclose(whole, parts, atol=1e-4)


async def test_scores_of_a_causal_model_in_parts(causal_ranker: Path) -> None:
    documents = ["bad ce " * 60, "du", "ba du " * 30]
    scores = []
    for size in (512, 32):
        async with serving(causal_ranker, reranking=True, ubatch_size=size) as server:
            done = await server.rerank("what {document}", documents)
            scores.append(done.scores)
            # The query is not read as a template.
            assert done.n_tokens[1] == len(
                server.model.vocab.tokenize("Q: what {document}\nD: du\nA:")
            )
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    assert all(0 < score < 1 for score in scores[0])  # a share of two labels


async def test_a_document_in_a_template_is_cut(causal_ranker: Path) -> None:
    async with serving(causal_ranker, reranking=True) as server:
        tokenize = server.model.vocab.tokenize
        first = tokenize("bad ce bad", add_special=False)[:3]
        text = server.model.vocab.detokenize(first).decode()
        expected = await server.rerank("what", text)
        done = await server.rerank("what", ["bad ce bad ce " * 100, text], most=3)
        assert done.n_tokens == expected.n_tokens * 2
        assert done.scores == pytest.approx(expected.scores * 2, abs=1e-4)


@pytest.mark.parametrize(
    ("norm", "size"),
    [
        (0, lambda v: np.abs(v).max() / 32760),
        (1, lambda v: np.abs(v).sum()),
        (2, lambda v: math.sqrt((v**2).sum())),
        (3, lambda v: (np.abs(v) ** 3).sum() ** (1 / 3)),
    ],
)
async def test_norms_and_dimensions(mean: Bert, norm: int, size: Any) -> None:
    async with serving(mean.path, embd_normalize=norm) as server:
        raw = (await server.embed(TEXTS, normalize=-1)).vectors
        for n in (None, 5, WIDTH):
            done = await server.embed(TEXTS, dimensions=n)
            for vector, one in zip(done.vectors, raw, strict=True):
                np.testing.assert_allclose(vector, one[:n] / size(one[:n]), rtol=1e-5)


async def test_the_best_documents_come_first(ranker: Bert) -> None:
    async with serving(ranker.path, reranking=True) as server:
        done = await server.rerank("what", TEXTS)
        order = done.best()
        assert sorted(order) == list(range(len(TEXTS)))
        ordered = [done.scores[i] for i in order]
        assert ordered == sorted(ordered, reverse=True)
        assert done.best(2) == order[:2]
        assert done.best(0) == ()
        again = await server.rerank("what", [TEXTS[order[0]]])
        assert again.scores[0] == pytest.approx(ordered[0], abs=1e-4)


async def test_requests_share_batches_and_get_their_own(mean: Bert) -> None:
    async with serving(mean.path) as server:
        alone = await server.embed(TEXTS)
        results: dict[int, Any] = {}

        async def ask(number: int) -> None:
            results[number] = await server.embed(TEXTS[number:] + TEXTS[:number])

        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(ask, number)
        for number, done in results.items():
            for i, vector in enumerate(done.vectors):
                wanted = alone.vectors[(i + number) % 6]
                np.testing.assert_allclose(vector, wanted, atol=1e-5, rtol=0)


async def test_large_answers_are_normalized_in_a_thread(mean: Bert) -> None:
    async with serving(mean.path) as server:
        done = await server.embed(["mat"] * 3000)
        np.testing.assert_allclose(np.linalg.norm(done.vectors, axis=1), 1, rtol=1e-5)


# -- what is refused


async def test_texts_that_are_too_long(mean: Bert, decoder: Path) -> None:
    async with serving(mean.path) as server:
        with pytest.raises(InputTooLongError, match=r"82 tokens.*holds 64"):
            await server.embed(["mat", "the cat " * 40])
    async with serving(mean.path, ubatch_size=32) as server:
        with pytest.raises(InputTooLongError, match=r"42 tokens.* 32 .*--ubatch-size"):
            await server.embed(["the cat " * 20])
        assert (await server.embed(["the cat " * 15])).n_tokens == (32,)
    async with serving(decoder, kv_unified_per_slot=40) as server:
        with pytest.raises(InputTooLongError, match="holds 40"):
            await server.embed(["bad ce " * 20])
    async with serving(decoder, ctx_size=256) as server:
        with pytest.raises(InputTooLongError, match="holds 256"):
            await server.embed(["bad ce " * 100])


async def test_scaled_positions_make_room_for_longer_texts(mean: Bert, decoder: Path) -> None:
    async with serving(decoder, rope_freq_scale=0.5, ctx_size=1024) as server:
        done = await server.embed(["bad ce " * 200])
        assert 512 < done.n_tokens[0] < 1024
    async with serving(mean.path, rope_freq_scale=0.5) as server:  # it has a table of positions
        with pytest.raises(InputTooLongError, match="holds 64"):
            await server.embed(["the cat " * 40])


async def test_inputs_that_make_no_sense(mean: Bert) -> None:
    async with serving(mean.path) as server:
        for inputs in ([], [()], [(1, 10**6)]):
            with pytest.raises(InvalidRequestError):
                await server.embed(inputs)
        for settings in ({"normalize": -2}, {"dimensions": 0}, {"dimensions": WIDTH + 1}):
            with pytest.raises(InvalidRequestError):
                await server.embed(["a"], **settings)


async def test_a_server_does_one_thing(mean: Bert, ranker: Bert, decoder: Path) -> None:
    async with serving(mean.path) as server:
        with pytest.raises(NotSupportedError, match="--reranking"):
            await server.rerank("a", ["b"])
        with pytest.raises(NotSupportedError, match="no text"):
            await server.complete("a")
        with pytest.raises(NotSupportedError, match="no text"):
            await server.chat([{"role": "user", "content": "Hi"}])
        assert await server.tokenize("the cat sits") == CAT
        server.lifecycle.check_live()
    async with serving(ranker.path) as server:
        with pytest.raises(NotSupportedError, match="ranks"):
            await server.embed(["a"])
        assert len((await server.rerank("a", ["b", "c"])).scores) == 2
    async with serving(decoder, embeddings=False, embd_ctx_size=0) as server:
        with pytest.raises(NotSupportedError, match="--embeddings"):
            await server.embed(["a"])
        with pytest.raises(NotSupportedError, match="--reranking"):
            await server.rerank("a", ["b"])
        with pytest.raises(NotSupportedError):
            server.lifecycle.services.loop.check(EmbeddingTask(1, ((1,),)))


async def test_models_that_cannot_do_it_are_refused(mean: Bert, decoder: Path) -> None:
    for path, settings, why in (
        (mean.path, {"embeddings": False}, "--embeddings"),
        (decoder, {"reranking": True}, "no classification head"),
    ):
        with pytest.raises(ModelLoadError, match=why):
            async with serving(path, **settings):
                pass


def test_options() -> None:
    config = parse(["--embedding", "--pooling", "cls", "--embd-normalize", "-1"], {}).config
    assert (config.embeddings, config.pooling, config.embd_normalize) == (True, "cls", -1)
    assert parse([], {"LLAMA_ARG_RERANKING": "1"}).config.serves_embeddings
    assert parse([], {"LLAMA_ARG_EMBEDDINGS": "1", "LLAMA_ARG_POOLING": "last"}).config.embeddings
    assert not parse([], {}).config.serves_embeddings
    for flags in (["--rerank", "--pooling", "cls"], ["--pooling", "x"]):
        with pytest.raises(ConfigError):
            parse(flags, {})


# -- cancellation and limits, on a script


def scripted(**settings: Any) -> tuple[Server, ScriptedEmbedder]:
    backend = ScriptedEmbedder()
    config = Config(embeddings=True, **settings)
    return Server(config, load=lambda _config, progress=None: backend, drive=stepping), backend


async def test_leaving_frees_the_engine(autojump_clock: trio.testing.MockClock) -> None:
    server, backend = scripted(parallel=1)
    async with server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.embed, [(1,) * 16] * 1000)
            while len(backend.batches) < 3:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        n_batches = len(backend.batches)
        await trio.testing.wait_all_tasks_blocked()
        assert len(backend.batches) == n_batches
        assert len(server.lifecycle.services.dispatcher) == 0
        assert (await server.status()).slots[0].state == "idle"
        assert len((await server.embed([(1, 2)])).vectors) == 1
    assert backend.closed


async def test_a_deadline_ends_it(mock_clock: trio.testing.MockClock) -> None:
    server, backend = scripted()
    async with server, trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(DeadlineExceededError):
                await server.embed([(1,) * 16] * 10_000, context=within(5))

        nursery.start_soon(ask)
        while not backend.batches:
            await trio.lowlevel.checkpoint()
        mock_clock.jump(6)


async def test_the_queue_is_bounded_and_draining_refuses() -> None:
    server, _ = scripted(max_queue=0)
    async with server:
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(server.embed, [(1,) * 16] * 10_000)
            while len(server.lifecycle.services.dispatcher) < 2:
                await trio.lowlevel.checkpoint()
            with pytest.raises(QueueFullError):
                await server.embed([(1, 2)])
            nursery.cancel_scope.cancel()
        await server.drain()
        with pytest.raises(ServerClosingError):
            await server.embed([(1, 2)])


async def test_a_request_is_logged_once() -> None:
    server, _ = scripted()
    async with server:
        with capture_logs() as logs:
            await server.embed([(1, 2), (3,)])
        assert [line["event"] for line in logs] == ["request started", "request ended"]
        assert logs[1]["prompt_tokens"] == 3 and logs[1]["finish"] == "none"
