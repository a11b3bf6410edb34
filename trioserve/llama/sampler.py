"""Sampler: chooses the tokens of one task, with their probabilities; scores those of prompts."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trioserve.errors import DecodeError, EngineError, OutputError
from trioserve.llama import sampler_chain
from trioserve.llama.context import Context
from trioserve.llama.grammar.matcher import LazyMatcher, Matcher
from trioserve.llama.grammar.tokens import Mask
from trioserve.llama.library import HandleOwner, lib, short
from trioserve.llama.sampler_chain import Offload
from trioserve.llama.vocab import LlamaVocab
from trioserve.types import (
    Candidates,
    PromptScores,
    SamplingParams,
    TokenId,
    TokenProb,
    TokenProbs,
)
from trioserve.types.params import changed

#: Logits in one block; only the largest of each block is looked at first.
_BLOCK = 128
#: With a smaller vocabulary, making all candidates takes no longer than finding the best 40.
_MIN_VOCAB = 65_536


class Shortlist:
    """The tokens that a chain must consider.

    Args:
        params: the request's parameters.
        biases: added to logits before all samplers, by token.
        n_vocab: tokens in the vocabulary.
    """

    __slots__ = ("_is_greedy", "_lowered", "_n_best", "is_useful")

    def __init__(
        self, params: SamplingParams, biases: Mapping[TokenId, float], n_vocab: int
    ) -> None:
        self._lowered = frozenset(biases)
        best = n_best(params)
        # Tokens with biases may be among the largest logits, and fall behind others later.
        self._n_best = best + len(biases)
        possible = best > 0 and all(bias <= 0 for bias in biases.values())
        self._is_greedy = possible and best == 1
        #: Whether to use it; if not, the chain considers all tokens.
        self.is_useful = possible and (self._is_greedy or n_vocab >= _MIN_VOCAB)

    def best(self, logits: NDArray[np.float32], ids: NDArray[np.int32] | None = None) -> int | None:
        """Return the index of the only logit to consider; None: there are more, or it is NaN.

        The chain has nothing to choose then, and no memory that matters: of its samplers, only
        those that use none come before the temperature of 0.
        """
        if not self._is_greedy:
            return None
        best = int(logits.argmax())  # or the first NaN
        token = best if ids is None else int(ids[best])
        return best if token not in self._lowered and math.isfinite(logits[best]) else None

    def places(
        self, logits: NDArray[np.float32], ids: NDArray[np.int32] | None = None
    ) -> NDArray[np.intp] | None:
        """Return the indices of the logits to consider; None: all, and some may be NaN.

        Args:
            logits: of all tokens, or of those that a grammar allows.
            ids: which tokens these are; None: all.
        """
        best = self.best(logits, ids)
        if best is not None:
            return np.array([best])
        n_blocks = len(logits) // _BLOCK
        if self._n_best > n_blocks // 2:
            return None
        blocks = logits[: n_blocks * _BLOCK].reshape(_BLOCK, n_blocks)
        # In each of `_n_best` blocks a logit reaches this bound, so none of the best is cut off.
        largest = blocks.max(axis=0)  # or NaN
        rest = logits[n_blocks * _BLOCK :].max(initial=-np.inf)
        if not math.isfinite(largest.max()) or not rest < np.inf:
            return None
        bound = np.partition(largest, -self._n_best)[-self._n_best]
        return np.flatnonzero(logits >= bound)


def n_best(params: SamplingParams) -> int:
    """Return how many of the largest logits a chain can choose from, before biases; 0: all."""
    if params.mirostat:
        return 0
    n = 0
    exact = True  # no sampler so far depended on the probabilities of all tokens
    for name in params.samplers:
        if name == "top_k" and params.top_k > 0:
            n = n or (params.top_k if exact else 0)
        elif name == "temperature":
            if params.temperature <= 0 and not params.dynatemp_range:
                return 1
            exact &= not params.dynatemp_range
        elif name == "top_p":
            exact &= params.top_p >= 1
        elif name != "min_p" and _is_on(name, params):
            break  # it may drop the most probable tokens
    return n


def _is_on(name: str, params: SamplingParams) -> bool:
    match name:
        case "penalties":
            return sampler_chain.uses_penalties(params)
        case "dry":
            return sampler_chain.uses_dry(params)
        case "top_n_sigma":
            return params.top_n_sigma > 0
        case "typ_p":
            return params.typical_p < 1
        case "xtc":
            return params.xtc_probability > 0
        case "top_k":
            return params.top_k > 0
    return True


NOT_FINITE = "The model computed logits that are not finite numbers; its file may be damaged."

#: llama.cpp's ``llama_token_data``.
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class _Scratch:
    """A buffer for candidates, with the ctypes objects that take long to make."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.candidates = np.zeros(size, dtype=_CANDIDATE)
        self.ids, self.logits = self.candidates["id"], self.candidates["logit"]
        self.probs = self.candidates["p"]
        self.data: Any = self.candidates.ctypes.data_as(ctypes.POINTER(lib.llama_token_data))
        self.array: Any = lib.llama_token_data_array()
        self.reference: Any = ctypes.byref(self.array)


class LlamaSampler(HandleOwner):
    """A sampler chain, with its random numbers and its memory of the task's tokens.

    For the inference thread; to be closed before the context.

    Args:
        context: whose logits it reads.
        vocab: of the model.
        params: the request's parameters.
        prompt: the task's prompt, which the penalties take into account.
        n_ctx: how many tokens the task's sequence can hold.
        matcher: follows the output through a grammar; it is closed with the sampler.
        offload: gives chains to the device; None: it samples on the CPU.
        on_close: called once, when it is closed.

    Raises:
        InvalidRequestError: a parameter cannot be used with this model.
    """

    def __init__(
        self,
        context: Context,
        vocab: LlamaVocab,
        params: SamplingParams,
        prompt: Sequence[TokenId],
        *,
        n_ctx: int,
        matcher: Matcher | LazyMatcher | None = None,
        offload: Offload | None = None,
        on_close: Callable[[LlamaSampler], object] = lambda _: None,
    ) -> None:
        self._context = context
        # A grammar needs the logits, and a chain on a device stays as it is.
        self._offload = offload if matcher is None and not params.min_tokens else None
        self._params, self._n_until_end = params, params.min_tokens
        self._seq: int | None = None  # whose decode samples
        self._next_seq: int | None = None  # whose decode is to sample from now on
        self._vocab, self._n_vocab = vocab, vocab.n_tokens
        self._on_close = on_close
        self._matcher = matcher
        # The typical sampler makes NaNs of candidates without probability.
        self._compact = params.typical_p < 1
        self._scratch: _Scratch | None = None
        self.handle: Any = sampler_chain.build(params, vocab, n_ctx=n_ctx)
        self._shortlist = Shortlist(params, sampler_chain.biases(params, vocab), vocab.n_tokens)
        if size := sampler_chain.window(params, n_ctx):
            for token in prompt[-size:]:
                short.llama_sampler_accept(self.handle, token)

    def attach(self, seq: int) -> None:
        """Let decodes of this sequence sample, from the next `sample` on, where they can."""
        if self._offload is not None and self._seq is None:
            self._next_seq = seq

    def detach(self) -> None:
        """Sample on the CPU: the tokens are in no sequence, or in another one."""
        self._next_seq = None
        if self._offload is not None and self._seq is not None:
            self.handle = self._offload.stop(self.handle, self._seq)
            self._seq = None

    def sample(self, row: int) -> TokenId:
        """Choose a token from the logits of a row of the last batch, and accept it.

        Raises:
            DecodeError: a logit is NaN, or the largest is infinite.
            EngineError: the row has no logits, or the sampler is closed.
        """
        rows = self._context.rows
        if self.handle is None or not 0 <= row < len(rows) or not rows[row]:
            self._refuse(row)
        if self._seq is not None:
            return self._sampled(row)
        token = self._draw(row) if self._matcher is None else self._follow(row, self._matcher)
        if self._n_until_end:
            self._count()
        if self._offload is not None and self._next_seq is not None:
            here = self._offload.start(self.handle, self._next_seq)
            if here is None:
                self._seq = self._next_seq
            else:
                self.handle, self._offload = here, None
            self._next_seq = None
        return token

    def _sampled(self, row: int) -> TokenId:
        """Take the token that the decode has sampled."""
        token: int = short.llama_sampler_sample(self.handle, self._context.handle, row)
        if not 0 <= token < self._n_vocab:
            raise DecodeError(NOT_FINITE)
        return token

    def _follow(self, row: int, matcher: Matcher | LazyMatcher) -> TokenId:
        """Choose a token that a grammar allows."""
        while True:
            mask = matcher.mask()
            token = self._draw(row) if mask is None else self._constrained(row, mask)
            if matcher.accept(token):  # the penalties still count one that it refuses
                return token

    def sample_with_probs(self, row: int, n: int, *, post: bool) -> tuple[TokenId, TokenProbs]:
        """Choose the token that `sample` would, with candidates, as `Sampler` has it.

        The raw logits are those without the grammar. Of the candidates after all samplers, those of
        probability 0 are left out.
        """
        rows = self._context.rows
        if self.handle is None or not 0 <= row < len(rows) or not rows[row]:
            self._refuse(row)
        logits = self._context.logits(row, self._n_vocab)
        if post:
            token, ids, probs = self._apply_all(logits)
            self._count()
            best = np.array(largest(probs, n), dtype=np.intp)
            best = best[probs[best] > 0]
            return token, self._named(token, probs[ids == token], ids[best], probs[best])
        token = self.sample(row)
        return token, self.probs(row, token, n, post=False)

    def accept(self, token: TokenId) -> None:
        """Note a token that comes next, as `Sampler` has it."""
        if self.handle is None:
            raise EngineError("The sampler is closed.")
        if self._matcher is not None and not self._matcher.accept(token):
            raise OutputError(f"The grammar does not allow token {token}, which must come next.")
        short.llama_sampler_accept(self.handle, token)
        self._count()

    def _count(self) -> None:
        """Count a token of the output, and let it end when it has as many as it must."""
        if self._n_until_end:
            self._n_until_end -= 1
            if not self._n_until_end:
                sampler_chain.allow_end(self.handle)
                biases = sampler_chain.biases(changed(self._params, {"min_tokens": 0}), self._vocab)
                self._shortlist = Shortlist(self._params, biases, self._n_vocab)

    def forced(self, n_max: int) -> list[TokenId]:
        """Take the tokens that the grammar allows no other ones for, as `Sampler` has it."""
        tokens = [] if self._matcher is None else self._matcher.forced(n_max)
        for token in tokens:
            short.llama_sampler_accept(self.handle, token)
        return tokens

    def probs(self, row: int, token: TokenId, n: int, *, post: bool) -> TokenProbs:
        """Return the probabilities of a token that comes next, as `Sampler` has it."""
        if post:
            certain = np.ones(1)
            return self._named(token, certain, np.array([token])[:n], certain[:n])
        raw = _softmax(self._context.logits(row, self._n_vocab))
        best = np.array(largest(raw, n), dtype=np.intp)
        return self._named(token, raw[[token]], best, raw[best])

    def close(self) -> None:
        """Free it. Closing twice is fine."""
        if self.handle is not None:
            self.detach()
        handle, self.handle = self.handle, None
        if handle is not None:
            lib.llama_sampler_free(handle)
            if self._matcher is not None:
                self._matcher.close()
            self._on_close(self)

    def _refuse(self, row: int) -> None:
        if self.handle is None:
            raise EngineError("The sampler is closed.")
        raise EngineError(f"Row {row} of the last batch has no logits.")

    def _draw(self, row: int) -> TokenId:
        logits = self._context.logits(row, self._n_vocab)
        if self._shortlist.is_useful:
            best = self._shortlist.best(logits)
            if best is not None:
                short.llama_sampler_accept(self.handle, best)
                return best
            ids = self._shortlist.places(logits)
            if ids is not None:
                return self._choose(ids, logits[ids])
        _check_numbers(logits)
        token: int = lib.llama_sampler_sample(self.handle, self._context.handle, row)
        return token

    def _constrained(self, row: int, mask: Mask) -> TokenId:
        """Choose from the tokens of a mask, without changing the logits."""
        if mask.only is not None:
            short.llama_sampler_accept(self.handle, mask.only)
            return mask.only
        logits = self._context.logits(row, self._n_vocab)
        best = self._shortlist.best(logits)
        if best is not None and best in mask:
            short.llama_sampler_accept(self.handle, best)
            return best
        if not mask.allows_most or self._compact:
            ids = mask.ids
            allowed = logits[ids]
            places = self._shortlist.places(allowed, ids) if self._shortlist.is_useful else None
            if places is not None:
                ids, allowed = ids[places], allowed[places]
            else:
                _check_numbers(allowed)
            return self._choose(ids, allowed)
        forbidden = mask.forbidden
        hidden = logits[forbidden]
        logits[forbidden] = -np.inf
        try:
            return self._draw(row)
        finally:
            logits[forbidden] = hidden

    def _choose(self, ids: NDArray[np.integer[Any]], logits: NDArray[np.float32]) -> TokenId:
        """Like `llama_sampler_sample`, for these tokens only."""
        size = len(ids)
        if self._scratch is None or self._scratch.size < size:
            self._scratch = _Scratch(size)
        scratch = self._scratch
        scratch.ids[:size], scratch.logits[:size], scratch.probs[:size] = ids, logits, 0
        array = scratch.array
        array.data, array.size, array.selected, array.sorted = scratch.data, size, -1, False
        lib.llama_sampler_apply(self.handle, scratch.reference)
        token: int = array.data[array.selected].id  # of the remaining candidates
        short.llama_sampler_accept(self.handle, token)
        return token

    def _apply_all(
        self, logits: NDArray[np.float32]
    ) -> tuple[TokenId, NDArray[np.int32], NDArray[np.float32]]:
        """Like `sample`; also returns the remaining candidates."""
        while True:
            mask = None if self._matcher is None else self._matcher.mask()
            if mask is None:
                chosen = self._apply(np.arange(len(logits), dtype=np.int32), logits)
            else:
                ids = mask.ids
                chosen = self._apply(ids, logits[ids])
            if self._matcher is None or self._matcher.accept(chosen[0]):
                return chosen

    def _apply(
        self, ids: NDArray[np.int32], logits: NDArray[np.float32]
    ) -> tuple[TokenId, NDArray[np.int32], NDArray[np.float32]]:
        """Like `_choose`; also returns the remaining candidates."""
        _check_numbers(logits)
        token = self._choose(ids, logits)
        assert self._scratch is not None
        candidates, array = self._scratch.candidates, self._scratch.array
        # Samplers shorten the array, and may move its beginning.
        first = (
            ctypes.addressof(array.data.contents) - candidates.ctypes.data
        ) // _CANDIDATE.itemsize
        left = candidates[first : first + array.size]
        return token, left["id"], np.nan_to_num(left["p"])

    def _named(
        self, token: TokenId, prob: NDArray[Any], ids: NDArray[Any], probs: NDArray[Any]
    ) -> TokenProbs:
        pieces = self._vocab.pieces
        self._vocab.is_read_later = True
        chosen = TokenProb(token, pieces[token], _logs(prob)[0])
        return TokenProbs(chosen, Candidates(ids.tolist(), _logs(probs), pieces.__getitem__))


def _logs(probs: NDArray[Any]) -> list[float]:
    with np.errstate(divide="ignore"):  # of 0: -inf
        logs: list[float] = np.log(probs.astype(np.float64)).tolist()
    return logs


def _check_numbers(logits: NDArray[np.float32]) -> None:
    """Raise DecodeError if a logit is NaN, or the largest is infinite.

    `argmax` finds the first NaN or the largest: 0.5 µs for 2,048 logits, 14 for 152,000.
    """
    if not math.isfinite(logits[logits.argmax()]):
        raise DecodeError(NOT_FINITE)


def _softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    probs: NDArray[np.float64] = np.exp(logits - logits.max(), dtype=np.float64)
    probs /= probs.sum()
    return probs


def add_score(scores: PromptScores, logits: NDArray[np.float32], token: TokenId) -> None:
    """Add how probable a token is by these logits, and the candidates for its place.

    It takes no copy of the logits: they are overwritten.

    Raises:
        DecodeError: a logit is NaN, or the largest is infinite.
    """
    highest = float(logits[logits.argmax()])  # or NaN
    if not math.isfinite(highest):
        raise DecodeError(NOT_FINITE)
    chosen = float(logits[token])
    rank = int(np.count_nonzero(logits >= chosen))
    best = [(id_, float(logits[id_])) for id_ in largest(logits, scores.n_top)]
    logits -= np.float32(highest)
    np.exp(logits, out=logits)
    base = highest + math.log(float(logits.sum(dtype=np.float64)))
    scores.add(token, chosen - base, rank, [(id_, logit - base) for id_, logit in best])


def largest(values: NDArray[Any], n: int) -> list[int]:
    """Return the indices of the `n` largest, in order; equal ones by index."""
    n = min(n, len(values))
    if n <= 1:
        return [int(values.argmax())] if n else []
    bound = -np.inf
    n_blocks = len(values) // _BLOCK
    if n <= n_blocks:
        # In each of `n` blocks a value reaches this bound, so none of the largest is cut off.
        blocks = values[: n_blocks * _BLOCK].reshape(n_blocks, _BLOCK).max(axis=1)
        bound = np.partition(blocks, -n)[-n]
    elif n < len(values):
        bound = np.partition(values, -n)[-n]
    places = np.flatnonzero(values >= bound)
    best: list[int] = places[np.argsort(-values[places], kind="stable")][:n].tolist()
    return best
