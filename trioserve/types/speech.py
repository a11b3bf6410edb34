"""Speech: what a request has a model say, and the sound that comes back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

import attrs

from trioserve.types.params import TokenId, in_range
from trioserve.types.task import EmbeddingTask, Prompt, Task

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Seeds are 32 bits in llama.cpp, and its highest one stands for a random one.
MAX_SEED = 2**32 - 2


@attrs.frozen(eq=False)
class Voice:
    """A voice that a model has taken from a recording."""

    #: What stands for it before a text: shape (n, width of the model).
    rows: NDArray[np.float32] = attrs.field(repr=False)


def _to_prompts(pieces: Iterable[Iterable[TokenId]]) -> tuple[Prompt, ...]:
    return tuple(Prompt(piece) for piece in pieces)


@attrs.frozen(kw_only=True)
class SpeechTask:
    """The task of a request for speech: texts to say one after another, as one sound."""

    id: int
    #: What `SpeechBackend.tokenize` makes of each text.
    pieces: tuple[Prompt, ...] = attrs.field(converter=_to_prompts)
    voice: Voice | None = None  # None: the model's own
    language: str = ""  # one of `SpeechBackend.languages`; empty: the first one
    seed: int = attrs.field(default=-1, validator=in_range(-1, MAX_SEED))  # -1: a random one
    #: For the models that choose among tokens; 0: as the model's makers have it.
    top_k: int = attrs.field(default=0, validator=in_range(0, 2**31 - 1))
    top_p: float = attrs.field(default=0.0, validator=in_range(0, 1))
    #: The most frames of sound, of all pieces together; see `SpeechBackend.frame_rate`.
    max_frames: int = attrs.field(default=2**31 - 1, validator=in_range(1, 2**31 - 1))
    #: Clients take turns in the queue. It may be an API key, so it is never shown.
    client: str = attrs.field(default="", repr=False)
    weight: float = 1.0  # turns of this client for one of the others
    priority: int = attrs.field(default=0, validator=in_range(-100, 100))  # higher goes first
    #: The field of the request that errors name.
    param: str = "input"

    #: All pieces, one after another.
    prompt: Prompt = attrs.field(init=False, repr=False)

    @prompt.default
    def _join(self) -> Prompt:
        return Prompt.joined(self.pieces)


#: What an engine may get.
AnyTask: TypeAlias = Task | EmbeddingTask | SpeechTask


@attrs.frozen(eq=False)
class Sound:
    """The next part of what a `SpeechTask` says. It may come at any time, and be of any length."""

    task_id: int
    samples: NDArray[np.float32]  # of one channel, from -1 to 1, all finite
    piece: int  # the text that it is of; a new one need not go on where the last one ended
