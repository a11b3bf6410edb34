"""Drafters that guess all tokens of a draft in one step: DFlash, DFlash 2 and DSpark.

The guesses are in the places of mask tokens, and with DSpark the first one in the place of the
token before::

    token mask mask mask  ->  .... guess guess guess

DFlash reads them from the logits, each by itself. DFlash 2 gives some candidates for each place,
and scores for each pair of neighbours::

    place 1   candidates  a b c   score of each after the token before
    place 2   candidates  d e f   scores of d e f after a, after b, and after c
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import attrs
import numpy as np

from trioserve.engine.backend import DraftRequest
from trioserve.llama.batch import LlamaBatch, RowBatch
from trioserve.llama.context import Context
from trioserve.llama.drafter import DraftRules, most_probable
from trioserve.llama.head_texts import HeadText, Rows
from trioserve.llama.heads import Head, HeadDrafter
from trioserve.types import TokenId

#: The best token in each row of a batch, and how probable it is.
Guesses: TypeAlias = tuple[Sequence[TokenId], Sequence[float]]


@attrs.frozen(kw_only=True)
class Block:
    """The form of the blocks that a model guesses.

    Attributes:
        mask: the token in the places of guesses.
        first: the first place that has a guess: 0 is that of the newest token.
        hidden: returns the rows of the model's own last batch, given its size, if it is needed.
        n_candidates: how many it gives for each place; 0: their logits have the guesses.
        says_how_sure: a row begins with how probable it is that its guess is right.
    """

    mask: TokenId
    first: int = 1
    hidden: Callable[[int], Rows]
    n_candidates: int = 0
    says_how_sure: bool = False


class BlockDrafter(HeadDrafter):
    """Drafts by such a model. Arguments as `HeadDrafter`.

    A draft has at most as many tokens as a block has guesses.
    """

    needs_rows = False

    def __init__(self, head: Head, model: Context, rules: DraftRules, block: Block) -> None:
        super().__init__(head, model, rules)
        self._block = block
        self._batch = LlamaBatch(self._context.n_batch, n_vocab=head.n_known, n_seqs=model.n_seqs)

    def _read_piece(self, text: HeadText, n: int) -> None:
        rows = text.unread(self._head.widths[0], n)[1:]
        self._context.decode(RowBatch(rows, text.n_cells, text.id))
        text.settle(n)

    def _guess(self, able: Sequence[tuple[DraftRequest, HeadText]]) -> dict[int, list[TokenId]]:
        for _, text in able:
            self._read(text, len(text.tokens))
        # As in training, all of a block is there, even if fewer tokens are wanted.
        block = self._block
        size = self.n_max + block.first
        self._batch.clear()
        for request, text in able:
            tokens = [request.keys[-1], *[block.mask] * (size - 1)]
            self._batch.extend(tokens, text.n_cells, text.id)
            text.is_stale = True
        if not block.n_candidates:
            self._batch.want_all()
        self._context.decode(self._batch)
        found, probs = self._guesses(len(self._batch), size)
        made = {}
        for i, (request, text) in enumerate(able):
            start = i * size + block.first
            block_of = slice(start, start + self._room(request))
            pairs = zip(found[block_of], probs[block_of], strict=True)
            made[text.id] = list(self._usable(pairs))
        return made

    def _guesses(self, n_rows: int, size: int) -> Guesses:
        """Read the guesses of a batch with blocks of this size."""
        block, p_min = self._block, self._rules.p_min
        if block.n_candidates:
            blocks = np.split(block.hidden(n_rows), n_rows // size)
            pairs = [one for rows in blocks for one in best_path(rows, block.n_candidates)]
            return [token for token, _ in pairs], [prob for _, prob in pairs]
        sure = block.says_how_sure and p_min > 0
        shape = n_rows, self._head.n_known
        tokens, probs = most_probable(self._context, shape, 0 if sure else p_min)
        return tokens, block.hidden(n_rows)[:, 0].tolist() if sure else probs

    def _usable(self, pairs: Iterable[tuple[TokenId, float]]) -> Iterator[TokenId]:
        """Yield tokens up to one that is improbable, unknown to the model, or the end."""
        for token, prob in pairs:
            if token >= self._head.n_shared or not prob >= self._rules.p_min:
                return
            yield token
            if token in self._head.ends:
                return


def best_path(rows: Rows, n: int) -> Iterator[tuple[TokenId, float]]:
    """Yield the best token of each place of a block, after that of the place before.

    A row has `n` candidates, and `n` scores of them after each candidate before. The first row has
    the token before the block.
    """
    yield 0, 0.0
    before = 0
    for row in rows[1:]:
        scores = row[n * (1 + before) : n * (2 + before)]
        before = int(scores.argmax())
        prob = 1 / float(np.exp(scores - scores[before]).sum())
        yield int(row[before]), prob
