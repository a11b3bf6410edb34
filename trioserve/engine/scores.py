"""Scores of prompts: how probable each of their tokens is, by the logits of the row before it.

A batch has few rows with logits, so the prompt of a request that wants scores comes in more steps.
Its cells may come from the cache as far as their scores are known: from an earlier prompt with the
same beginning. Prompts that share `n` tokens share ``n - 1`` scores: the row of the last of these
tokens is still needed, for the token where the prompts diverge.
"""

from __future__ import annotations

from trioserve.engine.backend import Backend
from trioserve.engine.cache.prefix_tree import PrefixTree
from trioserve.engine.slot import RequestState
from trioserve.types import PromptScores

#: Bytes that a token of a prompt takes in it, and a candidate for its place.
_TOKEN, _CANDIDATE = 64, 12

#: Bytes of the scores that are kept.
LIMIT = 8 * 2**20


class ScoreKeeper:
    """Collects the scores of prompts, and keeps the latest. Used from the inference thread.

    Args:
        backend: computes them.
        limit: bytes of memory for those that are kept.
    """

    def __init__(self, backend: Backend, limit: int = LIMIT) -> None:
        self._backend = backend
        self._limit = limit
        self._kept: dict[int, PromptScores] = {}  # by task, the ones used last at the end
        self._tree = PrefixTree()  # of their prompts
        self._n_bytes = self._n_added = 0

    def begin(self, request: RequestState, n_top: int) -> None:
        """Prepare a new request that wants scores, with the `n_top` best of each token."""
        vocab = self._backend.vocab
        request.scores = PromptScores(min(n_top, vocab.n_tokens), vocab.names.__getitem__)

    def find(self, request: RequestState) -> None:
        """Give a request that is to start the scores of the beginning of its prompt."""
        scores = request.scores
        if (
            scores is None
            or not request.task.params.cache_prompt
            or request.n_sought == self._n_added
        ):
            return
        request.n_sought = self._n_added
        root = (request.task.root, scores.n_top)
        length, holders = self._tree.match(request.keys[: request.n_prompt], root)
        if length - 1 > len(scores):
            holder = max(holders)
            found = self._kept[holder] = self._kept.pop(holder)
            request.scores = found.head(length - 1)

    def collect(self, request: RequestState, n_held: int, row: int) -> PromptScores | None:
        """Take the scores of a request whose first `n_held` cells are computed, the last one in a
        row of the batch. Returns all of them when they are complete, once.

        Raises DecodeError: a logit is not a number.
        """
        scores, first = request.scores, request.next_score
        assert scores is not None
        end = min(n_held, request.n_prompt - 1)
        if first < end:
            tokens = request.keys[first + 1 : end + 1]
            self._backend.score(scores, row - (n_held - 1 - first), tokens)
        if request.has_sent_scores or n_held < request.n_prompt:
            return None
        request.has_sent_scores = True
        self._keep(request, scores)
        return scores

    def _keep(self, request: RequestState, scores: PromptScores) -> None:
        """Keep the scores of a whole prompt. Those that were unused for longest make room."""
        holder, size = request.task.id, self._size(scores)
        keys, root = request.keys[: request.n_prompt], (request.task.root, scores.n_top)
        if size > self._limit or self._tree.match(keys, root)[0] == len(keys):
            return
        self._n_added += 1
        self._kept[holder] = scores
        self._tree.extend(holder, keys, root)
        self._n_bytes += size
        while self._n_bytes > self._limit:
            oldest = next(iter(self._kept))
            self._n_bytes -= self._size(self._kept.pop(oldest))
            self._tree.cut(oldest, 0)

    def _size(self, scores: PromptScores) -> int:
        return len(scores) * (_TOKEN + _CANDIDATE * scores.n_top)
