"""The projector on tiny models: what it makes of media, and how the model takes it."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import numpy as np
import pytest

from tests.support.media_decoding import decode_as_libmtmd, decode_prompt, logits
from tests.support.media_models import KINDS, RATE, random_image, random_sound, write_pair
from trioserve import llama
from trioserve.config import Config
from trioserve.engine.backend import MediaPiece
from trioserve.errors import (
    DecodeInterruptedError,
    EncodeInterruptedError,
    EngineError,
    InvalidMediaError,
    NotSupportedError,
    ServerClosingError,
)
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.media.projector import LlamaProjector
from trioserve.types import DecodedAudio, DecodedImage, DecodedVideo, MediaChunk, Prompt
from trioserve.types.media import content_id

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
        backend.memory.remove(seq, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_are_those_of_libmtmd(backends: Backends, kind: str) -> None:
    backend = backends(kind)
    make = partial(random_image, 150, 100) if projector_of(backend).sees else random_sound
    media = make()
    parts = ["What is\nthis: ", media, "? And this: ", media, "?"]
    prompt = prepared(backend, *parts)
    empty(backend)
    whole, next_pos = decode_prompt(backend, prompt)
    pieces, _ = decode_prompt(backend, prompt, seq=1, step=100 if kind == "ultravox" else 7)
    theirs, their_pos = decode_as_libmtmd(backend, parts, seq=2)
    assert next_pos == their_pos == prompt.n_positions
    np.testing.assert_allclose(whole, theirs, atol=1e-3)
    np.testing.assert_allclose(pieces, theirs, atol=1e-3)
    other = (
        random_image(150, 100, seed=1) if projector_of(backend).sees else random_sound(1, seed=1)
    )
    different, _ = decode_prompt(backend, prepared(backend, "What is\nthis: ", other), seq=3)
    assert np.abs(different - whole).max() > 0.1


def test_what_a_projector_takes(backends: Backends) -> None:
    mixed, deaf = projector_of(backends("mixed")), projector_of(backends("gemma3"))
    assert (mixed.sees, mixed.hears, mixed.audio_rate, mixed.max_chunk) == (True, True, RATE, 0)
    assert (deaf.sees, deaf.hears, deaf.audio_rate, deaf.max_chunk) == (True, False, 0, 16)


def test_a_prompt_is_text_and_chunks(backends: Backends) -> None:
    backend = backends("mlp")
    prompt = prepared(backend, "a", random_image(), "b", random_image(seed=1))
    tokenize = backend.vocab.tokenize
    assert prompt.tokens == (*tokenize("a"), *tokenize("b"))
    assert [(n_before, chunk.n_cells) for n_before, chunk in prompt.media] == [(1, 16), (2, 16)]
    assert len(prompt) == prompt.n_positions == 34
    assert len({chunk.id for _, chunk in prompt.media}) == 2


def test_equal_content_has_equal_ids_and_tiles_have_their_own(backends: Backends) -> None:
    backend = backends("idefics3")
    first, again = (prepared(backend, random_image(90, 60)) for _ in range(2))
    assert first.keys == again.keys
    ids = [chunk.id for _, chunk in first.media]
    assert len(set(ids)) == len(ids) > 1
    other = prepared(backend, random_image(60, 90))
    assert not set(ids) & {chunk.id for _, chunk in other.media}


def test_windows_of_sound_have_their_own_ids(backends: Backends) -> None:
    prompt = prepared(backends("qwen3a"), random_sound(20))
    assert [chunk.n_cells for _, chunk in prompt.media] == [104, 104, 65]
    assert len({chunk.id for _, chunk in prompt.media}) == 3


def test_an_image_has_fewer_positions_than_cells(backends: Backends) -> None:
    ((_, chunk),) = prepared(backends("qwen2vl"), random_image(280, 140)).media
    assert (chunk.n_cells, chunk.n_positions) == (50, 10)


def video(n_frames: int, fps: float) -> DecodedVideo:
    frames = tuple((i / fps, random_image(56, 56, seed=i)) for i in range(n_frames))
    return DecodedVideo(frames=frames, id=content_id(*(one.id.encode() for _, one in frames)))


@pytest.mark.parametrize(("kind", "n_chunks"), [("qwen2vl", 5), ("mlp", 7)])
def test_a_video_is_frames_and_times(backends: Backends, kind: str, n_chunks: int) -> None:
    """Some models see two frames at once, unless a time is between them."""
    backend = backends(kind)
    prompt = projector_of(backend).prepare([video(7, 1)], add_special=False)
    assert [chunk.kind for _, chunk in prompt.media] == ["image"] * n_chunks
    text = backend.vocab.detokenize(prompt.tokens).decode()
    for mark in ("<|vision_start|>", "<|vision_end|>"):
        text = text.replace(mark, "")
    assert text == "Video:[0m0.00s][0m5.00s]"


def test_cells_are_decoded_for_several_sequences_at_once(backends: Backends) -> None:
    backend = backends("mlp")
    empty(backend)
    pieces, alone = [], []
    for seq in range(3):
        ((_, chunk),) = prepared(backend, random_image(seed=seq)).media
        piece = whole_piece(backend, chunk, seq)
        (row,) = backend.decode_media([piece])
        alone.append(logits(backend, row))
        backend.memory.remove(seq, 0)
        pieces.append(piece)
    rows = backend.decode_media(pieces)
    assert rows == [15, 31, 47]
    for row, expected in zip(rows, alone, strict=True):
        np.testing.assert_allclose(logits(backend, row), expected, atol=1e-3)


def whole_piece(backend: LlamaBackend, chunk: MediaChunk, seq: int, pos: int = 0) -> MediaPiece:
    return MediaPiece(
        chunk=chunk,
        embeddings=projector_of(backend).encode(chunk),
        start=0,
        stop=chunk.n_cells,
        pos=pos,
        seq=seq,
        logits=True,
    )


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gemma3", {"stop": 8}, "decoded whole and alone"),
        ("mlp", {"start": 16}, "has none from 16 on"),
        ("mlp", {"stop": 17}, "has none from 0 on"),
        ("mlp", {"seq": 99}, "There is no position 0 of a sequence 99"),
        ("mlp", {"pos": -1}, "There is no position -1"),
        ("mlp", {"embeddings": np.zeros((16, 8), dtype=np.float32)}, "have the shape"),
    ],
)
def test_pieces_that_would_end_the_process_are_refused(
    backends: Backends, kind: str, changes: dict[str, Any], message: str
) -> None:
    backend = backends(kind)
    empty(backend)
    ((_, chunk),) = prepared(backend, random_image()).media
    piece = whole_piece(backend, chunk, 0)
    with pytest.raises(EngineError, match=message):
        backend.decode_media([attrs.evolve(piece, **changes)])
    assert backend.memory.last(0) == -1
    backend.decode_media([piece])


def test_a_chunk_that_is_not_causal_is_alone(backends: Backends) -> None:
    backend = backends("gemma3")
    ((_, chunk),) = prepared(backend, random_image()).media
    with pytest.raises(EngineError, match="decoded whole and alone"):
        backend.decode_media([whole_piece(backend, chunk, seq) for seq in range(2)])


def test_a_decode_that_was_interrupted_leaves_nothing(backends: Backends) -> None:
    backend = backends("qwen2vl")
    empty(backend)
    prompt = prepared(backend, "a", random_image(280, 280))
    decode_prompt(backend, Prompt(prompt.tokens[:1]))
    ((_, chunk),) = prompt.media
    piece = whole_piece(backend, chunk, 0, pos=1)
    backend.interrupt()
    with pytest.raises(DecodeInterruptedError):
        backend.decode_media([piece])
    assert backend.memory.last(0) == 0
    backend.decode_media([piece])
    assert backend.memory.last(0) == 1  # where the image begins


def test_the_rest_of_an_image_is_not_interrupted(backends: Backends) -> None:
    """All of its cells begin at one position, so the first of them would go, too."""
    backend = backends("qwen2vl")
    empty(backend)
    ((_, chunk),) = prepared(backend, random_image(280, 280)).media
    piece = whole_piece(backend, chunk, 0)
    backend.decode_media([attrs.evolve(piece, stop=50, logits=False)])
    backend.interrupt()
    (row,) = backend.decode_media([attrs.evolve(piece, start=50)])
    found = logits(backend, row)
    (row,) = backend.decode_media([attrs.evolve(piece, seq=1)])
    np.testing.assert_allclose(logits(backend, row), found, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "media", "message"),
    [
        ("mlp", random_sound(), "The model takes no sound."),
        ("qwen3a", random_image(), "The model takes no images."),
        ("qwen3a", random_sound(0.01), "The sound is too short."),
        ("qwen3a", attrs.evolve(random_sound(), rate=8000), "The model takes 16000 samples a seco"),
        ("idefics3", random_image(1, 4000), "The model cannot take it: resize target 0x256 is out"),
    ],
)
def test_media_that_the_model_cannot_take_are_named(
    backends: Backends, kind: str, media: DecodedImage | DecodedAudio, message: str
) -> None:
    with pytest.raises(InvalidMediaError) as caught:
        prepared(backends(kind), "a", "b", media)
    assert caught.value.index == 2
    assert caught.value.message.startswith(message)


def test_preparing_stops_when_nobody_waits(backends: Backends) -> None:
    asked = []

    class GivenUpError(Exception):
        pass

    def check(n_cells: int) -> None:
        asked.append(n_cells)
        if len(asked) == 2:
            raise GivenUpError

    parts = ["a", random_image(), random_image(), random_image()]
    with pytest.raises(GivenUpError):
        projector_of(backends("mlp")).prepare(parts, add_special=False, check=check)
    assert asked == [1, 17]


def test_an_encoding_is_interrupted_and_the_next_one_is_not(backends: Backends) -> None:
    projector = projector_of(backends("qwen2vl"))
    ((_, chunk),) = projector.prepare([random_image(560, 560)], add_special=False).media
    projector.interrupt()  # nothing runs, so this ends nothing
    before = projector.encode(chunk)
    caught: list[BaseException] = []

    def encode() -> None:
        try:
            projector.encode(chunk)
        except EncodeInterruptedError as error:
            caught.append(error)

    encoding = threading.Thread(target=encode)
    encoding.start()
    while encoding.is_alive() and not caught:  # until it has begun
        projector.interrupt()
    encoding.join()
    assert caught
    np.testing.assert_array_equal(projector.encode(chunk), before)


def test_encoding_gives_the_same_with_any_number_of_threads(backends: Backends) -> None:
    projector = projector_of(backends("qwen2vl"))
    ((_, chunk),) = projector.prepare([random_image(140, 140)], add_special=False).media
    alone = projector.encode(chunk)
    projector.set_threads(2)
    np.testing.assert_allclose(projector.encode(chunk), alone, atol=1e-4)
    projector.set_threads(1)


def test_a_model_without_a_projector_takes_text_only() -> None:
    config = Config(ctx_size=256, threads=1, mmproj_auto=False)
    with llama.load(config) as backend:
        assert isinstance(backend, LlamaBackend)
        assert backend.projector is None
        with pytest.raises(NotSupportedError):
            backend.decode_media([])


def test_a_closed_projector_refuses(tmp_path: Path) -> None:
    config = Config(**write_pair(tmp_path, "mlp").settings, ctx_size=256, threads=1)
    with llama.load(config) as backend:
        assert isinstance(backend, LlamaBackend)
        projector = projector_of(backend)
        ((_, chunk),) = prepared(backend, random_image()).media
    with pytest.raises(ServerClosingError):
        projector.encode(chunk)
    with pytest.raises(ServerClosingError):
        projector.prepare([random_image()], add_special=False)
    with pytest.raises(ServerClosingError):
        projector.set_threads(1)


@pytest.mark.parametrize(("kind", "size"), [("gemma3", 8), ("idefics3", 100), ("qwen2vl", 500)])
def test_what_chunks_take_in_memory_is_known(kind: str, size: int, backends: Backends) -> None:
    projector = backends(kind).projector
    assert projector is not None
    images = [random_image(size, size, seed=i) for i in range(10)]
    gc.collect()
    kept, taken = [], []
    for _ in range(3):  # the median: other threads of this process may allocate and free, too
        before = _allocated()
        kept.append(projector.prepare(images, add_special=False))
        taken.append(_allocated() - before)
    n_cells = sum(chunk.n_cells for _, chunk in kept[0].media)
    assert 0.7 < median(taken) / (n_cells * projector.bytes_per_cell) < 1.5


class _Usage(ctypes.Structure):
    """The statistics of glibc's malloc."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in (
        "arena", "free", "fast", "maps", "mapped", "unused", "in_fast", "used", "in_free", "top"
    ))  # fmt: skip


def _allocated() -> int:
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Usage
    usage = mallinfo2()
    return int(usage.used + usage.mapped)
