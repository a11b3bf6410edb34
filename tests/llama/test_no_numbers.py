"""Logits that are not finite: they end the request that they belong to, and no other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.support.gguf_models import Array, write_decoder
from trioserve import llama
from trioserve.config import Config
from trioserve.errors import DecodeError
from trioserve.llama import sampler as sampler_module
from trioserve.llama.backend import LlamaBackend
from trioserve.server import Server
from trioserve.types import Grammar, SamplingParams

NAN, INF = math.nan, math.inf


@pytest.fixture(scope="module")
def backend() -> Iterator[LlamaBackend]:
    with llama.load(Config(threads=1, ctx_size=256, parallel=2)) as backend:
        assert isinstance(backend, LlamaBackend)
        backend.batch.want_logits(backend.batch.extend([5], 0, 0))
        yield backend


def poisoned(backend: LlamaBackend, params: SamplingParams, places: object, value: float) -> None:
    """Draw from a row with these values in it."""
    backend.memory.remove(0, 0)
    backend.decode()
    with backend.sampler(params, ()) as sampler:
        backend._context.logits(0, backend.vocab.n_tokens)[places] = value
        sampler.sample(0)


@pytest.mark.parametrize("min_vocab", [0, 10**9])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0},
        {"top_k": 1},
        {"top_k": 0},
        {"top_k": 4},
        {"typical_p": 0.5},
        {"mirostat": 2},
        {"mirostat": 1},
        {"samplers": ("top_p",)},
        {"logit_bias": ((3, -1.0),), "temperature": 0.0},
    ],
)
def test_one_is_found_wherever_it_is(
    backend: LlamaBackend, fields: dict[str, object], min_vocab: int
) -> None:
    with mock.patch.multiple(sampler_module, _MIN_VOCAB=min_vocab, _BLOCK=10):
        for place, value in itertools.product([0, 1000, 2047, slice(None)], [NAN, INF]):
            with pytest.raises(DecodeError, match="not finite numbers"):
                poisoned(backend, SamplingParams(**fields), place, value)


def test_nothing_but_minus_infinity(backend: LlamaBackend) -> None:
    with pytest.raises(DecodeError):
        poisoned(backend, SamplingParams(), slice(None), -INF)


def test_minus_infinity_is_a_token_that_cannot_be(backend: LlamaBackend) -> None:
    poisoned(backend, SamplingParams(), slice(1, None), -INF)


@pytest.mark.parametrize("post", [False, True])
def test_with_probabilities(backend: LlamaBackend, post: bool) -> None:
    backend.memory.remove(0, 0)
    backend.decode()
    with backend.sampler(SamplingParams(), ()) as sampler:
        backend._context.logits(0, backend.vocab.n_tokens)[7] = NAN
        with pytest.raises(DecodeError):
            sampler.sample_with_probs(0, 3, post=post)


@pytest.mark.parametrize(
    ("source", "fields"),
    [
        ('root ::= "a" | "b"', {"temperature": 0.0}),
        ("root ::= [^a]+", {}),
        ("root ::= [^a]+", {"top_k": 2}),
    ],
)
def test_among_what_a_grammar_allows(
    backend: LlamaBackend, source: str, fields: dict[str, object]
) -> None:
    constraint = backend.compile(Grammar("gbnf", source))
    [token] = backend.vocab.tokenize("b")
    backend.memory.remove(0, 0)
    backend.decode()
    with backend.sampler(SamplingParams(**fields), (), constraint) as sampler:
        backend._context.logits(0, backend.vocab.n_tokens)[token] = NAN
        with pytest.raises(DecodeError):
            sampler.sample(0)


# -- models


def model(path: Path, name: str, value: float, row: int | slice = slice(None)) -> str:
    """Write a model with a weight that is NaN."""

    def change(weights: dict[str, Array]) -> None:
        weights["output.weight"] = weights["token_embd.weight"].copy()
        weights[name] = weights[name].copy()
        weights[name][row] = value

    return str(write_decoder(path / "model.gguf", pooling=None, change=change))


@pytest.mark.parametrize(
    ("name", "value"), [("blk.0.attn_v.weight", NAN), ("output_norm.weight", INF)]
)
async def test_a_model_that_computes_no_numbers(tmp_path: Path, name: str, value: float) -> None:
    path = model(tmp_path, name, value)
    async with Server(Config(model=path, threads=1, ctx_size=512, parallel=2)) as server:
        for temperature in (0.0, 0.8):
            with pytest.raises(DecodeError, match="not finite numbers"):
                await server.complete("Hi", temperature=temperature)
        assert server.lifecycle.ready


@pytest.mark.parametrize("unified", [False, True])
async def test_a_neighbour_goes_on(tmp_path: Path, unified: bool) -> None:
    """One token's embedding is NaN, and so is all that follows it, but nothing else.

    This needs flash attention, the default. Without it, llama.cpp multiplies all that is or was in
    the KV cache by zeros, and NaN times zero is NaN.
    """
    path = model(tmp_path, "token_embd.weight", NAN, ord("~"))
    config = Config(model=path, threads=1, ctx_size=1024, parallel=2, kv_unified=unified)
    async with Server(config) as server:
        assert await server.tokenize("~") == (ord("~"),)
        expected = (await server.complete("abc", temperature=0, max_tokens=60)).text
        async with server.stream_complete("abc", temperature=0, max_tokens=60) as neighbour:
            with pytest.raises(DecodeError):
                await server.complete("abc~d", temperature=0, max_tokens=5)
            text = "".join([getattr(event, "text", "") async for event in neighbour])
        assert text == expected
        with pytest.raises(DecodeError):
            await server.complete("abc~d", temperature=0, max_tokens=5)
        assert (await server.complete("abc", temperature=0, max_tokens=60)).text == expected
        assert (await server.complete("xyz", temperature=0, max_tokens=60)).text
