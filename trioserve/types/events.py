"""The answers of an engine: the events of a task, and looks at slots, queue and counters."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, overload

import attrs

from trioserve.types.media import CellKey
from trioserve.types.params import GenerationParams, TokenId
from trioserve.types.speech import Sound
from trioserve.types.task import Adapters, CacheRoot

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from trioserve.errors import TrioServeError


class FinishReason(enum.Enum):
    """Why the output ended. The values are llama-server's ``stop_type``."""

    NONE = "none"  # there is no output: the task made embeddings
    EOS = "eos"
    WORD = "word"
    LIMIT = "limit"


class CancelReason(enum.Enum):
    """Why a task was cancelled, for logs and metrics."""

    DISCONNECT = "disconnect"  # the client went away
    CALLER = "caller"  # a cancel scope around the call
    DEADLINE = "deadline"  # the request's own deadline
    STALLED = "stalled_reader"  # the client does not read what is generated
    SHUTDOWN = "shutdown"  # the server's drain ran out of time


@attrs.frozen
class TokenProb:
    """A candidate for one place in the output, and its probability.

    `logprob` is the natural logarithm, ``-inf`` for a probability of 0.
    """

    id: TokenId
    piece: bytes
    logprob: float


class Candidates(Sequence[TokenProb]):
    """Candidates for one place in the output, most probable first.

    They are numbers in arrays until one is looked at: a thousand for each token are too many
    objects.

    Args:
        ids: of the tokens.
        logprobs: of each.
        piece_of: returns the bytes of a token.
    """

    __slots__ = ("_ids", "_logprobs", "_piece_of")

    def __init__(
        self,
        ids: Iterable[TokenId],
        logprobs: Iterable[float],
        piece_of: Callable[[TokenId], bytes],
    ) -> None:
        self._ids = array("i", ids)
        self._logprobs = array("d", logprobs)
        self._piece_of = piece_of

    @classmethod
    def of(cls, *candidates: TokenProb) -> Self:
        """Make candidates from tokens with their probabilities."""
        pieces = {each.id: each.piece for each in candidates}
        ids = [each.id for each in candidates]
        return cls(ids, [each.logprob for each in candidates], pieces.__getitem__)

    def named(self, piece_of: Callable[[TokenId], bytes]) -> Candidates:
        """Get the same candidates with the pieces of another function."""
        return Candidates(self._ids, self._logprobs, piece_of)

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> TokenProb: ...

    @overload
    def __getitem__(self, index: slice) -> Candidates: ...

    def __getitem__(self, index: int | slice) -> TokenProb | Candidates:
        if isinstance(index, slice):
            return Candidates(self._ids[index], self._logprobs[index], self._piece_of)
        id_ = self._ids[index]
        return TokenProb(id_, self._piece_of(id_), self._logprobs[index])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Candidates({list(self)})"


@attrs.frozen
class TokenProbs:
    """The token that was chosen for one place, and the candidates, most probable first."""

    chosen: TokenProb
    top: Candidates
    #: The number of tokens that are as probable as it or more; 0: not counted.
    rank: int = 0


class PromptScores(Sequence[TokenProbs]):
    """The probabilities of each token of a prompt after those before it.

    The first token has no score, so item 0 is of the second one. An engine adds to it until the
    prompt is computed.

    Args:
        n_top: candidates for each token.
        piece_of: returns the bytes of a token.
    """

    __slots__ = ("_ids", "_logprobs", "_ranks", "_top_ids", "_top_logprobs", "n_top", "piece_of")

    def __init__(self, n_top: int, piece_of: Callable[[TokenId], bytes]) -> None:
        self.n_top = n_top
        self.piece_of = piece_of
        self._ids, self._ranks, self._top_ids = array("i"), array("i"), array("i")
        self._logprobs, self._top_logprobs = array("d"), array("d")

    def add(
        self,
        token: TokenId,
        logprob: float,
        rank: int,
        top: Iterable[tuple[TokenId, float]],
    ) -> None:
        """Add the next token of the prompt, with `n_top` candidates for its place."""
        self._ids.append(token)
        self._logprobs.append(logprob)
        self._ranks.append(rank)
        for id_, its_logprob in top:
            self._top_ids.append(id_)
            self._top_logprobs.append(its_logprob)

    @property
    def columns(self) -> tuple[bytes, ...]:
        """The numbers of all scores as bytes; see `of`."""
        columns = (self._ids, self._ranks, self._top_ids, self._logprobs, self._top_logprobs)
        return tuple(each.tobytes() for each in columns)

    @property
    def pieces(self) -> dict[TokenId, bytes]:
        """The bytes of all of their tokens."""
        return {id_: self.piece_of(id_) for id_ in {*self._ids, *self._top_ids}}

    @classmethod
    def of(
        cls, n_top: int, columns: Sequence[bytes], pieces: Mapping[TokenId, bytes]
    ) -> PromptScores:
        """Make scores of `columns` and `pieces`. Raises ValueError for others."""
        made = cls(n_top, lambda id_: pieces.get(id_, b""))
        arrays: tuple[array[Any], ...] = (
            made._ids,
            made._ranks,
            made._top_ids,
            made._logprobs,
            made._top_logprobs,
        )
        for each, data in zip(arrays, columns, strict=True):
            each.frombytes(data)
        if not (len(made._ids) == len(made._ranks) == len(made._logprobs)) or not (
            len(made._top_ids) == len(made._top_logprobs) == n_top * len(made._ids)
        ):
            raise ValueError("the scores of a prompt have several lengths")
        return made

    def head(self, n: int) -> PromptScores:
        """Copy the first `n` scores."""
        copied = PromptScores(self.n_top, self.piece_of)
        copied._ids, copied._ranks = self._ids[:n], self._ranks[:n]
        copied._logprobs = self._logprobs[:n]
        copied._top_ids = self._top_ids[: n * self.n_top]
        copied._top_logprobs = self._top_logprobs[: n * self.n_top]
        return copied

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> TokenProbs: ...

    @overload
    def __getitem__(self, index: slice) -> list[TokenProbs]: ...

    def __getitem__(self, index: int | slice) -> TokenProbs | list[TokenProbs]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        id_ = self._ids[index]
        start = index % len(self) * self.n_top
        places = slice(start, start + self.n_top)
        return TokenProbs(
            TokenProb(id_, self.piece_of(id_), self._logprobs[index]),
            Candidates(self._top_ids[places], self._top_logprobs[places], self.piece_of),
            self._ranks[index],
        )


@attrs.frozen(kw_only=True)
class Timings:
    """The durations of the parts of a task.

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
    #: Tokens of drafts that were decoded, and how many of them the sampler accepted.
    draft_n: int = 0
    draft_n_accepted: int = 0

    def plus(self, other: Timings) -> Timings:
        """The sums of these and those of another task."""
        names = attrs.fields_dict(Timings)
        return Timings(**{name: getattr(self, name) + getattr(other, name) for name in names})


@attrs.frozen
class Admitted:
    """The task has a slot. `queue_ms` is how long it waited for its first one."""

    task_id: int
    queue_ms: float


@attrs.frozen
class Preempted:
    """The task has lost its slot, and is in the queue again."""

    task_id: int


@attrs.frozen
class Progress:
    """The part of the prompt that is in the KV cache. Sent when `return_progress` is set: as the
    prompt begins, after each batch of it, and at its end.
    """

    task_id: int
    total: int
    cached: int
    processed: int  # the cached ones included
    time_ms: float


@attrs.frozen
class Chunk:
    """New output of a request.

    `text` is always whole characters; it may be empty while a character, or what may become a
    stop string, is held back. `tokens` are those generated since the last chunk. `pace` is
    the seconds until the reader should get the next one, which hides how long steps are; 0: none.
    `drafts` are `Timings.draft_n` and `draft_n_accepted` so far; zeros say that nothing is new.
    `scores` come with the first chunk, if `prompt_logprobs` asks for them.
    """

    task_id: int
    text: str
    tokens: tuple[TokenId, ...]
    probs: tuple[TokenProbs, ...] = ()
    pace: float = 0.0
    drafts: tuple[int, int] = (0, 0)
    scores: PromptScores | None = None


@attrs.frozen
class Chunks:
    """A `Chunk` of one token for each of many tasks, in columns, which are quicker to make."""

    task_ids: Sequence[int]
    texts: Sequence[str]
    tokens: Sequence[TokenId]
    pace: float = 0.0

    def __iter__(self) -> Iterator[Chunk]:
        for task_id, text, token in zip(self.task_ids, self.texts, self.tokens, strict=True):
            yield Chunk(task_id, text, (token,), pace=self.pace)

    def without(self, task_id: int) -> Chunks:
        """Return those of other tasks."""
        kept = [i for i, its_id in enumerate(self.task_ids) if its_id != task_id]
        return Chunks(
            [self.task_ids[i] for i in kept],
            [self.texts[i] for i in kept],
            [self.tokens[i] for i in kept],
            self.pace,
        )


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
    embeddings: tuple[NDArray[np.float32], ...] = ()


@attrs.frozen(kw_only=True)
class Spoken(Finished):
    """The last event of a `SpeechTask` that went well.

    The reason is `FinishReason.EOS`, or `FinishReason.LIMIT` if a text was not said to its end.
    `timings` count frames as output, and rows before them as the prompt. `Timings.prompt_ms` ends
    with the first frame.
    """

    @property
    def n_frames(self) -> int:
        return self.timings.predicted_n

    @property
    def n_prompt(self) -> int:
        return self.timings.prompt_n


@attrs.frozen
class Failed:
    """The last event of a task that went wrong."""

    task_id: int
    error: TrioServeError


@attrs.frozen
class Returned:
    """A function that was called on the inference thread has returned. `reply` gets its value."""

    reply: Callable[[Any], object]
    value: object
    task_id: int = attrs.field(default=0, init=False)  # it is not of a task


#: The events of a task that its request sees.
Event = Progress | Chunk | Sound | Finished | Failed
#: The events of a task or a call that the engine sends.
EngineEvent = Admitted | Preempted | Returned | Event


@attrs.frozen(kw_only=True)
class FimTokens:
    """The tokens of a vocabulary that mark the parts of a text with a gap; -1: not in it."""

    prefix: TokenId = -1
    suffix: TokenId = -1
    middle: TokenId = -1
    repository: TokenId = -1
    file: TokenId = -1  # before each file of a repository


@attrs.frozen(kw_only=True)
class ModelInfo:
    """Facts about the loaded model."""

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
    """A text that a slot has computed, and the state of a KV sequence that holds it."""

    keys: tuple[CellKey, ...]  # what its cells are compared by
    root: CacheRoot = attrs.field(default=CacheRoot())
    state: bytes = attrs.field(repr=False)


@attrs.frozen
class SlotTask:
    """A task in a slot, as far as a `SlotStatus` tells of it."""

    id: int
    params: GenerationParams
    root: CacheRoot


@attrs.frozen(kw_only=True)
class SlotStatus:
    """A look at one slot, taken between two steps."""

    id: int
    state: str  # "idle", "prefill" or "decode"
    n_ctx: int
    task_id: int | None = None
    n_prompt: int = 0
    n_past: int = 0  # tokens in the KV sequence
    n_cached: int = 0
    n_decoded: int = 0
    paused: bool = False
    encoding: bool = False  # its prompt waits for media to be encoded
    has_new_line: bool = False  # in the output so far
    speculative: bool = False  # it may have drafts
    task: SlotTask | None = None  # of an idle slot: the last one


@attrs.frozen(kw_only=True)
class WaitingStatus:
    """A look at one task in the queue, taken between two steps."""

    task_id: int
    position: int  # 1 is the next one
    n_prompt: int
    priority: int
    waited_s: float
    #: The estimated rest of its wait, by the pace of late; none while no pace is known.
    wait_s: float | None = None
    adapters: Adapters = ()


#: Of the counters below, those that are not added up over time.
_NOW = frozenset(
    {
        "n_cells",
        "n_cells_used",
        "n_cells_copied",
        "n_cells_running",
        "kv_bytes",
        "ram_bytes",
        "disk_bytes",
        "threads",
        "threads_batch",
    }
)


@attrs.define(kw_only=True)
class EngineCounters:
    """The work of an engine since its start, and its state now. Times are in seconds.

    An engine adds to its own, and hands out copies.
    """

    steps: int = 0
    step_s: float = 0.0
    decodes: int = 0  # batches that were computed
    busy_slots: int = 0  # slots in them, added up
    prompt_tokens: int = 0  # prefilled
    prompt_s: float = 0.0  # in steps that prefilled
    prompt_queries: int = 0  # tokens of prompts that were admitted
    cached_tokens: int = 0  # of these, found in the KV cache, in RAM or on disk
    ram_tokens: int = 0  # of the ones that were found, in RAM
    disk_tokens: int = 0  # of the ones that were found, on disk
    disk_read_bytes: int = 0
    disk_written_bytes: int = 0
    kv_bytes: int = 0  # now, of what the sequences hold
    ram_bytes: int = 0  # now, of states in RAM
    disk_bytes: int = 0  # of all files in the folder, when they were last counted
    predicted_tokens: int = 0
    n_tokens_max: int = 0  # the longest sequence so far
    drafts: int = 0  # that were checked
    draft_tokens: int = 0  # in them
    accepted_tokens: int = 0  # of these, right
    n_cells: int = 0  # of the KV cache
    n_cells_used: int = 0  # now, also by what is only kept
    n_cells_copied: int = 0  # now, beside these, with copies of what other sequences hold
    n_cells_running: int = 0  # now, by requests in slots
    threads: int = 0  # now, of batches with few tokens
    threads_batch: int = 0  # now, of batches with many
    thread_changes: int = 0
    media_chunks: int = 0  # images, parts of them, and windows of sound that were encoded
    media_s: float = 0.0  # in which the encoder worked

    def after(self, earlier: EngineCounters) -> EngineCounters:
        """Add the counts of an engine that ran before this one."""
        sums = {
            name: value + getattr(earlier, name)
            for name, value in attrs.asdict(self).items()
            if name not in _NOW
        }
        longest = max(self.n_tokens_max, earlier.n_tokens_max)
        return attrs.evolve(self, **{**sums, "n_tokens_max": longest})


@attrs.frozen
class StepRecord:
    """The work of one step of an engine. A step without a batch has zeros for what is in one."""

    index: int  # of the records of a server, from 1; one that is missing was lost
    began: float
    ms: float
    n_slots: int  # with something in the batch
    n_decode: int  # tokens of outputs in it, with those of drafts
    n_prefill: int  # tokens of prompts in it
    n_running: int  # requests with a slot, after the step
    n_waiting: int  # requests in the queue

    @property
    def n_tokens(self) -> int:
        return self.n_decode + self.n_prefill


@attrs.frozen
class DraftCounts:
    """Counts of the drafts of one type, since the engine's start."""

    type: str  # as `--spec-type` calls it
    checked: int = 0  # drafts
    tokens: int = 0  # in them
    accepted: int = 0  # of these tokens

    def plus(self, checked: int, tokens: int, accepted: int) -> DraftCounts:
        """Add some drafts."""
        return DraftCounts(
            self.type, self.checked + checked, self.tokens + tokens, self.accepted + accepted
        )


@attrs.frozen(kw_only=True)
class EngineStatus:
    """A look at the engine, taken between two steps."""

    slots: tuple[SlotStatus, ...]
    waiting: tuple[WaitingStatus, ...]  # the tasks in the queue, next one first
    counters: EngineCounters = attrs.field(factory=EngineCounters)
    drafts: tuple[DraftCounts, ...] = ()  # of each type, in the order of their use

    def after(self, earlier: EngineStatus) -> EngineStatus:
        """Add the counts of an engine that ran before this one, with the same configuration."""
        drafts = self.drafts
        if earlier.drafts:
            drafts = tuple(
                one.plus(old.checked, old.tokens, old.accepted)
                for one, old in zip(drafts, earlier.drafts, strict=True)
            )
        counters = self.counters.after(earlier.counters)
        return attrs.evolve(self, counters=counters, drafts=drafts)
