"""The guesses of heads are those of llama-server's procedure, which these tests write down again.

They read a text from its beginning in each step, and keep nothing: neither what a head has read,
nor its cells.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.drafted import Hand, load, write_head
from trioserve.llama.batch import LlamaBatch
from trioserve.llama.head_texts import Rows
from trioserve.llama.staged import staged

TEXT = [300 + i * i % 97 for i in range(40)]


@pytest.fixture(params=["glm4moe", "step35", "mimo2", "gemma4"])
def hand(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hand]:
    settings = write_head(tmp_path, request.param, is_good=False)
    with load(settings, parallel=2) as backend:
        yield Hand(backend)


class Procedure:
    """The head of a model, with a sequence that no text is in."""

    def __init__(self, hand: Hand) -> None:
        drafter: Any = hand.drafter
        self.context, self.width = drafter._context, drafter._head.widths[0]
        self.functions, self.seq = staged("draft-mtp"), 1
        self.is_shared, self.n_heads = not drafter.has_cells, 1
        if hasattr(drafter, "_choose"):
            self.n_heads = drafter.n_max
        self.n_vocab = hand.backend.vocab.n_tokens
        self.batch = LlamaBatch(128, n_vocab=self.n_vocab, n_seqs=2, width=self.width)

    def read(self, tokens: Sequence[int], rows: Rows, start: int, seq: int, n_out: int = 0) -> None:
        """Compute tokens with rows from a position on; the last ones have outputs."""
        self.batch.clear()
        for i, token in enumerate(tokens):
            self.batch.add(token, start + i, seq, logits=i >= len(tokens) - n_out)
        self.batch.put_rows(0, rows)
        self.context.decode(self.batch)

    def run(self, tokens: Sequence[int], rows: Rows, start: int, seq: int) -> tuple[int, Rows]:
        """Compute tokens; returns the best one after them, and the last row."""
        self.read(tokens, rows, start, seq, len(tokens))
        logits = self.context.logits(len(tokens) - 1, self.n_vocab)
        address = self.functions.llama_get_embeddings_nextn(self.context.handle)
        floats: Any = (ctypes.c_float * (len(tokens) * self.width)).from_address(address)
        hidden = np.frombuffer(floats, np.float32).reshape(-1, self.width)
        return int(logits.argmax()), hidden[-1:].copy()

    def head(self, i: int) -> None:
        self.context.memory.remove(self.seq, 0)
        self.functions.llama_set_nextn_layer_offset(self.context.handle, i)

    def drafts(self, text: Sequence[int], rows: Rows, newest: int, n_max: int) -> list[int]:
        """Guess what follows a text with these rows of the model, and its newest token."""
        before = np.concatenate([np.zeros((1, self.width), np.float32), rows])
        drafts: list[int] = []
        if self.is_shared:
            row, token = rows[-1:], newest
            while len(drafts) < n_max:
                token, row = self.run([token], row, len(text), 0)
                drafts.append(token)
            return drafts
        if self.n_heads == 1:
            self.head(0)
            self.read(text, before[:-1], 0, self.seq)
            token, row = newest, before[-1:]
            while len(drafts) < n_max:
                token, row = self.run([token], row, len(text) + len(drafts), self.seq)
                drafts.append(token)
            self.head(0)
            return drafts
        own = [before[-1:]]
        for i in range(min(self.n_heads, n_max)):
            self.head(i)
            self.read(text, before[:-1], 0, self.seq)
            tokens = [newest, *drafts]
            token, row = self.run(tokens, np.concatenate(own), len(text), self.seq)
            drafts.append(token)
            own.append(row)
        self.head(0)
        return drafts


def test_the_guesses_are_those_of_the_procedure(hand: Hand) -> None:
    procedure, head = Procedure(hand), hand.drafter
    rows: list[Rows] = []
    for n in (25, 1, 1, 13):  # a prompt, and what comes piece by piece
        done = len(hand.texts[0])
        hand.extend((0, TEXT[done : done + n]))
        rows.append(np.concatenate(head._head.read(n), axis=1).copy())
        newest = 400 + n
        expected = procedure.drafts(hand.texts[0], np.concatenate(rows), newest, 3)
        assert hand.draft({0: newest}, 3) == [expected]
        head.check_integrity()
