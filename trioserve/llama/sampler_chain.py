"""Sampler chains: `SamplingParams` as llama.cpp's samplers, in llama-server's order.

With `min_tokens`, one comes first that forbids end-of-generation tokens until then. Then come the
logit biases: the request's, and those that forbid end-of-generation tokens (if they
are to be ignored) and tokens that the model file forbids. Then come the samplers in the request's
order, and last the one that draws: ``dist``, or ``adaptive-p`` if the request names it. Mirostat
replaces all but the biases. A temperature of 0 is no special case: its sampler leaves one token.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

from trioserve.errors import InvalidRequestError
from trioserve.llama.context import Context
from trioserve.llama.library import lib
from trioserve.llama.vocab import LlamaVocab
from trioserve.log import get_logger
from trioserve.types import SamplingParams, TokenId
from trioserve.types.params import MAX_FLOAT

_MAX_BREAKERS = 32
_MAX_BREAKER = 40  # bytes; llama.cpp cuts longer ones
# The infill sampler compares all pairs of candidates, in buffers for pieces of 512 bytes.
_MAX_INFILL = 1024
_MAX_INFILL_PIECE = 512
# A temperature below this is taken as 0, because dividing logits by it would give infinities.
_MIN_TEMPERATURE = 1e-30


def check(params: SamplingParams, vocab: LlamaVocab) -> None:
    """Check parameters that depend on the vocabulary; see `SamplingParams.needs_vocab`.

    Raises:
        InvalidRequestError: a value cannot be used; `param` names the field.
    """
    _check_biases(params, vocab)
    if uses_dry(params):
        _check_breakers(params)
    if "infill" in params.samplers and not params.mirostat:
        _check_infill(params, vocab)


def build(params: SamplingParams, vocab: LlamaVocab, *, n_ctx: int) -> Any:
    """Make a chain and return llama.cpp's pointer, which the caller frees.

    Args:
        params: the request's parameters.
        vocab: of the model.
        n_ctx: how many tokens the sequence can hold; windows of -1 are of this size.

    Raises:
        InvalidRequestError: as `check`.
    """
    check(params, vocab)
    chain_params = lib.llama_sampler_chain_default_params()
    chain_params.no_perf = True
    chain = lib.llama_sampler_chain_init(chain_params)
    if params.min_tokens:
        lib.llama_sampler_chain_add(chain, _logit_bias(_no_ends(vocab), vocab))
    for sampler in _samplers(params, vocab, n_ctx):
        lib.llama_sampler_chain_add(chain, sampler)
    return chain


def banned(params: SamplingParams, vocab: LlamaVocab) -> list[TokenId]:
    """List the tokens that the chain never chooses."""
    return [token for token, bias in _biases(params, vocab) if bias == -math.inf]


def biases(params: SamplingParams, vocab: LlamaVocab) -> dict[TokenId, float]:
    """Return the biases that the chain adds to logits before all samplers, by token."""
    total: dict[TokenId, float] = {}
    at_first = _no_ends(vocab) if params.min_tokens else []
    for token, bias in [*at_first, *_biases(params, vocab)]:
        total[token] = total.get(token, 0.0) + bias
    return total


def allow_end(chain: Any) -> None:
    """Take the sampler of `min_tokens` off a chain."""
    lib.llama_sampler_free(lib.llama_sampler_chain_remove(chain, 0))


def window(params: SamplingParams, n_ctx: int) -> int:
    """Return how many of the last tokens the chain looks back at; 0 if at none."""
    if params.mirostat:
        return 0
    sizes = [0]
    if uses_penalties(params):
        sizes.append(_last_n(params.repeat_last_n, n_ctx))
    if uses_dry(params):
        sizes.append(_last_n(params.dry_penalty_last_n, n_ctx))
    return max(sizes)


def uses_penalties(params: SamplingParams) -> bool:
    """Return True if the penalties are in the chain and have an effect."""
    return "penalties" in params.samplers and (
        params.repeat_penalty != 1.0
        or params.frequency_penalty != 0
        or params.presence_penalty != 0
    )


def uses_dry(params: SamplingParams) -> bool:
    """Return True if the DRY sampler is in the chain and has an effect."""
    return (
        not params.mirostat
        and "dry" in params.samplers
        and params.dry_multiplier != 0
        and params.dry_base >= 1
        and params.dry_penalty_last_n != 0
    )


def _samplers(params: SamplingParams, vocab: LlamaVocab, n_ctx: int) -> list[Any]:
    seed = params.seed & 0xFFFFFFFF  # llama.cpp takes the largest as "random"
    samplers = []
    if biases := _biases(params, vocab):
        samplers.append(_logit_bias(biases, vocab))
    if params.mirostat:
        samplers.append(lib.llama_sampler_init_temp(params.temperature))
        tau, eta = params.mirostat_tau, params.mirostat_eta
        if params.mirostat == 1:
            last = lib.llama_sampler_init_mirostat(vocab.n_tokens, seed, tau, eta, 100)
        else:
            last = lib.llama_sampler_init_mirostat_v2(seed, tau, eta)
        return [*samplers, last]
    for name in params.samplers:
        if name != "adaptive_p":  # it selects the token, so it is always the last one
            samplers.append(_MAKERS[name](params, vocab, n_ctx, seed))
    if "adaptive_p" in params.samplers:
        target, decay = params.adaptive_target, params.adaptive_decay
        samplers.append(lib.llama_sampler_init_adaptive_p(target, decay, seed))
    else:
        samplers.append(lib.llama_sampler_init_dist(seed))
    return samplers


def _logit_bias(biases: list[tuple[int, float]], vocab: LlamaVocab) -> Any:
    array = (lib.llama_logit_bias * len(biases))(*biases)
    return lib.llama_sampler_init_logit_bias(vocab.n_tokens, len(biases), array)


def _penalties(params: SamplingParams, vocab: LlamaVocab, n_ctx: int, _seed: int) -> Any:
    return lib.llama_sampler_init_penalties(
        vocab.n_tokens,
        _last_n(params.repeat_last_n, n_ctx),
        params.repeat_penalty,
        params.frequency_penalty,
        params.presence_penalty,
    )


def _dry(params: SamplingParams, vocab: LlamaVocab, n_ctx: int, _seed: int) -> Any:
    # Finding the breakers in the vocabulary takes time, so none are given if they have no effect.
    breakers = [text.encode() for text in params.dry_sequence_breakers] if uses_dry(params) else []
    return lib.llama_sampler_init_dry(
        vocab.handle,
        params.dry_multiplier,
        params.dry_base,
        params.dry_allowed_length,
        _last_n(params.dry_penalty_last_n, n_ctx),
        (ctypes.c_char_p * len(breakers))(*breakers),
        len(breakers),
    )


def _temperature(params: SamplingParams, _vocab: LlamaVocab, _n_ctx: int, _seed: int) -> Any:
    temperature = params.temperature
    if params.dynatemp_range == 0 and 0 < temperature < _MIN_TEMPERATURE:
        temperature = 0.0
    return lib.llama_sampler_init_temp_ext(
        temperature, params.dynatemp_range, params.dynatemp_exponent
    )


_Maker = Callable[[SamplingParams, LlamaVocab, int, int], Any]
_MAKERS: dict[str, _Maker] = {
    "penalties": _penalties,
    "dry": _dry,
    "top_n_sigma": lambda p, v, n, s: lib.llama_sampler_init_top_n_sigma(p.top_n_sigma),
    "top_k": lambda p, v, n, s: lib.llama_sampler_init_top_k(p.top_k),
    "typ_p": lambda p, v, n, s: lib.llama_sampler_init_typical(p.typical_p, p.min_keep),
    "top_p": lambda p, v, n, s: lib.llama_sampler_init_top_p(p.top_p, p.min_keep),
    "min_p": lambda p, v, n, s: lib.llama_sampler_init_min_p(p.min_p, p.min_keep),
    "xtc": lambda p, v, n, s: lib.llama_sampler_init_xtc(
        p.xtc_probability, p.xtc_threshold, p.min_keep, s
    ),
    "temperature": _temperature,
    "infill": lambda p, v, n, s: lib.llama_sampler_init_infill(v.handle),
}


def _last_n(number: int, n_ctx: int) -> int:
    """Bound a window by `n_ctx`, because llama.cpp allocates it."""
    return n_ctx if number == -1 else min(number, n_ctx)


def _biases(params: SamplingParams, vocab: LlamaVocab) -> list[tuple[int, float]]:
    return [
        *((token, bias) for token, bias in params.logit_bias),
        *(_no_ends(vocab) if params.ignore_eos else ()),
        *((token, -math.inf) for token in vocab.suppressed),
    ]


def _no_ends(vocab: LlamaVocab) -> list[tuple[int, float]]:
    """The biases that forbid tokens that end the output."""
    return [(token, -math.inf) for token in sorted(vocab.end_of_generation)]


def _check_biases(params: SamplingParams, vocab: LlamaVocab) -> None:
    if len(params.logit_bias) > vocab.n_tokens:
        raise _invalid("logit_bias", f"has more entries than the {vocab.n_tokens} tokens there are")
    vocab.check([token for token, _ in params.logit_bias], param="logit_bias")
    for token, bias in params.logit_bias:
        if not (bias == -math.inf or abs(bias) <= MAX_FLOAT):  # NaN is neither
            raise _invalid(
                "logit_bias", f"adds {bias} to token {token}; it must be a finite number"
            )


def _check_breakers(params: SamplingParams) -> None:
    name, breakers = "dry_sequence_breakers", params.dry_sequence_breakers
    if len(breakers) > _MAX_BREAKERS:
        raise _invalid(name, f"holds {len(breakers)} strings; at most {_MAX_BREAKERS} are allowed")
    for text in breakers:
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise _invalid(name, "holds half of a surrogate pair") from error
        if not 0 < size <= _MAX_BREAKER or "\0" in text:
            raise _invalid(
                name, f"must hold strings of 1 to {_MAX_BREAKER} bytes without NUL characters"
            )


def _check_infill(params: SamplingParams, vocab: LlamaVocab) -> None:
    candidates = vocab.n_tokens
    for name in params.samplers[: params.samplers.index("infill")]:
        if name == "top_k" and params.top_k > 0:
            candidates = min(candidates, params.top_k)
    if candidates > _MAX_INFILL:
        raise _invalid("samplers", f"needs 'top_k' of at most {_MAX_INFILL} before 'infill'")
    if max(vocab.eot, vocab.eos) < 0 or max(map(len, vocab.names)) > _MAX_INFILL_PIECE:
        raise _invalid("samplers", "holds 'infill', which this model's vocabulary does not support")


def _invalid(name: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError.at(name, f"{problem}.")


_log = get_logger("llama")


class Offload:
    """Gives llama.cpp the sampler chains to run within `llama_decode`, one for each sequence.

    A chain is prepared once. After that, only its sequence can use it; a copy starts from its
    state. Use it from the inference thread only.

    With `has_drafts`, a decode samples several rows of a sequence. Each has a random number of its
    own, and those of rows that are not sampled from are drawn again.
    """

    def __init__(self, context: Context, *, has_drafts: bool = False) -> None:
        self._context, self._has_drafts = context, has_drafts
        self._told: set[str] = set()

    def start(self, chain: Any, seq: int) -> Any:
        """Have a chain that is new, or a copy, sample for a sequence.

        Returns None, or, where a sampler of the chain cannot run on the device, a copy of the
        chain to be used on the CPU.
        """
        accepted = lib.llama_set_sampler(self._context.handle, seq, chain)
        names = names_of(chain)
        here = [name for name in names if not name.startswith(("+", "?"))]
        if accepted and not here:
            return None
        # Those after one that runs on the CPU do so, too.
        reason = here[0].lstrip("-") if here else "the model is split by tensors"
        if reason not in self._told:
            self._told.add(reason)
            _log.info("a request is sampled on the CPU, not on the device", reason=reason)
        return self.stop(chain, seq)

    def stop(self, chain: Any, seq: int) -> Any:
        """Take a sequence's chain away; returns a copy of it, and frees it."""
        copy = self._take(chain, seq)
        if self._has_drafts:
            # Its random numbers for the rows of wrong guesses are still open, and on the CPU, each
            # token would take one of them, too. A chain that is set again has none.
            lib.llama_set_sampler(self._context.handle, seq, copy)
            copy = self._take(copy, seq)
        return copy

    def _take(self, chain: Any, seq: int) -> Any:
        lib.llama_set_sampler(self._context.handle, seq, None)
        copy = lib.llama_sampler_clone(chain)
        lib.llama_sampler_free(chain)
        return copy


def names_of(chain: Any) -> tuple[str, ...]:
    """Return the names of a chain's samplers, in order.

    A ``?`` before a name means "without effect". In a chain that was prepared for a device, ``+``
    means "on the device", and ``-`` "on the CPU".
    """
    count = lib.llama_sampler_chain_n(chain)
    each = (lib.llama_sampler_chain_get(chain, i) for i in range(count))
    return tuple(lib.llama_sampler_name(sampler).decode() for sampler in each)
