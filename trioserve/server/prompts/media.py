"""Prompts with images, sound and video: loads media, and inserts them between chunks of text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from trioserve.chat.markers import Parts
from trioserve.chat.messages import (
    Attachment,
    Message,
    Messages,
    document_part,
    documents_in,
    media_part,
    pages_of,
)
from trioserve.concurrency import check_cancelled
from trioserve.engine.backend import Projector
from trioserve.errors import (
    ContextLengthExceededError,
    InvalidMediaError,
    PayloadTooLargeError,
    UnsupportedFieldError,
)
from trioserve.fair_limiter import FairLimiter, Workers
from trioserve.server.limits.memory import MemoryBudget, MemoryReservation
from trioserve.server.media.loader import MEDIA, MediaLoader, Wanted, check_extra
from trioserve.server.model import LoadedModel
from trioserve.types import (
    DecodedMedia,
    DecodedVideo,
    DocumentSource,
    MediaKind,
    MediaSource,
    Modalities,
    Prompt,
)

#: The most documents of a request.
_MAX_DOCUMENTS = 100


def check_kinds(modalities: Modalities, sources: Iterable[MediaSource]) -> None:
    """Check that a model supports the media of a request.

    Raises:
        UnsupportedFieldError: it does not support one; the error names the part.
        NotSupportedError: the server is installed without `trioserve[media]`.
    """
    for source in sources:
        if not modalities.take(source.kind):
            check_extra("media", MEDIA, source.param)  # without it, models have no projector
            raise UnsupportedFieldError(
                f"{source.kind or 'media'} input is not supported - hint: if this is unexpected, "
                "you may need to provide the mmproj",
                param=source.param,
            )


def _to_parts(parts: Iterable[str | MediaSource | Attachment]) -> Parts:
    return tuple(
        part.source(f"prompt[{index}]") if isinstance(part, Attachment) else part
        for index, part in enumerate(parts)
    )


def _is_file(part: Mapping[str, Any]) -> bool:
    """True if a content part is media that are not loaded yet."""
    return part["type"] == "media" and part["media"].decoded is None


def _with_decoded(message: Message, loaded: Iterator[DecodedMedia]) -> Message:
    """Replace the media files of a message with the next loaded media."""
    if isinstance(message["content"], str):
        return message
    content = []
    for part in message["content"]:
        if _is_file(part):
            source = part["media"]
            part = media_part(
                MediaSource(kind=source.kind, decoded=next(loaded), param=source.param)
            )
        content.append(part)
    return {**message, "content": content}


def _scoped(media: DecodedMedia, scope: str) -> DecodedMedia:
    """Give media an id that they have in this scope alone."""
    if not scope:
        return media
    if isinstance(media, DecodedVideo):
        frames = tuple((at, attrs.evolve(one, id=scope + one.id)) for at, one in media.frames)
        return attrs.evolve(media, id=scope + media.id, frames=frames)
    return attrs.evolve(media, id=scope + media.id)


@attrs.frozen
class MixedPrompt:
    """A prompt of text and media: ``MixedPrompt(["This is ", Image("cat.png"), ", a"])``."""

    parts: Parts = attrs.field(converter=_to_parts)


@attrs.define(eq=False, slots=False)
class MediaPrompts:
    """Makes prompts of text and media."""

    _model: LoadedModel
    _projector: Projector | None  # the model's projector; None: text only
    _loader: MediaLoader  # loads media
    _workers: Workers  # threads in which prompts are made
    memory: MemoryBudget  # of requests
    _video_fps: float  # frames to take from each second of a video

    def __attrs_post_init__(self) -> None:
        #: Memory during preparation is not in the budget, so this limits it.
        self._preparing = FairLimiter(3, 2)

    async def read_documents(self, messages: Messages, hold: MemoryReservation) -> Messages:
        """Replace documents with their text and images. `hold`: see `prompt_of`.

        Raises:
            NotSupportedError: the server is installed without `trioserve[pdf]`.
            InvalidMediaError: a document cannot be read; the error names the part.
            TrioServeError: from loading.
        """
        documents = [one for message in messages for one in documents_in(message)]
        if not documents:
            return messages
        if len(documents) > _MAX_DOCUMENTS:
            raise InvalidMediaError(
                f"The request has {len(documents)} documents, and may have at most "
                f"{_MAX_DOCUMENTS}.",
                param=documents[_MAX_DOCUMENTS].param,
            )
        return Messages([await self._with_pages(message, hold) for message in messages])

    async def load_once(self, messages: Messages, hold: MemoryReservation) -> Messages:
        """Replace files with decoded media, for a chat that becomes several prompts.

        Arguments and errors are those of `read_documents`.
        """
        messages = await self.read_documents(messages, hold)
        sources = [
            part["media"]
            for message in messages
            if not isinstance(message["content"], str)
            for part in message["content"]
            if _is_file(part)
        ]
        check_kinds(self._model.modalities, sources)
        if not sources or self._projector is None:
            return messages
        loaded = iter(await self._loader.load(sources, self._wanted(self._projector), hold))
        return Messages([_with_decoded(message, loaded) for message in messages])

    async def _with_pages(self, message: Message, hold: MemoryReservation) -> Message:
        if not documents_in(message):
            return message
        content: list[dict[str, Any]] = []
        for part in message["content"]:
            content += await self._parts(part["document"], hold) if "document" in part else [part]
        return {**message, "content": content}

    async def _parts(self, source: DocumentSource, hold: MemoryReservation) -> list[dict[str, Any]]:
        if source.url is None:
            return await self._pages(source, hold)
        data = await self._loader.read(MediaSource(url=source.url, param=source.param), hold)
        part = document_part(data, name=source.name, about=source.about, param=source.param)
        if part is None:
            return [media_part(MediaSource(data=data, param=source.param))]
        return await self._pages(part["document"], hold) if part["type"] == "document" else [part]

    async def _pages(self, source: DocumentSource, hold: MemoryReservation) -> list[dict[str, Any]]:
        sees = self._model.modalities.vision
        document = await self._loader.load_document(source, with_images=sees, hold=hold)
        if not sees and not any(page.text.strip() for page in document.pages):
            raise InvalidMediaError(
                f"The document in '{source.param}' has no text, and this model sees no images.",
                param=source.param,
            )
        return pages_of(source, document)

    async def prompt_of(
        self,
        parts: Parts,
        hold: MemoryReservation,
        *,
        scope: str,
        add_special: bool,
        fits: bool = True,
        aside: bool = False,
    ) -> Prompt:
        """Load the media of a prompt, and insert them. Special tokens in the text are parsed.

        Args:
            parts: text and media sources.
            hold: reserves memory for the media; it outlives the prompt.
            scope: embeddings are kept for other prompts of this scope only: of the same cache root.
            add_special: see `Vocab.tokenize`.
            fits: whether the prompt must fit into the context.
            aside: whether the tokens are not for a prompt that the model continues.

        Raises:
            UnsupportedFieldError: the model does not support one of the media.
            InvalidMediaError: one cannot be loaded or used; the error names the part.
            ContextLengthExceededError: the prompt does not fit.
            TrioServeError: from loading.
        """
        sources = [part for part in parts if isinstance(part, MediaSource)]
        check_kinds(self._model.modalities, sources)
        assert self._projector is not None
        projector = self._projector
        before = hold.n_bytes
        files = [source for source in sources if source.decoded is None]
        loaded = iter(await self._loader.load(files, self._wanted(projector), hold))
        given = [
            part if isinstance(part, str) else _scoped(part.decoded or next(loaded), scope)
            for part in parts
        ]

        def prepare() -> Prompt:
            def check(n_cells: int) -> None:
                if fits and n_cells > self._model.n_ctx_seq:
                    raise ContextLengthExceededError(n_cells, self._model.n_ctx_seq, at_least=True)
                if n_cells * projector.bytes_per_cell > self.memory.limit:
                    raise PayloadTooLargeError(
                        f"The media of the request take more than {self.memory.limit} bytes of "
                        "memory, which --max-request-memory allows."
                    )
                check_cancelled()

            return projector.prepare(given, add_special=add_special, check=check)

        try:
            async with self._preparing.place():
                prompt = await self._workers.offload(prepare, aside=aside)
        except InvalidMediaError as error:
            source = parts[error.index]
            assert isinstance(source, MediaSource)
            raise InvalidMediaError(
                f"'{source.param}': {error.message}", param=source.param, index=error.index
            ) from error
        n_cells = sum(chunk.n_cells for _, chunk in prompt.media)
        hold.shrink_to(before)  # only the chunks remain
        hold.grow(n_cells * projector.bytes_per_cell)
        return prompt

    def _wanted(self, projector: Projector) -> Wanted:
        kinds: list[MediaKind] = ["image", "audio", "video"]
        taken = frozenset(kind for kind in kinds if self._model.modalities.take(kind))
        return Wanted(kinds=taken, rate=projector.audio_rate, fps=self._video_fps)
