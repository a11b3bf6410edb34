"""Images, sound and video: as clients send them, as they are decoded, and as parts of a prompt.

A file goes through three forms. A `MediaSource` is what a request says, and may be anything at all.
`DecodedMedia` is what a child process has made of it: pixels, or samples. A `MediaChunk` is
a part of a prompt, as the model's projector has cut it; the model takes its embeddings in place
of tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal, Self, TypeAlias

import attrs

MediaKind: TypeAlias = Literal["image", "audio", "video"]

#: The content of a cell of the KV cache, for comparing: a token id, or for media a number below 0,
#: made of the identity of the chunk and the place in it::
#:
#:     - | digest of the id | cells of the chunk | positions of the chunk | place in the chunk |
CellKey: TypeAlias = int

#: The number of bits of each of the last three.
_BITS = 24
_MASK = (1 << _BITS) - 1


@attrs.frozen(kw_only=True)
class MediaSource:
    """A file that a request brings or names: `data`, `url`, `path` or `decoded`, and one only."""

    #: Its kind according to the client. None: an image, sound or a video.
    kind: MediaKind | None = None
    data: bytes | None = attrs.field(default=None, repr=False)
    url: str | None = None  # http, https or file
    path: str | None = None  # given by a program that has the server in it, and trusted
    #: Media that the server itself has decoded before, such as a window of a long recording.
    decoded: DecodedMedia | None = attrs.field(default=None, repr=False)
    #: The field of the request that errors name, such as ``messages[0].content[1].image_url``.
    param: str = "messages"


@attrs.frozen(kw_only=True)
class DocumentSource:
    """A file that a request brings, by `data`, or names, by `url`: a PDF, a text, or media.

    Before the model gets it, it becomes text and media.
    """

    data: bytes | None = attrs.field(default=None, repr=False)
    url: str | None = None  # http, https or file
    name: str = ""
    about: str = ""  # what the request says of it
    #: The field of the request that errors name.
    param: str = "messages"


@attrs.frozen(kw_only=True)
class Modalities:
    """The kinds of input that a model takes beside text."""

    vision: bool = False  # images, and so the frames of videos
    audio: bool = False

    @property
    def video(self) -> bool:
        """True if the model takes videos, which are frames for it."""
        return self.vision

    @property
    def names(self) -> list[str]:
        """The kinds of input, text included, as lists of models name them."""
        names = {"text": True, "image": self.vision, "audio": self.audio}
        return [name for name, is_taken in names.items() if is_taken]

    def take(self, kind: MediaKind | None) -> bool:
        """True if it takes files of a kind; None: of any."""
        if kind is None:
            return self.vision or self.audio
        return self.audio if kind == "audio" else self.vision


def content_id(*parts: bytes) -> str:
    """Make an identity of content: equal content has equal ones, and no other has."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


@attrs.frozen(kw_only=True, eq=False)
class DecodedImage:
    """Pixels: RGB, row after row from the top, three bytes each."""

    width: int
    height: int
    pixels: bytes = attrs.field(repr=False)
    id: str  # `content_id` of the size and the pixels


@attrs.frozen(kw_only=True, eq=False)
class DecodedAudio:
    """Samples of one channel: float32 in native byte order, from -1 to 1, all finite."""

    rate: int  # samples a second
    samples: bytes = attrs.field(repr=False)
    id: str  # `content_id` of the rate and the samples

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return len(self.samples) / 4 / self.rate


@attrs.frozen(kw_only=True, eq=False)
class DecodedVideo:
    """Frames, each with the second at which it is shown."""

    frames: tuple[tuple[float, DecodedImage], ...] = attrs.field(repr=False)
    id: str  # `content_id` of the ids and times of the frames


@attrs.frozen(kw_only=True, eq=False)
class DecodedPage:
    """A page of a document: its text, and a picture of it where one was wanted."""

    text: str
    image: DecodedImage | None = None


@attrs.frozen(kw_only=True, eq=False)
class DecodedDocument:
    """The pages of a document."""

    pages: tuple[DecodedPage, ...] = attrs.field(repr=False)


DecodedMedia: TypeAlias = DecodedImage | DecodedAudio | DecodedVideo


@attrs.frozen
class ChunkOutline:
    """The facts about a chunk that each of its cells in the KV cache tells."""

    digest: bytes  # of its id, 16 bytes
    n_cells: int
    n_positions: int

    @classmethod
    def of(cls, key: CellKey) -> Self:
        """Read it from the key of any of its cells."""
        n_cells, n_positions, _ = _read(key)
        return cls(((-key >> 3 * _BITS) - 1).to_bytes(16, "little"), n_cells, n_positions)

    @property
    def keys(self) -> tuple[CellKey, ...]:
        """The keys of its cells."""
        key = int.from_bytes(self.digest, "little") + 1
        for number in (self.n_cells, self.n_positions, 0):
            key = key << _BITS | number
        return tuple(range(-key, -key - self.n_cells, -1))


@attrs.frozen(kw_only=True, eq=False)
class MediaChunk:
    """A part of a prompt that is no text: an image, a tile of one, or a window of sound.

    The model takes a row of embeddings for each of its cells, which the projector computes from
    `content`.
    """

    kind: MediaKind
    n_cells: int  # rows of embeddings, and cells in the KV cache
    n_positions: int  # how much further the next token's position is; with M-RoPE, fewer
    #: The identity of content and preparation: chunks with equal ids have equal embeddings.
    id: str
    #: Its cells see only those before them. If not, all are decoded in one ubatch.
    is_causal: bool = True
    #: Prepared by the projector; no other code reads it.
    content: Any = attrs.field(repr=False)
    #: The keys that its cells are compared by, in the KV cache.
    keys: tuple[CellKey, ...] = attrs.field(init=False, repr=False)

    @keys.default
    def _make_keys(self) -> tuple[CellKey, ...]:
        digest = hashlib.sha256(self.id.encode()).digest()[:16]
        return ChunkOutline(digest, self.n_cells, self.n_positions).keys


def whole_chunks(keys: Sequence[CellKey], length: int) -> int:
    """Go down from a length to the beginning of the chunk that would be cut there, if any would."""
    if not length or keys[length - 1] >= 0:
        return length
    n_cells, _, place = _read(keys[length - 1])
    return length if place + 1 == n_cells else length - (place + 1)


def chunk_start(keys: Sequence[CellKey]) -> int:
    """Find where the chunk begins that these keys end in."""
    return len(keys) - 1 - _read(keys[-1])[2]


def n_folded(key: CellKey) -> int:
    """Count the positions that a chunk has less than cells, from the key of its last cell; or 0."""
    if key >= 0:
        return 0
    n_cells, n_positions, place = _read(key)
    return n_cells - n_positions if place + 1 == n_cells else 0


def _read(key: CellKey) -> tuple[int, int, int]:
    return -key >> 2 * _BITS & _MASK, -key >> _BITS & _MASK, -key & _MASK
