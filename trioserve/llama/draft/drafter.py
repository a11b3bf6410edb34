"""LlamaDrafter: guesses the next tokens of all slots with a draft model.

In each step the first decode takes what is new in the slots, and each later one a guess of every
slot that goes on::

    slot 0   held ................... | new | guess  guess  guess
    slot 1   held ..... | a part of what is new ...
    slot 2   held ............. | new | guess

Slot 1 is behind: its prompt is long, and the draft model has not seen it yet. It catches up in
pieces, beside the others, so that no step becomes long. Until then it has no drafts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from time import monotonic
from typing import Any

import attrs
import numpy as np
import structlog
from numpy.typing import NDArray

from trioserve.engine.backend import Drafter, DraftRequest
from trioserve.errors import DecodeError, KVCacheFullError
from trioserve.llama.batch import Batch
from trioserve.llama.context import Context
from trioserve.llama.draft.texts import FEW, Text, Texts
from trioserve.llama.library import short
from trioserve.llama.model import Model
from trioserve.types import TokenId

_log = structlog.get_logger("llama")

#: Seconds of a step in which slots that are behind catch up.
PIECE_S = 0.025
#: Share of a new time in an average, and the most that it may be of that average: something else
#: may have had the core.
_WEIGHT, _MOST = 0.25, 2.0


@attrs.frozen(kw_only=True)
class DraftRules:
    """How drafts are made.

    They have at most `n_max` tokens, and end before one that is less probable than `p_min`. Those
    with fewer than `n_min` are not used. A text has at most `n_ctx_seq` tokens. With
    `follows_threads`, the draft model computes with as many threads as the other one.
    """

    n_max: int
    n_min: int
    p_min: float
    n_ctx_seq: int
    follows_threads: bool = False


@attrs.define
class _Average:
    """How long something takes, of late; 0: not known."""

    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Learn from another time."""
        old = self.seconds
        self.seconds += _WEIGHT * (min(seconds, _MOST * old) - old) if old else seconds


@attrs.frozen
class _Draft:
    """A draft that is being made."""

    text: Text
    n_max: int
    tokens: list[TokenId] = attrs.field(factory=list)


class LlamaDrafter(Drafter):
    """Implements `trioserve.engine.backend.Drafter` with a model of its own.

    Args:
        model: with the vocabulary of the model that it drafts for. It is closed with the drafter.
        context: of this model, with a sequence for each slot; they can be cut. It is closed, too.
        n_vocab: tokens of the other model's vocabulary; the draft model may know some more.
        rules: how drafts are made.
    """

    def __init__(self, model: Model, context: Context, n_vocab: int, rules: DraftRules) -> None:
        self._model = model
        self._context = context
        self._rules = rules
        self._n_known = model.vocab.n_tokens
        self._n_shared = min(n_vocab, self._n_known)
        self._ends = model.vocab.end_of_generation
        self._batch = Batch(context.n_batch, n_vocab=self._n_known, n_seqs=context.n_seqs)
        self._texts = Texts(context.memory, context.n_seqs)
        self._token = _Average()  # of what it takes to catch up with a token
        self._step = _Average()  # to guess a token in all slots
        self._has_failed = False

    @property
    def name(self) -> str:
        """The type of speculative decoding."""
        return "draft-simple"

    @property
    def is_free(self) -> bool:
        """Its guesses take time."""
        return False

    @property
    def n_max(self) -> int:
        """The most tokens of a draft."""
        return self._rules.n_max

    @property
    def step_s(self) -> float:
        """Seconds for each token of the longest draft, without catching up."""
        return self._step.seconds

    def set_threads(self, count: int) -> None:
        """Compute with so many threads from now on, unless they are configured."""
        if self._rules.follows_threads:
            self._context.set_threads(count)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[TokenId]]:
        """Guess what follows in each slot: what the draft model finds most probable."""
        drafts: list[_Draft] = []
        try:
            if not self._has_failed:
                drafts = self._make(requests)
        except KVCacheFullError:
            self._texts.make_room(requests)
        except DecodeError as error:
            _log.error("the draft model has failed and is not used any more", reason=error.message)
            self._has_failed = True
        made = {draft.text.id: draft.tokens for draft in drafts}
        found = [made.get(request.slot_id, []) for request in requests]
        return [tokens if len(tokens) >= self._rules.n_min else [] for tokens in found]

    def _make(self, requests: Sequence[DraftRequest]) -> list[_Draft]:
        """Make drafts, and learn how long that takes."""
        started = monotonic()
        drafts = self._begin(requests)
        if not drafts:
            return []
        has_caught_up = len(self._batch) > 2 * len(drafts)
        self._extend(drafts)
        if not has_caught_up:
            n_steps = max(len(draft.tokens) for draft in drafts)
            self._step.add((monotonic() - started) / max(1, n_steps))
        return drafts

    def forget(self, slot_id: int) -> None:
        """Expect another text in a slot."""
        self._texts.reopen(slot_id)

    def close(self) -> None:
        """Free the context and the model. Closing twice is fine."""
        self._context.close()
        self._model.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless llama.cpp holds what the drafter believes."""
        self._texts.check_integrity()

    # -- the first decode

    def _begin(self, requests: Sequence[DraftRequest]) -> list[_Draft]:
        """Decode what is new in the slots; returns the drafts that can go on from there."""
        followed = [(request, self._texts.follow(request)) for request in requests]
        followed.sort(key=lambda pair: len(pair[0].keys) - len(pair[1].held))
        self._batch.clear()
        left = self._catch_up_tokens()
        added: list[tuple[Text, list[TokenId]]] = []
        drafts = []
        for request, text in followed:
            n_max = self._room(request, text)
            new = self._new_tokens(request, text, left) if n_max > 0 else []
            if not new:
                continue
            row = self._batch.extend(new, len(text.held), text.id)
            added.append((text, new))
            if len(new) > FEW:
                left -= len(new)
            if len(text.held) + len(new) == len(request.keys):
                self._batch.want_logits(row)
                drafts.append(_Draft(text, n_max))
        started = monotonic()
        self._decode(added)
        n_tokens = len(self._batch)
        if n_tokens > FEW:  # fewer say too little of many
            self._token.add((monotonic() - started) / n_tokens)
        return drafts

    def _room(self, request: DraftRequest, text: Text) -> int:
        """How long a draft may be."""
        if text.is_closed:
            return 0
        room = self._rules.n_ctx_seq - len(request.keys)
        return min(request.n_max, self._rules.n_max, room)

    def _new_tokens(self, request: DraftRequest, text: Text, left: int) -> list[TokenId]:
        """Return what of a slot's text is decoded in this step."""
        start = len(text.held)
        n_new = len(request.keys) - start
        if n_new > FEW:
            n_new = min(n_new, left)
        n_new = min(n_new, self._context.n_batch - len(self._batch))
        new = list(request.keys[start : start + n_new])
        if new and not 0 <= min(new) <= max(new) < self._n_known:
            text.is_closed = True  # it has something that this model does not know
            return []
        return new

    def _catch_up_tokens(self) -> int:
        """How many tokens slots that are behind may decode in a step, all together."""
        seconds = self._token.seconds
        return max(FEW + 1, int(PIECE_S / seconds)) if seconds else 2 * FEW

    # -- the guesses

    def _extend(self, drafts: list[_Draft]) -> None:
        """Guess the next token of each draft, until the last one ends."""
        while drafts:
            tokens, probs = self._most_probable(len(drafts))
            self._batch.clear()
            going_on = []
            for draft, token, prob in zip(drafts, tokens, probs, strict=True):
                if token >= self._n_shared or not prob >= self._rules.p_min:
                    continue
                draft.tokens.append(token)
                if len(draft.tokens) < draft.n_max and token not in self._ends:
                    self._batch.add(token, len(draft.text.held), draft.text.id, logits=True)
                    going_on.append(draft)
            self._decode([(draft.text, draft.tokens[-1:]) for draft in going_on])
            drafts = going_on

    def _most_probable(self, n_rows: int) -> tuple[list[TokenId], list[float]]:
        """Find the best token in each row of logits of the last batch, and how probable it is."""
        first = short.llama_get_logits_ith(self._context.handle, self._context.rows.index(1))
        address = ctypes.addressof(first.contents)
        floats: Any = (ctypes.c_float * (n_rows * self._n_known)).from_address(address)
        logits: NDArray[np.float32] = np.frombuffer(floats, np.float32).reshape(n_rows, -1)
        best = logits.argmax(axis=1)
        if self._rules.p_min <= 0:
            return best.tolist(), [1.0] * n_rows
        largest = logits[np.arange(n_rows), best]
        probs = 1 / np.exp(logits - largest[:, None]).sum(axis=1)
        return best.tolist(), probs.tolist()

    def _decode(self, added: Sequence[tuple[Text, list[TokenId]]]) -> None:
        """Run the batch, which adds these tokens to their texts."""
        if added:
            self._context.decode(self._batch)
        for text, tokens in added:
            text.held += tokens
