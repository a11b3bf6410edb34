"""Models that take media generate what a plain loop does, whatever else the engine does."""

from __future__ import annotations

from pathlib import Path

import PIL.Image
import pytest
import trio

from tests.support.media_decoding import decode_prompt, logits
from tests.support.media_files import encode, wav_file
from tests.support.media_models import random_image, write_pair
from tests.support.plain_loop import EXACT
from trioserve import Audio, Config, Image, MixedPrompt, Server, llama
from trioserve.llama.backend import LlamaBackend
from trioserve.types import Prompt

pytestmark = pytest.mark.system

N = 12


def picture(seed: int, width: int, height: int) -> Image:
    found = random_image(width, height, seed=seed)
    return Image(encode(PIL.Image.frombytes("RGB", (width, height), found.pixels)))


def prompts(kind: str) -> list[MixedPrompt]:
    """Two questions about one image, one about another, and one about both, or about sound."""
    one, other = picture(0, 60, 60), picture(1, 100, 40)
    last = Audio(wav_file(1.5)) if kind == "mixed" else other
    parts = [
        [one, "What is this?"],
        [one, "What is this? ba du It is this. And why?"],
        ["Look: ", other],
        ["a", one, "b", last, "c"],
    ]
    return [MixedPrompt(each) for each in parts]


def greedy(backend: LlamaBackend, prompt: Prompt) -> list[int]:
    backend.memory.remove(0, 0)
    found, first = decode_prompt(backend, prompt)
    tokens = [int(found.argmax())]
    for pos in range(first, first + N - 1):
        if tokens[-1] in backend.vocab.end_of_generation:
            break
        backend.batch.clear()
        row = backend.batch.add(tokens[-1], pos, 0, logits=True)
        backend.decode()
        tokens.append(int(logits(backend, row).argmax()))
    return tokens


@pytest.mark.parametrize("kind", ["gemma3", "idefics3", "qwen2vl", "mixed"])
async def test_the_tokens_are_those_of_a_plain_loop(tmp_path: Path, kind: str) -> None:
    """Alone, from the cache, and beside others that start at the same time."""
    pair = write_pair(tmp_path, kind)
    config = Config(**pair.settings, **EXACT, ctx_size=4096, threads=1, parallel=4)
    asked = prompts(kind)
    async with Server(config) as server:
        alone = [await server.complete(one, temperature=0, max_tokens=N) for one in asked]
        again = [await server.complete(one, temperature=0, max_tokens=N) for one in asked]
    together: list[list[int]] = [[] for _ in asked]
    async with Server(config) as server, trio.open_nursery() as nursery:

        async def ask(place: int) -> None:
            output = await server.complete(asked[place], temperature=0, max_tokens=N)
            together[place] = list(output.tokens)

        for place in range(len(asked)):
            nursery.start_soon(ask, place)
    with llama.load(config) as backend:
        assert isinstance(backend, LlamaBackend)
        expected = [greedy(backend, output.prompt) for output in alone]
    assert [list(output.tokens) for output in alone] == expected
    assert [list(output.tokens) for output in again] == expected
    assert together == expected
