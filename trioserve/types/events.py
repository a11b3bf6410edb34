"""What comes back from the engine."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import attrs

from trioserve.types.sampling import TokenId

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
    """The task has a slot. `queue_ms` is how long it waited for its first one."""

    task_id: int
    queue_ms: float


@attrs.frozen
class Preempted:
    """The task has lost its slot, and is in the queue again."""

    task_id: int


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
    embeddings: tuple[NDArray[np.float32], ...] = ()


@attrs.frozen
class Failed:
    """The last event of a task that went wrong."""

    task_id: int
    error: TrioServeError


#: What a request sees of its task.
Event = Progress | Chunk | Finished | Failed
#: What the engine says of a task.
EngineEvent = Admitted | Preempted | Event
