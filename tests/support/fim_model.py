"""Writes a small GGUF with random weights whose vocabulary has all tokens for text with a gap."""

from __future__ import annotations

from pathlib import Path

import gguf

from benchmarks import gguf_maker
from trioserve.types import FimTokens

#: Bytes that no text has stand for the tokens.
TOKENS = FimTokens(prefix=1, suffix=2, middle=3, repository=4, file=5)


class _Writer(gguf.GGUFWriter):
    """Adds the tokens to whatever else is written."""

    def write_header_to_file(self, path: Path | None = None) -> None:
        self.add_uint32("tokenizer.ggml.fim_pre_token_id", TOKENS.prefix)
        self.add_uint32("tokenizer.ggml.fim_suf_token_id", TOKENS.suffix)
        self.add_uint32("tokenizer.ggml.fim_mid_token_id", TOKENS.middle)
        self.add_uint32("tokenizer.ggml.fim_rep_token_id", TOKENS.repository)
        self.add_uint32("tokenizer.ggml.fim_sep_token_id", TOKENS.file)
        super().write_header_to_file(path)


def write(path: Path) -> None:
    """Write the model."""
    shape = gguf_maker.Shape(vocab=300, width=32, layers=1, heads=1, kv_heads=1, ffn=32)
    gguf_maker.write(path, shape, writer=_Writer)
