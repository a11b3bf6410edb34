"""Parts of the corpus: turns, and documents made of turns."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from examples.bundled_model.chat import render

HELD_OUT_SHARE = 25


@dataclass(frozen=True)
class Turn:
    """A question and its answer.

    ``key`` holds the values that the turn is about: a turn whose key is held
    out never appears in training. ``accept`` lists other right answers.
    """

    kind: str
    user: str
    answer: str
    key: str
    thought: str = ""
    accept: tuple[str, ...] = ()

    @property
    def held_out(self) -> bool:
        """True if this turn is kept for the evaluation."""
        return is_held_out(self.kind, self.key)


def is_held_out(kind: str, key: str) -> bool:
    """Decide by a checksum, so that training and evaluation always agree."""
    return zlib.crc32(f"{kind}:{key.lower()}".encode()) % HELD_OUT_SHARE == 0


@dataclass(frozen=True)
class Document:
    """One training example: a conversation, or bare text.

    It is ``held_out`` when any of its turns is, and ``fresh`` when the last one is.
    """

    kind: str
    messages: Sequence[dict[str, Any]] = ()
    tools: Sequence[dict[str, Any]] | None = None
    thinking: bool = False
    text: str | None = None
    held_out: bool = False
    fresh: bool = False
    accept: tuple[str, ...] = field(default=(), compare=False)

    def render(self) -> str:
        """Return the text that the model is trained on."""
        if self.text is not None:
            return self.text
        return render(self.messages, tools=self.tools, thinking=self.thinking)

    def prompt(self) -> str:
        """Return the text before the last answer, for the evaluation."""
        return render(self.messages[:-1], tools=self.tools, thinking=self.thinking, prompt=True)

    def expected(self) -> str:
        """Return the last answer as the template renders it, without the end token."""
        whole = render(self.messages, tools=self.tools, thinking=self.thinking)
        return whole[len(self.prompt()) :].removesuffix("<|im_end|>\n")
