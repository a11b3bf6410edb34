"""The messages that cross layers: what a request asks of the engine, and what comes back.

All are frozen: a message that left its maker never changes. Times are in seconds (floats from a
monotonic clock) unless a name ends in ``_ms``.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import attrs

from trioserve.errors import InvalidRequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from trioserve.errors import TrioServeError

#: A place in the vocabulary of the model.
TokenId = int

#: LoRA adapters that are in use: pairs of id and scale, in the order of ids, no scale is 0.
Adapters = tuple[tuple[int, float], ...]

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

_INT32_MAX = 2**31 - 1

#: The largest scale of a LoRA adapter, either way. Useful ones are near 1.
MAX_SCALE = 1e6


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _in_range(
    low: float, high: float = math.inf
) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Make an attrs validator: a finite number with ``low <= value <= high``."""

    def check(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        wants = int if attribute.type in (int, "int") else (int, float)
        if isinstance(value, bool) or not isinstance(value, wants):
            kind = "an integer" if wants is int else "a number"
            raise InvalidRequestError(f"'{attribute.name}' must be {kind}.", param=attribute.name)
        if not _is_finite(value) or not low <= value <= high:
            bounds = f"at least {low}" if high == math.inf else f"between {low} and {high}"
            raise InvalidRequestError(f"'{attribute.name}' must be {bounds}.", param=attribute.name)

    check.bounds = (low, high)  # type: ignore[attr-defined]
    return check


def _is_bool(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidRequestError(
            f"'{attribute.name}' must be true or false.", param=attribute.name
        )


def _are_scales(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    for pair in value if isinstance(value, tuple) else [None]:
        match pair:
            case (int(id_), float() | int() as scale) if id_ >= 0 and abs(scale) <= MAX_SCALE:
                continue
        raise InvalidRequestError(
            f"'{attribute.name}' must be a list of pairs of adapter id and scale.",
            param=attribute.name,
        )


def _are_strings(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
        raise InvalidRequestError(
            f"'{attribute.name}' must be a list of strings.", param=attribute.name
        )


def _to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _to_strings(value: Any) -> Any:
    return (value,) if isinstance(value, str) else _to_tuple(value)


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
    _are_strings(_instance, attribute, value)
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

    seed: int = attrs.field(default=-1, validator=_in_range(-1, 2**32 - 1))  # -1: random
    temperature: float = attrs.field(default=0.8, validator=_in_range(-math.inf))  # <= 0: greedy
    dynatemp_range: float = attrs.field(default=0.0, validator=_in_range(0.0))
    dynatemp_exponent: float = attrs.field(default=1.0, validator=_in_range(0.0))
    top_k: int = attrs.field(default=40, validator=_in_range(-1, _INT32_MAX))  # <= 0: off
    top_p: float = attrs.field(default=0.95, validator=_in_range(0.0))
    min_p: float = attrs.field(default=0.05, validator=_in_range(0.0))
    typical_p: float = attrs.field(default=1.0, validator=_in_range(0.0))
    top_n_sigma: float = attrs.field(default=-1.0, validator=_in_range(-math.inf))
    xtc_probability: float = attrs.field(default=0.0, validator=_in_range(0.0))
    xtc_threshold: float = attrs.field(default=0.1, validator=_in_range(0.0))
    min_keep: int = attrs.field(default=0, validator=_in_range(0, _INT32_MAX))
    repeat_last_n: int = attrs.field(default=64, validator=_in_range(-1, _INT32_MAX))
    repeat_penalty: float = attrs.field(default=1.0, validator=_in_range(0.0))
    presence_penalty: float = attrs.field(default=0.0, validator=_in_range(-math.inf))
    frequency_penalty: float = attrs.field(default=0.0, validator=_in_range(-math.inf))
    dry_multiplier: float = attrs.field(default=0.0, validator=_in_range(0.0))
    dry_base: float = attrs.field(default=1.75, validator=_in_range(0.0))
    dry_allowed_length: int = attrs.field(default=2, validator=_in_range(-1, _INT32_MAX))
    dry_penalty_last_n: int = attrs.field(default=64, validator=_in_range(-1, _INT32_MAX))
    dry_sequence_breakers: tuple[str, ...] = attrs.field(
        default=("\n", ":", '"', "*"), converter=_to_tuple, validator=_are_strings
    )
    mirostat: int = attrs.field(default=0, validator=_in_range(0, 2))
    mirostat_tau: float = attrs.field(default=5.0, validator=_in_range(0.0))
    mirostat_eta: float = attrs.field(default=0.1, validator=_in_range(0.0))
    adaptive_target: float = attrs.field(default=-1.0, validator=_in_range(-1.0, 1.0))
    adaptive_decay: float = attrs.field(default=0.9, validator=_in_range(0.0, 0.99))
    samplers: tuple[str, ...] = attrs.field(
        default=DEFAULT_SAMPLERS, converter=_to_tuple, validator=_known_samplers
    )
    ignore_eos: bool = attrs.field(default=False, validator=_is_bool)
    #: Pairs of token id and what is added to its logit; ``-inf`` forbids the token.
    logit_bias: tuple[tuple[TokenId, float], ...] = attrs.field(
        default=(), converter=_to_tuple, validator=_are_biases
    )


#: What the `source` of a `Grammar` may be.
GRAMMAR_KINDS = ("json_schema", "json_object", "gbnf", "regex", "tools")


def _known_kind(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value not in GRAMMAR_KINDS:
        raise InvalidRequestError(
            f"'{attribute.name}' must be one of {', '.join(GRAMMAR_KINDS)}.", param=attribute.name
        )


def _is_text(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, str):
        raise InvalidRequestError(f"'{instance.param}' must be a string.", param=instance.param)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(
            f"'{instance.param}' has half of a surrogate pair, which is not Unicode.",
            param=instance.param,
        ) from None


def _are_stages(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    stages = value if isinstance(value, tuple) else [None]
    if not all(
        isinstance(texts, tuple) and texts and all(isinstance(one, str) and one for one in texts)
        for texts in stages
    ):
        raise InvalidRequestError(
            f"'{attribute.name}' must be tuples of text.", param=attribute.name
        )


@attrs.frozen(kw_only=True)
class Thinking:
    """Reasoning that an output may begin with: all that stands between two texts."""

    start: str
    end: str = attrs.field(validator=attrs.validators.min_len(1))
    #: The prompt ends with `start`, so that the output goes on with reasoning.
    begun: bool = False


@attrs.frozen
class Grammar:
    """What an output must look like: all of it, or what follows a certain place.

    Grammars are equal when they say the same, whichever field of a request they came from.

    Raises:
        InvalidRequestError: the kind is unknown, or the source is not Unicode text.
    """

    #: "json_schema": the source is a JSON Schema, as JSON. "json_object": any object, no source.
    #: "gbnf": a grammar in llama.cpp's notation. "regex": a regular expression. "tools": calls of
    #: tools, as `trioserve.chat.lark` describes them.
    kind: str = attrs.field(validator=_known_kind)
    source: str = attrs.field(default="", validator=_is_text)
    #: The field of the request that errors name.
    param: str = attrs.field(default="grammar", eq=False, kw_only=True)
    #: Stages: each waits until one of its texts has come since the one before it. What follows
    #: the last one must look as the grammar says; names of control tokens count as text. A token
    #: that goes beyond the text, in a way the grammar does not allow, is not chosen.
    after: tuple[tuple[str, ...], ...] = attrs.field(
        default=(), validator=_are_stages, kw_only=True
    )
    #: Whether the output may only end where the grammar says, so not before it begins. Without
    #: stages it is so in any case.
    required: bool = attrs.field(default=False, kw_only=True)
    #: Reasoning that may come before all this, and is free.
    thinking: Thinking | None = attrs.field(default=None, kw_only=True)

    @property
    def begins_late(self) -> bool:
        """Whether something may come before what it says."""
        return bool(self.after) or self.thinking is not None


def _is_grammar(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and not isinstance(value, Grammar):
        raise InvalidRequestError(f"'{attribute.name}' must be a Grammar.", param=attribute.name)


@attrs.frozen(kw_only=True)
class Options:
    """How a prompt is continued: sampling, limits, and what to report.

    Raises:
        InvalidRequestError: a value is out of range; `param` names the field.
    """

    sampling: SamplingParams = attrs.field(factory=SamplingParams)
    max_tokens: int = attrs.field(default=-1, validator=_in_range(-1, _INT32_MAX))  # -1: no limit
    #: Strings that end the output and are not part of it.
    stop: tuple[str, ...] = attrs.field(default=(), converter=_to_strings, validator=_are_strings)
    #: Tokens at the beginning that a context shift keeps; -1: the prompt.
    n_keep: int = attrs.field(default=0, validator=_in_range(-1, _INT32_MAX))
    #: Tokens after these that it takes out; 0: half of them.
    n_discard: int = attrs.field(default=0, validator=_in_range(0, _INT32_MAX))
    #: A line after the first that begins with fewer blanks ends the output; 0: none does.
    n_indent: int = attrs.field(default=0, validator=_in_range(0, _INT32_MAX))
    #: May reuse what the KV cache holds of the prompt.
    cache_prompt: bool = attrs.field(default=True, validator=_is_bool)
    id_slot: int = attrs.field(default=-1, validator=_in_range(-1, _INT32_MAX))  # -1: any slot
    #: Pairs of adapter id and scale; those that are not named have 0. Empty: as the server says.
    lora: tuple[tuple[int, float], ...] = attrs.field(
        default=(), converter=_to_tuple, validator=_are_scales
    )
    priority: int = attrs.field(default=0, validator=_in_range(-100, 100))  # higher goes first
    n_probs: int = attrs.field(default=0, validator=_in_range(0, _INT32_MAX))  # per output token
    post_sampling_probs: bool = attrs.field(default=False, validator=_is_bool)
    t_max_predict_ms: float = attrs.field(default=0, validator=_in_range(0.0))  # 0: no limit
    #: Send a `Progress` after each prefill chunk.
    return_progress: bool = attrs.field(default=False, validator=_is_bool)
    #: Only tokens that it allows are chosen; where it allows the end, the output may end.
    grammar: Grammar | None = attrs.field(default=None, validator=_is_grammar)


class Constraint:
    """A grammar that a backend has compiled, for the samplers of the same backend.

    Frozen: any number of tasks may use it, also at the same time.
    """

    __slots__ = ("__weakref__", "grammar")

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar


@attrs.frozen(kw_only=True)
class ThinkingBudget:
    """When reasoning ends that the model does not end itself."""

    thinking: Thinking
    n_tokens: int = -1  # of reasoning; -1: no limit, but `Engine.end_thinking` ends it
    #: What is written then, as if the model had: some last words, and `Thinking.end`.
    closing: tuple[TokenId, ...]


@attrs.frozen
class Task:
    """What one request asks of the engine: one prompt, continued.

    The maker has checked that the prompt is not empty and that its ids are in the vocabulary.
    """

    id: int
    prompt: tuple[TokenId, ...]
    options: Options = attrs.field(factory=Options)
    #: Clients take turns in the queue. It may be an API key, so it is never shown.
    client: str = attrs.field(default="", repr=False)
    weight: float = 1.0  # turns of this client for one of the others
    #: What `Backend.compile` made of `options.grammar`.
    constraint: Constraint | None = attrs.field(default=None, eq=False, repr=False)
    #: The LoRA adapters to run with. Tasks with others are never in the same batch.
    adapters: Adapters = ()
    #: Control tokens whose names are a part of the text of the output.
    visible: frozenset[TokenId] = attrs.field(default=frozenset(), repr=False)
    budget: ThinkingBudget | None = None

    @property
    def priority(self) -> int:
        """Higher ones go first."""
        return self.options.priority


@attrs.frozen
class EmbeddingTask:
    """What one request asks of an engine for embeddings: texts, each of which gets a vector."""

    id: int
    texts: tuple[tuple[TokenId, ...], ...]
    #: Clients take turns in the queue. It may be an API key, so it is never shown.
    client: str = attrs.field(default="", repr=False)
    weight: float = 1.0  # turns of this client for one of the others
    priority: int = attrs.field(default=0, validator=_in_range(-100, 100))  # higher goes first
    #: The field of the request that errors name.
    param: str = "input"

    @cached_property
    def prompt(self) -> tuple[TokenId, ...]:
        """The tokens of all texts, one after another."""
        return tuple(itertools.chain.from_iterable(self.texts))

    @cached_property
    def lengths(self) -> tuple[int, int]:
        """How many tokens the shortest and the longest text have."""
        return min(map(len, self.texts), default=0), max(map(len, self.texts), default=0)

    @cached_property
    def tokens(self) -> tuple[TokenId, TokenId]:
        """The lowest and the highest token."""
        return min(self.prompt, default=0), max(self.prompt, default=0)

    def look(self) -> None:
        """Find all of these out, which takes a while with many texts, so that they are known."""
        self.prompt, self.lengths, self.tokens  # noqa: B018


class FinishReason(enum.Enum):
    """Why the output ended. The values are llama-server's ``stop_type``."""

    NONE = "none"  # there is no output: the task made vectors
    EOS = "eos"
    WORD = "word"
    LIMIT = "limit"


class CancelReason(enum.Enum):
    """Why a task was cancelled, for logs and metrics."""

    DISCONNECT = "disconnect"  # the client went away
    CALLER = "caller"  # a cancel scope around the call
    DEADLINE = "deadline"  # the request's own deadline
    STALLED = "stalled_reader"  # nobody reads what is generated
    SHUTDOWN = "shutdown"  # the server's drain ran out of time


@attrs.frozen
class TokenProb:
    """A candidate for one place in the output, and its probability.

    `logprob` is the natural logarithm, ``-inf`` for a probability of 0.
    """

    id: TokenId
    piece: bytes
    logprob: float


@attrs.frozen
class TokenProbs:
    """The token that was chosen for one place, and the candidates, most probable first."""

    chosen: TokenProb
    top: tuple[TokenProb, ...]


@attrs.frozen(kw_only=True)
class Timings:
    """How long the parts of a task took.

    `prompt_ms` runs from admission to the first output token, `predicted_ms` from there to the
    last, `queue_ms` from submission to admission. `prompt_n` counts the tokens that were
    prefilled, `cache_n` those that were found in the KV cache.
    """

    queue_ms: float = 0.0
    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0


@attrs.frozen
class Admitted:
    """The task has a slot. Sent once; a task that is preempted stays admitted."""

    task_id: int
    queue_ms: float


@attrs.frozen
class Progress:
    """How much of the prompt is in the KV cache. Sent when `Task.return_progress` is set."""

    task_id: int
    total: int
    cached: int
    processed: int  # the cached ones included
    time_ms: float


@attrs.frozen
class Chunk:
    """Newly generated output.

    `text` is always whole characters; it may be empty while a character, or what may become a
    stop string, is held back. `tokens` are those generated since the last chunk.
    """

    task_id: int
    text: str
    tokens: tuple[TokenId, ...]
    probs: tuple[TokenProbs, ...] = ()


@attrs.frozen(kw_only=True)
class Finished:
    """The last event of a task that went well."""

    task_id: int
    reason: FinishReason
    stopping_word: str = ""
    timings: Timings
    truncated: bool = False
    slot_id: int = -1


@attrs.frozen(kw_only=True, eq=False)
class Embedded(Finished):
    """The last event of an `EmbeddingTask` that went well."""

    reason: FinishReason = FinishReason.NONE
    #: A matrix for each text: one row, or with pooling "none" a row for each of its tokens.
    vectors: tuple[NDArray[np.float32], ...] = ()


@attrs.frozen
class Failed:
    """The last event of a task that went wrong."""

    task_id: int
    error: TrioServeError


#: What a request sees of its task.
Event = Progress | Chunk | Finished | Failed
#: What the engine says of a task.
EngineEvent = Admitted | Event


@attrs.frozen(kw_only=True)
class FimTokens:
    """The tokens of a vocabulary that mark the parts of a text with a gap; -1: there is none."""

    prefix: TokenId = -1
    suffix: TokenId = -1
    middle: TokenId = -1
    repository: TokenId = -1
    file: TokenId = -1  # before each file of a repository


@attrs.frozen(kw_only=True)
class ModelInfo:
    """What is known of the loaded model."""

    name: str  # the alias that clients use
    path: str
    description: str  # such as "llama 3M Q8_0"
    ftype: str
    n_params: int
    size: int  # bytes of all tensors
    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_layer: int
    vocab_type: int  # llama.cpp's enum llama_vocab_type
    chat_template: str | None
    bos_token: str
    eos_token: str
    add_bos: bool
    modified: int  # seconds since the epoch
    metadata: dict[str, str] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class AdapterInfo:
    """A LoRA adapter that was loaded with the model. Its id is its place among them."""

    path: str
    scale: float = 1.0  # as the configuration has it
    task_name: str = ""  # of its metadata
    prompt_prefix: str = ""


@attrs.frozen(kw_only=True)
class SlotState:
    """What a slot has computed: tokens, and the state of a KV sequence that holds them."""

    tokens: tuple[TokenId, ...]
    adapters: Adapters = ()
    state: bytes = attrs.field(repr=False)


@attrs.frozen(kw_only=True)
class SlotStatus:
    """A look at one slot, taken between two ticks."""

    id: int
    state: str  # "idle", "prefill" or "decode"
    n_ctx: int
    task_id: int | None
    n_prompt: int
    n_past: int  # tokens in the KV sequence
    n_cached: int
    n_decoded: int
    paused: bool
    has_new_line: bool = False  # in the output so far
    task: Task | None = None  # of an idle slot: the last one


@attrs.frozen(kw_only=True)
class WaitingStatus:
    """A look at one task in the queue, taken between two ticks."""

    task_id: int
    position: int  # 1 is the next one
    n_prompt: int
    priority: int
    waited_s: float
    #: How long it goes on waiting, by the pace of late; none while no pace is known.
    wait_s: float | None = None


@attrs.frozen(kw_only=True)
class EngineCounters:
    """What an engine has done since its start. Times are in seconds."""

    ticks: int = 0
    tick_s: float = 0.0
    decodes: int = 0  # batches that were computed
    busy_slots: int = 0  # slots in them, added up
    prompt_tokens: int = 0  # prefilled
    prompt_s: float = 0.0  # in ticks that prefilled
    prompt_queries: int = 0  # tokens of prompts that were admitted
    cached_tokens: int = 0  # of these, found in the KV cache or in RAM
    predicted_tokens: int = 0
    n_tokens_max: int = 0  # the longest sequence so far
    n_cells: int = 0  # of the KV cache
    n_cells_used: int = 0  # now


@attrs.frozen(kw_only=True)
class EngineStatus:
    """A look at the engine, taken between two ticks."""

    slots: tuple[SlotStatus, ...]
    waiting: tuple[WaitingStatus, ...]  # the tasks in the queue, next one first
    counters: EngineCounters = attrs.field(factory=EngineCounters)
