"""What the sampled tokens of a tick mean for their run: text to show, and perhaps the end."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

import attrs

from trioserve.engine.backend import Vocab
from trioserve.engine.run import Run
from trioserve.engine.sampler_pool import Draw
from trioserve.types import Chunk, FinishReason, TokenId, TokenProbs


def accept(
    run: Run, draws: Sequence[Draw], vocab: Vocab, n_ctx_seq: int, *, shifts: bool = False
) -> Chunk | None:
    """Add the sampled tokens of a tick to the output of a run, up to the one that ends it.

    A full context ends the output, unless it `shifts`; then an output without a limit ends after
    as many tokens as the context has. Sets `run.finish_reason` when the output is complete.
    Returns the text that may be shown now, with the tokens it came from, or None while all of it
    is held back.
    """
    run.last_token_at = monotonic()
    if run.first_token_at is None:
        run.first_token_at = run.last_token_at
    text = ""
    for draw in draws:
        run.keys.append(draw.token)
        run.unsent_tokens.append(draw.token)
        if draw.probs is not None:
            run.unsent_probs.append(_named(draw.probs, run.task.preserved_tokens, vocab))
        shown = _show(run, draw.token, vocab, n_ctx_seq, shifts=shifts)
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
    if not text and run.finish_reason is None:
        return None
    run.has_new_line = run.has_new_line or "\n" in text
    tokens, run.unsent_tokens = run.unsent_tokens, []
    probs, run.unsent_probs = run.unsent_probs, []
    return Chunk(run.task.id, text, tuple(tokens), tuple(probs))


def _show(run: Run, token: TokenId, vocab: Vocab, n_ctx_seq: int, *, shifts: bool) -> str:
    """Decide what text the token brings, and whether it is the last one."""
    if token in vocab.end_of_generation:
        run.finish_reason = FinishReason.EOS
        shown = run.text.feed(vocab.names[token]) if run.task.special else ""
        return shown + run.text.flush()
    piece = vocab.names[token] if token in run.task.preserved_tokens else vocab.pieces[token]
    text = run.text.feed(piece)
    if run.text.stopping_word:
        run.finish_reason = FinishReason.WORD
        return text
    if _limit_reached(run, piece, n_ctx_seq, shifts=shifts):
        text += run.text.flush()  # which may complete a stop string
        run.finish_reason = FinishReason.WORD if run.text.stopping_word else FinishReason.LIMIT
    return text


def _limit_reached(run: Run, piece: bytes, n_ctx_seq: int, *, shifts: bool) -> bool:
    params = run.task.params
    endless = shifts and params.max_tokens < 0
    if run.n_output == (n_ctx_seq if endless else params.max_tokens):
        return True
    if not shifts and len(run.keys) >= n_ctx_seq:
        run.truncated = True
        return True
    if params.t_max_predict_ms and b"\n" in piece:  # only lines that are whole
        assert run.first_token_at is not None and run.last_token_at is not None
        return (run.last_token_at - run.first_token_at) * 1e3 > params.t_max_predict_ms
    return False


def _named(probs: TokenProbs, preserved: frozenset[TokenId], vocab: Vocab) -> TokenProbs:
    """Give control tokens that are shown the bytes that they are shown with."""

    def piece_of(token: TokenId) -> bytes:
        return vocab.names[token] if token in preserved else vocab.pieces[token]

    if not preserved:
        return probs
    chosen = attrs.evolve(probs.chosen, piece=piece_of(probs.chosen.id))
    return TokenProbs(chosen, probs.top.named(piece_of))
