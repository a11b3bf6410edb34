"""The parameters of an output: sampling, limits, grammar. Each field is checked by its class."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, TypeAlias, TypeVar, cast

import attrs

from trioserve.errors import InvalidRequestError

_T = TypeVar("_T", bound=attrs.AttrsInstance)

INT32_MAX = 2**31 - 1

#: The largest number that a float of C can hold.
MAX_FLOAT = 3.4028234e38

Validator: TypeAlias = "Callable[[Any, attrs.Attribute[Any], Any], None]"


def _wrong(attribute: attrs.Attribute[Any], must_be: str) -> InvalidRequestError:
    return InvalidRequestError.at(attribute.name, f"must be {must_be}.")


def in_range(low: float, high: float = math.inf) -> Validator:
    """Make an attrs validator: a number of at least `low` and at most `high` that fits in C."""

    def check(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        wants = int if attribute.type in (int, "int", "int | None") else (int, float)
        if isinstance(value, bool) or not isinstance(value, wants):
            raise _wrong(attribute, "an integer" if wants is int else "a number")
        if not low <= value <= high:  # as NaN
            no_end = high == math.inf
            raise _wrong(attribute, f"at least {low}" if no_end else f"between {low} and {high}")
        if abs(value) > MAX_FLOAT:
            raise _wrong(attribute, f"between -{MAX_FLOAT} and {MAX_FLOAT}")

    check.bounds = (low, high)  # type: ignore[attr-defined]
    return check


def _above_zero(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    _FROM_ZERO(instance, attribute, value)
    if value < 1e-37:
        raise _wrong(attribute, "greater than 0")


_FROM_ZERO = in_range(0.0)
_above_zero.bounds = _FROM_ZERO.bounds  # type: ignore[attr-defined]


def is_bool(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validate that an attribute is a bool."""
    if not isinstance(value, bool):
        raise _wrong(attribute, "true or false")


def is_text(max_length: int) -> Validator:
    """Make an attrs validator: a string of at most `max_length` characters."""

    def check(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, str) or len(value) > max_length:
            raise _wrong(attribute, f"a string of at most {max_length} characters")

    return check


def are_strings(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validate a tuple of strings."""
    if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
        raise _wrong(attribute, "a list of strings")


def _are_pairs(of: str, *, lowest_id: float = -math.inf, most: float = math.inf) -> Validator:
    """Make a validator: a tuple of pairs of an id and a number, which is not NaN."""

    def check(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        for pair in value if isinstance(value, tuple) else [None]:
            match pair:
                case (int(id_), float() | int() as x) if id_ >= lowest_id and abs(x) <= most:
                    continue
            raise _wrong(attribute, f"a list of pairs of {of}")

    return check


def to_tuple(value: Any) -> Any:
    """Turn a list into a tuple, and leave the rest to a validator."""
    return tuple(value) if isinstance(value, list) else value


def to_strings(value: Any) -> Any:
    """The same, and make a tuple of a string."""
    return (value,) if isinstance(value, str) else to_tuple(value)


def changed(base: _T, changes: Mapping[str, Any]) -> _T:
    """Make parameters with some other values. Only those are checked: the others were before.

    Raises:
        InvalidRequestError: a value has the wrong type or is out of range.
    """
    made, attributes = copy(base), attrs.fields(type(base))
    for name, value in changes.items():
        attribute = getattr(attributes, name)
        if (convert := cast(Any, attribute.converter)) is not None:
            value = convert(value)
        if attribute.validator is not None:
            attribute.validator(made, attribute, value)
        object.__setattr__(made, name, value)
    return made


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

_MAX_SAMPLERS = 32

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


def _known_samplers(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    are_strings(_instance, attribute, value)
    if len(value) > _MAX_SAMPLERS:
        raise InvalidRequestError.at(
            attribute.name, f"holds {len(value)}; at most {_MAX_SAMPLERS} are allowed."
        )
    for name in value:
        if name not in SAMPLER_NAMES:
            raise InvalidRequestError.at(
                attribute.name,
                f"holds {name!r}, which is not a sampler; "
                f"the samplers are {', '.join(sorted(SAMPLER_NAMES))}.",
            )


def _sampler(default: Any, flags: str, validator: Validator, help: str) -> Any:
    """Make a field that a flag sets for all requests; see `trioserve.config.option`."""
    metadata = {"flags": flags, "help": help}
    return attrs.field(default=default, validator=validator, metadata=metadata)


@attrs.frozen(kw_only=True, slots=False)  # it is copied for each request, and that is faster so
class SamplingParams:
    """The choice of the next token. Names and defaults are those of llama-server.

    Raises:
        InvalidRequestError: a value is out of range; `param` names the field.
    """

    # fmt: off
    seed: int = _sampler(-1, "-s --seed", in_range(-1, 2**32 - 1),
        "seed of the random numbers; -1 = a new one for each request")
    temperature: float = _sampler(0.8, "--temp --temperature LLAMA_ARG_TEMPERATURE",
        in_range(-math.inf), "sampling temperature; 0 or less = always the most probable token")
    top_k: int = _sampler(40, "--top-k LLAMA_ARG_TOP_K", in_range(-1, INT32_MAX),
        "keep the K most probable tokens; 0 = off")
    top_p: float = _sampler(0.95, "--top-p LLAMA_ARG_TOP_P", in_range(0.0),
        "keep the smallest set of tokens whose probabilities add up to P; 1.0 = off")
    min_p: float = _sampler(0.05, "--min-p LLAMA_ARG_MIN_P", in_range(0.0),
        "drop tokens with less than this share of the best token's probability; 0.0 = off")
    top_n_sigma: float = _sampler(-1.0, "--top-nsigma --top-n-sigma", in_range(-math.inf),
        "keep tokens whose logits are within N standard deviations of the highest; -1.0 = off")
    xtc_probability: float = _sampler(0.0, "--xtc-probability", in_range(0.0),
        "XTC: chance of dropping top tokens; 0.0 = off")
    xtc_threshold: float = _sampler(0.1, "--xtc-threshold", in_range(0.0),
        "XTC: minimum probability of tokens that may be dropped; 1.0 = off")
    typical_p: float = _sampler(1.0, "--typical --typical-p", in_range(0.0),
        "locally typical sampling with this P; 1.0 = off")
    repeat_last_n: int = _sampler(64, "--repeat-last-n", in_range(-1, INT32_MAX),
        "number of last tokens that the penalties look at; 0 = off, -1 = the whole context")
    repeat_penalty: float = _sampler(1.0, "--repeat-penalty LLAMA_ARG_REPEAT_PENALTY",
        _above_zero, "penalty for repeating tokens; 1.0 = off")
    presence_penalty: float = _sampler(0.0, "--presence-penalty LLAMA_ARG_PRESENCE_PENALTY",
        in_range(-math.inf), "penalty for tokens that have occurred; 0.0 = off")
    frequency_penalty: float = _sampler(0.0, "--frequency-penalty LLAMA_ARG_FREQUENCY_PENALTY",
        in_range(-math.inf), "penalty for each time that a token has occurred; 0.0 = off")
    dry_multiplier: float = _sampler(0.0, "--dry-multiplier", in_range(0.0),
        "DRY: strength of the penalty; 0.0 = off")
    dry_base: float = _sampler(1.75, "--dry-base", in_range(0.0),
        "DRY: base of the penalty, which grows with the repetition")
    dry_allowed_length: int = _sampler(2, "--dry-allowed-length", in_range(-1, INT32_MAX),
        "DRY: longest repetition without a penalty")
    dry_penalty_last_n: int = _sampler(64, "--dry-penalty-last-n", in_range(-1, INT32_MAX),
        "DRY: number of last tokens to look at; 0 = off, -1 = the whole context")
    adaptive_target: float = _sampler(-1.0, "--adaptive-target", in_range(-1.0, 1.0),
        "adaptive sampling: probability to select tokens near; negative = off")
    adaptive_decay: float = _sampler(0.9, "--adaptive-decay", in_range(0.0, 0.99),
        "adaptive sampling: how slowly the target adapts, from 0.0 to 0.99")
    dynatemp_range: float = _sampler(0.0, "--dynatemp-range", in_range(0.0),
        "range of the dynamic temperature; 0.0 = off")
    dynatemp_exponent: float = _sampler(1.0, "--dynatemp-exp", in_range(0.0),
        "exponent of the dynamic temperature")
    mirostat: int = _sampler(0, "--mirostat", in_range(0, 2),
        "use Mirostat sampling; 0 = off, 1 = version 1, 2 = version 2")
    mirostat_tau: float = _sampler(5.0, "--mirostat-ent", in_range(0.0),
        "Mirostat: target entropy (tau)")
    mirostat_eta: float = _sampler(0.1, "--mirostat-lr", in_range(0.0),
        "Mirostat: learning rate (eta)")
    ignore_eos: bool = _sampler(False, "--ignore-eos | --no-ignore-eos", is_bool,
        "continue after an end-of-generation token")
    # fmt: on
    min_keep: int = attrs.field(default=0, validator=in_range(0, INT32_MAX))
    #: Tokens before the first one that may end the output; stop strings end it at any time.
    min_tokens: int = attrs.field(default=0, validator=in_range(0, INT32_MAX))
    dry_sequence_breakers: tuple[str, ...] = attrs.field(
        default=("\n", ":", '"', "*"), converter=to_tuple, validator=are_strings
    )
    samplers: tuple[str, ...] = attrs.field(
        default=DEFAULT_SAMPLERS, converter=to_tuple, validator=_known_samplers
    )
    #: Pairs of token id and what is added to its logit; ``-inf`` forbids the token.
    logit_bias: tuple[tuple[TokenId, float], ...] = attrs.field(
        default=(), converter=to_tuple, validator=_are_pairs("token id and bias")
    )

    @property
    def needs_vocab(self) -> bool:
        """True if only the vocabulary of the model shows that they can be used."""
        return bool(self.logit_bias or self.dry_multiplier or "infill" in self.samplers)


#: The largest scale of a LoRA adapter, either way. Useful ones are near 1.
MAX_SCALE = 1e6

#: Characters of a `cache_salt`.
MAX_SALT = 256
#: The most outputs of a prompt. Those without a slot wait.
MAX_OUTPUTS = 256

#: The kinds of the `source` of a `Grammar`.
GRAMMAR_KINDS = ("json_schema", "json_object", "gbnf", "lark", "regex", "structural", "tools")


def _known_kind(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value not in GRAMMAR_KINDS:
        raise _wrong(attribute, f"one of {', '.join(GRAMMAR_KINDS)}")


def _is_text(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, str):
        raise InvalidRequestError.at(instance.param, "must be a string.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError.at(
            instance.param, "has half of a surrogate pair, which is not Unicode."
        ) from None


def _are_triggers(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    groups = value if isinstance(value, tuple) else [None]
    if not all(
        isinstance(texts, tuple) and texts and all(isinstance(one, str) and one for one in texts)
        for texts in groups
    ):
        raise _wrong(attribute, "tuples of text")


@attrs.frozen(kw_only=True)
class Thinking:
    """Reasoning that an output may begin with: all that stands between two texts."""

    start: str
    end: str = attrs.field(validator=attrs.validators.min_len(1))
    #: The prompt ends with `start`, so that the output continues the reasoning.
    begun: bool = False


@attrs.frozen
class Grammar:
    """The form of an output: all of it, or what follows a certain place.

    Grammars are equal when they say the same, whichever field of a request they came from.

    Raises:
        InvalidRequestError: the kind is unknown, or the source is not Unicode text.
    """

    #: "json_schema": the source is a JSON Schema, as JSON. "json_object": any object, no source.
    #: "gbnf": a grammar in llama.cpp's notation. "lark": one in llguidance's. "regex": a regular
    #: expression, of the whole. "structural": structural tags, from `chat.grammar.structural`.
    #: "tools": calls of tools, as `trioserve.chat.grammar.schemas` describes them.
    kind: str = attrs.field(validator=_known_kind)
    source: str = attrs.field(default="", validator=_is_text)
    #: The field of the request that errors name.
    param: str = attrs.field(default="grammar", eq=False, kw_only=True)
    #: A lazy grammar waits for them: one text of each group, group after group. From there on the
    #: output must look as the grammar says. Names of control tokens count as text. A token that
    #: ends a trigger and continues in a way that the grammar does not allow is not chosen.
    triggers: tuple[tuple[str, ...], ...] = attrs.field(
        default=(), validator=_are_triggers, kw_only=True
    )
    #: The output may only end where the grammar says, so not before it begins. Without
    #: triggers it is so in any case.
    required: bool = attrs.field(default=False, kw_only=True)
    #: Reasoning that may come before all this, and is free.
    thinking: Thinking | None = attrs.field(default=None, kw_only=True)

    @property
    def lazy(self) -> bool:
        """True if something may come before what it describes."""
        return bool(self.triggers) or self.thinking is not None


def _is_grammar(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and not isinstance(value, Grammar):
        raise _wrong(attribute, "a Grammar")


@attrs.frozen(kw_only=True, slots=False)
class GenerationParams:
    """The continuation of a prompt: sampling, limits, and what to report.

    Raises:
        InvalidRequestError: a value is out of range; `param` names the field.
    """

    sampling: SamplingParams = attrs.field(factory=SamplingParams)
    max_tokens: int = attrs.field(default=-1, validator=in_range(-1, INT32_MAX))  # -1: no limit
    #: The most tokens of each draft; -1: as the server says, 0: no drafts.
    draft_max: int = attrs.field(default=-1, validator=in_range(-1, INT32_MAX))
    #: Strings that end the output and are not part of it.
    stop: tuple[str, ...] = attrs.field(default=(), converter=to_strings, validator=are_strings)
    #: Tokens at the beginning that a context shift keeps; -1: the prompt.
    n_keep: int = attrs.field(default=0, validator=in_range(-1, INT32_MAX))
    #: Tokens after these that it takes out; 0: half of them.
    n_discard: int = attrs.field(default=0, validator=in_range(0, INT32_MAX))
    #: A line after the first that begins with fewer blanks ends the output; 0: none does.
    n_indent: int = attrs.field(default=0, validator=in_range(0, INT32_MAX))
    #: May reuse what the KV cache holds of the prompt.
    cache_prompt: bool = attrs.field(default=True, validator=is_bool)
    #: Only texts with the same one share what the KV cache holds. It may be a secret.
    cache_salt: str = attrs.field(default="", validator=is_text(MAX_SALT), repr=False)
    id_slot: int = attrs.field(default=-1, validator=in_range(-1, INT32_MAX))  # -1: any slot
    #: Pairs of adapter id and scale; those that are not named have 0. Empty: as the server says.
    lora: tuple[tuple[int, float], ...] = attrs.field(
        default=(),
        converter=to_tuple,
        validator=_are_pairs("adapter id and scale", lowest_id=0, most=MAX_SCALE),
    )
    priority: int = attrs.field(default=0, validator=in_range(-100, 100))  # higher goes first
    n_probs: int = attrs.field(default=0, validator=in_range(0, INT32_MAX))  # per output token
    #: Candidates to report for each token of the prompt, with its probability; None: no report.
    prompt_logprobs: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(in_range(0, INT32_MAX))
    )
    post_sampling_probs: bool = attrs.field(default=False, validator=is_bool)
    t_max_predict_ms: float = attrs.field(default=0, validator=in_range(0.0))  # 0: no limit
    #: Send a `Progress` after each prefill chunk.
    return_progress: bool = attrs.field(default=False, validator=is_bool)
    #: Control tokens have no text; otherwise their names are in the output.
    skip_special_tokens: bool = attrs.field(default=True, validator=is_bool)
    #: Only tokens that it allows are chosen; where it allows the end, the output may end.
    grammar: Grammar | None = attrs.field(default=None, validator=_is_grammar)
