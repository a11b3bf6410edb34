"""What the sampled tokens of a step mean for their run: text to show, and perhaps the end."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

import attrs

from trioserve.engine.backend import Vocab
from trioserve.engine.run import Run
from trioserve.engine.sampler_pool import Draw, Drawn
from trioserve.types import Chunk, Chunks, FinishReason, TokenId, TokenProbs


class _PlainTexts(dict[TokenId, str]):
    """The texts of the tokens that were met so far.

    It is empty for tokens that are not whole characters of one line: they need a closer look.
    """

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab

    def __missing__(self, token: TokenId) -> str:
        piece = self._vocab.pieces[token]
        is_plain = token not in self._vocab.end_of_generation and b"\n" not in piece
        try:
            text = piece.decode() if is_plain else ""
        except UnicodeDecodeError:
            text = ""
        self[token] = text
        return text


class Outputs:
    """Adds what was sampled to the outputs of runs.

    Args:
        vocab: of the model.
        n_ctx_seq: the most tokens of one text. A full context ends the output, unless it `shifts`;
            then an output without a limit ends after as many tokens as the context has.
        shifts: whether the engine makes room in a full context.
    """

    def __init__(self, vocab: Vocab, n_ctx_seq: int, *, shifts: bool = False) -> None:
        self._vocab = vocab
        self._plain_texts = _PlainTexts(vocab)
        self._n_ctx_seq = n_ctx_seq
        self._shifts = shifts
        #: Of all chunks of this step; see `Chunk.pace`.
        self.pace = 0.0

    def step(self, runs: Sequence[Run], drawn: Sequence[Drawn]) -> tuple[Chunks, list[int]]:
        """Add a token to each output in which it means nothing but text, as nearly all do.

        Returns the text, which may be shown, and the places of the other runs, for `accept`.
        """
        task_ids, texts, tokens, others = [], [], [], []
        plain_texts = self._plain_texts
        for place, (run, token) in enumerate(zip(runs, drawn, strict=True)):
            keys = run.keys
            if (
                len(keys) < run.n_simple
                and isinstance(token, int)
                and (text := plain_texts[token])
                and not run.unsent_tokens
                and not run.text.tail
            ):
                keys.append(token)
                task_ids.append(run.task.id)
                texts.append(text)
                tokens.append(token)
            else:
                others.append(place)
        return Chunks(task_ids, texts, tokens, self.pace), others

    def accept(self, run: Run, draws: Sequence[Draw]) -> Chunk | None:
        """Add the sampled tokens of a step to the output of a run, up to the one that ends it.

        Sets `run.finish_reason` when the output is complete. Returns the text that may be shown
        now, with the tokens it came from, or None while all of it is held back.
        """
        vocab = self._vocab
        run.last_token_at = monotonic()
        if run.first_token_at is None:
            run.first_token_at = run.last_token_at
        text = ""
        for draw in draws:
            run.keys.append(draw.token)
            run.unsent_tokens.append(draw.token)
            if draw.probs is not None:
                run.unsent_probs.append(_named(draw.probs, run.task.preserved_tokens, vocab))
            shown = self._show(run, draw.token)
            if run.indent_stop is not None:
                shown = run.indent_stop.cut(shown)
                if run.indent_stop.ended:
                    run.finish_reason, run.text.stopping_word = FinishReason.LIMIT, ""
            if run.reasoning is not None:
                run.reasoning.feed(vocab.names[draw.token])
                run.close_thinking()
            text += shown
            if run.finish_reason is not None:
                break
        run.n_simple = self._n_simple(run)
        if not text and run.finish_reason is None:
            return None
        run.has_new_line = run.has_new_line or "\n" in text
        tokens, run.unsent_tokens = run.unsent_tokens, []
        probs, run.unsent_probs = run.unsent_probs, []
        return Chunk(run.task.id, text, tuple(tokens), tuple(probs), self.pace)

    def _show(self, run: Run, token: TokenId) -> str:
        """Decide what text the token brings, and whether it is the last one."""
        vocab = self._vocab
        if token in vocab.end_of_generation:
            run.finish_reason = FinishReason.EOS
            shown = run.text.feed(vocab.names[token]) if run.task.special else ""
            return shown + run.text.flush()
        piece = vocab.names[token] if token in run.task.preserved_tokens else vocab.pieces[token]
        text = run.text.feed(piece)
        if run.text.stopping_word:
            run.finish_reason = FinishReason.WORD
            return text
        if self._limit_reached(run, piece):
            text += run.text.flush()  # which may complete a stop string
            run.finish_reason = FinishReason.WORD if run.text.stopping_word else FinishReason.LIMIT
        return text

    def _limit_reached(self, run: Run, piece: bytes) -> bool:
        params = run.task.params
        if run.n_output == self._max_tokens(run):
            return True
        if not self._can_shift(run) and len(run.keys) >= self._n_ctx_seq:
            run.truncated = True
            return True
        if params.t_max_predict_ms and b"\n" in piece:  # only lines that are whole
            assert run.first_token_at is not None and run.last_token_at is not None
            return (run.last_token_at - run.first_token_at) * 1e3 > params.t_max_predict_ms
        return False

    def _can_shift(self, run: Run) -> bool:
        """Whether there may be room in a full context: not by cutting media, or moving them."""
        return self._shifts and not run.task.prompt.media

    def _max_tokens(self, run: Run) -> int:
        """How many tokens an output may have; -1: no limit but the context."""
        max_tokens = run.task.params.max_tokens
        return self._n_ctx_seq if self._shifts and max_tokens < 0 else max_tokens

    def _n_simple(self, run: Run) -> int:
        """Find the number of keys below which another token can end an output only by being EOG.

        It is 0 for runs that look at every token.
        """
        task, params = run.task, run.task.params
        if run.indent_stop or run.reasoning or task.preserved_tokens or params.n_probs:
            return 0
        if params.stop or params.t_max_predict_ms:
            return 0
        n_keys, max_tokens = self._n_ctx_seq, self._max_tokens(run)
        if max_tokens >= 0:
            n_keys = min(n_keys, len(run.keys) - run.n_output + max_tokens)
        return n_keys - 1


def _named(probs: TokenProbs, preserved: frozenset[TokenId], vocab: Vocab) -> TokenProbs:
    """Give control tokens that are shown the bytes that they are shown with."""

    def piece_of(token: TokenId) -> bytes:
        return vocab.names[token] if token in preserved else vocab.pieces[token]

    if not preserved:
        return probs
    chosen = attrs.evolve(probs.chosen, piece=piece_of(probs.chosen.id))
    return TokenProbs(chosen, probs.top.named(piece_of))
