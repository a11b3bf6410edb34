"""Tries out the files of a model: computes once what requests will have computed.

llama.cpp ends the process where a file is not what it takes for granted. So this comes before the
first request and, where the files are new, in a separate process.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import numpy as np

from trioserve.engine.backend import DraftRequest, MediaPiece
from trioserve.engine.speaker import Rows
from trioserve.errors import (
    DecodeError,
    EncodeError,
    KVCacheFullError,
    ModelLoadError,
    TrioServeError,
)
from trioserve.llama import last_word
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.embedding import LlamaEmbedder
from trioserve.llama.media.projector import LlamaProjector
from trioserve.llama.speech.speaker import LlamaSpeaker
from trioserve.log import get_logger
from trioserve.types import (
    CacheRoot,
    DecodedAudio,
    DecodedImage,
    DecodedMedia,
    MediaChunk,
    SamplingParams,
    SpeechTask,
    TokenId,
    Voice,
)

_log = get_logger("llama")

#: Has words, digits, a line break, and a character that most vocabularies have in bytes only.
_TEXT = "Once upon a time, 12 bears\nsang \U0001f600"

#: Frames of sound that are made of a text.
_FRAMES = 3

#: The width of the image where the projector's file gives none.
_WIDTH = 224


def try_out(
    backend: LlamaBackend | LlamaEmbedder | LlamaSpeaker, *, everything: bool = True
) -> None:
    """Decode a prompt, or say a text; with `everything`, use all that came with the model.

    Nothing of it is left in the KV cache. What is not finite is not refused: other prompts may do
    better. Blocks.

    Raises:
        ModelLoadError: a decode fails.
    """
    model = f"the model file {backend.info.path}"
    last_word.names(model)
    # A decode of a few tokens takes long where one of several threads has to wait for its core.
    backend.set_threads(1)
    try:
        if isinstance(backend, LlamaSpeaker):
            _speak(backend, everything=everything)
            return
        if isinstance(backend, LlamaEmbedder):
            _embed(backend, _prompt(backend, everything))
        else:
            _generate(backend, _prompt(backend, everything), everything=everything)
        if everything and backend.projector is not None:
            last_word.names(f"the projector {backend.projector.path}")
            _perceive(backend, backend.projector)
        others = [f"the projector {backend.projector.path}"] if backend.projector else []
        if isinstance(backend, LlamaBackend):
            others += [f"the LoRA adapter {one.path}" for one in backend.adapters]
        last_word.names(model, *others)
    except TrioServeError as error:
        raise ModelLoadError(
            f"The model in {backend.info.path} cannot be used: {error.message}"
        ) from error
    finally:
        backend.set_threads(max(choices[-1] for choices in backend.thread_choices))


def _speak(speaker: LlamaSpeaker, *, everything: bool) -> None:
    """Say the beginning of a text, without a voice and with that of a second of sound."""
    last_word.names(*speaker.file_names)
    if everything:
        speaker.check_codes()
    # Not every vocabulary has all of the letters.
    pieces = [speaker.vocab.tokenize(_TEXT)[: speaker.max_piece] or (0,)]
    voices: list[Voice | None] = [None]
    if everything and speaker.takes_voices:
        voices.append(speaker.take_voice(_sound(speaker.voice_rate)))  # as short as may be
    for voice in voices:
        _say(speaker, SpeechTask(id=0, pieces=pieces, voice=voice, seed=0))


def _say(speaker: LlamaSpeaker, task: SpeechTask) -> None:
    """Say the first frames of a task."""
    utterance = speaker.utterance(task)
    with closing(utterance):
        rows, pos = utterance.begin(0).rows[: speaker.n_ctx_seq - _FRAMES], 0
        for _ in range(_FRAMES):
            n_rows = len(rows)
            for start in range(0, n_rows, speaker.n_batch):
                part = rows[start : start + speaker.n_batch]
                row = speaker.decode([Rows(part, pos + start, 0, True)])[0]
            pos += n_rows
            made = utterance.frame(row)
            if made is None:
                break
            rows = made
        utterance.sound()
    speaker.forget(0)


def _prompt(backend: LlamaBackend | LlamaEmbedder, whole: bool) -> Sequence[TokenId]:
    tokens = backend.vocab.tokenize(_TEXT) or (0,)
    return tokens[: min(len(tokens) if whole else 2, backend.n_batch, backend.n_ctx_seq - 1)]


def _embed(backend: LlamaEmbedder, tokens: Sequence[TokenId]) -> None:
    backend.batch.clear()
    backend.batch.extend(tokens, 0, 0)
    backend.compute()
    if backend.pooling == "none":
        backend.rows(0, len(tokens))
    else:
        backend.pooled(0)
    backend.batch.clear()
    backend.forget(0)


def _generate(backend: LlamaBackend, tokens: Sequence[TokenId], *, everything: bool) -> None:
    _decode(backend, tokens)
    if everything:
        for i, adapter in enumerate(backend.adapters):
            last_word.names(f"the LoRA adapter {adapter.path}")
            backend.set_adapters(((i, 1.0),))
            _decode(backend, tokens)
        if backend.adapters:
            backend.set_adapters(())
        if backend.drafters:
            _draft(backend, tokens)


def _draft(backend: LlamaBackend, tokens: Sequence[TokenId]) -> None:
    """Make drafts for a text, after decoding all of it but the last token."""
    batch = backend.batch
    batch.clear()
    if tokens[1:]:
        batch.extend(tokens[:-1], 0, 0)
        backend.decode()
        batch.clear()
    for drafter in backend.drafters:
        drafter.propose([DraftRequest(0, tokens, CacheRoot(), 2)])
        drafter.forget(0)
    _clear(backend)


def _decode(backend: LlamaBackend, tokens: Sequence[TokenId]) -> None:
    """Decode a prompt, and the token that is sampled after it."""
    batch = backend.batch
    batch.clear()
    row = batch.extend(tokens, 0, 0)
    batch.want_logits(row)
    backend.decode()
    token = tokens[0]
    with backend.sampler(SamplingParams(), tokens) as sampler:
        try:
            token = sampler.sample(row)
        except DecodeError as error:
            _log.warning("the model gives bad numbers", reason=error.message)
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
    try:
        embeddings = projector.encode(chunk)
    except EncodeError as error:
        _log.warning("the projector gives bad numbers", reason=error.message)
        return
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
        pass  # requests with an image get the error
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
