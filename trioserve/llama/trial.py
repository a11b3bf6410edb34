"""Tries out the files of a model: computes once what requests will have computed.

llama.cpp ends the process where a file is not what it takes for granted. So this comes before the
first request, and where the files are new, in a process of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trioserve.engine.backend import DraftRequest, MediaPiece
from trioserve.errors import KVCacheFullError, ModelLoadError, TrioServeError
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.embedding import LlamaEmbedder
from trioserve.llama.media.projector import LlamaProjector
from trioserve.types import (
    CacheRoot,
    DecodedAudio,
    DecodedImage,
    DecodedMedia,
    MediaChunk,
    SamplingParams,
    TokenId,
)

#: Has words, digits, a line break, and a character that most vocabularies have in bytes only.
_TEXT = "Once upon a time, 12 bears\nsang \U0001f600"

#: The width of an image where a projector does not say what it was made for.
_WIDTH = 224


def try_out(backend: LlamaBackend | LlamaEmbedder, *, everything: bool = True) -> None:
    """Decode a prompt; with `everything`, use each adapter, the draft model and the projector, too.

    Nothing of it is left in the KV cache. Blocks.

    Raises:
        ModelLoadError: something of it fails.
    """
    try:
        if isinstance(backend, LlamaEmbedder):
            _embed(backend)
        else:
            _generate(backend, everything=everything)
        if everything and backend.projector is not None:
            _perceive(backend, backend.projector)
    except ModelLoadError:
        raise
    except TrioServeError as error:
        raise ModelLoadError(
            f"The model in {backend.info.path} cannot be used: {error.message}"
        ) from error


def _prompt(backend: LlamaBackend | LlamaEmbedder) -> Sequence[TokenId]:
    tokens = backend.vocab.tokenize(_TEXT) or (0,)
    return tokens[: min(backend.n_batch, backend.n_ctx_seq - 1)]


def _embed(backend: LlamaEmbedder) -> None:
    tokens = _prompt(backend)
    backend.batch.clear()
    backend.batch.extend(tokens, 0, 0)
    backend.compute()
    if backend.pooling == "none":
        backend.rows(0, len(tokens))
    else:
        backend.pooled(0)
    backend.batch.clear()
    backend.forget(0)


def _generate(backend: LlamaBackend, *, everything: bool) -> None:
    tokens = _prompt(backend)
    _decode(backend, tokens)
    if everything:
        for i in range(len(backend.adapters)):
            backend.set_adapters(((i, 1.0),))
            _decode(backend, tokens)
        if backend.adapters:
            backend.set_adapters(())
        for drafter in backend.drafters:
            drafter.propose([DraftRequest(0, tokens, CacheRoot(), 1)])
            drafter.forget(0)


def _decode(backend: LlamaBackend, tokens: Sequence[TokenId]) -> None:
    """Decode a prompt, and the token that is sampled after it."""
    batch = backend.batch
    batch.clear()
    row = batch.extend(tokens, 0, 0)
    batch.want_logits(row)
    backend.decode()
    with backend.sampler(SamplingParams(), tokens) as sampler:
        token = sampler.sample(row)
    batch.clear()
    batch.add(token, len(tokens), 0, logits=True)
    backend.decode()
    batch.clear()
    _clear(backend)


def _clear(backend: LlamaBackend | LlamaEmbedder) -> None:
    if isinstance(backend, LlamaEmbedder):
        backend.forget(0)
    else:
        backend.memory.remove(0, 0)
        backend.memory.trim(0, 0)


def _perceive(backend: LlamaBackend | LlamaEmbedder, projector: LlamaProjector) -> None:
    """Encode an image and a second of sound, and decode their embeddings."""
    media: list[DecodedMedia] = []
    if projector.sees:
        media.append(_image(projector.image_size or _WIDTH))
    if projector.hears:
        media.append(_sound(projector.audio_rate))
    for one in media:
        for _, chunk in projector.prepare([one], add_special=False).media:
            _decode_chunk(backend, projector, chunk)


def _decode_chunk(
    backend: LlamaBackend | LlamaEmbedder, projector: LlamaProjector, chunk: MediaChunk
) -> None:
    embeddings = projector.encode(chunk)
    n_cells = chunk.n_cells
    if chunk.is_causal:
        n_cells = min(n_cells, backend.n_batch, backend.n_ctx_seq)
    piece = MediaPiece(
        chunk=chunk, embeddings=embeddings, start=0, stop=n_cells, pos=0, seq=0, logits=True
    )
    try:
        if isinstance(backend, LlamaEmbedder):
            backend.compute_media(piece)
        else:
            backend.decode_media([piece])
    except KVCacheFullError:
        pass  # the context is smaller than an image, which requests are told
    _clear(backend)


def _image(width: int) -> DecodedImage:
    """Make a picture with light and dark places in all colors."""
    rows, columns = np.indices((width, width))
    channels = [rows * 3 + columns, rows + columns * 5, rows * columns]
    pixels = (np.stack(channels, axis=-1) % 256).astype(np.uint8)
    return DecodedImage(width=width, height=width, pixels=pixels.tobytes(), id="trial")


def _sound(rate: int) -> DecodedAudio:
    """Make a second of a tone."""
    wave = 0.3 * np.sin(np.arange(rate) * (2 * np.pi * 440 / max(rate, 1)))
    return DecodedAudio(rate=rate, samples=wave.astype(np.float32).tobytes(), id="trial")
