"""Embeddings and scores of every architecture are those of llama.cpp, alone and in company."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from gguf import PoolingType

from tests.support import tiny_models
from tests.support.architectures import GENERATING, WINDOW
from tests.support.engine_events import take_events
from tests.support.gguf_models import WORD_PIECES, write_bert
from tests.support.plain_loop import EXACT, plain_embeddings
from trioserve import llama
from trioserve.config import Config
from trioserve.engine import EmbeddingBackend, EmbeddingEngine
from trioserve.engine.backend import POOLINGS
from trioserve.errors import DecodeInterruptedError
from trioserve.llama.embedding import LlamaEmbedder
from trioserve.llama.library import lib
from trioserve.types import Embedded, EmbeddingTask

LENGTHS = (1, 2, 7, 3 * WINDOW, 5, 2 * WINDOW, 4 * WINDOW)


def random_texts(n_tokens: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(7)
    return [tuple(int(token) for token in rng.integers(5, n_tokens, n)) for n in LENGTHS]


def embed(
    path: Path, tasks: Sequence[Sequence[tuple[int, ...]]], **config: object
) -> list[list[np.ndarray]]:
    """Embed the texts of some tasks at the same time."""
    backend = llama.load(Config(model=str(path), threads=1, **{**EXACT, "parallel": 4, **config}))
    engine = EmbeddingEngine(backend, lambda: None)
    try:
        for i, texts in enumerate(tasks):
            engine.submit(EmbeddingTask(i, tuple(texts)))
        while engine.step():
            pass
        done = {event.task_id: event for event in take_events(engine) if type(event) is Embedded}
        return [[vectors[0] for vectors in done[i].embeddings] for i in range(len(tasks))]
    finally:
        backend.close()


def assert_close(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> None:
    """Check that vectors are the same but for rounding, and that no two texts have the same."""
    assert len({tuple(vector.round(3)) for vector in wanted}) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        size = float(np.linalg.norm(other))
        assert size > 0
        assert float(np.linalg.norm(one - other)) < 1e-3 * size


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize(
    ("name", "pooling"), [*((name, "mean") for name in GENERATING), ("llama", "last")]
)
def test_of_models_that_generate(folder: Path, name: str, pooling: str) -> None:
    path = tiny_models.write_generating(folder, name)
    texts = random_texts(500)
    wanted = plain_embeddings(path, texts, pooling=POOLINGS.index(pooling))
    config = {"embeddings": True, "pooling": pooling}
    for i in (0, 3):
        assert_close(embed(path, [[texts[i]]], **config)[0], [wanted[i]])
    first, second, third = embed(path, [texts[:3], texts[3:], texts[::-1]], **config)
    assert_close([*first, *second], wanted)
    assert_close(third, wanted[::-1])


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba2", "lfm2"])
def test_of_texts_that_are_computed_in_parts(folder: Path, name: str) -> None:
    path = tiny_models.write_generating(folder, name)
    texts = random_texts(500)
    wanted = plain_embeddings(path, texts, pooling=POOLINGS.index("last"))
    config = {"embeddings": True, "pooling": "last", "batch_size": WINDOW, "ubatch_size": WINDOW}
    (found,) = embed(path, [texts], **config)
    assert_close(found, wanted)


@pytest.mark.parametrize("pooling", [PoolingType.MEAN, PoolingType.CLS, PoolingType.LAST])
def test_of_bert(folder: Path, pooling: PoolingType) -> None:
    model = write_bert(folder / f"bert-{pooling.name}.gguf", pooling=pooling)
    texts = random_texts(len(WORD_PIECES))
    wanted = plain_embeddings(model.path, texts)
    first, second = embed(model.path, [texts, texts[::-1]], embeddings=True)
    assert_close(first, wanted)
    assert_close(second, wanted[::-1])


def test_scores_of_bert(folder: Path) -> None:
    model = write_bert(folder / "rank.gguf", pooling=PoolingType.RANK, labels=["relevant"], seed=2)
    texts = random_texts(len(WORD_PIECES))
    wanted = plain_embeddings(model.path, texts, width=1)
    first, second = embed(model.path, [texts, texts[::-1]], reranking=True)
    assert_close(first, wanted)
    assert_close(second, wanted[::-1])


@pytest.mark.parametrize("has_cache", [True, False])
def test_an_interrupted_batch_can_be_computed_again(folder: Path, has_cache: bool) -> None:
    path = folder / "interrupted.gguf"
    if has_cache:
        path = tiny_models.write_generating(folder, "llama")
    else:
        write_bert(path, pooling=PoolingType.MEAN)
    backend = llama.load(Config(model=str(path), threads=1, embeddings=True, pooling="mean"))
    assert isinstance(backend, EmbeddingBackend)
    try:
        vectors = []
        for interrupts in (False, True):
            backend.batch.clear()
            backend.batch.extend((5, 6, 7), 0, 0)
            if interrupts:
                backend.interrupt()
                with pytest.raises(DecodeInterruptedError):
                    backend.compute()
            backend.compute()
            vectors.append(backend.pooled(0))
            backend.forget(0)
        np.testing.assert_array_equal(*vectors)
    finally:
        backend.close()


def test_no_logits_are_computed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_models.write_generating(folder, "llama")
    found = []
    for installs in (True, False):
        if not installs:
            monkeypatch.setattr("trioserve.llama.no_logits.install", lambda params: None)
        config = Config(model=str(path), threads=1, embeddings=True, pooling="mean")
        backend = llama.load(config)
        assert isinstance(backend, LlamaEmbedder)
        try:
            backend.batch.extend((5, 6, 7), 0, 0)
            backend.compute()
            logits = lib.llama_get_logits(backend._context.handle)
            found.append((backend.pooled(0), np.ctypeslib.as_array(logits, shape=(3, 500)).copy()))
        finally:
            backend.close()
    (embedding, unset), (wanted, logits) = found
    np.testing.assert_array_equal(embedding, wanted)
    assert not np.array_equal(unset, logits)
