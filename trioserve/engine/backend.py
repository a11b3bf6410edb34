"""The engine's view of the world below it: a model that decodes batches and samples tokens.

`trioserve.llama` implements this with llama.cpp, `trioserve.testing` with a script. Every method
is called from the inference thread only, except those of `Vocab`, which any thread may call.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from trioserve.engine.adapters import AdapterBackend
from trioserve.engine.rollback import Rollback
from trioserve.types import (
    Adapters,
    CacheRoot,
    Constraint,
    DecodedMedia,
    FimTokens,
    Grammar,
    MediaChunk,
    ModelInfo,
    Prompt,
    PromptScores,
    SamplingParams,
    SlotState,
    TokenId,
    TokenProbs,
)

if TYPE_CHECKING:
    from trioserve.engine.speaker import SpeechBackend


@attrs.frozen
class DraftRequest:
    """A slot in decode that may have a draft in this step."""

    #: From 0 to ``n_slots - 1``. It is the same from the first one for a request until `forget`.
    slot_id: int
    #: All of the text so far, without media: the prompt and the output. The newest token is the
    #: last. It may belong to the engine, which adds to it after the call: to be read, not kept or
    #: changed.
    keys: Sequence[TokenId]
    #: Nothing that was learned from a text may be used for one with another root: it would show
    #: in how long that takes.
    root: CacheRoot
    n_max: int  # the most tokens that the draft may have; at least 1
    #: The slot's KV sequence, and how many of the last keys it does not hold yet.
    seq: int = 0
    n_new: int = 1


class Drafter(Protocol):
    """Guesses the next tokens of slots. Called from the inference thread, between decodes."""

    @property
    def name(self) -> str:
        """The type of speculative decoding, as `--spec-type` calls it."""

    @property
    def is_free(self) -> bool:
        """True if a guess takes next to no time.

        Then the drafter is asked for a new guess as soon as all of the last one was right, or a
        token of it was wrong, and the guess is compared with the output even where it does not pay
        to decode it. Others are asked only where their drafts are expected to pay, their own time
        included, and now and then to find out whether they do.
        """

    @property
    def n_max(self) -> int:
        """The most tokens of a guess; it is not asked for more."""

    #: Set by the engine: whether drafts are expected to pay. While not, a drafter puts off work.
    pays: bool

    @property
    def step_s(self) -> float:
        """Seconds for each token of the longest draft, once it has caught up; 0: next to none."""

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[TokenId] | None]:
        """Guess for each request what follows its last key.

        All requests of a step come at once, so that they can be batched. Slots that are in prefill,
        or have a draft by another drafter, are left out of this step. Between two calls a slot's
        keys grow by the accepted tokens and by those that the sampler chose.

        Returns:
            A draft for each request, at most `DraftRequest.n_max` long; empty where there is no
            guess. All of its tokens are in the vocabulary of the model. None where the drafter must
            first catch up with the text; asking it again continues that.
        """

    def forget(self, slot_id: int) -> None:
        """Drop the data of a slot: its request has ended, or its text is replaced by any other."""

    def close(self) -> None:
        """Free everything. Closing twice is fine. The slots need not be forgotten before."""


#: A row for each cell of a chunk: shape (n_cells, n_embd).
Embeddings = NDArray[np.float32]


@attrs.frozen(kw_only=True)
class MediaPiece:
    """Cells of a chunk to decode in place of tokens, for one sequence.

    It has all cells of the chunk, unless the chunk is causal.
    """

    chunk: MediaChunk
    embeddings: Embeddings = attrs.field(repr=False)
    start: int  # its first cell, counted in the chunk
    stop: int  # its last cell + 1
    pos: int  # the position at which the chunk begins in the sequence
    seq: int
    logits: bool  # the last cell gets logits

    @classmethod
    def of(
        cls, text: Prompt, start: int, stop: int, embeddings: Embeddings, seq: int, *, logits: bool
    ) -> Self:
        """Describe the cells ``start <= i < stop`` of a text, which are of one chunk."""
        span = text.span_from(start)
        assert span is not None
        first, chunk = span
        return cls(
            chunk=chunk,
            embeddings=embeddings,
            start=start - first,
            stop=stop - first,
            pos=text.position(first),
            seq=seq,
            logits=logits,
        )


class Projector(Protocol):
    """Turns media into embeddings. It comes with a model, and fits only that one."""

    #: It takes images, and so the frames of videos.
    sees: bool
    #: It takes sound.
    hears: bool
    #: Samples a second of the sound that it takes; 0: it takes none.
    audio_rate: int

    @property
    def max_chunk(self) -> int:
        """The most cells of a chunk that is decoded whole; 0: there are no such chunks."""

    #: The rough size in memory of a chunk, for each of its cells, before it is encoded.
    bytes_per_cell: int

    def prepare(
        self,
        parts: Sequence[str | DecodedMedia],
        *,
        add_special: bool,
        check: Callable[[int], object] = lambda _n: None,
    ) -> Prompt:
        """Tokenize text, and cut media into chunks, with the tokens that surround them.

        May be called from any thread. `check` gets the number of cells so far, now and then, and
        what it raises ends the work.

        Raises InvalidMediaError: the model cannot take one of the media; `index` is its part.
        """

    def encode(self, chunk: MediaChunk) -> Embeddings:
        """Compute the embeddings of a chunk. From one thread, which may not be that of the model.

        Raises:
            EncodeInterruptedError: `interrupt` was called.
            EncodeError: it failed.
        """

    def interrupt(self) -> None:
        """End the `encode` that runs within milliseconds; without one, nothing. From any thread."""

    def set_threads(self, count: int) -> None:
        """Encode with `count` threads, from the next node of the graph or the next chunk on."""


class Vocab(Protocol):
    """Text to token ids and back. Safe to call from any thread while the backend is open."""

    @property
    def n_tokens(self) -> int:
        """The number of tokens; ids run from 0 to ``n_tokens - 1``."""

    @property
    def pieces(self) -> Sequence[bytes]:
        """The bytes each token adds to the output; empty for control tokens."""

    @property
    def names(self) -> Sequence[bytes]:
        """The same, with the names of control tokens."""

    @property
    def control(self) -> Sequence[TokenId]:
        """The tokens with a name and without a piece."""

    @property
    def max_token_bytes(self) -> int:
        """The most bytes of a text that one token stands for."""

    @property
    def end_of_generation(self) -> frozenset[TokenId]:
        """The tokens that end the output."""

    @property
    def bos(self) -> TokenId:
        """The token that begins a text; -1: texts begin without one."""

    @property
    def fim(self) -> FimTokens:
        """The tokens for text with a gap."""

    def tokenize(
        self,
        text: str,
        *,
        add_special: bool = False,
        parse_special: bool = True,
        is_fragment: bool = False,
        check: Callable[[int], object] = lambda _n: None,
    ) -> tuple[TokenId, ...]:
        """Turn text into token ids.

        `add_special` adds BOS and EOS where the model wants them; `parse_special` reads names of
        control tokens in the text as those tokens; `is_fragment` means that the text follows other
        text, so no space is put before it. `check` runs in this thread now and then, and gets the
        number of tokens so far; what it raises ends the work.
        """

    def detokenize(self, tokens: Sequence[TokenId]) -> bytes:
        """Join the pieces of tokens, with the names of control tokens."""


class Sampler(Protocol):
    """Chooses the tokens of one task, and remembers what it chose."""

    def sample(self, row: int) -> TokenId:
        """Choose a token from the logits of a row of the last batch, and accept it."""

    def sample_with_probs(self, row: int, n: int, *, post: bool) -> tuple[TokenId, TokenProbs]:
        """Like `sample`, with the `n` most probable candidates.

        They come from the raw logits, or with `post` from the candidates after all samplers.
        """

    def accept(self, token: TokenId) -> None:
        """Note a token that comes next without having been sampled.

        Raises EngineError: the grammar does not allow it.
        """

    def forced(self, n_max: int) -> list[TokenId]:
        """Take the tokens that must come next, whatever the logits are, `n_max` at most.

        `sample` would return them one by one. None ends the output.

        Raises EngineError: the grammar cannot be followed.
        """

    def probs(self, row: int, token: TokenId, n: int, *, post: bool) -> TokenProbs:
        """Give the probabilities for a token that comes next without having been sampled.

        With `post` they are those of a token that is certain.
        """

    def attach(self, seq: int) -> None:
        """Learn the sequence that the task's tokens are in, so that decodes may sample.

        From the next `sample` on, until `detach`, rows of the sequence that have logits are sampled
        in their order, without gaps from the first one of a batch on, and none with
        `sample_with_probs`. The rest of a batch's rows, those of a wrong guess, are not.
        """

    def detach(self) -> None:
        """Learn that the sequence is another's from now on."""

    def close(self) -> None:
        """Free it. Closing twice is fine."""


class Batch(Protocol):
    """The tokens of the next `Backend.decode`. At most `Backend.n_batch` of them."""

    def clear(self) -> None:
        """Remove all tokens."""

    def add(self, token: TokenId, pos: int, seq: int, *, logits: bool) -> int:
        """Append one token; returns its row. `logits` asks for the row's logits."""

    def add_each(
        self, tokens: Sequence[TokenId], positions: Sequence[int], seqs: Sequence[int]
    ) -> range:
        """Append one token to each of some sequences, with logits; returns their rows."""

    def advance(self, tokens: Sequence[TokenId]) -> None:
        """Replace the tokens of all rows; each row is one position further than before."""

    def extend(self, tokens: Sequence[TokenId], pos: int, seq: int) -> int:
        """Append tokens at positions ``pos, pos + 1, …``, without logits; returns the last row."""

    def want_logits(self, row: int) -> None:
        """Ask for the logits of a row that is already there."""


class KVMemory(Protocol):
    """The contents of the sequences of a backend. Their ids run from 0 to ``n_seqs - 1``."""

    def remove(self, seq: int, start: int) -> bool:
        """Remove the positions from `start` on; returns whether it could. From 0 on, it can."""

    def trim(self, seq: int, n_cells: int) -> None:
        """Give back the memory of a sequence behind its first `n_cells` cells, where possible."""

    def copy(self, source: int, target: int) -> None:
        """Copy a whole sequence over an empty one."""

    def step_back(self, seq: int, token: TokenId) -> bool:
        """Remove the last position, of this token, if a drafter needs it again; returns whether."""

    def first(self, seq: int) -> int:
        """The first position from which on a sequence holds all, -1 when it is empty.

        Windows and recurrent states hold less than the sequence.
        """

    def last(self, seq: int) -> int:
        """The last position that a sequence holds, -1 when it is empty."""

    def size(self, seq: int, *, partial: bool = False) -> int:
        """The number of bytes that `save` would return."""

    def save(self, seq: int, *, partial: bool = False) -> bytes:
        """Return the state of a sequence, for `restore`.

        With `partial`, only the part of it that cannot be cut, for `rewind`.
        """

    def restore(self, seq: int, data: bytes) -> None:
        """Load the state of another sequence into an empty one."""

    def rewind(self, seq: int, length: int, data: bytes) -> bool:
        """Put a sequence back to its first `length` positions.

        `data` is from a partial `save` of this sequence, or of another with the same beginning, at
        that length. Returns whether it succeeded; if not, the sequence is empty.
        """


class ModelBackend(Protocol):
    """A loaded model with a context, for either kind of engine."""

    #: The model's properties. For any thread.
    info: ModelInfo
    #: Cells in the KV cache, all sequences together.
    n_ctx: int
    #: The most tokens that one sequence may hold.
    n_ctx_seq: int
    #: The most tokens in one batch.
    n_batch: int
    #: The most requests that run at the same time.
    n_slots: int
    #: The number of sequences; ids run from 0 to ``n_seqs - 1``.
    n_seqs: int
    #: The numbers of threads that may compute a batch of few tokens, and one of many: each a range
    #: from the fewest to the most, which are used at first.
    thread_choices: tuple[range, range]

    def set_threads(self, count: int) -> None:
        """Compute with `count` threads from the next batch on."""

    def interrupt(self) -> None:
        """End the running batch within milliseconds, or else the next one. From any thread.

        Has no effect on a batch that cannot be undone without a loss.
        """

    def close(self) -> None:
        """Free everything. Closing twice is fine."""


class Backend(ModelBackend, AdapterBackend, Protocol):
    """A loaded model, with a context of `n_seqs` KV sequences for `n_slots` requests."""

    @property
    def vocab(self) -> Vocab:
        """The model's vocabulary."""

    @property
    def batch(self) -> Batch:
        """The one batch, refilled each step."""

    @property
    def memory(self) -> KVMemory:
        """The KV cache."""

    #: The most rows of a batch that may have logits to sample from; from `n_slots` to `n_batch`.
    n_outputs: int
    #: Rows beside these that may have logits for `score`; at least 1.
    n_score_rows: int
    #: Cores that `decode` leaves to others.
    n_spare_cores: int
    #: Bytes of RAM that states outside the KV cache may take; None: as many as is configured.
    spare_ram: int | None
    #: All sequences share the cells, so that a copy moves no data.
    unified: bool
    #: Sequences share no cells, and may be longer than an equal part of `n_ctx`. A copy
    #: of one is then made at once, from its state.
    is_elastic: bool
    #: Cells beyond `n_ctx` that copies may take in an elastic cache: what several sequences share
    #: counts once until these are in use. In any other cache 0.
    n_ctx_copies: int
    #: Cells at the end of each sequence that it cannot share with others. They count where there
    #: could be too few of them: in a cache for sliding windows that is no larger than `n_ctx`.
    window: int
    #: Sequences can be cut at any position. Those of recurrent and hybrid models, and of sliding
    #: windows, can only be cleared, or go back to a checkpoint.
    can_cut: bool
    #: The width of the sliding window in tokens, if it alone prevents cuts at any position; else 0.
    #: A cache may hold more: see `KVMemory.first`. With `can_cut`, a unified one may lose some.
    sliding_window: int
    #: Without `can_cut`, the most cells of a sequence that can still be cut anywhere, also after
    #: `KVMemory.restore`: a sliding window that is not full has forgotten nothing.
    cuttable: int
    rollback: Rollback

    @property
    def drafters(self) -> Sequence[Drafter]:
        """Drafters that came with the model, in their order. The engine closes them, before it."""

    @property
    def projector(self) -> Projector | None:
        """Turns media into embeddings; None: the model takes text only. The backend closes it."""

    @property
    def embedding_pooling(self) -> str | None:
        """The pooling of `embedder`; None without one."""

    def embedder(self) -> EmbeddingBackend:
        """Make a context for embeddings, which keeps the weights. Raises ModelLoadError."""

    #: Loads the model that speaks, or raises ModelLoadError; None: none is configured.
    speaker: Callable[[], SpeechBackend] | None

    def decode(self) -> None:
        """Run the batch.

        Raises:
            KVCacheFullError: not enough free cells; nothing has changed.
            DecodeInterruptedError: `interrupt` was called; nothing has changed.
            DecodeError: any other failure; the contents of the sequences are unknown.
        """

    def decode_media(self, pieces: Sequence[MediaPiece]) -> list[int]:
        """Decode parts of chunks of media, `n_batch` cells at most; of one chunk only, if that is
        not causal. Returns the row of the last cell of each piece.

        Raises what `decode` raises.
        """

    def check_sampling(self, params: SamplingParams) -> None:
        """Refuse parameters that `sampler` would refuse. From any thread.

        Raises InvalidRequestError: a value is invalid for this model; `param` names the field.
        """

    def compile(self, grammar: Grammar, owner: str = "") -> Constraint:
        """Compile a grammar for `sampler`. From any thread but the inference thread.

        It may take seconds, and runs beside the inference thread. The latest results are cached for
        each owner.

        Raises:
            InvalidRequestError: the grammar is invalid, too large, or has a rule that cannot be
                enforced; `param` is the grammar's.
        """

    def sampler(
        self,
        params: SamplingParams,
        prompt: Sequence[TokenId],
        constraint: Constraint | None = None,
    ) -> Sampler:
        """Make the sampler of a task. It has seen the prompt (for penalties).

        With a constraint it chooses only tokens that the grammar allows next, and one that ends
        the output only where the grammar may end.
        """

    def score(self, scores: PromptScores, row: int, tokens: Sequence[TokenId]) -> None:
        """Add how probable each token was as the next one, by rows ``row, row + 1, …``.

        Their logits are lost: nothing can be sampled from them afterwards. Raises DecodeError: a
        logit is not a number.
        """

    def state_identity(self) -> tuple[str, tuple[str, ...]]:
        """Identify what a state depends on, by content. From any thread; it reads the files.

        Returns 32 hexadecimal digits for the model and the settings of the context, and a text for
        each LoRA adapter. A state fits every context with the same.

        Raises OSError: a file cannot be read.
        """

    def write_state(self, path: Path, saved: SlotState) -> int:
        """Write the result of `KVMemory.save` to a file; returns its size. From any thread.

        The write is atomic.

        Raises:
            PermissionDeniedError: it would replace a file of another owner (`CacheRoot.owner`).
            OSError: it cannot be written.
        """

    def read_state(self, path: Path, adapters: Adapters) -> tuple[SlotState, int]:
        """Read such a file, for `KVMemory.restore`, and its size. From any thread.

        `adapters` apply to a file that does not name its adapters.

        Raises:
            InvalidRequestError: it is not such a file, or is from another model.
            OSError: it cannot be read.
        """


#: Shape (rows, width).
Matrix = NDArray[np.float32]

#: Ways to make the embedding of a text from those of its tokens: not at all, their mean, the first
#: one, the last one, or scores that a head makes of one of them.
POOLINGS = ("none", "mean", "cls", "last", "rank")


class EmbeddingBackend(ModelBackend, abc.ABC):
    """A loaded model, with a context that makes embeddings: a sequence for each text of a batch.

    Used by the inference thread alone, except `info`, `vocab` and `pair`, which any thread may use.
    """

    vocab: Vocab
    #: Makes embeddings of media, for cells of them; None: the model takes text only.
    projector: Projector | None
    #: The texts of one `compute`, one per sequence, from position 0 on or continued.
    batch: Batch
    pooling: str
    #: Numbers in an embedding; with pooling "rank", scores of a text, one for each class.
    width: int
    #: The names of the classes, as far as the model has them; and if their scores add up to 1.
    labels: Sequence[str] = ()
    scores_are_probs: bool = False
    #: A text may come in parts, one batch after another. Its tokens see only those before.
    can_split: bool

    @abc.abstractmethod
    def pair(self, query: str, document: str, most: int | None = None) -> tuple[TokenId, ...]:
        """Make of a query and a document the text that a ranking model gives a score to.

        Of a document with more tokens than `most`, only the first ones are in it.

        Raises InvalidRequestError: one of them cannot be encoded.
        """

    @abc.abstractmethod
    def compute(self) -> None:
        """Run the batch. Raises as `Backend.decode`."""

    @abc.abstractmethod
    def compute_media(self, piece: MediaPiece) -> None:
        """Run a batch of cells of a chunk. Raises as `compute`."""

    @abc.abstractmethod
    def pooled(self, seq: int) -> Matrix:
        """Return the embedding of a sequence, of its part in the last batch. Shape (1, width)."""

    @abc.abstractmethod
    def rows(self, start: int, stop: int) -> Matrix:
        """Return the embeddings of rows of the last batch, of a model without pooling."""

    @abc.abstractmethod
    def forget(self, seq: int) -> None:
        """Remove all tokens of a sequence."""


#: A model. The kind decides which requests a server accepts.
AnyBackend: TypeAlias = "Backend | EmbeddingBackend | SpeechBackend"
