"""What one sampled token means for its run: text to show, and perhaps the end."""

from __future__ import annotations

from time import monotonic

from trioserve.engine.backend import Backend
from trioserve.engine.run import Run
from trioserve.types import Chunk, FinishReason, TokenId


def accept(
    run: Run, row: int, backend: Backend, n_ctx_seq: int, *, shifts: bool = False
) -> Chunk | None:
    """Sample the next token of a run and add it to the output.

    A full context ends the output, unless it `shifts`. Sets `run.finish_reason` when the output is complete. Returns the text that may be shown now,
    with the tokens it came from, or None while all of it is held back.
    """
    if run.task.options.max_tokens == 0:
        run.finish_reason = FinishReason.LIMIT
        return None
    if run.sampler is None:
        run.sampler = backend.sampler(
            run.task.options.sampling, run.task.prompt, run.task.constraint
        )
    token = _sample(run, row)
    run.last_token_at = monotonic()
    if run.first_token_at is None:
        run.first_token_at = run.last_token_at
    run.tokens.append(token)
    run.unsent_tokens.append(token)
    text = _show(run, token, backend, None if shifts else n_ctx_seq)
    if not text and run.finish_reason is None:
        return None
    tokens, run.unsent_tokens = run.unsent_tokens, []
    probs, run.unsent_probs = run.unsent_probs, []
    return Chunk(run.task.id, text, tuple(tokens), tuple(probs))


def _sample(run: Run, row: int) -> TokenId:
    assert run.sampler is not None
    n_probs = run.task.options.n_probs
    if not n_probs:
        return run.sampler.sample(row)
    post = run.task.options.post_sampling_probs
    token, probs = run.sampler.sample_with_probs(row, n_probs, post=post)
    run.unsent_probs.append(probs)
    return token


def _show(run: Run, token: TokenId, backend: Backend, most_tokens: int | None) -> str:
    """Decide what text the token brings, and whether it is the last one."""
    if token in backend.vocab.end_of_generation:
        run.finish_reason = FinishReason.EOS
        return run.text.flush()
    piece = backend.vocab.pieces[token]
    text = run.text.feed(piece)
    if run.text.stopping_word:
        run.finish_reason = FinishReason.WORD
        return text
    if _limit_reached(run, piece, most_tokens):
        text += run.text.flush()  # which may complete a stop string
        run.finish_reason = FinishReason.WORD if run.text.stopping_word else FinishReason.LIMIT
    return text


def _limit_reached(run: Run, piece: bytes, most_tokens: int | None) -> bool:
    options = run.task.options
    if run.n_output == options.max_tokens:
        return True
    if most_tokens is not None and len(run.tokens) >= most_tokens:
        run.truncated = True
        return True
    if options.t_max_predict_ms and b"\n" in piece:  # only lines that are whole
        assert run.first_token_at is not None and run.last_token_at is not None
        return (run.last_token_at - run.first_token_at) * 1e3 > options.t_max_predict_ms
    return False
