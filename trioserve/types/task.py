"""The tasks of an engine: a prompt to continue, or texts to make embeddings of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from typing import Any, NamedTuple, Self

import attrs

from trioserve.errors import InvalidRequestError
from trioserve.types.media import CellKey, MediaChunk
from trioserve.types.params import GenerationParams, Grammar, Thinking, TokenId, in_range


def shared_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Count the leading items that two sequences of one type have in common."""
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    low, high = 0, limit - 1  # comparing slices is quick: halve until the difference is found
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _to_tuple(tokens: Iterable[TokenId]) -> tuple[TokenId, ...]:
    return tuple(tokens)


def _to_chunks(media: Iterable[tuple[int, MediaChunk]]) -> tuple[tuple[int, MediaChunk], ...]:
    return tuple(media)


def _keys(prompt: Prompt) -> tuple[CellKey, ...]:
    keys: list[CellKey] = []
    n_tokens = 0
    for n_before, chunk in prompt.media:
        keys += prompt.tokens[n_tokens:n_before]
        keys += chunk.keys
        n_tokens = n_before
    return (*keys, *prompt.tokens[n_tokens:]) if keys else prompt.tokens


def _spans(prompt: Prompt) -> tuple[tuple[int, MediaChunk], ...]:
    spans, n_media = [], 0
    for n_before, chunk in prompt.media:
        spans.append((n_before + n_media, chunk))
        n_media += chunk.n_cells
    return tuple(spans)


def _lowest(prompt: Prompt) -> TokenId:
    return min(prompt.tokens, default=0)


def _highest(prompt: Prompt) -> TokenId:
    return max(prompt.tokens, default=0)


@attrs.frozen
class Prompt:
    """The text that a task continues: tokens, and chunks of media between them.

    Its length is the number of cells that it takes in the KV cache. A chunk takes many cells and,
    with M-RoPE, fewer positions; so a length in cells is not a position.
    """

    #: Its text.
    tokens: tuple[TokenId, ...] = attrs.field(converter=_to_tuple)
    #: Its chunks in their order, each with the number of tokens before it.
    media: tuple[tuple[int, MediaChunk], ...] = attrs.field(
        default=(), converter=_to_chunks, eq=False, repr=False, kw_only=True
    )
    #: Lengths in cells at which a later prompt is likely to diverge from this one. Where memory
    #: cannot be cut, the state is kept there.
    divergence_points: tuple[int, ...] = attrs.field(
        default=(), converter=_to_tuple, eq=False, repr=False, kw_only=True
    )
    #: Its chunks, each with the number of cells before it.
    spans: tuple[tuple[int, MediaChunk], ...] = attrs.field(
        init=False, repr=False, eq=False, default=attrs.Factory(_spans, True)
    )
    #: The keys that cells are compared by. Equal prompts have equal keys, and no others do.
    keys: Sequence[CellKey] = attrs.field(
        init=False, repr=False, default=attrs.Factory(_keys, True)
    )
    #: The range of the token ids, found once: a prompt may have a hundred thousand of them.
    lowest: TokenId = attrs.field(init=False, repr=False, default=attrs.Factory(_lowest, True))
    highest: TokenId = attrs.field(init=False, repr=False, default=attrs.Factory(_highest, True))

    @classmethod
    def joined(cls, prompts: Iterable[Prompt]) -> Self:
        """Put prompts one after another."""
        tokens: list[TokenId] = []
        media: list[tuple[int, MediaChunk]] = []
        for prompt in prompts:
            media += ((len(tokens) + n_before, chunk) for n_before, chunk in prompt.media)
            tokens += prompt.tokens
        return cls(tokens, media=media)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def n_positions(self) -> int:
        """The number of positions of a sequence that it takes."""
        return len(self.tokens) + sum(chunk.n_positions for _, chunk in self.media)

    def span_from(self, cell: int) -> tuple[int, MediaChunk] | None:
        """Find the first of the `spans` that does not end before a cell."""
        for start, chunk in self.spans:
            if start + chunk.n_cells > cell:
                return start, chunk
        return None

    def part_from(self, cell: int) -> tuple[int, MediaChunk | None]:
        """Find where the tokens that begin at a cell end, or the chunk that it is in; and which."""
        span = self.span_from(cell)
        if span is None:
            return len(self), None
        start, chunk = span
        return (start, None) if start > cell else (start + chunk.n_cells, chunk)

    def position(self, cell: int) -> int:
        """The position of a cell that is a token, or the first of a chunk."""
        ended = (chunk for start, chunk in self.spans if start + chunk.n_cells <= cell)
        return cell - sum(chunk.n_cells - chunk.n_positions for chunk in ended)

    def check(self, n_vocab: int, param: str) -> None:
        """Refuse tokens that a vocabulary of `n_vocab` does not have.

        Raises:
            InvalidRequestError: there is one; the error names `param`.
        """
        if self.lowest < 0 or self.highest >= n_vocab:
            token = self.lowest if self.lowest < 0 else self.highest
            raise InvalidRequestError.at(
                param, f"has an unknown token, {token}: token ids run from 0 to {n_vocab - 1}."
            )


#: LoRA adapters that are in use: pairs of id and scale, in the order of ids, no scale is 0.
Adapters = tuple[tuple[int, float], ...]


class CacheRoot(NamedTuple):
    """The attributes that two texts must share to share computed state.

    Each root has its tree of prefixes, in the KV cache and in RAM.
    """

    adapters: Adapters = ()
    #: The owner of the text: a digest of an API key; empty: any client may share it.
    owner: str = ""
    #: A digest of the request's `cache_salt`; empty: it had none.
    salt: str = ""


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
    #: The end that is written then, as if by the model: some last words, and `Thinking.end`.
    closing: tuple[TokenId, ...]


@attrs.frozen
class Aside:
    """Parts of an output that are no part of its answer, so that stop strings in them do not count.

    Such a part begins with `start`, and blanks before it in the output belong to it. It ends with
    one text of each of `ends`, in this order.
    """

    start: str
    ends: tuple[tuple[str, ...], ...]
    #: The beginning of one that the prompt has, after `start`; None: it has not.
    begun: str | None = None


@attrs.frozen
class Task:
    """The task of one request: one prompt, continued."""

    id: int
    prompt: Prompt
    params: GenerationParams = attrs.field(factory=GenerationParams)
    #: Clients take turns in the queue. It may be an API key, so it is never shown.
    client: str = attrs.field(default="", repr=False)
    weight: float = 1.0  # turns of this client for one of the others
    #: Compiled from `params.grammar` by `Backend.compile`.
    constraint: Constraint | None = attrs.field(default=None, eq=False, repr=False)
    #: The LoRA adapters to run with, and whose text it is. Tasks with other adapters are never in
    #: the same batch; those with another root share nothing.
    root: CacheRoot = attrs.field(default=CacheRoot())
    #: Control tokens whose names are a part of the text of the output.
    preserved_tokens: frozenset[TokenId] = attrs.field(default=frozenset(), repr=False)
    #: The name of the token that ends the output is a part of its text, too.
    special: bool = False
    budget: ThinkingBudget | None = None
    #: Texts that end the output as a token that ends it does.
    turn_ends: tuple[str, ...] = ()
    #: The parts in which stop strings do not count; None: they count everywhere.
    aside: Aside | None = None

    @property
    def priority(self) -> int:
        return self.params.priority


def _to_prompts(texts: Iterable[Prompt | Iterable[TokenId]]) -> tuple[Prompt, ...]:
    return tuple(text if isinstance(text, Prompt) else Prompt(text) for text in texts)


@attrs.frozen
class EmbeddingTask:
    """The task of a request for embeddings: one for each text.

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

    @prompt.default
    def _join(self) -> Prompt:
        return Prompt.joined(self.texts)


def place_of(index: int, texts: Sized, param: str) -> str:
    """Say where one of the texts of a request stands, for errors: such as ``input[3]``."""
    return f"{param}[{index}]" if len(texts) > 1 else param
