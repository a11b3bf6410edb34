"""Outputs in llama-server's form, with the name of the model and the time that each part took."""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Sequence
from time import monotonic
from typing import Any

import attrs
from msgspec import UNSET, UnsetType

from trioserve import types
from trioserve._version import __version__
from trioserve.api.base.answers import Answer
from trioserve.api.base.generation_request import GenerationRequest
from trioserve.api.base.scores import TokenProbs
from trioserve.api.base.usage import Usage, counted, usage_of
from trioserve.server.generation.text import RANDOM_SEED
from trioserve.server.model_server import ModelServer
from trioserve.types import Finished, GenerationParams, Prompt, SamplingParams, TokenId

#: The build that made a response, for `system_fingerprint` and `build_info`. Clients of
#: llama-server expect a "b" at its beginning.
FINGERPRINT = f"b{__version__}-trioserve"

#: The field of other answers that has an output, too.
VERBOSE = "__verbose"


def new_id(prefix: str) -> str:
    """Make the id of a response."""
    return f"{prefix}-{secrets.token_hex(16)}"


def name_of(server: ModelServer, request: GenerationRequest, params: GenerationParams) -> str:
    """The name that an answer gives for its model: that of its adapter, if the request names one.

    The server is awake.
    """
    if params.lora and not request.lora:
        return server.adapters.scales.names[params.lora[0][0]]
    return server.model.info.name


# -- how long a prompt and its output took. The names are llama-server's


class Timings(Answer):
    """The times of a prompt and its output. The first output token counts as the prompt's."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | UnsetType = UNSET
    draft_n_accepted: int | UnsetType = UNSET


def timings_of(value: types.Timings) -> Timings:
    """Write the timings of prompt and output."""
    drafts = (value.draft_n, value.draft_n_accepted)
    prompt = (value.cache_n, value.prompt_n, value.prompt_ms)
    return _timings(*prompt, value.predicted_n, value.predicted_ms, drafts)


def _timings(
    cache_n: int, prompt_n: int, prompt_ms: float, n: int, ms: float, drafts: tuple[int, int]
) -> Timings:
    """Write the timings of a prompt, and of `n` tokens of output in `ms` milliseconds."""
    return Timings(
        cache_n,
        prompt_n,
        prompt_ms,
        _ratio(prompt_ms, prompt_n),
        _ratio(prompt_n * 1e3, prompt_ms),
        n,
        ms,
        _ratio(ms, n - 1),
        _ratio((n - 1) * 1e3, ms),
        *(drafts if drafts[0] else ()),
    )


def _ratio(a: float, b: float) -> float:
    return a / b if a > 0 and b > 0 else 0.0


class LiveTimings:
    """The timings of a request that is still running, as far as its events tell them."""

    def __init__(self, n_prompt: int, request: GenerationRequest) -> None:
        self._request = request  # says what its client wants to know
        self._prompt = types.Progress(0, n_prompt, 0, 0, 0.0)
        self._first: float | None = None
        self.n_predicted = 0
        self._drafts = (0, 0)
        #: The client asks for figures that change with each token.
        self.is_wanted = request.timings_per_token or request.stream_options.continuous_usage_stats

    def on_output(self, n_tokens: int, drafts: tuple[int, int]) -> None:
        """Record new tokens, and the totals drafted and accepted so far; zeros: unchanged."""
        self.n_predicted += n_tokens
        self._drafts = max(self._drafts, drafts)

    def progress(self, value: types.Progress) -> dict[str, Any] | None:
        """Record the progress of the prompt, and write it; None: the client does not ask for it."""
        self._prompt = value
        if not self._request.return_progress:
            return None
        written: dict[str, Any] = {
            "prompt_progress": {
                "total": value.total,
                "cache": value.cached,
                "processed": value.processed,
                "time_ms": round(value.time_ms),
            }
        }
        if self._request.timings_per_token:
            n_new = value.processed - value.cached
            written["timings"] = _timings(value.cached, n_new, value.time_ms, 0, 0.0, (0, 0))
        return written

    def now(self) -> dict[str, Timings | Usage]:
        """Write the timings and the usage so far, once there is output, as the client asks."""
        written: dict[str, Timings | Usage] = {}
        if self._request.timings_per_token:
            written["timings"] = self._timings()
        if self._request.stream_options.continuous_usage_stats:
            prompt = self._prompt
            written["usage"] = counted(prompt.total, prompt.cached, self.n_predicted)
        return written

    def usage(self, timings: types.Timings) -> Usage:
        """Write the usage of the whole output."""
        return usage_of(self._prompt.total, [timings])

    def _timings(self) -> Timings:
        now, prompt = monotonic(), self._prompt
        if self._first is None:
            self._first = now
        n_new, ms = prompt.total - prompt.cached, (now - self._first) * 1e3
        output = (self.n_predicted, ms, self._drafts)
        return _timings(prompt.cached, n_new, prompt.time_ms, *output)


# -- whole outputs


class Output(Answer):
    """An output in llama-server's form.

    The `response_fields` of a request choose fields, also by paths in others.
    """

    is_open = True
    index: int | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tokens: Sequence[int] | UnsetType = UNSET
    id_slot: int | UnsetType = UNSET
    stop: bool | UnsetType = UNSET
    model: str | UnsetType = UNSET
    tokens_predicted: int | UnsetType = UNSET
    tokens_evaluated: int | UnsetType = UNSET
    generation_settings: dict[str, Any] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: str | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    completion_probabilities: Sequence[TokenProbs] | UnsetType = UNSET


class OutputWriter:
    """Writes outputs that have ended as llama-server's own routes do; on others, as ``__verbose``.

    That field is there where a request asks for it, or the log level is debug.
    """

    def __init__(
        self, server: ModelServer, request: GenerationRequest, params: GenerationParams
    ) -> None:
        self.model = name_of(server, request, params)
        self._texts: list[tuple[Prompt | Sequence[TokenId], str]] = []
        self._server, self._request, self._params = server, request, params
        wanted = request.verbose
        self._is_verbose = server.config.log_level == "debug" if wanted is None else wanted

    async def read(self, *texts: Prompt | Sequence[TokenId], anyway: bool = False) -> None:
        """Get texts that `verbose` writes, or `anyway`."""
        if anyway or self._is_verbose:
            for each in texts:
                if each and self.text(each) is None:
                    self._texts.append((each, await self._server.detokenize(each)))

    def text(self, tokens: Prompt | Sequence[TokenId]) -> str | None:
        """The text of some tokens, if it was read."""
        return next((text for each, text in self._texts if each is tokens), None)

    def whole(
        self,
        index: int,
        prompt: Prompt,
        finished: Finished,
        *,
        text: str = "",
        tokens: Sequence[TokenId] = (),
    ) -> Output:
        """Write an output. `text` and `tokens` are empty at the end of a stream."""
        server, n_predicted = self._server, finished.timings.predicted_n
        return Output(
            index=index,
            content=text,
            tokens=tokens,
            id_slot=finished.slot_id,
            stop=True,
            model=self.model,
            tokens_predicted=n_predicted,
            tokens_evaluated=len(prompt),
            generation_settings=generation_settings(
                self._params,
                self._request,
                reasoning_format=server.config.reasoning_format,
                end_of_generation=server.model.vocab.end_of_generation,
                draft_types=server.config.draft_types,
            ),
            prompt=self.text(prompt) or "",
            has_new_line="\n" in text,
            truncated=finished.truncated,
            stop_type=finished.reason.value,
            stopping_word=finished.stopping_word,
            # The last token was sampled, and not decoded.
            tokens_cached=len(prompt) + max(n_predicted - 1, 0),
            timings=timings_of(finished.timings),
        )

    def verbose(
        self, index: int, prompt: Prompt, finished: Finished, tokens: Sequence[TokenId] = ()
    ) -> dict[str, Any]:
        """Write the field, or nothing; of a whole answer with its tokens."""
        if not self._is_verbose:
            return {}
        text = self.text(tokens) or ""
        return {VERBOSE: self.whole(index, prompt, finished, text=text, tokens=tokens)}


# -- the settings of a request


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
    del sampling["logit_bias"], sampling["dry_sequence_breakers"]
    settings = sampling | {
        "seed": RANDOM_SEED if params.sampling.seed == -1 else params.sampling.seed,
        "max_tokens": params.max_tokens,
        "n_predict": params.max_tokens,
        "n_keep": params.n_keep,
        "n_discard": params.n_discard,
        "stream": False,
        "n_probs": params.n_probs,
        "chat_format": "Content-only",
        "reasoning_format": reasoning_format,
        "reasoning_in_content": False,
        "generation_prompt": "",
        "speculative.types": ",".join(draft_types) or "none",
        "timings_per_token": False,
        "post_sampling_probs": params.post_sampling_probs,
        "backend_sampling": False,
        "lora": [{"id": id_, "scale": scale} for id_, scale in params.lora],
    }
    if request is None:
        return settings
    return settings | {
        "stop": params.stop,
        "dry_sequence_breakers": params.sampling.dry_sequence_breakers,
        "logit_bias": _biases(params.sampling, end_of_generation),
        "grammar": params.grammar.source if params.grammar else "",
        "grammar_lazy": False,
        "grammar_triggers": [],
        "preserved_tokens": [],
        "stream": request.stream,
        "reasoning_in_content": request.stream and reasoning_format == "deepseek-legacy",
        "timings_per_token": request.timings_per_token,
    }


def _biases(
    sampling: SamplingParams, end_of_generation: Collection[TokenId]
) -> list[dict[str, Any]]:
    """Write the biases. A bias that forbids a token is null, as in llama-server."""
    forbidden = sorted(end_of_generation) if sampling.ignore_eos else ()
    return [
        {"bias": bias if math.isfinite(bias) else None, "token": token}
        for token, bias in sampling.logit_bias
    ] + [{"bias": None, "token": token} for token in forbidden]
