"""Samples the tokens of a step, and adds them to the outputs: text to show, and perhaps the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import cast

import attrs

from trioserve.engine.backend import Backend, Sampler, Vocab
from trioserve.engine.helpers import start_all
from trioserve.engine.planner import StepPlan
from trioserve.engine.slot import RequestState
from trioserve.errors import TrioServeError
from trioserve.types import Chunk, Chunks, FinishReason, GenerationParams, TokenId, TokenProbs

#: With fewer tokens in a step, distributing them to threads takes longer than sampling them.
MIN_PARALLEL = 4
#: The most tokens to take at once that a grammar leaves no choice about. A step may always have
#: this many prompt tokens beside its streams.
MAX_AHEAD = 16


@attrs.frozen
class SampledToken:
    """A token that was sampled, with its probabilities if the task asks for them."""

    token: TokenId
    probs: TokenProbs | None = None


#: The result of sampling for a request: mostly a single token, without probabilities.
Sampled = TokenId | list[SampledToken] | TrioServeError


class SamplerPool:
    """Samples for many requests at once. Samplers are C, and release the GIL.

    Args:
        backend: makes the samplers. The pool uses the cores that the backend leaves free.
    """

    def __init__(self, backend: Backend) -> None:
        self._n_threads = n_threads = min(backend.n_spare_cores, backend.n_slots)
        self._ends = backend.vocab.end_of_generation  # nothing is sampled after one of them
        self._n_ctx_seq = backend.n_ctx_seq
        # The next step must have room for the forced tokens of all slots, beside rows with logits.
        n_left = backend.n_batch - backend.n_outputs
        self._n_ahead = min(MAX_AHEAD, n_left // backend.n_slots)
        self._threads = ThreadPoolExecutor(n_threads, "trioserve-sampler") if n_threads else None

    def sample(
        self,
        requests: Sequence[RequestState],
        rows: Sequence[int],
        *,
        are_plain: bool = False,
        is_part: bool = False,
    ) -> list[Sampled]:
        """Sample for each request, from its row of logits.

        With `are_plain`, all of the requests are known to be. With `is_part`, they are some of
        those of a step, and this thread samples for all of them.

        The result is one token, and one more for each accepted token of a draft, whose rows follow.
        Each is followed by the tokens that a grammar leaves no choice about. An error affects only
        one request; the others have their tokens.
        """
        if self._threads is not None and len(requests) >= MIN_PARALLEL and not is_part:
            return self._sample_in_parallel(self._threads, requests, rows, are_plain)
        sampled: list[Sampled] = []
        for request, row in zip(requests, rows, strict=True):
            sampler = request.sampler
            assert sampler is not None
            try:
                if are_plain or request.is_plain:
                    sampled.append(sampler.sample(row))
                else:
                    sampled.append(self._sample_several(request, sampler, row))
            except TrioServeError as error:
                sampled.append(error)
        return sampled

    def _sample_in_parallel(
        self,
        threads: ThreadPoolExecutor,
        requests: Sequence[RequestState],
        rows: Sequence[int],
        are_plain: bool,
    ) -> list[Sampled]:
        sample = partial(self.sample, are_plain=are_plain, is_part=True)
        # The first access to a batch's logits reorders them, so no other may run beside it.
        results = sample(requests[:1], rows[:1]) * len(requests)
        parts = [slice(1 + i, None, self._n_threads + 1) for i in range(self._n_threads + 1)]
        others = [threads.submit(sample, requests[part], rows[part]) for part in parts[1:]]
        sampled = [sample(requests[parts[0]], rows[parts[0]])]
        sampled += [other.result() for other in others]
        for part, its in zip(parts, sampled, strict=True):
            results[part] = its
        return results

    def start(self) -> None:
        """Start the threads. Raises ModelLoadError: the system refuses them."""
        if self._threads is not None:
            start_all(self._threads, self._n_threads)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()

    def _sample_several(
        self, request: RequestState, sampler: Sampler, row: int
    ) -> list[SampledToken]:
        params, draft = request.task.params, request.draft
        sampled: list[SampledToken] = []
        tokens: list[TokenId] = []
        first = row
        while True:
            row = first + len(sampled)
            if request.forced:
                token = request.forced.popleft()
                one = SampledToken(token, _force(sampler, token, row, params))
            elif not params.n_probs:
                one = SampledToken(sampler.sample(row))
            else:
                post = params.post_sampling_probs
                one = SampledToken(*sampler.sample_with_probs(row, params.n_probs, post=post))
            tokens.append(one.token)
            ahead = self._take_forced(request, sampler, tokens)
            tokens += ahead
            sampled += [one, *map(SampledToken, ahead)]
            if one.token in self._ends or draft[: len(tokens)] != tokens:
                return sampled

    def _take_forced(
        self, request: RequestState, sampler: Sampler, tokens: list[TokenId]
    ) -> Sequence[TokenId]:
        """Take the tokens that must follow those of this step, unless something else chooses."""
        params = request.task.params
        if (
            request.task.constraint is None
            or request.forced
            or params.n_probs
            or not request.is_free
        ):
            return ()
        n_max = min(self._n_ahead, self._n_ctx_seq - len(request.keys) - len(tokens))
        return sampler.forced(n_max) if n_max > 0 and tokens[-1] not in self._ends else ()


def _force(
    sampler: Sampler, token: TokenId, row: int, params: GenerationParams
) -> TokenProbs | None:
    probs = None
    if params.n_probs:
        probs = sampler.probs(row, token, params.n_probs, post=params.post_sampling_probs)
    sampler.accept(token)
    return probs


class _PlainTexts(dict[Sampled, str]):
    """The texts of the tokens that were met so far.

    It is empty for what needs a closer look: errors, and tokens that are not whole characters of
    one line.
    """

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab

    def __missing__(self, token: Sampled) -> str:
        if not isinstance(token, int):
            return ""
        piece = self._vocab.pieces[token]
        is_plain = token not in self._vocab.end_of_generation and b"\n" not in piece
        try:
            text = piece.decode() if is_plain else ""
        except UnicodeDecodeError:
            text = ""
        self[token] = text
        return text


class Outputs:
    """Adds sampled tokens to the outputs of requests.

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

    def step(
        self, requests: Sequence[RequestState], sampled: Sequence[Sampled], pace: float
    ) -> tuple[Chunks, list[int]]:
        """Add a token to each output in which it means nothing but text, as nearly all do.

        Returns the text, which may be shown, and the places of the other requests, for `accept`.
        `pace` is that of all chunks of this step; see `Chunk.pace`.
        """
        task_ids, texts, tokens, others = [], [], [], []
        plain_texts = self._plain_texts
        for place, (request, token) in enumerate(zip(requests, sampled, strict=True)):
            keys = request.keys
            if (
                len(keys) < request.n_simple
                and isinstance(token, int)
                and (text := plain_texts[token])
                and not request.unsent_tokens
                and not request.text.tail
            ):
                keys.append(token)
                task_ids.append(request.task.id)
                texts.append(text)
                tokens.append(token)
            else:
                others.append(place)
        return Chunks(task_ids, texts, tokens, pace), others

    def step_steadily(self, plan: StepPlan, sampled: Sequence[Sampled]) -> Chunks | None:
        """Add a token to each output of a plan; None, and nothing, if one means more than text."""
        texts = list(map(self._plain_texts.__getitem__, sampled))
        if not all(texts):
            return None
        plan.keys = tokens = cast(list[TokenId], sampled)
        deque(map(list.append, plan.texts, tokens), maxlen=0)
        plan.n_left -= 1
        return Chunks(plan.task_ids, texts, tokens)

    def accept(
        self, request: RequestState, sampled: Sequence[SampledToken], pace: float
    ) -> Chunk | None:
        """Add the sampled tokens of a step to the output of a request, up to the one that ends it.

        Sets `request.finish_reason` when the output is complete. Returns the text that may be shown
        now, with the tokens it came from, or None while all of it is held back.
        """
        vocab = self._vocab
        request.last_token_at = monotonic()
        if request.first_token_at is None:
            request.first_token_at = request.last_token_at
        text = ""
        for one in sampled:
            request.keys.append(one.token)
            request.unsent_tokens.append(one.token)
            if one.probs is not None:
                request.unsent_probs.append(_named(one.probs, request.task.preserved_tokens, vocab))
            shown = self._show(request, one.token)
            if request.indent_stop is not None:
                shown = request.indent_stop.cut(shown)
                if request.indent_stop.ended:
                    request.finish_reason, request.text.stopping_word = FinishReason.LIMIT, ""
            if request.reasoning is not None:
                request.reasoning.feed(vocab.names[one.token])
                request.close_thinking()
            text += shown
            if request.finish_reason is not None:
                break
        request.n_simple = self._n_simple(request)
        if not text and request.finish_reason is None:
            return None
        request.has_new_line = request.has_new_line or "\n" in text
        tokens, request.unsent_tokens = request.unsent_tokens, []
        probs, request.unsent_probs = request.unsent_probs, []
        return Chunk(request.task.id, text, tuple(tokens), tuple(probs), pace)

    def _show(self, request: RequestState, token: TokenId) -> str:
        """Decide what text the token brings, and whether it is the last one."""
        vocab = self._vocab
        if token in vocab.end_of_generation:
            request.finish_reason = FinishReason.EOS
            shown = request.text.feed(vocab.names[token]) if request.task.special else ""
            return shown + request.text.flush()
        piece = (
            vocab.names[token] if token in request.task.preserved_tokens else vocab.pieces[token]
        )
        text = request.text.feed(piece)
        if request.text.stopping_word:
            request.finish_reason = FinishReason.WORD
            return text
        if self._limit_reached(request, piece):
            text += request.text.flush()  # which may complete a stop string
            request.finish_reason = (
                FinishReason.WORD if request.text.stopping_word else FinishReason.LIMIT
            )
        return text

    def _limit_reached(self, request: RequestState, piece: bytes) -> bool:
        params = request.task.params
        if request.n_output == self._max_tokens(request):
            return True
        # Media can be neither cut nor moved, so a context with media cannot make room.
        can_shift = self._shifts and not request.task.prompt.media
        if not can_shift and len(request.keys) >= self._n_ctx_seq:
            request.truncated = True
            return True
        if params.t_max_predict_ms and b"\n" in piece:  # only lines that are whole
            assert request.first_token_at is not None and request.last_token_at is not None
            return (request.last_token_at - request.first_token_at) * 1e3 > params.t_max_predict_ms
        return False

    def _max_tokens(self, request: RequestState) -> int:
        """The most tokens of an output; -1: no limit but the context."""
        max_tokens = request.task.params.max_tokens
        return self._n_ctx_seq if self._shifts and max_tokens < 0 else max_tokens

    def _n_simple(self, request: RequestState) -> int:
        """Find the number of keys below which another token can end an output only by being EOG.

        It is 0 for requests that look at every token.
        """
        task, params = request.task, request.task.params
        if request.indent_stop or not request.is_free or task.preserved_tokens or params.n_probs:
            return 0
        if params.stop or task.turn_ends or params.t_max_predict_ms:
            return 0
        n_keys, max_tokens = self._n_ctx_seq, self._max_tokens(request)
        if max_tokens >= 0:
            n_keys = min(n_keys, len(request.keys) - request.n_output + max_tokens)
        return n_keys - 1


def _named(probs: TokenProbs, preserved: frozenset[TokenId], vocab: Vocab) -> TokenProbs:
    """Give control tokens that are shown the bytes that they are shown with."""

    def piece_of(token: TokenId) -> bytes:
        return vocab.names[token] if token in preserved else vocab.pieces[token]

    if not preserved:
        return probs
    chosen = attrs.evolve(probs.chosen, piece=piece_of(probs.chosen.id))
    return TokenProbs(chosen, probs.top.named(piece_of))
