"""Writes a small SentencePiece vocabulary with random weights behind it, as Llama 2's is made."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import gguf

from tests.support.vocabularies import write_model

_MARK = "\u2581"  # stands for a space
_SPECIAL = ("<unk>", "<s>", "</s>")
#: Text that special tokens of kind "user-defined" are made of, so that they are found in any text.
USER_DEFINED = ("<call>", "</call>")
#: The results of merges; both parts of each are further up.
_MERGED = (
    "th", "the", "aa", "aaa", "42", "10", '{"', '":', '",', '"}', "me", "name", "é", "ж",
    *(_MARK + text for text in ("the", "a", "b", "{", '"', "42", "x", "t")),
)  # fmt: skip
_LETTERS = string.ascii_letters + string.digits + string.punctuation + _MARK


def write_sentence_pieces(
    path: Path, *, defined: tuple[str, ...] = USER_DEFINED, **metadata: Any
) -> Path:
    """Write a model whose vocabulary puts a space before each text.

    Line breaks, and most of what is not ASCII, have no tokens but those of their bytes. `metadata`
    is that of `write_model`: `add_space_prefix=False`, for one, makes it a vocabulary as Gemma's.
    `defined` are the tokens of kind "user-defined".
    """
    _write_tokens(path, "llama", [f"<0x{byte:02X}>" for byte in range(256)], defined)
    return write_model(path, path, **metadata)


def write_unigrams(path: Path) -> Path:
    """Write a model with unigrams, as T5's: what is not ASCII, and a line break, has no token."""
    _write_tokens(path, "t5", [])
    return write_model(path, path, add_space_prefix=True)


def _write_tokens(
    path: Path, kind: str, of_bytes: list[str], defined: tuple[str, ...] = USER_DEFINED
) -> None:
    writer = gguf.GGUFWriter(str(path), "llama")
    normal = [*_LETTERS, *_MERGED]
    tokens = [*_SPECIAL, *of_bytes, *defined, *normal]
    kinds = gguf.TokenType
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(
        [0.0] * (len(tokens) - len(normal)) + [-float(i) for i in range(len(normal))]
    )
    writer.add_token_types(
        [
            kinds.UNKNOWN,
            *[kinds.CONTROL] * 2,
            *[kinds.BYTE] * len(of_bytes),
            *[kinds.USER_DEFINED] * len(defined),
            *[kinds.NORMAL] * len(normal),
        ]
    )
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
