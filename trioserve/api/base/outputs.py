"""Writes outputs as JSON, in the forms that several routes share. The names are llama-server's."""

from __future__ import annotations

import codecs
import json
import math
import secrets
from collections.abc import Collection, Sequence
from itertools import count
from typing import Any

import attrs

from trioserve._version import __version__
from trioserve.api.base.generation_request import GenerationRequest
from trioserve.api.base.sse import LazyList
from trioserve.server.core import ServerCore
from trioserve.types import (
    Finished,
    FinishReason,
    GenerationParams,
    Progress,
    Prompt,
    PromptScores,
    SamplingParams,
    Timings,
    TokenId,
    TokenProb,
    TokenProbs,
)

#: The build that made a response, for `system_fingerprint` and `build_info`. Clients of
#: llama-server expect a "b" at its beginning.
FINGERPRINT = f"b{__version__}-trioserve"

#: Stands for a probability of 0, whose logarithm JSON has no number for.
_LOWEST = -3.4028234663852886e38

#: Requests a random seed for each output, as -1 does.
RANDOM_SEED = 2**32 - 1


_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


def new_id(prefix: str) -> str:
    """Make the id of a response."""
    return f"{prefix}-{secrets.token_hex(16)}"


def timings(value: Timings) -> dict[str, Any]:
    """Write the timings of prompt and output. The first output token counts as the prompt's."""
    n_decoded = value.predicted_n - 1
    return {
        "cache_n": value.cache_n,
        "prompt_n": value.prompt_n,
        "prompt_ms": value.prompt_ms,
        "prompt_per_token_ms": _ratio(value.prompt_ms, value.prompt_n),
        "prompt_per_second": _ratio(value.prompt_n * 1e3, value.prompt_ms),
        "predicted_n": value.predicted_n,
        "predicted_ms": value.predicted_ms,
        "predicted_per_token_ms": _ratio(value.predicted_ms, n_decoded),
        "predicted_per_second": _ratio(n_decoded * 1e3, value.predicted_ms),
    } | _drafts(value)


def _drafts(value: Timings) -> dict[str, int]:
    if not value.draft_n:
        return {}
    return {"draft_n": value.draft_n, "draft_n_accepted": value.draft_n_accepted}


def _ratio(a: float, b: float) -> float:
    return a / b if a > 0 and b > 0 else 0.0


def progress(value: Progress) -> dict[str, Any]:
    """Write the progress of the prompt."""
    return {
        "total": value.total,
        "cache": value.cached,
        "processed": value.processed,
        "time_ms": round(value.time_ms),
    }


def usage(n_prompt: int, values: Sequence[Timings], *, copies: int = 1) -> dict[str, Any]:
    """Count tokens as OpenAI does: those of a prompt only once, for any number of outputs.

    Args:
        n_prompt: tokens of all prompts.
        values: the timings of all outputs, those of one prompt together.
        copies: outputs of each prompt.
    """
    n_output = sum(each.predicted_n for each in values)
    # One of the outputs of a prompt computes it; the others find it in the cache.
    groups = (values[start : start + copies] for start in range(0, len(values), copies))
    n_cached = sum(min(each.cache_n for each in group) for group in groups)
    return {
        "completion_tokens": n_output,
        "prompt_tokens": n_prompt,
        "total_tokens": n_prompt + n_output,
        "prompt_tokens_details": {"cached_tokens": n_cached},
    }


def finish_reason(reason: FinishReason, *, tool_calls: bool = False) -> str:
    """Translate the finish reason to OpenAI's names."""
    if reason is FinishReason.LIMIT:
        return "length"
    return "tool_calls" if tool_calls else "stop"


def probs(
    values: Sequence[TokenProbs], *, post_sampling: bool, n_top: int | None = None
) -> LazyList:
    """Write the candidates for each token, or only the first `n_top`."""
    key, list_key = ("prob", "top_probs") if post_sampling else ("logprob", "top_logprobs")

    def one(candidate: TokenProb) -> dict[str, Any]:
        return {
            "id": candidate.id,
            "token": decode_piece(candidate.piece),
            "bytes": list(candidate.piece),
            key: figure_of(candidate, post_sampling=post_sampling),
        }

    def write(each: TokenProbs) -> dict[str, Any]:
        return {**one(each.chosen), list_key: [one(top) for top in each.top[:n_top]]}

    return LazyList(write, values)


def prompt_logprobs(scores: PromptScores, n_top: int) -> LazyList:
    """Write the scores of a prompt as vLLM does: null for the first token, and for each other one
    an object that has it and the `n_top` candidates for its place, by their ids.
    """

    def write(index: int) -> dict[str, Any] | None:
        if not index:
            return None
        each = scores[index - 1]
        return {
            str(one.id): {
                "logprob": figure_of(one, post_sampling=False),
                "rank": rank,
                "decoded_token": decode_piece(one.piece),
            }
            for one, rank in [(each.chosen, each.rank), *zip(each.top[:n_top], count(1))]
        }

    return LazyList(write, range(len(scores) + 1))


def figure_of(candidate: TokenProb, *, post_sampling: bool) -> float:
    """The probability of a candidate after sampling, or else its logarithm, which is finite."""
    return math.exp(candidate.logprob) if post_sampling else max(candidate.logprob, _LOWEST)


def decode_piece(piece: bytes) -> str:
    """Decode a token, without an incomplete character at its end."""
    return _Utf8Decoder("replace").decode(piece)


def generation_settings(
    params: GenerationParams,
    request: GenerationRequest | None = None,
    *,
    reasoning_format: str = "none",
    end_of_generation: Collection[TokenId] = (),
    draft_types: Collection[str] = (),
) -> dict[str, Any]:
    """Write how a request is continued, with all defaults.

    Without `request` it is the short form, which llama-server uses where it speaks of no request.
    `end_of_generation` are the tokens that `ignore_eos` forbids, `draft_types` what the server
    drafts tokens with.
    """
    if reasoning_format == "auto":
        reasoning_format = "deepseek"  # which is the same
    sampling = attrs.asdict(params.sampling, recurse=False)
    sampling["seed"] = RANDOM_SEED if params.sampling.seed == -1 else params.sampling.seed
    del sampling["logit_bias"]
    settings = sampling | {
        "stop": list(params.stop),
        "samplers": list(params.sampling.samplers),
        "dry_sequence_breakers": list(params.sampling.dry_sequence_breakers),
        "logit_bias": _biases(params.sampling, end_of_generation),
        "max_tokens": params.max_tokens,
        "n_predict": params.max_tokens,
        "n_keep": params.n_keep,
        "n_discard": params.n_discard,
        "stream": request.stream if request else False,
        "n_probs": params.n_probs,
        "grammar": params.grammar.source if params.grammar else "",
        "grammar_lazy": False,
        "grammar_triggers": [],
        "preserved_tokens": [],
        "chat_format": "Content-only",
        "reasoning_format": reasoning_format,
        "reasoning_in_content": bool(request and request.stream)
        and reasoning_format == "deepseek-legacy",
        "generation_prompt": "",
        "speculative.types": ",".join(draft_types) or "none",
        "timings_per_token": request.timings_per_token if request else False,
        "post_sampling_probs": params.post_sampling_probs,
        "backend_sampling": False,
        "lora": [{"id": id_, "scale": scale} for id_, scale in params.lora],
    }
    if request is None:
        for name in _ONLY_LONG:
            del settings[name]
    return settings


_ONLY_LONG = (
    "stop",
    "dry_sequence_breakers",
    "logit_bias",
    "grammar",
    "grammar_lazy",
    "grammar_triggers",
    "preserved_tokens",
)


def _biases(
    sampling: SamplingParams, end_of_generation: Collection[TokenId]
) -> list[dict[str, Any]]:
    """Write the biases. A bias that forbids a token is null, as in llama-server."""
    forbidden = sorted(end_of_generation) if sampling.ignore_eos else ()
    return [
        {"bias": bias if math.isfinite(bias) else None, "token": token}
        for token, bias in sampling.logit_bias
    ] + [{"bias": None, "token": token} for token in forbidden]


class LiveTimings:
    """The timings of a request that is still running, as far as its events tell them."""

    def __init__(self, n_prompt: int, clock: Any) -> None:
        self._clock = clock
        self._prompt = Progress(0, n_prompt, 0, 0, 0.0)
        self._first: float | None = None
        self.n_predicted = 0
        self._drafts = (0, 0)

    def on_output(self, n_tokens: int, drafts: tuple[int, int]) -> None:
        """Record new tokens, and the totals drafted and accepted so far; zeros: unchanged."""
        self.n_predicted += n_tokens
        self._drafts = max(self._drafts, drafts)

    def on_progress(self, value: Progress) -> None:
        """Record the progress of the prompt."""
        self._prompt = value

    def with_progress(self, value: Progress, *, timed: bool) -> dict[str, Any]:
        """Record and return the progress of the prompt, with the timings so far if `timed`."""
        self.on_progress(value)
        written: dict[str, Any] = {"prompt_progress": progress(value)}
        if timed:
            so_far = Timings(
                cache_n=value.cached,
                prompt_n=value.processed - value.cached,
                prompt_ms=value.time_ms,
            )
            written["timings"] = timings(so_far)
        return written

    def now(self) -> Timings:
        """The timings so far, once there is output."""
        now = self._clock()
        if self._first is None:
            self._first = now
        return Timings(
            cache_n=self._prompt.cached,
            prompt_n=self._prompt.total - self._prompt.cached,
            prompt_ms=self._prompt.time_ms,
            predicted_n=self.n_predicted,
            predicted_ms=(now - self._first) * 1e3,
            draft_n=self._drafts[0],
            draft_n_accepted=self._drafts[1],
        )


def name_of(server: ServerCore, request: GenerationRequest, params: GenerationParams) -> str:
    """The name that an answer gives for its model: that of its adapter, if the request names one.

    The server is awake.
    """
    if params.lora and not request.lora:
        return server.adapters.names[params.lora[0][0]]
    return server.model.info.name


class OutputWriter:
    """Writes outputs that have ended as llama-server's own routes do; on others, as ``__verbose``.

    That field is there where a request asks for it, or the log level is debug.
    """

    def __init__(
        self, server: ServerCore, request: GenerationRequest, params: GenerationParams
    ) -> None:
        self.model = name_of(server, request, params)
        #: The bytes of each token.
        self.pieces = server.model.vocab.pieces
        self._server, self._request, self._params = server, request, params
        wanted = request.verbose
        self._is_verbose = server.config.log_level == "debug" if wanted is None else wanted

    def whole(
        self,
        index: int,
        prompt: Prompt,
        finished: Finished,
        *,
        text: str = "",
        tokens: Sequence[TokenId] = (),
    ) -> dict[str, Any]:
        """Write an output. `text` and `tokens` are empty at the end of a stream."""
        server, n_predicted = self._server, finished.timings.predicted_n
        return {
            "index": index,
            "content": text,
            "tokens": tokens,
            "id_slot": finished.slot_id,
            "stop": True,
            "model": self.model,
            "tokens_predicted": n_predicted,
            "tokens_evaluated": len(prompt),
            "generation_settings": generation_settings(
                self._params,
                self._request,
                reasoning_format=server.config.reasoning_format,
                end_of_generation=server.model.vocab.end_of_generation,
                draft_types=server.config.draft_types,
            ),
            "prompt": server.detokenize(prompt),
            "has_new_line": "\n" in text,
            "truncated": finished.truncated,
            "stop_type": finished.reason.value,
            "stopping_word": finished.stopping_word,
            # The last token was sampled, and not decoded.
            "tokens_cached": len(prompt) + max(n_predicted - 1, 0),
            "timings": timings(finished.timings),
        }

    def verbose(
        self, index: int, prompt: Prompt, finished: Finished, tokens: Sequence[TokenId] = ()
    ) -> dict[str, Any]:
        """Write the field, or nothing; of a whole answer with its tokens."""
        if not self._is_verbose:
            return {}
        text = self._server.detokenize(tokens) if tokens else ""
        return {"__verbose": self.whole(index, prompt, finished, text=text, tokens=tokens)}


def read_arguments(text: str) -> Any:
    """Read the arguments of a call. If they are cut short, keep the complete ones, as SDKs do."""
    head, closing = _cut(text)
    for candidate in (text, text + closing, head):
        try:
            return json.loads(candidate, parse_int=_integer)
        except ValueError:
            continue
    return {}  # it was cut before there was anything


def _integer(digits: str) -> int | str:
    return int(digits) if len(digits) < 4000 else digits  # Python refuses longer ones


def _cut(text: str) -> tuple[str, str]:
    """Cut JSON after its last complete member, closed; and tell what would close all of it."""
    open_: list[str] = []
    at, closing = 0, ""
    in_string = escaped = False
    for i, character in enumerate(text):
        if in_string:
            in_string = escaped or character != '"'
            escaped = not escaped and character == "\\"
        elif character == '"':
            in_string = True
        elif character in "{[":
            open_.append("}" if character == "{" else "]")
            at, closing = i + 1, "".join(reversed(open_))
        elif character in "}]":
            open_.pop()
            at, closing = i + 1, "".join(reversed(open_))
        elif character == ",":
            at, closing = i, "".join(reversed(open_))
    return text[:at] + closing, "".join(reversed(open_))
