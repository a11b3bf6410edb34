"""The projector on tiny models: what it makes of media, and how the model takes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial

import numpy as np
import pytest

from tests.support.media_decoding import decode_as_libmtmd, decode_prompt
from tests.support.media_models import KINDS, random_image, random_sound, write_pair
from trioserve import llama
from trioserve.config import Config
from trioserve.llama import LlamaBackend
from trioserve.llama.media.projector import LlamaProjector
from trioserve.types import DecodedAudio, DecodedImage, Prompt

#: So that logits hang as little as may be on how cells are put into batches.
EXACT = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attn": "off"}

Backends = Callable[[str], LlamaBackend]


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backends]:
    """Backends by the kind of their projector, each loaded once."""
    folder = tmp_path_factory.mktemp("media")
    with ExitStack() as stack:

        @cache
        def load(kind: str) -> LlamaBackend:
            config = Config(**write_pair(folder, kind).settings, **EXACT, ctx_size=8192, threads=1)
            backend = llama.load(config)
            assert isinstance(backend, LlamaBackend)
            return stack.enter_context(backend)

        yield load


def projector_of(backend: LlamaBackend) -> LlamaProjector:
    assert backend.projector is not None
    return backend.projector


def prepared(backend: LlamaBackend, *parts: str | DecodedImage | DecodedAudio) -> Prompt:
    return projector_of(backend).prepare(parts, add_special=True)


def empty(backend: LlamaBackend) -> None:
    for seq in range(backend.n_seqs):
        backend.seq_rm(seq, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_are_those_of_libmtmd(backends: Backends, kind: str) -> None:
    backend = backends(kind)
    make = partial(random_image, 150, 100) if projector_of(backend).sees else random_sound
    media = make()
    parts = ["What is\nthis: ", media, "? And this: ", media, "?"]
    prompt = prepared(backend, *parts)
    empty(backend)
    whole, next_pos = decode_prompt(backend, prompt)
    pieces, _ = decode_prompt(backend, prompt, seq=1, step=7)
    theirs, their_pos = decode_as_libmtmd(backend, parts, seq=2)
    assert next_pos == their_pos == prompt.n_positions
    np.testing.assert_allclose(whole, theirs, atol=1e-3)
    np.testing.assert_allclose(pieces, theirs, atol=1e-3)
    other = (
        random_image(150, 100, seed=1) if projector_of(backend).sees else random_sound(1, seed=1)
    )
    different, _ = decode_prompt(backend, prepared(backend, "What is\nthis: ", other), seq=3)
    assert np.abs(different - whole).max() > 0.1
