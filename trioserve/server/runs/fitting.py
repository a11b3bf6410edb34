"""Results of tools that are too long for the model are cut."""

from __future__ import annotations

from typing import Protocol

from trioserve.types import TokenId

#: Characters of a token, generously: what has more of them is cut before it is tokenized.
_MAX_CHARS = 16

#: Tokens that a note takes, about.
_NOTE = 24


class Tokens(Protocol):
    """Turns text into tokens and back, as `Server` does."""

    async def tokenize(
        self, prompt: str, *, add_special: bool = True, parse_special: bool = True
    ) -> tuple[TokenId, ...]:
        """Turn text into token ids."""

    def detokenize(self, tokens: tuple[TokenId, ...]) -> str:
        """Turn token ids into text."""


async def fit(text: str, n_tokens: int, tokens: Tokens) -> str:
    """Cut a text to so many tokens, with a note that says so. It is left as it is if it fits."""
    head = _as_unicode(text[: max(0, n_tokens) * _MAX_CHARS])
    if 4 * len(text) <= n_tokens:  # a token has at least a byte
        return head
    ids = await tokens.tokenize(head, add_special=False, parse_special=False)
    if len(ids) <= n_tokens and len(head) == len(text):
        return head
    n_chars = len(tokens.detokenize(ids[: max(0, n_tokens - _NOTE)]))
    note = f"[cut here: all {len(text)} characters are too long for the context]"
    return f"{head[:n_chars]}\n{note}"


def _as_unicode(text: str) -> str:
    """Replace halves of surrogate pairs, which cannot be tokenized."""
    return text.encode("utf-8", "replace").decode()
