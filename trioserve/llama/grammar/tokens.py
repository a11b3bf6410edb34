"""The vocabulary as grammars need it, and masks: which of its tokens a grammar allows next."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from trioserve.errors import InvalidRequestError, OutputError
from trioserve.llama.vocab import LlamaVocab
from trioserve.types import TokenId


class Mask:
    """The tokens that may come next.

    `only` is the token if there is just one. `ids` and `forbidden` take a while to find, and are
    found when they are asked for.
    """

    __slots__ = ("_n_vocab", "_words", "allows_most", "only")

    def __init__(self, words: NDArray[np.int32], n_vocab: int) -> None:
        self._words, self._n_vocab = words, n_vocab
        # One large integer: it counts its bits ten times as fast as an array of booleans.
        bits = int.from_bytes(words.tobytes(), "little") & ((1 << n_vocab) - 1)
        n_allowed = bits.bit_count()
        if n_allowed == 0:
            raise OutputError("The grammar allows no token to follow.")
        self.only: TokenId | None = bits.bit_length() - 1 if n_allowed == 1 else None
        #: Most tokens are allowed, so that it is cheaper to mask the others.
        self.allows_most = n_vocab - n_allowed <= n_vocab // 8

    @classmethod
    def of(cls, bits: NDArray[np.bool_]) -> Mask:
        """Make a mask of a boolean for each token."""
        packed = np.zeros(-(-len(bits) // 32) * 4, dtype=np.uint8)
        packed[: -(-len(bits) // 8)] = np.packbits(bits, bitorder="little")
        return cls(packed.view(np.int32), len(bits))

    def __contains__(self, token: TokenId) -> bool:
        return bool(self._words[token >> 5] >> (token & 31) & 1)

    @property
    def ids(self) -> NDArray[np.int32]:
        """The allowed tokens, in order."""
        return np.flatnonzero(self._bits).astype(np.int32)

    @property
    def forbidden(self) -> NDArray[np.int32]:
        """The ids of the tokens that the mask forbids, in order."""
        return np.flatnonzero(~self._bits).astype(np.int32)

    @property
    def _bits(self) -> NDArray[np.bool_]:
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little")
        return bits[: self._n_vocab].view(np.bool_)

    def joined(self, others: NDArray[np.int32]) -> Mask:
        """Return a mask that allows these tokens too."""
        bits = self._bits.copy()
        bits[others] = True
        return Mask.of(bits)

    def without(self, banned: NDArray[np.int32], ends: NDArray[np.int32]) -> Mask:
        """Return a mask without the tokens that the request forbids.

        Where only the end of the output is allowed, it stays allowed: the grammar is complete.

        Raises:
            InvalidRequestError: nothing is left.
        """
        bits = self._bits.copy()
        bits[banned] = False
        if not bits.any():
            bits[ends] = self._bits[ends]
        if not bits.any():
            raise InvalidRequestError.at(
                "logit_bias", "forbids every token that the grammar allows next."
            )
        return Mask.of(bits)


def none_but(ids: NDArray[np.int32], n_vocab: int) -> Mask:
    """Allow these tokens and no others.

    Raises:
        EngineError: `ids` is empty.
    """
    bits = np.zeros(n_vocab, dtype=np.bool_)
    bits[ids] = True
    return Mask.of(bits)


def all_but(ids: NDArray[np.int32], n_vocab: int) -> Mask:
    """Allow all tokens but these."""
    bits = np.ones(n_vocab, dtype=np.bool_)
    bits[ids] = False
    return Mask.of(bits)


class NameIndex:
    """The tokens of a vocabulary, sorted by name.

    Making one takes a tenth of a second for 150,000 tokens.
    """

    def __init__(self, names: Sequence[bytes]) -> None:
        names = list(names)
        self._ids = sorted(range(len(names)), key=names.__getitem__)
        self._names = [names[token] for token in self._ids]

    def find(self, name: bytes) -> list[TokenId]:
        """Return the tokens with this name; there may be several."""
        start = bisect_left(self._names, name)
        return self._ids[start : bisect_left(self._names, name + b"\0", start)]

    def openers(self, text: bytes) -> NDArray[np.int32]:
        """Return the tokens whose name is a prefix of the text, or has the text as its prefix."""
        ids: list[int] = []
        for size in range(1, len(text)):
            ids += self.find(text[:size])
        start = bisect_left(self._names, text)
        while start < len(self._names) and self._names[start].startswith(text):
            ids.append(self._ids[start])
            start += 1
        return np.array(sorted(ids), dtype=np.int32)


class GrammarVocab:
    """The properties of a vocabulary that compiled grammars and matchers need."""

    def __init__(self, vocab: LlamaVocab) -> None:
        self.n_vocab = vocab.n_tokens
        #: The tokens that end an output.
        self.ends = vocab.end_of_generation
        self.end_ids = np.array(sorted(self.ends), dtype=np.int32)
        self._vocab = vocab
        self._tokenizer: LLTokenizer | None = None

    @property
    def tokenizer(self) -> LLTokenizer:
        """The vocabulary in llguidance's form; made when it is first asked for."""
        if self._tokenizer is None:
            self._tokenizer = _make_tokenizer(self._vocab)
        return self._tokenizer

    @cached_property
    def names(self) -> NameIndex:
        """An index of the tokens by their names."""
        return NameIndex(self._vocab.names)

    @cached_property
    def no_end(self) -> Mask:
        """Anything but the end of the output."""
        return all_but(self.end_ids, self.n_vocab)

    @cached_property
    def control(self) -> dict[str, TokenId]:
        """Control tokens by their names."""
        return {
            self._vocab.names[token].decode(errors="replace"): token
            for token in self._vocab.control
        }

    def newlines(self, max_newlines: int) -> NDArray[np.int32]:
        """Return the tokens that consist of newlines, `max_newlines` at most."""
        ids = [token for n in range(1, max_newlines + 1) for token in self.names.find(b"\n" * n)]
        return np.array(ids, dtype=np.int32)

    def name_of(self, token: TokenId) -> bytes:
        """Return the text of a token, or the name of a control token."""
        name: bytes = self._vocab.names[token]
        return name

    def split(self, text: bytes) -> list[TokenId]:
        """Turn text into tokens, as a matcher takes them."""
        return self.tokenizer.tokenize_bytes(text)

    def in_lark(self, token: str | int, negated: bool) -> str | None:
        """Write a token in Lark, by its name or id; None if it does not exist.

        A negated one stands for any other token that does not end the output.
        """
        if isinstance(token, str):
            ids = self._vocab.tokenize(token, is_fragment=True)
            if len(ids) != 1:
                return None
            token = ids[0]
        if not 0 <= token < self.n_vocab:
            return None
        if not negated:
            return f"<[{token}]>"
        return f"<[^{','.join(map(str, sorted(self.ends | {token})))}]>"

    def close(self) -> None:
        """Free llguidance's copy of the vocabulary."""
        self._tokenizer = None


class _Wrapped:
    """The vocabulary as llguidance's `TokenizerWrapper` takes it.

    llguidance can also call llama.cpp's tokenizer itself. It would do so with any text of a schema,
    which may be too long for it, and after the model is closed.
    """

    bos_token_id = None

    def __init__(self, vocab: LlamaVocab) -> None:
        self.eos_token_id = min(vocab.end_of_generation)
        self.tokens = list(vocab.names)
        self.special_token_ids = list(vocab.control)
        self.fallback: LLTokenizer | None = None
        self._vocab = vocab

    def __call__(self, text: str) -> list[TokenId]:
        """Tokenize some text of an output: tokens that spell it to the byte, or an empty list."""
        tokens: Sequence[TokenId]
        try:
            tokens = self._vocab.tokenize(text, parse_special=False, is_fragment=True)
        except InvalidRequestError:  # a word too long for llama.cpp
            tokens = ()
        if not self._spells(tokens, text) and self.fallback is not None:
            tokens = self.fallback.greedy_tokenize(text)  # any split will do
        return list(tokens) if self._spells(tokens, text) else []

    def _spells(self, tokens: Sequence[TokenId], text: str) -> bool:
        return self._vocab.detokenize(tokens) == text.encode()


def _make_tokenizer(vocab: LlamaVocab) -> LLTokenizer:
    """Give llguidance the vocabulary. It takes a third of a second for 150,000 tokens."""
    wrapped = _Wrapped(vocab)
    # This is done in two steps because llguidance keeps the GIL: 0.1 s each for 150,000 tokens.
    ends = sorted(vocab.end_of_generation)
    wrapped.fallback = LLTokenizer(TokenizerWrapper(wrapped), eos_token=ends, slices=[])
    return wrapped.fallback.with_slices(LLTokenizer.json_slices())
