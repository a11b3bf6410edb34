"""The settings of a request with all defaults, as llama-server tells them."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import attrs

from trioserve.api.base.generation_request import GenerationRequest
from trioserve.server.generation.text import RANDOM_SEED
from trioserve.types import GenerationParams, SamplingParams, TokenId


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
