"""Drafters that continue from what the model has computed: heads (MTP, EAGLE-3) and DFlash.

A head reads what the model has decoded, a little later: the tokens of a few steps together with the
newest one, in the batch that also gives the first guess. Of a prompt, it reads each chunk at once.
So a prompt has drafts from its first token on.

A chain guesses a token from the one before, step by step::

    row, token    ->  guess, its own row  ->  guess, its own row  ->  ...

A block guesses all tokens of a draft in one step, in the places of mask tokens::

    token mask mask mask  ->  .... guess guess guess
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from time import monotonic

import attrs
import numpy as np

from trioserve.engine.backend import DraftRequest, MediaPiece
from trioserve.errors import DecodeError, KVCacheFullError
from trioserve.llama import identity
from trioserve.llama.batch import LlamaBatch, RowBatch
from trioserve.llama.context import Context
from trioserve.llama.drafter import DraftRules, average, most_probable
from trioserve.llama.head_texts import HeadMemory, HeadText, Rows
from trioserve.llama.model import LlamaModel
from trioserve.log import get_logger
from trioserve.types import TokenId

#: With no more unread tokens than this, a text is read in the batch of its first guess, which has
#: logits for all rows: heads differ in how they treat rows without.
FEW = 8
#: With more than this, it is read at once, so that few rows are kept.
MANY = 32

_log = get_logger("llama")


@attrs.frozen(kw_only=True)
class Head:
    """A head, and how it is used.

    Attributes:
        name: the type of drafts.
        context: of the head, with a sequence for each one of the model. It is closed with the
            drafter.
        read: returns the rows of the last batch that the model has decoded, given its size.
        width: numbers in a row.
        shift: see `HeadMemory`.
        n_known: tokens of its vocabulary; `n_shared` of them are the model's.
        ends: the tokens that end an output.
        cache_types: of the keys and values in its KV cache.
        model: the weights, unless they are in the model's file. Closed with the drafter.
    """

    name: str
    context: Context
    read: Callable[[int], Rows]
    width: int
    shift: int
    n_known: int
    n_shared: int
    ends: frozenset[TokenId]
    cache_types: tuple[str, str]
    model: LlamaModel | None = None


class HeadDrafter(ABC):
    """Implements `trioserve.engine.backend.Drafter` with a head of the model.

    Args:
        head: the head.
        model: the model's context.
        rules: how drafts are made.
    """

    is_free = False

    def __init__(self, head: Head, model: Context, rules: DraftRules) -> None:
        self._head, self._rules = head, rules
        self.name, self.n_max = head.name, rules.n_max
        self.step_s = 0.0  # seconds to guess a token in all slots; 0: not known
        self._context = head.context
        self._texts = [HeadText(i) for i in range(model.n_seqs)]
        #: The sequences of the model with those of the head, for the engine.
        self.memory = HeadMemory(
            model.memory, self._context.memory, self._texts, width=head.width, shift=head.shift
        )
        self._has_failed = False

    def identity(self) -> tuple[str, ...]:
        """Return what the states of its sequences depend on. Raises OSError if a file is gone."""
        model = self._head.model
        of_file = () if model is None else (identity.of_file(Path(model.info.path)),)
        return (self.name, *self._head.cache_types, *of_file)

    def set_threads(self, count: int) -> None:
        """Compute with `count` threads from now on, unless their number is configured."""
        if self._rules.follows_threads:
            self._context.set_threads(count)

    # -- what the model has decoded

    def observe(self, batch: LlamaBatch) -> None:
        """Take the rows of a batch that the model has just decoded."""
        tokens, positions, seqs = batch.content()
        if self._has_failed or not len(tokens):
            return
        with self._forgiving():
            rows = self._head.read(len(tokens))
            bounds = [0, *(np.flatnonzero(np.diff(seqs)) + 1).tolist(), len(tokens)]
            for start, stop in pairwise(bounds):
                text = self._texts[seqs[start]]
                text.append(int(positions[start]), tokens[start:stop].tolist(), rows[start:stop])
            self._read([text for text in self._texts if len(text.tokens) > MANY])

    def observe_media(self, pieces: Sequence[MediaPiece], last_rows: Sequence[int]) -> None:
        """Note that the model has just decoded media, which the head cannot read.

        It continues behind them, from their last row.
        """
        if self._has_failed:
            return
        with self._forgiving():
            rows = self._head.read(last_rows[-1] + 1)
            for piece, row in zip(pieces, last_rows, strict=True):
                self._texts[piece.seq].skip(rows[row : row + 1].copy())

    @abstractmethod
    def _read(self, texts: Sequence[HeadText]) -> None:
        """Have the head read all that the model has decoded of some texts."""

    @contextmanager
    def _forgiving(self) -> Iterator[None]:
        """Let the head fail in this block: the model has decoded its batch."""
        try:
            yield
        except KVCacheFullError:
            for text in self._texts:
                self.memory.forget(text)
        except DecodeError as error:
            _log.error("the head for drafts has failed and is not used any more",
                       reason=error.message)  # fmt: skip
            self._has_failed = True

    # -- drafts

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[TokenId]]:
        """Guess the next tokens of each slot: those most probable for the head."""
        made: dict[int, list[TokenId]] = {}
        if not self._has_failed:
            with self._forgiving():
                made = self._make(requests)
        found = [made.get(request.seq, []) for request in requests]
        return [tokens if len(tokens) >= self._rules.n_min else [] for tokens in found]

    def _make(self, requests: Sequence[DraftRequest]) -> dict[int, list[TokenId]]:
        """Make drafts, and learn how long that takes; returns them by sequence."""
        able = [
            (request, text)
            for request in requests
            if request.n_new == 1 and self._room(request) > 0
            and (text := self._texts[request.seq]).end and not text.is_adrift
        ]  # fmt: skip
        self._read([text for _, text in able if len(text.tokens) > FEW])
        started = monotonic()
        made = self._guess(able) if able else {}
        if made:
            n_steps = max(1, *map(len, made.values()))
            self.step_s = average(self.step_s, (monotonic() - started) / n_steps)
        return made

    def _room(self, request: DraftRequest) -> int:
        """How long a draft may be."""
        room = self._rules.n_ctx_seq - len(request.keys)
        return min(request.n_max, self.n_max, room)

    @abstractmethod
    def _guess(self, able: Sequence[tuple[DraftRequest, HeadText]]) -> dict[int, list[TokenId]]:
        """Make drafts; returns them by sequence. Few tokens of the texts are unread."""

    def forget(self, slot_id: int) -> None:
        """Do nothing: what was read is kept of sequences, not of slots."""
        return

    def close(self) -> None:
        """Free the context, and the weights if they are the head's own. Twice is fine."""
        self._context.close()
        if self._head.model is not None:
            self._head.model.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless what was read of the texts agrees with llama.cpp."""
        for text in self._texts:
            assert len(text.tokens) == sum(map(len, text.rows))
            last = self.memory.last(text.id)
            assert text.is_adrift or self._has_failed or text.end == last + 1
            if text.stale_from is None and text.n_read > self._head.shift:
                held = self._context.memory.last(text.id)
                assert held in (text.n_read - self._head.shift - 1, -1)


@attrs.define
class _Chain:
    """A draft that is being made: its last token is in a row of the batch, before a position."""

    text: HeadText
    n_max: int
    row: int
    pos: int
    tokens: list[TokenId] = attrs.field(factory=list)


class ChainDrafter(HeadDrafter):
    """Drafts by MTP and EAGLE-3 heads. Arguments as `HeadDrafter`.

    `hidden` returns the rows of the head's own last batch, given its size.
    """

    def __init__(
        self, head: Head, model: Context, rules: DraftRules, hidden: Callable[[int], Rows]
    ) -> None:
        super().__init__(head, model, rules)
        self._hidden = hidden
        self._batch = LlamaBatch(
            self._context.n_batch, n_vocab=head.n_known, n_seqs=model.n_seqs, width=head.width
        )

    def _read(self, texts: Sequence[HeadText]) -> None:
        """Have the head read all that the model has decoded of some texts."""
        size = self._context.n_batch
        for text in texts:
            tokens, rows, pos = self._unread(text)
            for start in range(0, len(tokens), size):
                self._batch.clear()
                self._add(text, tokens[start : start + size], rows[start:], pos + start)
                self._context.decode(self._batch)
            text.settle()

    def _unread(self, text: HeadText) -> tuple[list[TokenId], Rows, int]:
        """Return what to read of a text: tokens, a row for each and one more, and the position."""
        self.memory.tidy(text)
        rows, pos = text.unread(self._head.width), text.n_read - self._head.shift
        if pos < 0:  # the first token has no cell
            return text.tokens[1:], rows[1:], 0
        return text.tokens, rows, pos

    def _add(self, text: HeadText, tokens: Sequence[TokenId], rows: Rows, pos: int) -> int:
        """Add tokens to the batch, and the row of each; returns the last row."""
        last = self._batch.extend(tokens, pos, text.id)
        self._batch.put_rows(last + 1 - len(tokens), rows[: len(tokens)])
        return last

    def _guess(self, able: Sequence[tuple[DraftRequest, HeadText]]) -> dict[int, list[TokenId]]:
        drafts = self._begin(able)
        going_on = drafts
        while going_on:
            going_on = self._extend(going_on)
        return {draft.text.id: draft.tokens for draft in drafts}

    def _begin(self, able: Sequence[tuple[DraftRequest, HeadText]]) -> list[_Chain]:
        """Read the newest tokens, which gives the first guesses."""
        self._batch.clear()
        drafts = []
        for request, text in able:
            tokens, rows, pos = self._unread(text)
            last = self._add(text, [*tokens, request.keys[-1]], rows, pos)
            drafts.append(_Chain(text, self._room(request), last, pos + len(tokens) + 1))
        self._batch.want_all()
        self._context.decode(self._batch)
        for draft in drafts:
            draft.text.settle()
            draft.text.note_guesses()
        return drafts

    def _extend(self, drafts: list[_Chain]) -> list[_Chain]:
        """Take the next token of each draft, and read it; returns those to continue."""
        n_rows, picked = len(self._batch), [draft.row for draft in drafts]
        shape = n_rows, self._head.n_known
        tokens, probs = most_probable(self._context, shape, self._rules.p_min, picked)
        hidden = self._hidden(n_rows)
        self._batch.clear()
        going_on = []
        for draft, token, prob in zip(drafts, tokens, probs, strict=True):
            if token >= self._head.n_shared or not prob >= self._rules.p_min:
                continue
            draft.tokens.append(token)
            if len(draft.tokens) < draft.n_max and token not in self._head.ends:
                row = self._batch.add(token, draft.pos, draft.text.id, logits=True)
                self._batch.put_rows(row, hidden[draft.row : draft.row + 1])
                draft.row, draft.pos = row, draft.pos + 1
                going_on.append(draft)
        self._context.decode(self._batch)
        return going_on


class BlockDrafter(HeadDrafter):
    """Drafts by DFlash. Arguments as `HeadDrafter`.

    A draft has at most as many tokens as a block, less one. `mask` is the token in their places.
    """

    def __init__(self, head: Head, model: Context, rules: DraftRules, mask: TokenId) -> None:
        super().__init__(head, model, rules)
        self._mask = mask
        self._batch = LlamaBatch(self._context.n_batch, n_vocab=head.n_known, n_seqs=model.n_seqs)

    def _read(self, texts: Sequence[HeadText]) -> None:
        size = self._context.n_ubatch  # attention is not causal
        for text in texts:
            self.memory.tidy(text)
            rows = text.unread(self._head.width)[1:]
            for start in range(0, len(rows), size):
                piece = rows[start : start + size]
                self._context.decode(RowBatch(piece, text.n_read + start, text.id))
            text.settle()

    def _guess(self, able: Sequence[tuple[DraftRequest, HeadText]]) -> dict[int, list[TokenId]]:
        self._read([text for _, text in able])
        # As in training, all of a block is there, even if fewer tokens are wanted.
        size = self.n_max + 1
        self._batch.clear()
        for request, text in able:
            block = [request.keys[-1], *[self._mask] * self.n_max]
            self._batch.extend(block, text.end, text.id)
            text.note_guesses()
        self._batch.want_all()
        self._context.decode(self._batch)
        shape = len(self._batch), self._head.n_known
        tokens, probs = most_probable(self._context, shape, self._rules.p_min)
        made = {}
        for i, (request, text) in enumerate(able):
            block_of = slice(i * size + 1, i * size + 1 + self._room(request))
            pairs = zip(tokens[block_of], probs[block_of], strict=True)
            made[text.id] = list(self._usable(pairs))
        return made

    def _usable(self, pairs: Iterable[tuple[TokenId, float]]) -> Iterator[TokenId]:
        """Yield tokens up to one that is improbable, unknown to the model, or the end."""
        for token, prob in pairs:
            if token >= self._head.n_shared or not prob >= self._rules.p_min:
                return
            yield token
            if token in self._head.ends:
                return
