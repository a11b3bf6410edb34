"""A prompt, as the engine and its caches count and compare it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from trioserve.errors import InvalidRequestError
from trioserve.types.sampling import TokenId

#: What a cell of the KV cache holds, for comparing: a token id. For media it will be a number
#: below 0, made from the identity of the medium and the place in it.
CellKey = int


def _to_tuple(tokens: Iterable[TokenId]) -> tuple[TokenId, ...]:
    return tuple(tokens)


def _lowest(prompt: Prompt) -> TokenId:
    return min(prompt.tokens, default=0)


def _highest(prompt: Prompt) -> TokenId:
    return max(prompt.tokens, default=0)


@attrs.frozen
class Prompt:
    """What a task continues. Its length is the number of cells that it takes in the KV cache.

    Today it is all tokens, and a token takes one cell and one position. An image will take many
    cells and, with M-RoPE, fewer positions; so a length in cells is not a position.
    """

    tokens: tuple[TokenId, ...] = attrs.field(converter=_to_tuple)
    #: Lengths in cells at which a later prompt is likely to part from this one. Where memory cannot
    #: be cut, the state is kept there.
    hints: tuple[int, ...] = attrs.field(
        default=(), converter=_to_tuple, eq=False, repr=False, kw_only=True
    )
    #: The range of the token ids, found once: a prompt may have a hundred thousand of them.
    lowest: TokenId = attrs.field(init=False, repr=False, default=attrs.Factory(_lowest, True))
    highest: TokenId = attrs.field(init=False, repr=False, default=attrs.Factory(_highest, True))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def n_positions(self) -> int:
        """How many positions of a sequence it takes."""
        return len(self.tokens)

    @property
    def keys(self) -> Sequence[CellKey]:
        """What each cell is compared by. Equal prompts have equal keys, and no others do."""
        return self.tokens

    def check(self, n_vocab: int, param: str) -> None:
        """Refuse tokens that a vocabulary of `n_vocab` does not have.

        Raises:
            InvalidRequestError: there is one; the error names `param`.
        """
        if self.lowest < 0 or self.highest >= n_vocab:
            token = self.lowest if self.lowest < 0 else self.highest
            raise InvalidRequestError(
                f"'{param}' has an unknown token, {token}: token ids run from 0 to {n_vocab - 1}.",
                param=param,
            )
