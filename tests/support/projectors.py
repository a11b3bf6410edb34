"""A projector that writes media as text, to see what reaches the model of a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trioserve.errors import InvalidMediaError
from trioserve.testing import ScriptedProjector
from trioserve.testing.vocab import byte_vocab
from trioserve.types import DecodedAudio, DecodedImage, DecodedMedia, Prompt


class WordProjector(ScriptedProjector):
    """Writes ``(image 8x4)`` in place of an image, and ``(sound 0.5s)`` in place of sound."""

    def prepare(
        self,
        parts: Sequence[str | DecodedMedia],
        *,
        add_special: bool,
        parse_special: bool = True,
        check: Callable[[int], object] = lambda _n: None,
    ) -> Prompt:
        """Write text and words."""
        text = ""
        for index, part in enumerate(parts):
            check(len(text))
            text += part if isinstance(part, str) else _word(part, index)
        return Prompt(byte_vocab.tokenize(text, add_special=add_special))


def _word(media: DecodedMedia, index: int) -> str:
    if isinstance(media, DecodedImage):
        if media.width < 2:
            raise InvalidMediaError("The image is too narrow.", index=index)
        return f"(image {media.width}x{media.height})"
    if isinstance(media, DecodedAudio):
        return f"(sound {media.seconds:.1f}s)"
    return f"(video of {len(media.frames)})"
