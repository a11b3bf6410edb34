"""Drafters that continue from what the model has computed: MTP and EAGLE-3 heads.

A head reads what the model has decoded when it is asked for a draft: the tokens of a few steps
together with the newest one, in the batch that also gives the first guess. Where it is not asked,
nothing is read, and what has not been read for long is dropped. As long as drafts pay, it reads
each chunk of a prompt at once, so that a prompt has drafts from its first token on.

A chain guesses a token from the one before, step by step (MTP, EAGLE-3)::

    row, token    ->  guess, its own row  ->  guess, its own row  ->  ...

Several MTP heads guess one token each. Each has read the text, and reads what the heads before it
have guessed, too::

    row, token                    ->  first head   ->  guess, its own row
    row, token; own row, guess    ->  second head  ->  guess, its own row
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import attrs
import numpy as np

from trioserve.engine.backend import DraftRequest, MediaPiece
from trioserve.errors import DecodeError, KVCacheFullError
from trioserve.llama import identity
from trioserve.llama.batch import LlamaBatch
from trioserve.llama.context import Context
from trioserve.llama.drafter import PIECE_S, DraftRules, average, most_probable
from trioserve.llama.head_texts import HeadMemory, HeadText, HeadTexts, NoCells, Rows
from trioserve.llama.model import LlamaModel
from trioserve.log import get_logger
from trioserve.types import TokenId

#: With no more unread tokens than this, a text is read in the batch of its first guess, which has
#: logits for all rows: heads differ in how they treat rows without.
FEW = 8
#: A prompt with a chunk of more tokens than this is read at once, if drafts pay.
MANY = 32
#: The most unread tokens of a text, and the most bytes of the rows of all texts. With more, it is
#: read if drafts pay; else half of it is dropped.
MOST, MAX_BYTES = 512, 64 * 2**20
#: Rows of the last batches that are sorted by their texts together.
LOGGED = 128

_log = get_logger("llama")


@attrs.frozen(kw_only=True)
class Head:
    """A head, and how it is used.

    Attributes:
        name: the type of drafts.
        context: of the head, with a sequence for each one of the model. It is closed with the
            drafter.
        read: returns the rows of the last batch that the model has decoded, given its size, in
            parts that lie side by side. They are valid until the next one.
        encode: turns rows, which it may change, into those that the head reads.
        widths: numbers in a row, and in one that is encoded.
        shift: see `HeadText`.
        n_known: tokens of its vocabulary; `n_shared` of them are the model's.
        ends: the tokens that end an output.
        cache_types: of the keys and values in its KV cache.
        model: the weights, unless they are in the model's file. Closed with the drafter.
    """

    name: str
    context: Context
    read: Callable[[int], Sequence[Rows]]
    encode: Callable[[Rows], Rows] = lambda rows: rows
    widths: tuple[int, int]
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
    #: True if the head reads each token with the row before.
    needs_rows = True
    #: True for a head with a KV cache.
    has_cells = True

    def __init__(self, head: Head, model: Context, rules: DraftRules) -> None:
        self._head, self._rules = head, rules
        self.name, self.n_max = head.name, rules.n_max
        self.step_s = 0.0  # seconds to guess a token in all slots; 0: not known
        #: As `Drafter` has it.
        self.pays = True
        self._token_s = 0.0  # seconds to read a token
        self._context = head.context
        self._texts = HeadTexts(model.n_seqs, head.shift)
        width = head.widths[0]
        most = MAX_BYTES // (4 * width * model.n_seqs)
        self._most_unread = min(MOST, max(2 * MANY, most))
        #: The sequences of the model with those of the head, for the engine.
        self._cells = self._context.memory if self.has_cells else NoCells()
        self.memory = HeadMemory(
            model.memory,
            self._cells,
            self._texts,
            width=width,
            needs_rows=self.needs_rows,
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
            rows = np.concatenate(self._head.read(len(tokens)), axis=1)
            self._texts.log((tokens.copy(), positions.copy(), seqs.copy(), rows))
            has_prompt = len(tokens) > MANY and int(np.bincount(seqs).max()) > MANY
            if has_prompt or self._texts.n_logged >= LOGGED:
                self._relieve(MANY if has_prompt and self.pays else self._most_unread)

    def _relieve(self, most: int) -> None:
        """Read more unread tokens than that at once if drafts pay; else keep the newer ones."""
        for text in self._texts:
            if len(text.tokens) <= most:
                continue
            if self.pays:
                self._read(text, len(text.tokens))
            else:
                text.drop(len(text.tokens) - self._most_unread // 2)

    def observe_media(self, pieces: Sequence[MediaPiece], last_rows: Sequence[int]) -> None:
        """Note that the model has just decoded media, which the head cannot read.

        It continues behind them, from their last row.
        """
        if self._has_failed:
            return
        with self._forgiving():
            rows = np.concatenate(self._head.read(last_rows[-1] + 1), axis=1)
            for piece, row in zip(pieces, last_rows, strict=True):
                text = self._texts[piece.seq]
                if self.pays:
                    self._read(text, len(text.tokens))
                text.skip(rows[row : row + 1].copy())

    def _read(self, text: HeadText, n: int) -> None:
        """Have the head read the next `n` tokens of a text."""
        self.memory.tidy(text)
        size = self._context.n_ubatch
        while n > 0:
            self._read_piece(text, min(n, size))
            n -= size

    @abstractmethod
    def _read_piece(self, text: HeadText, n: int) -> None:
        """Have the head read the next `n` tokens of a text, as many as a batch has room for."""

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

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[TokenId] | None]:
        """Guess the next tokens of each slot: those most probable for the head."""
        made: dict[int, list[TokenId] | None] = {}
        if not self._has_failed:
            with self._forgiving():
                made = self._make(requests)
        found = [made.get(request.seq, []) for request in requests]
        return [[] if one is not None and len(one) < self._rules.n_min else one for one in found]

    def _make(self, requests: Sequence[DraftRequest]) -> dict[int, list[TokenId] | None]:
        """Make drafts; returns them by sequence, None where there is still more to read."""
        able = [
            (request, text)
            for request in requests
            if request.n_new == 1 and self._room(request) > 0
            and (text := self._texts[request.seq]).end and not text.is_adrift
        ]  # fmt: skip
        self._catch_up([text for _, text in able if len(text.tokens) > FEW])
        ready = [(request, text) for request, text in able if len(text.tokens) <= FEW]
        return dict.fromkeys((text.id for _, text in able), None) | self._timed_guesses(ready)

    def _catch_up(self, texts: list[HeadText]) -> None:
        """Read what is unread of some texts, as far as a step may last longer for it."""
        left = max(2 * MANY, int(PIECE_S / self._token_s) if self._token_s else 0)
        for text in sorted(texts, key=lambda text: len(text.tokens)):
            n = min(left, len(text.tokens))
            started = monotonic()
            self._read(text, n)
            if n > FEW:
                self._token_s = average(self._token_s, (monotonic() - started) / n)
            left -= n

    def _timed_guesses(
        self, able: Sequence[tuple[DraftRequest, HeadText]]
    ) -> dict[int, list[TokenId]]:
        """Make drafts, and learn how long that takes; returns them by sequence."""
        started = monotonic()
        made = self._guess(able) if able else {}
        if made:
            n_steps = max(1, *map(len, made.values()))
            self.step_s = average(self.step_s, (monotonic() - started) / n_steps)
        for _, text in able:  # where layers have a window, guesses would push it on
            self.memory.tidy(text)
        return made

    def _room(self, request: DraftRequest) -> int:
        """Return the most tokens that a draft may have."""
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
            assert len(text.tokens) == sum(map(len, text.rows)) < self._most_unread + LOGGED
            last = self.memory.last(text.id) + (text.repeated is not None)
            assert text.is_adrift or self._has_failed or text.end == last + 1
            assert not text.gaps or text.gaps[-1][1] <= text.n_read
            held = self._cells.last(text.id) + 1
            n_cells = max(0, text.n_cells) if self.has_cells else 0
            assert self._has_failed or held == n_cells or (text.is_stale and held >= n_cells)


@attrs.define
class _Chain:
    """A draft that is being made: its last token is in a row of the batch, before a position."""

    text: HeadText
    n_max: int
    row: int
    pos: int
    tokens: list[TokenId] = attrs.field(factory=list)


class ChainDrafter(HeadDrafter):
    """Drafts by an MTP or EAGLE-3 head. Arguments as `HeadDrafter`.

    `hidden` returns the rows of the head's own last batch, given its size.
    """

    #: The number of positions from one guess to the next.
    stride = 1

    def __init__(
        self, head: Head, model: Context, rules: DraftRules, hidden: Callable[[int], Rows]
    ) -> None:
        super().__init__(head, model, rules)
        self._hidden = hidden
        self._batch = LlamaBatch(
            self._context.n_batch, n_vocab=head.n_known, n_seqs=model.n_seqs, width=head.widths[1]
        )

    def _read_piece(self, text: HeadText, n: int) -> None:
        self._batch.clear()
        rows = self._add(text, text.tokens[:n], text.unread(self._head.widths[0], n)[:n])
        self._decode([rows])
        text.settle(n)

    def _add(self, text: HeadText, tokens: Sequence[TokenId], rows: Rows) -> Rows:
        """Add tokens to the batch; returns the row of each."""
        skipped = int(text.n_cells < 0)  # the first token has no cell
        self._batch.extend(tokens[skipped:], text.n_cells + skipped, text.id)
        return rows[skipped:]

    def _decode(self, rows: Sequence[Rows]) -> None:
        """Run the batch with these rows."""
        if len(self._batch):
            self._batch.put_rows(0, self._head.encode(np.concatenate(rows)))
            self._context.decode(self._batch)

    def _guess(self, able: Sequence[tuple[DraftRequest, HeadText]]) -> dict[int, list[TokenId]]:
        drafts = self._begin(able)
        going_on = drafts
        while going_on:
            going_on = self._extend(going_on)
        return {draft.text.id: draft.tokens for draft in drafts}

    def _begin(self, able: Sequence[tuple[DraftRequest, HeadText]]) -> list[_Chain]:
        """Read the newest tokens, which gives the first guesses."""
        self._batch.clear()
        drafts, rows = [], []
        for request, text in able:
            self.memory.tidy(text)
            n = len(text.tokens)
            unread = text.unread(self._head.widths[0], n)
            rows.append(self._add(text, [*text.tokens, request.keys[-1]], unread))
            last, pos = len(self._batch) - 1, text.n_cells + n + 1
            drafts.append(_Chain(text, self._room(request), last, pos))
        self._batch.want_all()
        self._decode(rows)
        for draft in drafts:
            draft.text.settle(len(draft.text.tokens))
            draft.text.is_stale = True
        return drafts

    def _extend(self, drafts: list[_Chain]) -> list[_Chain]:
        """Take the next token of each draft, and read it; returns those to continue."""
        going_on = self._take(drafts)
        self._batch.clear()
        for draft, hidden in going_on:
            draft.row = self._batch.add(draft.tokens[-1], draft.pos, draft.text.id, logits=True)
            self._batch.put_rows(draft.row, hidden)
            draft.pos += self.stride
        self._context.decode(self._batch)
        return [draft for draft, _ in going_on]

    def _take(self, drafts: list[_Chain]) -> list[tuple[_Chain, Rows]]:
        """Take the next token of each draft; returns those to continue, each with its own row."""
        n_rows, picked = len(self._batch), [draft.row for draft in drafts]
        shape = n_rows, self._head.n_known
        tokens, probs = most_probable(self._context, shape, self._rules.p_min, picked)
        hidden = self._hidden(n_rows)
        going_on = []
        for draft, token, prob in zip(drafts, tokens, probs, strict=True):
            if token >= self._head.n_shared or not prob >= self._rules.p_min:
                continue
            draft.tokens.append(token)
            if len(draft.tokens) < draft.n_max and token not in self._head.ends:
                going_on.append((draft, hidden[draft.row : draft.row + 1]))
        return going_on


class SeveralHeadsDrafter(ChainDrafter):
    """Drafts by several MTP heads, one for each token. Arguments as `ChainDrafter`.

    They have layers of one context, and what one of them computes is in its own layer alone. So
    each of them reads every token, in the same cells. `choose` says which one computes.
    """

    def __init__(
        self,
        head: Head,
        model: Context,
        rules: DraftRules,
        hidden: Callable[[int], Rows],
        choose: Callable[[int], None],
    ) -> None:
        super().__init__(head, model, rules, hidden)
        self._choose = choose

    def _read_piece(self, text: HeadText, n: int) -> None:
        tokens, rows = text.tokens[:n], text.unread(self._head.widths[0], n)[:n]
        for i in range(self.n_max):
            self._cells.remove(text.id, text.n_cells)
            self._choose(i)
            self._batch.clear()
            self._decode([self._add(text, tokens, rows)])
        text.settle(n)

    def _guess(self, able: Sequence[tuple[DraftRequest, HeadText]]) -> dict[int, list[TokenId]]:
        drafts, read = [], {}
        for request, text in able:
            self._read(text, len(text.tokens))
            text.is_stale = True
            drafts.append(_Chain(text, self._room(request), 0, text.n_cells))
            read[text.id] = [request.keys[-1]], [text.unread(self._head.widths[0], 0)]
        going_on = drafts
        for i in range(self.n_max):
            self._choose(i)
            self._batch.clear()
            for draft in drafts:
                self._cells.remove(draft.text.id, draft.pos)
            rows = []
            for draft in going_on:
                tokens, own_rows = read[draft.text.id]
                draft.row = self._batch.extend(tokens, draft.pos, draft.text.id)
                rows += own_rows
            self._batch.want_all()
            self._decode(rows)
            taken = self._take(going_on)
            for draft, hidden in taken:
                tokens, own_rows = read[draft.text.id]
                tokens.append(draft.tokens[-1])
                own_rows.append(hidden.copy())
            going_on = [draft for draft, _ in taken]
            if not going_on:
                break
        return {draft.text.id: draft.tokens for draft in drafts}


class AssistantDrafter(ChainDrafter):
    """Drafts by a head that reads the model's KV cache. Arguments as `ChainDrafter`.

    It has no cells, so it has nothing to read before a draft. All guesses are at the position of
    the newest token, as in training.
    """

    has_cells = False
    stride = 0

    def _read_piece(self, text: HeadText, n: int) -> None:
        text.settle(n)

    def _begin(self, able: Sequence[tuple[DraftRequest, HeadText]]) -> list[_Chain]:
        self._batch.clear()
        drafts = []
        for request, text in able:
            text.settle(len(text.tokens))
            row = self._batch.add(request.keys[-1], text.end, text.id, logits=True)
            self._batch.put_rows(row, text.unread(self._head.widths[0], 0))
            drafts.append(_Chain(text, self._room(request), row, text.end))
        self._context.decode(self._batch)
        return drafts
