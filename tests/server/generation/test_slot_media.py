"""Texts with images and sound, saved to files and restored, on tiny models with random weights."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from tests.support.media_files import encode, wav_file
from tests.support.media_models import random_image, write_pair, write_projector
from tests.support.plain_loop import EXACT
from trioserve import Audio, Config, Image, MixedPrompt, Server
from trioserve.errors import InvalidRequestError
from trioserve.server.generation.slots import SlotFiles

pytestmark = pytest.mark.system

GREEDY = {"max_tokens": 8, "temperature": 0.0, "id_slot": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@asynccontextmanager
async def serving(
    folder: Path, kind: str, files: Path, **settings: Any
) -> AsyncIterator[tuple[Server, SlotFiles]]:
    config = {**write_pair(folder, kind).settings, **EXACT, "ctx_size": 1024, **settings}
    async with Server(Config(threads=1, slot_save_path=str(files), **config)) as server:
        yield server, server.lifecycle.services.slots


def picture(seed: int, width: int = 60, height: int = 60) -> Image:
    found = random_image(width, height, seed=seed)
    return Image(encode(PIL.Image.frombytes("RGB", (width, height), found.pixels)))


async def encoded(server: Server) -> int:
    return (await server.status()).counters.media_chunks


@pytest.mark.parametrize("kind", ["gemma3", "qwen2vl", "mixed"])
async def test_another_process_goes_on_from_a_file(folder: Path, tmp_path: Path, kind: str) -> None:
    sound = Audio(wav_file(1.0)) if kind == "mixed" else picture(1, 100, 40)
    begin = ["Look: ", picture(0), " and ", sound, " What is it?"]
    async with serving(folder, kind, tmp_path) as (server, files):
        first = await server.complete(MixedPrompt(begin), **GREEDY)
        saved = await files.save(0, "one", "")
        assert saved.n_tokens == len(first.prompt) + len(first.tokens) - 1
        again = MixedPrompt([*begin, first.text, "? "])
        expected = await server.complete(again, **GREEDY)
    async with serving(folder, kind, tmp_path) as (server, files):
        restored = await files.restore(0, "one", "")
        assert (restored.n_tokens, restored.n_bytes) == (saved.n_tokens, saved.n_bytes)
        found = await server.complete(again, **GREEDY)
        assert found.tokens == expected.tokens
        assert found.finished.timings.cache_n == expected.finished.timings.cache_n
        assert await encoded(server) == 0
        other = MixedPrompt(["Look: ", picture(5), *begin[2:]])
        unlike = await server.complete(other, **GREEDY)
        assert unlike.finished.timings.cache_n < len(first.prompt) / 2
        assert await encoded(server) > 0


async def test_a_file_for_another_projector_is_refused(folder: Path, tmp_path: Path) -> None:
    async with serving(folder, "mlp", tmp_path) as (server, files):
        await server.complete(MixedPrompt([picture(0), "a"]), **GREEDY)
        await files.save(0, "seen", "")
        await files.restore(0, "seen", "")
    other = write_projector(folder / "other.gguf", "mlp", feed_forward_length=32)
    changed = bytearray(write_pair(folder, "mlp").projector.read_bytes())
    changed[-1] ^= 1
    other.write_bytes(changed)
    async with serving(folder, "mlp", tmp_path, mmproj=str(other)) as (server, files):
        with pytest.raises(InvalidRequestError, match="with another projector"):
            await files.restore(0, "seen", "")
    async with serving(folder, "mlp", tmp_path, mmproj=None) as (server, files):
        with pytest.raises(InvalidRequestError, match="without an mmproj"):
            await files.restore(0, "seen", "")
        assert (await server.complete("a", **GREEDY)).finished.timings.cache_n == 0
