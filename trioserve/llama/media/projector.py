"""LlamaProjector: turns images and sound into embeddings, for the model that it came with."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from trioserve.config import Config
from trioserve.engine.backend import Embeddings
from trioserve.errors import (
    EncodeError,
    EncodeInterruptedError,
    InvalidMediaError,
    ModelLoadError,
)
from trioserve.llama import devices, last_word, library
from trioserve.llama.context import FLASH_ATTENTION, thread_choices
from trioserve.llama.library import SharedHandle, lib
from trioserve.llama.media.chunks import CutChunk, CutError, Placeholder, as_parts, cut
from trioserve.llama.media.library import EncodingInterrupt, EncodingThreads, load as load_mtmd
from trioserve.llama.model import LlamaModel
from trioserve.log import get_logger
from trioserve.models import BUNDLED_PROJECTOR, gguf
from trioserve.types import (
    DecodedAudio,
    DecodedImage,
    DecodedMedia,
    DecodedVideo,
    MediaChunk,
    Prompt,
)
from trioserve.types.media import content_id

_log = get_logger("llama")

#: Sound of fewer samples is shorter than a frame of its spectrum. At one, libmtmd ends the process.
_MIN_SAMPLES = 400

#: Seconds before and after a short recording for the bundled model, which was trained on words with
#: silence around them.
_SILENCE = 0.4
_SHORT = 7.0

#: Bytes of a pixel that is prepared, three floats, and of the spectrum of sound, for each cell.
_PIXEL = 12
_SPECTRUM = 4096

#: Images whose chunks are as large as any: how many tokens one has may depend on its shape.
_LARGE = tuple(
    Placeholder(width=width, height=height)
    for width, height in ((4096, 4096), (8192, 2048), (2048, 8192), (1024, 1024))
)


class LlamaProjector:
    """Implements `trioserve.engine.backend.Projector` with libmtmd.

    `prepare` and `interrupt` may be called by any thread at any time. It is closed before its
    model.
    """

    def __init__(
        self, mtmd: Any, context: Any, model: LlamaModel, interrupt: EncodingInterrupt
    ) -> None:
        self.mtmd = mtmd
        self._shared = SharedHandle(context)
        self._vocab = model.vocab
        self._interrupt = interrupt
        self._threads = EncodingThreads(context)
        #: Numbers in the embedding of a cell.
        self.width: int = lib.llama_model_n_embd_inp(model.handle)
        self.sees: bool = mtmd.mtmd_support_vision(context)
        self.hears: bool = mtmd.mtmd_support_audio(context)
        self.audio_rate: int = mtmd.mtmd_get_audio_sample_rate(context) if self.hears else 0
        self.max_chunk = 0
        self.path = Path()
        #: The width of the images that it was made for; 0: not known.
        self.image_size = 0
        #: Identifies the projector.
        self.fingerprint = ""
        #: A position has sections (M-RoPE).
        self.has_sections: bool = mtmd.mtmd_decode_use_mrope(context)
        self._counts_images = False
        self._video_interval = 0
        self.bytes_per_cell = _SPECTRUM if self.hears else 0

    @property
    def is_closed(self) -> bool:
        return self._shared.is_closed

    @property
    def can_set_threads(self) -> bool:
        """True if `set_threads` has an effect."""
        return self._threads.is_found

    @classmethod
    def load(cls, path: Path, model: LlamaModel, config: Config) -> LlamaProjector:
        """Load the projector in a file.

        Raises:
            ModelLoadError: the file is damaged, no projector, of a kind that is not supported, or
                for another model.
            BackendMismatchError: the installed libmtmd is not one we can use.
        """
        mtmd = load_mtmd()
        last_word.names(f"the projector {path}")
        kinds = _kinds_in(path)
        params = _params(mtmd, config)
        interrupt = EncodingInterrupt()
        params.cb_eval = interrupt.callback
        context = _init(mtmd, path, model, params)
        projector = cls(mtmd, context, model, interrupt)
        try:
            if not projector._threads.is_found:
                _log.warning("the number of threads that encode cannot be changed")
                mtmd.mtmd_free(projector._shared.close())
                params.n_threads = thread_choices(config)[1][-1]
                projector = cls(mtmd, _init(mtmd, path, model, params), model, interrupt)
            projector.set_threads(thread_choices(config)[1][-1])
            projector._counts_images = "hunyuanvl" in kinds
            projector._video_interval = config.video_timestamp_interval
            projector.fingerprint = _fingerprint(path)
            projector.path = path
            projector.image_size = _image_size(path)
            projector._try_out(path)
        except BaseException:
            projector.close()
            raise
        _log.info("projector", path=str(path), sees=projector.sees, hears=projector.hears)
        return projector

    def prepare(
        self,
        parts: Sequence[str | DecodedMedia],
        *,
        add_special: bool,
        check: Callable[[int], object] = lambda _n: None,
    ) -> Prompt:
        """Tokenize text, and cut media into chunks, with the tokens that surround them.

        Raises:
            InvalidMediaError: the model cannot take one of the media; `index` is its part.
            InvalidRequestError: text cannot be tokenized.
            ServerClosingError: the projector is closed.
        """
        before, after = self._vocab.added if add_special else ((), ())
        tokens, media, n_media, n_images = [*before], list[tuple[int, MediaChunk]](), 0, 0
        for index, one in self._pieces(parts):
            n_cells = len(tokens) + n_media
            if isinstance(one, str):
                tokens += self._vocab.tokenize(one, check=partial(_after, check, n_cells))
                continue
            check(n_cells)
            for part in self._cut(one, index, n_images):
                if isinstance(part, MediaChunk):
                    media.append((len(tokens), part))
                    n_media += part.n_cells
                else:
                    tokens += part
            n_images += isinstance(one[0], DecodedImage)
        return Prompt((*tokens, *after), media=media)

    def encode(self, chunk: MediaChunk) -> Embeddings:
        """Compute the embeddings of a chunk. From one thread, which may not be that of the model.

        Raises:
            EncodeInterruptedError: `interrupt` was called.
            EncodeError: it failed.
            ServerClosingError: the projector is closed.
        """
        mtmd = self.mtmd
        with self.interruptible() as context:
            library.take_errors()
            code = mtmd.mtmd_encode_chunk(context, chunk.content.handle)
            if code != 0:
                why = library.reason(library.take_errors())
                raise EncodeError(f"The {chunk.kind} cannot be encoded: {why}.")
            rows = mtmd.mtmd_get_output_embd(context)
            found: Embeddings = np.array(
                np.ctypeslib.as_array(rows, shape=(chunk.n_cells, self.width)), dtype=np.float32
            )
        if not np.isfinite(found).all():
            raise EncodeError(
                f"The projector made numbers of the {chunk.kind} that are not finite."
            )
        return found

    def in_use(self) -> AbstractContextManager[Any]:
        """Keep libmtmd's context valid in this block. Raises ServerClosingError."""
        return self._shared.in_use()

    @contextmanager
    def interruptible(self) -> Iterator[Any]:
        """Compute something in this block that `interrupt` ends; otherwise as `in_use`.

        Raises EncodeInterruptedError: it was ended.
        """
        with self._shared.in_use() as context:
            self._interrupt.start()
            try:
                yield context
            finally:
                if self._interrupt.end():  # whatever has come of it
                    raise EncodeInterruptedError("The encoding was interrupted.")

    def interrupt(self) -> None:
        """End the `encode` that runs within milliseconds; without one, nothing. From any thread."""
        self._interrupt.set()

    def set_threads(self, count: int) -> None:
        """Encode with `count` threads, from the next chunk on.

        Raises:
            ServerClosingError: the projector is closed.
        """
        with self._shared.in_use():
            self._threads.set(count)

    def close(self) -> None:
        """Interrupt a running encoding, and free the projector. Closing twice is fine."""
        self._interrupt.set()
        if (context := self._shared.close()) is not None:
            self.mtmd.mtmd_free(context)

    def __del__(self) -> None:
        if getattr(self, "_shared", None) is not None and not self._shared.is_closed:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=2)

    def _pieces(
        self, parts: Sequence[str | DecodedMedia]
    ) -> Iterator[tuple[int, str | tuple[DecodedImage | DecodedAudio, ...]]]:
        """Go through text and media, with their places; a video is made of text and images."""
        for index, part in enumerate(parts):
            if isinstance(part, str):
                yield index, part
            elif isinstance(part, DecodedVideo):
                for one in as_parts(part, self._video_interval):
                    yield index, one
            else:
                yield index, (part,)

    def _cut(
        self, media: tuple[DecodedImage | DecodedAudio, ...], index: int, n_images: int
    ) -> Iterator[tuple[int, ...] | MediaChunk]:
        """Cut an image, a pair of frames, or sound. `n_images` come before it in the prompt."""
        self._check(media[0], index)
        media = tuple(map(self._with_silence, media))
        try:
            with self._shared.in_use() as context:
                found = cut(self.mtmd, context, media)
                if self._counts_images and n_images:
                    earlier = [Placeholder(width=64, height=64)] * n_images
                    numbered = _chunks(cut(self.mtmd, context, (*earlier, *media)))[-1]
                    found = [numbered if isinstance(one, CutChunk) else one for one in found]
        except CutError as error:
            raise InvalidMediaError(f"The model cannot take it: {error}.", index=index) from error
        ids = "".join(one.id for one in media)
        for place, part in enumerate(found):
            if not isinstance(part, CutChunk):
                yield part
                continue
            if not part.is_causal and part.n_cells > self.max_chunk:
                raise InvalidMediaError(
                    f"It has {part.n_cells} tokens, and the model takes {self.max_chunk} at once.",
                    index=index,
                )
            yield _chunk(part, ids, place)

    def _with_silence(self, one: DecodedImage | DecodedAudio) -> DecodedImage | DecodedAudio:
        if isinstance(one, DecodedImage) or one.seconds > _SHORT or self.path != BUNDLED_PROJECTOR:
            return one
        silence = bytes(4 * int(_SILENCE * one.rate))
        return attrs.evolve(one, samples=b"".join((silence, one.samples, silence)))

    def _check(self, one: DecodedImage | DecodedAudio, index: int) -> None:
        if isinstance(one, DecodedImage):
            why = "" if self.sees else "The model takes no images."
        elif not self.hears:
            why = "The model takes no sound."
        elif one.rate != self.audio_rate:
            why = f"The model takes {self.audio_rate} samples a second, not {one.rate}."
        elif len(one.samples) // 4 < _MIN_SAMPLES:
            why = "The sound is too short."
        else:
            why = ""
        if why:
            raise InvalidMediaError(why, index=index)

    def _try_out(self, path: Path) -> None:
        """Find out how large a chunk may be that is decoded whole, and what an image takes.

        Raises:
            ModelLoadError: the vocabulary lacks a token that goes around images.
        """
        if not self.sees:
            return
        try:
            with self._shared.in_use() as context:
                found = [one for size in _LARGE for one in cut(self.mtmd, context, (size,))]
                own = self.image_size or _LARGE[-1].width
                usual = _chunks(cut(self.mtmd, context, (Placeholder(width=own, height=own),)))[0]
        except CutError as error:
            raise ModelLoadError(f"The projector {path} cannot be used: {error}.") from error
        if any(token < 0 for one in found if not isinstance(one, CutChunk) for token in one):
            raise ModelLoadError(
                f"The projector {path} does not fit the model: its vocabulary lacks tokens that go "
                "around images."
            )
        self.max_chunk = max(
            (chunk.n_cells for chunk in _chunks(found) if not chunk.is_causal), default=0
        )
        if _chunks(found)[-1].n_cells != usual.n_cells:  # images keep their size
            own, usual = _LARGE[-1].width, _chunks(found)[-1]
        in_image = _PIXEL * own**2 // usual.n_cells
        self.bytes_per_cell = max(self.bytes_per_cell, in_image)


def _after(check: Callable[[int], object], n_before: int, n: int) -> None:
    check(n_before + n)


def _chunks(found: Sequence[tuple[int, ...] | CutChunk]) -> list[CutChunk]:
    return [one for one in found if isinstance(one, CutChunk)]


def _chunk(part: CutChunk, ids: str, place: int) -> MediaChunk:
    """Make a chunk of the engine. `ids` are of what it shows, and `place` is that among its own."""
    sections = b"" if part.positions is None else part.positions.tobytes()
    identity = (ids.encode(), f"{place} {part.n_cells}".encode(), sections)
    return MediaChunk(
        kind=part.kind,
        n_cells=part.n_cells,
        n_positions=part.n_positions,
        id=content_id(*identity),
        is_causal=part.is_causal,
        content=part,
    )


_KINDS = ("clip.projector_type", "clip.vision.projector_type", "clip.audio.projector_type")

#: Projectors that need more than is done here.
_UNKNOWN = {"deepseek4v": "its images must begin at certain places of a prompt"}

#: Bytes at the beginning and the end of a file that its fingerprint is made of.
_SAMPLE = 2**20


def _kinds_in(path: Path) -> frozenset[str]:
    """Return the types of the projectors in a file.

    Raises:
        ModelLoadError: it is no projector, or one of a type that is not supported.
    """
    gguf.check_file(path)
    with gguf.read(path) as header:
        arch = header.text("general.architecture")
        kinds = frozenset(header.text(key) for key in _KINDS if key in header)
    if arch != "clip":
        raise ModelLoadError(
            f"The file {path} is no projector: its architecture is {arch or 'not given'}."
        )
    for kind in kinds & _UNKNOWN.keys():
        raise ModelLoadError(
            f"The projector {path} cannot be used: the type {kind} is not supported, because "
            f"{_UNKNOWN[kind]}."
        )
    return kinds


def _fingerprint(path: Path) -> str:
    """Compute a file's fingerprint: a hash of its size, its beginning and its end."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        parts = [file.read(_SAMPLE)]
        file.seek(max(0, size - _SAMPLE))
        parts.append(file.read(_SAMPLE))
    return content_id(b"%d" % size, *parts)


def _image_size(path: Path) -> int:
    """Read the width of the images that a projector was made for; 0: not given."""
    with gguf.read(path) as header:
        return header.whole("clip.vision.image_size")


def _params(mtmd: Any, config: Config) -> Any:
    params = mtmd.mtmd_context_params_default()
    params.use_gpu = config.mmproj_offload and config.mmproj_device != "none"
    device = config.mmproj_device or next(iter(config.device), None)
    if params.use_gpu and device is not None:
        found = devices.chosen((device,))
        params.use_gpu, params.device = bool(found), found[0].handle if found else None
    params.print_timings = False
    params.n_threads = EncodingThreads.MARK
    params.flash_attn_type = FLASH_ATTENTION[config.flash_attn]
    params.image_min_tokens = config.image_min_tokens or -1
    params.image_max_tokens = config.image_max_tokens or -1
    return params


def _init(mtmd: Any, path: Path, model: LlamaModel, params: Any) -> Any:
    library.take_errors()
    context = mtmd.mtmd_init_from_file(os.fsencode(path), model.handle, params)
    if context is None:
        why = library.reason(library.take_errors())
        raise ModelLoadError(f"The projector {path} cannot be loaded: {why}.")
    return context
