"""Prompts with media in a context: as trioserve decodes them, and as libmtmd does it by itself."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from llama_cpp import mtmd_cpp as mtmd
from numpy.typing import NDArray

from trioserve.engine.backend import MediaPiece
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.library import lib
from trioserve.types import DecodedAudio, DecodedImage, DecodedMedia, MediaChunk, Prompt

Logits = NDArray[np.float32]


def decode_prompt(
    backend: LlamaBackend, prompt: Prompt, *, seq: int = 0, step: int | None = None
) -> tuple[Logits, int]:
    """Decode a prompt; returns the logits of its last cell, and the next position.

    With a `step`, causal chunks are decoded in pieces of that many cells.
    """
    pos = n_done = last = 0
    for n_before, chunk in prompt.media:
        last, pos = _decode_text(backend, prompt.tokens[n_done:n_before], pos, seq, last)
        n_done = n_before
        last = decode_chunk(backend, chunk, pos, seq, step)
        pos += chunk.n_positions
    last, pos = _decode_text(backend, prompt.tokens[n_done:], pos, seq, last)
    return logits(backend, last), pos


def _decode_text(
    backend: LlamaBackend, tokens: Sequence[int], pos: int, seq: int, last: int
) -> tuple[int, int]:
    if not tokens:
        return last, pos
    backend.batch.clear()
    row = backend.batch.extend(tokens, pos, seq)
    backend.batch.want_logits(row)
    backend.decode()
    return row, pos + len(tokens)


def decode_chunk(
    backend: LlamaBackend, chunk: MediaChunk, pos: int, seq: int = 0, step: int | None = None
) -> int:
    """Encode and decode a chunk; returns the row of its last cell."""
    assert backend.projector is not None
    embeddings = backend.projector.encode(chunk)
    step = step if step is not None and chunk.is_causal else chunk.n_cells
    for start in range(0, chunk.n_cells, step):
        stop = min(start + step, chunk.n_cells)
        piece = MediaPiece(
            chunk=chunk,
            embeddings=embeddings,
            start=start,
            stop=stop,
            pos=pos,
            seq=seq,
            logits=stop == chunk.n_cells,
        )
        (row,) = backend.decode_media([piece])
    return row


def logits(backend: LlamaBackend, row: int) -> Logits:
    """Return a copy of the logits of a row; -1 is the last that has any."""
    pointer = lib.llama_get_logits_ith(backend._context.handle, row)
    return np.ctypeslib.as_array(pointer, shape=(backend.vocab.n_tokens,)).copy()


def decode_as_libmtmd(
    backend: LlamaBackend, parts: Sequence[str | DecodedMedia], *, seq: int = 0
) -> tuple[Logits, int]:
    """Do the same with libmtmd's own functions, which encode and decode one after the other."""
    assert backend.projector is not None
    texts, bitmaps, pointers = [], [], []
    for part in parts:
        if isinstance(part, str):
            data = part.encode()
            texts.append(mtmd.mtmd_input_text(data, len(data), False, True))
            one = mtmd.mtmd_input_part(ctypes.pointer(texts[-1]), None)
        else:
            bitmaps.append(_bitmap(part))
            one = mtmd.mtmd_input_part(None, bitmaps[-1])
        pointers.append(ctypes.pointer(one))
    array = (ctypes.POINTER(mtmd.mtmd_input_part) * len(pointers))(*pointers)
    chunks = mtmd.mtmd_input_chunks_init()
    next_pos = ctypes.c_int32(0)
    with backend.projector._shared.in_use() as context:
        assert mtmd.mtmd_tokenize_from_parts(context, chunks, array, len(pointers), True) == 0
        arguments = (chunks, 0, seq, backend.n_batch, True, ctypes.byref(next_pos))
        assert mtmd.mtmd_helper_eval_chunks(context, backend._context.handle, *arguments) == 0
    mtmd.mtmd_input_chunks_free(chunks)
    for bitmap in bitmaps:
        mtmd.mtmd_bitmap_free(bitmap)
    return logits(backend, -1), next_pos.value


def _bitmap(media: DecodedMedia) -> int:
    if isinstance(media, DecodedImage):
        pixels = ctypes.cast(media.pixels, ctypes.POINTER(ctypes.c_uint8))
        return mtmd.mtmd_bitmap_init(media.width, media.height, pixels)
    assert isinstance(media, DecodedAudio)
    samples = ctypes.cast(media.samples, ctypes.POINTER(ctypes.c_float))
    return mtmd.mtmd_bitmap_init_from_audio(len(media.samples) // 4, samples)
