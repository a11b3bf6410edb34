"""A vocabulary with a token for each byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trioserve.types import FimTokens, TokenId

#: The id of the end-of-generation token; ids below are bytes.
EOS = 256


class ByteVocab:
    """One token a byte, and one that ends the output."""

    n_tokens = 257
    max_token_bytes = 5
    pieces: Sequence[bytes] = (*(bytes([i]) for i in range(256)), b"")
    names: Sequence[bytes] = (*pieces[:256], b"<eos>")
    end_of_generation = frozenset({EOS})
    bos = -1
    fim = FimTokens()

    def tokenize(
        self,
        text: str,
        *,
        add_special: bool = False,
        parse_special: bool = True,
        is_fragment: bool = False,
        stop: Callable[[int], bool] = lambda _n: False,
    ) -> tuple[TokenId, ...]:
        """Encode as UTF-8."""
        return tuple(text.encode())

    def detokenize(self, tokens: Sequence[TokenId], *, special: bool = True) -> bytes:
        """Join the bytes."""
        return b"".join(self.pieces[token] for token in tokens)


byte_vocab = ByteVocab()
