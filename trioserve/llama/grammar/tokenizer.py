"""The vocabulary in the form that llguidance takes."""

from __future__ import annotations

from llguidance import LLTokenizer, TokenizerWrapper

from trioserve.errors import InvalidRequestError
from trioserve.llama.vocab import Vocab
from trioserve.types import TokenId


class _Words:
    """The vocabulary as llguidance's `TokenizerWrapper` wants it.

    llguidance has a way of its own to call llama.cpp's tokenizer. It would do so with any text of
    a schema, and after the model is closed.
    """

    bos_token_id = None

    def __init__(self, vocab: Vocab) -> None:
        self.eos_token_id = min(vocab.end_of_generation)
        self.tokens = list(vocab.names)
        # What has a name and no text is no text to a grammar either.
        pairs = enumerate(zip(vocab.pieces, vocab.names, strict=True))
        self.special_token_ids = [token for token, (piece, name) in pairs if piece != name]
        self.fallback: LLTokenizer | None = None
        self._vocab = vocab

    def __call__(self, text: str) -> list[TokenId]:
        try:
            return list(self._vocab.tokenize(text, parse_special=False))
        except InvalidRequestError:  # a word too long for llama.cpp; any split will do
            return self.fallback.greedy_tokenize(text) if self.fallback is not None else []


def make_tokenizer(vocab: Vocab) -> LLTokenizer:
    """Give llguidance the vocabulary. It takes a third of a second for 150,000 tokens."""
    words = _Words(vocab)
    # This is done in two steps because llguidance keeps the GIL: 0.1 s each for 150,000 tokens.
    ends = sorted(vocab.end_of_generation)
    words.fallback = LLTokenizer(TokenizerWrapper(words), eos_token=ends, slices=[])
    return words.fallback.with_slices(LLTokenizer.json_slices())
