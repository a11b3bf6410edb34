"""Prompts with images, sound and video."""

from __future__ import annotations

from collections.abc import Iterable

from trioserve.errors import UnsupportedFieldError
from trioserve.types import MediaSource, Modalities


def check_kinds(modalities: Modalities, sources: Iterable[MediaSource]) -> None:
    """Refuse media that a model does not take.

    Raises:
        UnsupportedFieldError: there are some; the error names the part.
    """
    for source in sources:
        if not modalities.take(source.kind):
            raise UnsupportedFieldError(
                f"{source.kind or 'media'} input is not supported - hint: if this is unexpected, "
                "you may need to provide the mmproj",
                param=source.param,
            )
