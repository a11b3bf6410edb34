"""A projector without a model, and a scripted backend's record of the chunks it has decoded."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence

import attrs
import numpy as np

from trioserve.engine.backend import Embeddings
from trioserve.errors import (
    EncodeInterruptedError,
    InvalidMediaError,
    TrioServeError,
)
from trioserve.testing.vocab import byte_vocab
from trioserve.types import (
    CellKey,
    DecodedAudio,
    DecodedImage,
    DecodedMedia,
    MediaChunk,
    MediaKind,
    Prompt,
)


@attrs.define(eq=False, kw_only=True)
class ScriptedProjector:
    """Makes one chunk of an image, of a frame of a video, and of every 30 seconds of sound.

    A script sees a chunk as ``[image:ID]``, with the first eight letters of its id.

    Attributes:
        sees, hears, audio_rate: what it takes.
        n_cells: of each chunk.
        n_positions: of each chunk; fewer than cells are as with M-RoPE.
        is_causal: of each chunk.
        n_embd: numbers in an embedding.
        bytes_per_cell: the reported memory of chunks.
        fail_next: raised by the next `encode`.
        gate: `encode` waits until it is set, as it is at first.
        on_encode: called with each chunk before it is encoded.
        encoded: the ids of all chunks that were encoded.
        n_interrupted: how many encodings were ended early.
        threads: the numbers of threads that were set.
    """

    sees: bool = True
    hears: bool = True
    audio_rate: int = 16_000
    n_cells: int = 5
    n_positions: int = attrs.field(default=attrs.Factory(lambda self: self.n_cells, True))
    is_causal: bool = True
    n_embd: int = 4
    bytes_per_cell: int = 0
    fail_next: TrioServeError | None = None
    gate: threading.Event = attrs.field(init=False, factory=threading.Event)
    on_encode: Callable[[MediaChunk], None] | None = None
    encoded: list[str] = attrs.field(init=False, factory=list)
    n_interrupted: int = attrs.field(init=False, default=0)
    threads: list[int] = attrs.field(init=False, factory=list)
    _running: bool = attrs.field(init=False, default=False)
    _interrupted: threading.Event = attrs.field(init=False, factory=threading.Event)

    def __attrs_post_init__(self) -> None:
        self.gate.set()

    @property
    def max_chunk(self) -> int:
        return 0 if self.is_causal else self.n_cells

    def prepare(
        self,
        parts: Sequence[str | DecodedMedia],
        *,
        add_special: bool,
        check: Callable[[int], object] = lambda _n: None,
    ) -> Prompt:
        """Encode text as UTF-8, and put chunks between."""
        tokens: list[int] = []
        media: list[tuple[int, MediaChunk]] = []
        for index, part in enumerate(parts):
            if isinstance(part, str):
                tokens += byte_vocab.tokenize(part, add_special=add_special)
            else:
                media += [(len(tokens), chunk) for chunk in self._chunks(part, index)]
            check(len(tokens) + self.n_cells * len(media))
        return Prompt(tokens, media=media)

    def chunk(self, kind: MediaKind, id_: str) -> MediaChunk:
        """Make a chunk of something that exists in name only."""
        return MediaChunk(
            kind=kind,
            n_cells=self.n_cells,
            n_positions=self.n_positions,
            id=id_,
            is_causal=self.is_causal,
            content=id_,
        )

    def _chunks(self, part: DecodedMedia, index: int) -> list[MediaChunk]:
        takes = self.hears if isinstance(part, DecodedAudio) else self.sees
        if not takes:
            what = "sound" if isinstance(part, DecodedAudio) else "images"
            raise InvalidMediaError(f"The model takes no {what}.", index=index)
        if isinstance(part, DecodedImage):
            return [self.chunk("image", part.id)]
        if isinstance(part, DecodedAudio):
            n_windows = max(1, -int(-part.seconds // 30))
            return [self.chunk("audio", f"{part.id}-{i}") for i in range(n_windows)]
        return [self.chunk("video", frame.id) for _, frame in part.frames]

    def encode(self, chunk: MediaChunk) -> Embeddings:
        """Make numbers of the id of a chunk, once the gate is open."""
        assert not self._running, "two chunks at the same time"
        self._running = True
        self._interrupted.clear()
        try:
            if self.on_encode is not None:
                self.on_encode(chunk)
            while not self.gate.wait(0.001) and not self._interrupted.is_set():
                pass
            if self._interrupted.is_set():
                self.n_interrupted += 1
                raise EncodeInterruptedError("interrupted")
            failure, self.fail_next = self.fail_next, None
            if failure is not None:
                raise failure
            self.encoded.append(chunk.id)
            return embeddings_of(chunk, self.n_embd)
        finally:
            self._running = False

    def interrupt(self) -> None:
        self._interrupted.set()

    @property
    def is_interrupted(self) -> bool:
        return self._interrupted.is_set()

    def set_threads(self, count: int) -> None:
        assert count > 0
        self.threads.append(count)


def embeddings_of(chunk: MediaChunk, n_embd: int) -> Embeddings:
    """Make the embeddings that a scripted projector has for a chunk."""
    seed = int.from_bytes(hashlib.sha256(chunk.id.encode()).digest()[:8], "little")
    shape = chunk.n_cells, n_embd
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


class ChunkLog:
    """The chunks that a scripted backend has met, by the keys of their cells."""

    #: The numbers of media cells in a state begin here; there are fewer tokens.
    FIRST = 0x8000

    def __init__(self) -> None:
        self._cells: dict[CellKey, tuple[MediaChunk, int]] = {}
        self._keys: list[CellKey] = []
        self._numbers: dict[CellKey, int] = {}

    def add(self, chunk: MediaChunk) -> None:
        """Assign cell numbers to a chunk that is new."""
        if chunk.keys[0] not in self._cells:
            self._cells.update((key, (chunk, i)) for i, key in enumerate(chunk.keys))
            self._numbers.update(
                (key, self.FIRST + i) for i, key in enumerate(chunk.keys, start=len(self._keys))
            )
            self._keys += chunk.keys
            assert len(self._keys) < self.FIRST, "too many chunks"

    def positions(self, cells: Sequence[CellKey]) -> list[int]:
        """Return the position of each cell, and that of the one to come.

        The cells of a chunk with M-RoPE are all at its beginning, as in llama.cpp.
        """
        positions, pos = [], 0
        for key in cells:
            if key >= 0:
                positions.append(pos)
                pos += 1
                continue
            chunk, place = self._cells[key]
            is_flat = chunk.n_positions == chunk.n_cells
            positions.append(pos + place if is_flat else pos)
            if place + 1 == chunk.n_cells:
                pos += chunk.n_positions
        return [*positions, pos]

    def is_border(self, cells: Sequence[CellKey]) -> bool:
        """True unless these end within a chunk."""
        if not cells or cells[-1] >= 0:
            return True
        chunk, place = self._cells[cells[-1]]
        return place + 1 == chunk.n_cells

    def number(self, key: CellKey) -> int:
        """Return a small number for a cell; that of a token is its id."""
        return key if key >= 0 else self._numbers[key]

    def key(self, number: int) -> CellKey:
        """Return the cell key of a number, the inverse of `number`."""
        return number if number < self.FIRST else self._keys[number - self.FIRST]

    def text(self, cells: Sequence[CellKey]) -> str:
        written = b""
        for key in cells:
            if key >= 0:
                written += bytes([key])
            elif (found := self._cells[key])[1] == 0:
                written += f"[{found[0].kind}:{found[0].id[:8]}]".encode()
        return written.decode("utf-8", "replace")
