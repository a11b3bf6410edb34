"""`Server.embed` of texts with images and sound, on tiny models with random weights."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from gguf import PoolingType
from numpy.typing import NDArray

from tests.support.gguf_models import write_bert, write_decoder
from tests.support.media_files import encode, wav_file
from tests.support.media_models import random_image, write_pair
from tests.support.plain_loop import EXACT
from trioserve import Audio, Config, Image, MixedPrompt, Server
from trioserve.errors import (
    ContextLengthExceededError,
    InvalidMediaError,
    ModelLoadError,
    UnsupportedFieldError,
)

pytestmark = pytest.mark.system

Array = NDArray[np.float32]

N_CTX = 2048


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@asynccontextmanager
async def serving(folder: Path, kind: str, **settings: Any) -> AsyncIterator[Server]:
    pair = write_pair(folder, kind)
    config = {**pair.settings, **EXACT, "ctx_size": N_CTX, "threads": 1, **settings}
    async with Server(Config(embeddings=True, **config)) as server:
        yield server


def picture(seed: int, width: int = 60, height: int = 60) -> Image:
    found = random_image(width, height, seed=seed)
    return Image(encode(PIL.Image.frombytes("RGB", (width, height), found.pixels)))


def texts(kind: str) -> list[MixedPrompt | str]:
    """Text around an image, after one, before one, and two of them, or one and sound."""
    one, other = picture(0), picture(1, 100, 40)
    if kind == "qwen3a":
        one, other = Audio(wav_file(1.0)), Audio(wav_file(0.3))
    return [
        MixedPrompt(["What is this: ", one, "?"]),
        "nothing but text",
        MixedPrompt([one, "x"]),
        MixedPrompt(["ends in ", one]),
        MixedPrompt(["a", one, "b", other, "c"]),
    ]


@pytest.mark.parametrize("kind", ["gemma3", "qwen2vl", "qwen3a"])
async def test_a_pooled_embedding_is_of_all_cells(folder: Path, kind: str) -> None:
    """Those of the cells, which come in several batches, are the truth for the others."""
    asked = texts(kind)
    async with serving(folder, kind, pooling="none") as server:
        cells = await server.embed(asked)
    assert tuple(map(len, cells.vectors)) == cells.n_tokens
    for pooling in ("mean", "cls", "last"):
        async with serving(folder, kind, pooling=pooling) as server:
            pooled = await server.embed(asked, normalize=-1)
            alone = [(await server.embed([one], normalize=-1)).vectors[0] for one in asked]
        assert pooled.n_tokens == cells.n_tokens
        for rows, found, same in zip(cells.vectors, pooled.vectors, alone, strict=True):
            expected = {"mean": rows.mean(axis=0), "cls": rows[0], "last": rows[-1]}[pooling]
            np.testing.assert_allclose(found, expected, atol=2e-4, rtol=1e-3)
            np.testing.assert_allclose(found, same, atol=2e-4, rtol=1e-3)


async def test_an_embedding_hangs_on_what_is_seen(folder: Path) -> None:
    async with serving(folder, "mlp", pooling="last") as server:
        one, same, other, text = (
            await server.embed(
                [MixedPrompt(["It is ", picture(seed), "."]) for seed in (0, 0, 1)] + ["It is ."]
            )
        ).vectors
        status = await server.status()
    assert np.array_equal(one, same)
    assert np.abs(one - other).max() > 0.01 < np.abs(one - text).max()
    assert status.counters.media_chunks == 2


async def test_what_cannot_be_computed_is_refused(folder: Path) -> None:
    async with serving(folder, "mlp", pooling="last", ctx_size=256) as server:
        with pytest.raises(InvalidMediaError, match=r"'prompt\[1\]'"):
            await server.embed([MixedPrompt(["a", Image(b"no image")])])
        with pytest.raises(ContextLengthExceededError):
            await server.embed([MixedPrompt([picture(0), "a" * 300])])
        with pytest.raises(UnsupportedFieldError, match="audio input is not supported"):
            await server.embed([MixedPrompt([Audio(wav_file(0.5))])])
        assert len((await server.embed(["still there"])).vectors) == 1


@pytest.mark.parametrize("kind", ["encoder", "ranker"])
async def test_models_that_take_text_only(folder: Path, kind: str) -> None:
    projector = write_pair(folder, "mlp").projector
    if kind == "encoder":
        model, why = write_bert(folder / "bert.gguf").path, "takes a text as a whole"
    else:
        model = write_decoder(folder / "judge.gguf", pooling=PoolingType.RANK, labels=["yes"])
        why = "ranks documents"
    config = Config(model=str(model), mmproj=str(projector), embeddings=True, threads=1)
    with pytest.raises(ModelLoadError, match=why):
        async with Server(config):
            pass
