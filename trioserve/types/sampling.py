"""How the next token is chosen."""

from __future__ import annotations

import math
from typing import Any

import attrs

from trioserve.errors import InvalidRequestError
from trioserve.types.checks import INT32_MAX, are_strings, in_range, is_bool, to_tuple

#: A place in the vocabulary of the model.
TokenId = int

#: Samplers in the order llama-server applies them by default.
DEFAULT_SAMPLERS = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
)

#: All the names that `SamplingParams.samplers` may hold.
SAMPLER_NAMES = frozenset(DEFAULT_SAMPLERS) | {"infill", "adaptive_p"}

#: The letters that stand for samplers where a string gives their order.
SAMPLER_LETTERS = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
    "i": "infill",
    "a": "adaptive_p",
}


def _are_biases(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    for pair in value if isinstance(value, tuple) else [None]:
        match pair:
            case (int(), float() | int()):
                continue
        raise InvalidRequestError(
            f"'{attribute.name}' must be a list of pairs of token id and bias.",
            param=attribute.name,
        )


def _known_samplers(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    are_strings(_instance, attribute, value)
    for name in value:
        if name not in SAMPLER_NAMES:
            raise InvalidRequestError(
                f"'{attribute.name}' holds {name!r}, which is not a sampler; "
                f"the samplers are {', '.join(sorted(SAMPLER_NAMES))}.",
                param=attribute.name,
            )


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How the next token is chosen. Names, defaults and order are those of llama-server.

    Raises:
        InvalidRequestError: a value is out of range; `param` names the field.
    """

    seed: int = attrs.field(default=-1, validator=in_range(-1, 2**32 - 1))  # -1: random
    temperature: float = attrs.field(default=0.8, validator=in_range(-math.inf))  # <= 0: greedy
    dynatemp_range: float = attrs.field(default=0.0, validator=in_range(0.0))
    dynatemp_exponent: float = attrs.field(default=1.0, validator=in_range(0.0))
    top_k: int = attrs.field(default=40, validator=in_range(-1, INT32_MAX))  # <= 0: off
    top_p: float = attrs.field(default=0.95, validator=in_range(0.0))
    min_p: float = attrs.field(default=0.05, validator=in_range(0.0))
    typical_p: float = attrs.field(default=1.0, validator=in_range(0.0))
    top_n_sigma: float = attrs.field(default=-1.0, validator=in_range(-math.inf))
    xtc_probability: float = attrs.field(default=0.0, validator=in_range(0.0))
    xtc_threshold: float = attrs.field(default=0.1, validator=in_range(0.0))
    min_keep: int = attrs.field(default=0, validator=in_range(0, INT32_MAX))
    repeat_last_n: int = attrs.field(default=64, validator=in_range(-1, INT32_MAX))
    repeat_penalty: float = attrs.field(default=1.0, validator=in_range(0.0))
    presence_penalty: float = attrs.field(default=0.0, validator=in_range(-math.inf))
    frequency_penalty: float = attrs.field(default=0.0, validator=in_range(-math.inf))
    dry_multiplier: float = attrs.field(default=0.0, validator=in_range(0.0))
    dry_base: float = attrs.field(default=1.75, validator=in_range(0.0))
    dry_allowed_length: int = attrs.field(default=2, validator=in_range(-1, INT32_MAX))
    dry_penalty_last_n: int = attrs.field(default=64, validator=in_range(-1, INT32_MAX))
    dry_sequence_breakers: tuple[str, ...] = attrs.field(
        default=("\n", ":", '"', "*"), converter=to_tuple, validator=are_strings
    )
    mirostat: int = attrs.field(default=0, validator=in_range(0, 2))
    mirostat_tau: float = attrs.field(default=5.0, validator=in_range(0.0))
    mirostat_eta: float = attrs.field(default=0.1, validator=in_range(0.0))
    adaptive_target: float = attrs.field(default=-1.0, validator=in_range(-1.0, 1.0))
    adaptive_decay: float = attrs.field(default=0.9, validator=in_range(0.0, 0.99))
    samplers: tuple[str, ...] = attrs.field(
        default=DEFAULT_SAMPLERS, converter=to_tuple, validator=_known_samplers
    )
    ignore_eos: bool = attrs.field(default=False, validator=is_bool)
    #: Pairs of token id and what is added to its logit; ``-inf`` forbids the token.
    logit_bias: tuple[tuple[TokenId, float], ...] = attrs.field(
        default=(), converter=to_tuple, validator=_are_biases
    )
