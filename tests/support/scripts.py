"""Backends that answer from a script, and what the tests ask them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trioserve.testing import ScriptedBackend
from trioserve.testing.vocab import EOS

#: The chat template of the bundled model.
TEMPLATE = (Path(__file__).parents[2] / "examples" / "bundled_model" / "template.jinja").read_text(
    encoding="utf-8"
)

HI = [{"role": "user", "content": "Hi"}]
CHAT = {"messages": HI}

#: More tokens than any test waits for.
ENDLESS = 100_000


def answering(text: str | Callable[[str], str], **settings: Any) -> ScriptedBackend:
    """A backend that answers each chat with a text, or with what a function makes of the prompt."""
    script = text if callable(text) else lambda prompt: text
    settings = {"n_ctx": 4096, "chat_template": TEMPLATE, **settings}
    return ScriptedBackend(script, **settings)


def noting(text: str, **settings: Any) -> tuple[ScriptedBackend, list[str]]:
    """A backend that answers each chat with a text, and the list of the prompts that it gets."""
    prompts: list[str] = []

    def script(prompt: str) -> str:
        prompts.append(prompt)
        return text

    return answering(script, **settings), prompts


def endless(on_decode: Callable[[ScriptedBackend], None] | None = None) -> ScriptedBackend:
    """A backend that never comes to an end in a test; a step takes a millisecond by default."""
    backend = ScriptedBackend(lambda prompt: "x" * ENDLESS, n_ctx=4 * ENDLESS, n_ctx_seq=ENDLESS)
    backend.on_decode = on_decode or (lambda backend: time.sleep(0.001))
    return backend


class NamedVocab:
    """Bytes, and a control token with a name in place of the letter Z."""

    def __init__(self, backend: ScriptedBackend, name: bytes = b"[CALL]") -> None:
        self.n_tokens = backend.vocab.n_tokens
        self.max_token_bytes = 16
        self.end_of_generation = frozenset({EOS})
        self.control = (ord("Z"), EOS)
        self.names = tuple(
            name if i == ord("Z") else other for i, other in enumerate(backend.vocab.names)
        )
        self.pieces = tuple(
            b"" if i == ord("Z") else piece for i, piece in enumerate(backend.vocab.pieces)
        )


#: The fields that a request needs before its other fields are looked at.
BASE = {
    "content": "a",
    "documents": ["a", "b"],
    "input": "a",
    "input_prefix": "a",
    "input_suffix": "b",
    "max_tokens": 4,
    "max_output_tokens": 4,
    "messages": [{"role": "user", "content": "Hi"}],
    "model": "x",
    "n_predict": 4,
    "prompt": "a",
    "query": "a",
    "tokens": [97],
}
