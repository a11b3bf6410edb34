"""Places of media in a text. Templates render nothing but text, so each image, sound or video
becomes a marker, which is found again in what was rendered.

The markers of a chat are unguessable, so that what a user writes stays text.
"""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from trioserve.chat.messages import MarkedMessages, Messages, has_media
from trioserve.errors import InvalidRequestError
from trioserve.types import MediaSource

#: A prompt: text, and media where they stand in it.
Parts: TypeAlias = Sequence[str | MediaSource]


@functools.cache
def media_marker() -> str:
    """The marker in prompts that clients send with media, the same as long as the process runs.

    As in llama-server, `LLAMA_MEDIA_MARKER` in the environment sets it.
    """
    return os.environ.get("LLAMA_MEDIA_MARKER") or f"<__media_{secrets.token_hex(16)}__>"


def mark(messages: Messages, marker: str | None = None) -> MarkedMessages:
    """Replace media by markers. The parts of such a message become one text.

    Args:
        messages: in normal form.
        marker: the same for all media; such a text cannot be split. Without it, each has a
            different marker that cannot be guessed.
    """
    media: dict[str, MediaSource] = {}
    head = f"<__media_{secrets.token_hex(16)}"

    def write(source: MediaSource) -> str:
        own = f"{head}_{len(media)}__>"
        media[own] = source
        return own if marker is None else marker

    marked = Messages(
        {**one, "content": _join(one["content"], write)} if has_media(one["content"]) else one
        for one in messages
    )
    return MarkedMessages(marked, media)


def _join(parts: Sequence[Mapping[str, Any]], write: Callable[[MediaSource], str]) -> str:
    """Join parts as llama-server does: a newline before a text, but not beside a marker."""
    joined, after_text = "", False
    for part in parts:
        is_text = part["type"] == "text"
        piece = part["text"] if is_text else write(part["media"])
        joined += f"\n{piece}" if is_text and after_text and joined else piece
        after_text = is_text
    return joined


def split_at(text: str, marker: str, sources: Sequence[MediaSource], param: str) -> Parts:
    """Split a text at a marker, which stands for each of the media in turn.

    Raises:
        InvalidRequestError: there are more markers than media, or fewer; the error names `param`.
    """
    pieces = text.split(marker)
    if len(pieces) - 1 != len(sources):
        raise InvalidRequestError.at(
            param, f"has {len(pieces) - 1} media markers, and there are {len(sources)} media."
        )
    parts: list[str | MediaSource] = [pieces[0]]
    for source, piece in zip(sources, pieces[1:], strict=True):
        parts += (source, piece)
    return [part for part in parts if part]
