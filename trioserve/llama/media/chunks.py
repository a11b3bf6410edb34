"""Images and sound as libmtmd cuts them: chunks for the model, and the text around them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from trioserve.llama import library
from trioserve.types import DecodedAudio, DecodedImage, DecodedVideo, MediaKind, TokenId

_TEXT, _IMAGE, _AUDIO = 0, 1, 2

#: Sections of a position with M-RoPE: time, row, column, and one more.
N_SECTIONS = 4


@attrs.frozen(kw_only=True)
class Placeholder:
    """Stands for an image: only the size is used."""

    width: int
    height: int


class _ChunkList:
    """C's list of chunks, with the pixels or the spectrum of each."""

    def __init__(self, mtmd: Any) -> None:
        self._mtmd = mtmd
        self.handle: Any = mtmd.mtmd_input_chunks_init()

    def __del__(self) -> None:
        self._mtmd.mtmd_input_chunks_free(self.handle)


@attrs.frozen(kw_only=True, eq=False)
class CutChunk:
    """A chunk of media in C: the content of a `MediaChunk`."""

    handle: Any
    kind: MediaKind
    n_cells: int
    n_positions: int
    is_causal: bool
    #: With M-RoPE: the position of each cell for each section, in a chunk that begins at 0,
    positions: NDArray[np.int32] | None
    #: and by how much it is further on in one that begins at 1.
    steps: NDArray[np.int32] | None
    _list: _ChunkList = attrs.field(repr=False)  # keeps `handle` valid

    def positions_from(self, start: int, stop: int, pos: int) -> NDArray[np.int32]:
        """Return the positions of cells, if the chunk begins at `pos`: a row for each section."""
        if self.positions is None or self.steps is None:
            return np.arange(pos + start, pos + stop, dtype=np.int32)[np.newaxis]
        found: NDArray[np.int32] = self.positions[:, start:stop] + self.steps[:, start:stop] * pos
        return found


class CutError(Exception):
    """libmtmd refuses it; the message says why, as a part of a sentence."""


def cut(
    mtmd: Any, context: Any, media: Sequence[DecodedImage | DecodedAudio | Placeholder]
) -> list[tuple[TokenId, ...] | CutChunk]:
    """Cut media that follow each other without text between them; frames of one size may merge.

    Raises:
        CutError: libmtmd refuses them.
    """
    bitmaps: list[Any] = []
    try:
        for one in media:
            bitmaps.append(_bitmap(mtmd, one))
            mtmd.mtmd_bitmap_set_mergeable(bitmaps[-1], len(media) > 1)
        parts = [mtmd.mtmd_input_part(None, bitmap) for bitmap in bitmaps]
        pointers = (ctypes.POINTER(mtmd.mtmd_input_part) * len(parts))(*map(ctypes.pointer, parts))
        found = _ChunkList(mtmd)
        library.take_errors()
        library.lines.are_expected = lambda: True  # they are the client's
        code = mtmd.mtmd_tokenize_from_parts(context, found.handle, pointers, len(parts), False)
    finally:
        library.lines.are_expected = bool
        for bitmap in bitmaps:
            mtmd.mtmd_bitmap_free(bitmap)
    if code != 0:
        raise CutError(library.reason(library.take_errors()).removeprefix("error: "))
    return list(_read(mtmd, context, found))


def _bitmap(mtmd: Any, one: DecodedImage | DecodedAudio | Placeholder) -> Any:
    if isinstance(one, Placeholder):
        return mtmd.mtmd_bitmap_init(one.width, one.height, None)
    if isinstance(one, DecodedImage):
        pixels = ctypes.cast(ctypes.c_char_p(one.pixels), ctypes.POINTER(ctypes.c_uint8))
        return mtmd.mtmd_bitmap_init(one.width, one.height, pixels)
    samples = ctypes.cast(ctypes.c_char_p(one.samples), ctypes.POINTER(ctypes.c_float))
    return mtmd.mtmd_bitmap_init_from_audio(len(one.samples) // 4, samples)


def _read(mtmd: Any, context: Any, found: _ChunkList) -> Iterator[tuple[TokenId, ...] | CutChunk]:
    has_sections = mtmd.mtmd_decode_use_mrope(context)
    for index in range(mtmd.mtmd_input_chunks_size(found.handle)):
        handle = mtmd.mtmd_input_chunks_get(found.handle, index)
        kind = mtmd.mtmd_input_chunk_get_type(handle)
        n_cells = mtmd.mtmd_input_chunk_get_n_tokens(handle)
        if kind == _TEXT:
            size = ctypes.c_size_t()
            tokens = mtmd.mtmd_input_chunk_get_tokens_text(handle, ctypes.byref(size))
            yield tuple(tokens[: size.value])
            continue
        positions, steps = _sections(mtmd, handle, n_cells) if has_sections else (None, None)
        yield CutChunk(
            handle=handle,
            kind="image" if kind == _IMAGE else "audio",
            n_cells=n_cells,
            n_positions=mtmd.mtmd_input_chunk_get_n_pos(handle),
            is_causal=not mtmd.mtmd_decode_use_non_causal(context, handle),
            positions=positions,
            steps=steps,
            list=found,
        )


def _sections(mtmd: Any, handle: Any, n_cells: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the positions of a chunk that begins at 0, and how they change with its beginning."""
    image = mtmd.mtmd_input_chunk_get_tokens_image(handle)
    if not image:  # sound: all sections count on
        line = np.tile(np.arange(n_cells, dtype=np.int32), (N_SECTIONS, 1))
        return line, np.ones_like(line)
    first, second = (_sections_from(mtmd, image, n_cells, pos) for pos in (0, 1))
    return first, second - first


def _sections_from(mtmd: Any, image: Any, n_cells: int, pos: int) -> NDArray[np.int32]:
    room = (mtmd.mtmd_decoder_pos * n_cells)()
    mtmd.mtmd_helper_image_get_decoder_pos(image, pos, room)
    columns = np.frombuffer(room, dtype=np.int32).reshape(n_cells, N_SECTIONS)  # t, x, y, z
    return np.ascontiguousarray(columns[:, (0, 2, 1, 3)].T)


def as_parts(video: DecodedVideo, interval: int) -> Iterator[str | tuple[DecodedImage, ...]]:
    """Turn a video into text and images, as llama-server does.

    Frames without text between them come in pairs, which some models merge.

    Args:
        video: the decoded video.
        interval: milliseconds between two timestamps; 0: no timestamps.
    """
    yield "Video:"
    pair: list[DecodedImage] = []
    next_time = 0.0
    for seconds, frame in video.frames:
        pair.append(frame)
        tells_time = interval > 0 and seconds * 1000 >= next_time
        if tells_time or len(pair) == 2:
            yield tuple(pair)
            pair.clear()
        if tells_time:
            minutes = int(seconds / 60)
            yield f"[{minutes}m{seconds - minutes * 60:.2f}s]"
            next_time += interval
    if pair:
        yield tuple(pair)
