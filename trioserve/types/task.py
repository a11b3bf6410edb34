"""What a request asks of the engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import attrs

from trioserve.errors import InvalidRequestError
from trioserve.types.checks import (
    INT32_MAX,
    are_strings,
    in_range,
    is_bool,
    is_text,
    to_strings,
    to_tuple,
)
from trioserve.types.prompt import Prompt
from trioserve.types.sampling import SamplingParams, TokenId

#: LoRA adapters that are in use: pairs of id and scale, in the order of ids, no scale is 0.
Adapters = tuple[tuple[int, float], ...]


class CacheRoot(NamedTuple):
    """What two texts must have in common before one may start from what was computed for the other.

    Each such set has a tree of prefixes of its own, in the KV cache and in RAM.
    """

    adapters: Adapters = ()
    #: Whose text it is: a digest of an API key; empty: everybody's.
    owner: str = ""
    #: A digest of the request's `cache_salt`; empty: it had none.
    salt: str = ""


#: The largest scale of a LoRA adapter, either way. Useful ones are near 1.
MAX_SCALE = 1e6

#: Characters of a `cache_salt`.
MAX_SALT = 256

#: What the `source` of a `Grammar` may be.
GRAMMAR_KINDS = ("json_schema", "json_object", "gbnf", "regex", "tools")


def _are_scales(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    for pair in value if isinstance(value, tuple) else [None]:
        match pair:
            case (int(id_), float() | int() as scale) if id_ >= 0 and abs(scale) <= MAX_SCALE:
                continue
        raise InvalidRequestError(
            f"'{attribute.name}' must be a list of pairs of adapter id and scale.",
            param=attribute.name,
        )


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


def _are_triggers(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    groups = value if isinstance(value, tuple) else [None]
    if not all(
        isinstance(texts, tuple) and texts and all(isinstance(one, str) and one for one in texts)
        for texts in groups
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
    #: tools, as `trioserve.chat.grammar.lark` describes them.
    kind: str = attrs.field(validator=_known_kind)
    source: str = attrs.field(default="", validator=_is_text)
    #: The field of the request that errors name.
    param: str = attrs.field(default="grammar", eq=False, kw_only=True)
    #: What a lazy grammar waits for: one text of each group, group after group. From there on the
    #: output must look as the grammar says. Names of control tokens count as text. A token that
    #: ends a trigger and goes on in a way that the grammar does not allow is not chosen.
    triggers: tuple[tuple[str, ...], ...] = attrs.field(
        default=(), validator=_are_triggers, kw_only=True
    )
    #: Whether the output may only end where the grammar says, so not before it begins. Without
    #: triggers it is so in any case.
    required: bool = attrs.field(default=False, kw_only=True)
    #: Reasoning that may come before all this, and is free.
    thinking: Thinking | None = attrs.field(default=None, kw_only=True)

    @property
    def lazy(self) -> bool:
        """Whether something may come before what it describes."""
        return bool(self.triggers) or self.thinking is not None


def _is_grammar(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and not isinstance(value, Grammar):
        raise InvalidRequestError(f"'{attribute.name}' must be a Grammar.", param=attribute.name)


@attrs.frozen(kw_only=True)
class GenerationParams:
    """How a prompt is continued: sampling, limits, and what to report.

    Raises:
        InvalidRequestError: a value is out of range; `param` names the field.
    """

    sampling: SamplingParams = attrs.field(factory=SamplingParams)
    max_tokens: int = attrs.field(default=-1, validator=in_range(-1, INT32_MAX))  # -1: no limit
    #: The most tokens of each draft; -1: as the server says, 0: there are no drafts.
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
        default=(), converter=to_tuple, validator=_are_scales
    )
    priority: int = attrs.field(default=0, validator=in_range(-100, 100))  # higher goes first
    n_probs: int = attrs.field(default=0, validator=in_range(0, INT32_MAX))  # per output token
    post_sampling_probs: bool = attrs.field(default=False, validator=is_bool)
    t_max_predict_ms: float = attrs.field(default=0, validator=in_range(0.0))  # 0: no limit
    #: Send a `Progress` after each prefill chunk.
    return_progress: bool = attrs.field(default=False, validator=is_bool)
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
    """What one request asks of the engine: one prompt, continued."""

    id: int
    prompt: Prompt
    params: GenerationParams = attrs.field(factory=GenerationParams)
    #: Clients take turns in the queue. It may be an API key, so it is never shown.
    client: str = attrs.field(default="", repr=False)
    weight: float = 1.0  # turns of this client for one of the others
    #: What `Backend.compile` made of `params.grammar`.
    constraint: Constraint | None = attrs.field(default=None, eq=False, repr=False)
    #: The LoRA adapters to run with, and whose text it is. Tasks with other adapters are never in
    #: the same batch; those with another root share nothing.
    root: CacheRoot = attrs.field(default=CacheRoot())
    #: Control tokens whose names are a part of the text of the output.
    preserved_tokens: frozenset[TokenId] = attrs.field(default=frozenset(), repr=False)
    #: Whether the name of the token that ends the output is a part of its text, too.
    special: bool = False
    budget: ThinkingBudget | None = None

    @property
    def priority(self) -> int:
        """Higher ones go first."""
        return self.params.priority


def _to_prompts(texts: Iterable[Prompt | Iterable[TokenId]]) -> tuple[Prompt, ...]:
    return tuple(text if isinstance(text, Prompt) else Prompt(text) for text in texts)


@attrs.frozen
class EmbeddingTask:
    """What one request asks of an engine for embeddings: texts, each of which gets one.

    A text may have media in it. To make a task takes a while with many texts: it looks at every
    token.
    """

    id: int
    texts: tuple[Prompt, ...] = attrs.field(converter=_to_prompts)
    #: Clients take turns in the queue. It may be an API key, so it is never shown.
    client: str = attrs.field(default="", repr=False)
    weight: float = 1.0  # turns of this client for one of the others
    priority: int = attrs.field(default=0, validator=in_range(-100, 100))  # higher goes first
    #: The field of the request that errors name.
    param: str = "input"

    #: All texts, one after another.
    prompt: Prompt = attrs.field(init=False, repr=False)
    #: How many cells the shortest and the longest text take.
    min_length: int = attrs.field(init=False)
    max_length: int = attrs.field(init=False)

    @prompt.default
    def _join(self) -> Prompt:
        return Prompt.joined(self.texts)

    @min_length.default
    def _find_shortest(self) -> int:
        return min(map(len, self.texts), default=0)

    @max_length.default
    def _find_longest(self) -> int:
        return max(map(len, self.texts), default=0)
