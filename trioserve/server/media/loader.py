"""`MediaLoader`: loads the media of a request as pixels and samples.

A few child processes, shared by all requests, decode the files.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Self
from urllib.parse import unquote

import attrs
import trio

from trioserve.config import Config
from trioserve.config.extras import has_extra
from trioserve.errors import InvalidMediaError, NotSupportedError
from trioserve.fair_limiter import FairLimiter
from trioserve.media.decoders import Decoders
from trioserve.media.fetch import Dialer, Fetcher, FetchRules
from trioserve.media.orders import Format, MediaLimits, Order, sniff
from trioserve.server.limits.memory import MemoryReservation
from trioserve.types import (
    DecodedAudio,
    DecodedDocument,
    DecodedImage,
    DecodedMedia,
    DocumentSource,
    MediaKind,
    MediaSource,
)

#: Files to read concurrently, and those of one client.
_N_READERS, _N_READERS_EACH = 5, 4

_NAMES = {"image": "image", "audio": "sound", "video": "video", None: "file"}
#: The files that `trioserve[media]` reads.
MEDIA = "images, sound and video"

_PLURALS = {"image": "images", "audio": "sound", "video": "videos"}


def check_extra(extra: str, kinds: str, param: str | None) -> None:
    """Check that the packages that read some kinds of files are installed.

    Raises:
        NotSupportedError: the server is installed without the extra.
    """
    if not has_extra(extra):
        raise NotSupportedError(
            f"This server does not read {kinds}: install trioserve[{extra}].", param=param
        )


@attrs.frozen(kw_only=True)
class Wanted:
    """The media formats that a model needs."""

    kinds: frozenset[MediaKind]
    rate: int = 16000  # of sound, in Hz
    fps: float = 4.0  # frames a second, of video


@attrs.define(eq=False, slots=False)
class MediaLoader:
    """Reads and decodes the media of requests, within limits. Call `aclose` after use.

    Raises:
        ConfigError: an entry of `_urls` is invalid.
    """

    _limits: MediaLimits  # of a file
    #: The folder of files that requests may name with ``file://``; None: no files.
    _media_path: Path | None = None
    _urls: Sequence[str] = ()  # the hosts from which to fetch files, as entries of `FetchRules`
    _on_white: bool = True  # whether transparent images are laid on white

    def __attrs_post_init__(self) -> None:
        dialer, limits = Dialer(FetchRules(self._urls)), self._limits
        self._fetcher = Fetcher(dialer, limits.max_bytes, limits.timeout) if self._urls else None
        self._decoders = Decoders(limits)
        self._readers = FairLimiter(_N_READERS, _N_READERS_EACH)

    @classmethod
    def of(cls, config: Config) -> Self:
        """Make the loader of a configuration.

        Raises:
            ConfigError: ``media_urls`` has an invalid entry.
        """
        limits = MediaLimits(
            max_bytes=config.media_max_bytes,
            max_pixels=config.media_max_pixels,
            max_seconds=config.media_max_seconds,
            max_frames=config.media_max_frames,
            timeout=config.media_timeout,
        )
        folder = None if config.media_path is None else Path(config.media_path)
        return cls(limits, folder, config.media_urls, config.media_background == "white")

    async def load(
        self, sources: Sequence[MediaSource], wanted: Wanted, hold: MemoryReservation
    ) -> list[DecodedMedia]:
        """Load all media of a request, in their order.

        When cancelled, ends the decoder process and waits for its end.

        Args:
            hold: reserves memory for the result.

        Raises:
            InvalidMediaError: one cannot be loaded or used; the error has the source's `param`, and
                its position as `index`.
            NotSupportedError: the server is installed without `trioserve[media]`.
            PayloadTooLargeError: they take more memory than one request may hold.
            UnavailableError: no memory or no process is available now.
            QueueFullError: too many files of the client wait.
        """
        most = self._limits.max_files
        if len(sources) > most:
            raise InvalidMediaError(
                f"The request has {len(sources)} media, and may have at most {most}.",
                param=sources[most].param,
                index=most,
            )
        encoded = [source for source in sources if source.decoded is None]
        if encoded:
            check_extra("media", MEDIA, encoded[0].param)
        loaded: list[DecodedMedia] = []
        for index, source in enumerate(sources):
            with _named(_NAMES[source.kind], source.param, index):
                loaded.append(await self._load(source, wanted, hold))
        return loaded

    async def read(self, source: MediaSource, hold: MemoryReservation) -> bytes:
        """Read or fetch a file without decoding it. Otherwise like `load`."""
        with _named(_NAMES[source.kind], source.param):
            return await self._read(source, hold)

    async def load_document(
        self, source: DocumentSource, *, with_images: bool, hold: MemoryReservation
    ) -> DecodedDocument:
        """Decode a PDF whose data are loaded. Otherwise like `load`.

        Raises:
            NotSupportedError: the server is installed without `trioserve[pdf]`.
            InvalidMediaError: the document cannot be used; or as `load`.
        """
        check_extra("pdf", "PDF files", source.param)
        assert source.data is not None
        order = Order(format="pdf", kind="document", with_images=with_images)
        with _named("document", source.param):
            if len(source.data) > self._limits.max_bytes:
                raise InvalidMediaError(f"has more than {self._limits.max_bytes} bytes")
            document = await self._decoders.decode(source.data, order)
        assert isinstance(document, DecodedDocument)
        for page in document.pages:
            hold.grow(len(page.text) + (0 if page.image is None else size_of(page.image)))
        return document

    async def aclose(self) -> None:
        """End the decoder processes. No further media can be loaded."""
        await self._decoders.aclose()

    async def _load(
        self, source: MediaSource, wanted: Wanted, hold: MemoryReservation
    ) -> DecodedMedia:
        if source.decoded is not None:
            return source.decoded  # the decoding call has reserved its memory
        before = hold.n_bytes
        data = await self._read(source, hold)
        order = _order(source.kind, sniff(data), wanted, on_white=self._on_white)
        media = await self._decoders.decode(data, order)
        assert not isinstance(media, DecodedDocument)
        hold.shrink_to(before)
        hold.grow(size_of(media))
        return media

    async def _read(self, source: MediaSource, hold: MemoryReservation) -> bytes:
        if source.data is not None:
            return source.data
        if source.path is not None:
            data = await self._read_file(Path(source.path), None)
        elif source.url is not None and source.url.startswith("file://"):
            data = await self._read_file(*self._in_folder(source.url.removeprefix("file://")))
        elif source.url is not None and self._fetcher is not None:
            return (await self._fetcher.fetch(source.url, hold.grow)).body
        else:
            raise InvalidMediaError(
                "is at an address, and without --media-urls this server fetches nothing"
            )
        hold.grow(len(data))
        return data

    def _in_folder(self, name: str) -> tuple[Path, Path]:
        if self._media_path is None:
            raise InvalidMediaError(
                "is a file of the server, and without --media-path requests may name none"
            )
        path = Path(unquote(name))
        if not path.is_relative_to(self._media_path):  # llama-server takes a slash before the name
            path = self._media_path / path.as_posix().lstrip("/")
        return path, self._media_path

    async def _read_file(self, path: Path, folder: Path | None) -> bytes:
        read = partial(_read_file, path, folder, self._limits.max_bytes + 1)
        try:
            return await self._readers.run_sync(
                read, seconds=self._limits.timeout, abandon_on_cancel=True
            )
        except trio.TooSlowError:
            raise InvalidMediaError("is in a file that cannot be read in time") from None


@contextmanager
def _named(what: str, param: str | None, index: int = 0) -> Iterator[None]:
    """Name the file in an error whose message is a part of a sentence."""
    try:
        yield
    except InvalidMediaError as error:
        message = f"The {what} in '{param}' {error.message}."
        raise InvalidMediaError(message, param=param, index=index) from error


def _order(said: MediaKind | None, format: Format, wanted: Wanted, *, on_white: bool) -> Order:
    """Decide how to decode a file.

    Raises:
        InvalidMediaError: its format is not the declared one, or the model does not support it.
    """
    kinds = [kind for kind in format.kinds if said in (None, kind)]
    if not kinds:
        raise InvalidMediaError(f"is no {_NAMES[said]}, but a file of the format {format.name}")
    kind = next((kind for kind in kinds if kind in wanted.kinds), None)
    if kind is None:
        raise InvalidMediaError(
            f"is a file of the format {format.name}, and this model takes no {_PLURALS[kinds[0]]}"
        )
    return Order(format=format.name, kind=kind, rate=wanted.rate, fps=wanted.fps, on_white=on_white)


def _read_file(path: Path, folder: Path | None, most: int) -> bytes:
    """Read a regular file in a folder, up to a size.

    Raises:
        InvalidMediaError: it cannot be read, or a link leads out of the folder.
    """
    try:
        path = path.resolve()
        if folder is not None and not path.is_relative_to(folder.resolve()):
            raise InvalidMediaError("is outside of --media-path")  # whether it exists or not
        # Opening a pipe would block until another process writes to it.
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InvalidMediaError("is not in a plain file")
            return file.read(most)
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or "the name makes no sense"
        raise InvalidMediaError(f"is in a file that cannot be read: {reason}") from None


def size_of(media: DecodedMedia) -> int:
    """The bytes of decoded media."""
    if isinstance(media, DecodedImage):
        return len(media.pixels)
    if isinstance(media, DecodedAudio):
        return len(media.samples)
    return sum(len(image.pixels) for _, image in media.frames)
