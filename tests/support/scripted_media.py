"""Prompts with images that exist in name only, for scripted backends."""

from __future__ import annotations

import re

from trioserve.testing import ScriptedProjector
from trioserve.types import MediaChunk, Prompt


def prompt_of(
    text: str, projector: ScriptedProjector, divergence_points: tuple[int, ...] = ()
) -> Prompt:
    """Make a prompt of a text as a script sees it: ``see [image:x]`` has an image in it."""
    tokens = b""
    media: list[tuple[int, MediaChunk]] = []
    for i, part in enumerate(re.split(r"\[image:(.*?)\]", text)):
        if i % 2:
            media.append((len(tokens), projector.chunk("image", part)))
        else:
            tokens += part.encode()
    return Prompt(tokens, media=media, divergence_points=divergence_points)
