"""The tokens that an answer has used, as OpenAI counts them."""

from __future__ import annotations

from collections.abc import Sequence

from trioserve import types
from trioserve.api.base.answers import Answer


class _CachedTokens(Answer):
    cached_tokens: int


class Usage(Answer):
    """The tokens of prompts and outputs."""

    completion_tokens: int
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: _CachedTokens


class PromptUsage(Answer):
    """The tokens of prompts that have no output."""

    prompt_tokens: int
    total_tokens: int


def usage_of(n_prompt: int, values: Sequence[types.Timings], *, copies: int = 1) -> Usage:
    """Count the tokens of a prompt only once, for any number of outputs.

    Args:
        n_prompt: tokens of all prompts.
        values: the timings of all outputs, those of one prompt together.
        copies: outputs of each prompt.
    """
    n_output = sum(each.predicted_n for each in values)
    # One of the outputs of a prompt computes it; the others find it in the cache.
    groups = (values[start : start + copies] for start in range(0, len(values), copies))
    n_cached = sum(min(each.cache_n for each in group) for group in groups)
    return counted(n_prompt, n_cached, n_output)


def counted(n_prompt: int, n_cached: int, n_output: int) -> Usage:
    """Write counts of tokens; those of the prompt include the cached ones."""
    return Usage(n_output, n_prompt, n_prompt + n_output, _CachedTokens(n_cached))
