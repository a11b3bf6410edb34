"""The engine's view of a model that speaks.

Such a model makes one frame of sound a step. It is given rows of numbers in place of tokens: those
of a text, and then one for each frame, made of the frame before. `trioserve.llama` implements this
with llama.cpp, `trioserve.testing` with a script.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from trioserve.engine.backend import Matrix, ModelBackend, Vocab
from trioserve.types import DecodedAudio, SpeechTask, TokenId, Voice

#: Samples of one channel.
Samples: TypeAlias = NDArray[np.float32]


@attrs.frozen(eq=False)
class Rows:
    """Rows for a sequence at positions ``pos, pos + 1, …``."""

    rows: Matrix = attrs.field(repr=False)
    pos: int
    seq: int
    wanted: bool  # the last row has an output, for `Utterance.frame`


@attrs.frozen(eq=False)
class SpokenPrompt:
    """The rows of one text of a task, from position 0 on."""

    rows: Matrix = attrs.field(repr=False)
    n_shared: int  # at its beginning, equal to those of the task's other texts


class Utterance(Protocol):
    """A task being said: its random numbers, and the frames that are not sound yet.

    Used by the inference thread. A failure of one leaves the others as they are.
    """

    def begin(self, piece: int) -> SpokenPrompt:
        """Begin with a text of the task, after the last one has ended."""

    def frame(self, row: int) -> Matrix | None:
        """Make the next frame from the output of a row of the last batch.

        Returns the row for the next batch, shape (1, width); None: the text has ended, without one
        more frame.

        Raises OutputError: the model makes no sense.
        """

    @property
    def is_due(self) -> bool:
        """True if there are as many new frames as become sound together."""

    def sound(self) -> Samples:
        """Turn the new frames into sound; of none, make no samples.

        Raises:
            DecodeInterruptedError: `SpeechBackend.interrupt_sound` was called; nothing has changed.
            OutputError: the model makes no sense.
        """

    def close(self) -> None:
        """Free it. Closing twice is fine."""


class SpeechBackend(ModelBackend, abc.ABC):
    """A loaded model that speaks, with a context of a sequence for each slot.

    Used by the inference thread alone, except what says otherwise.
    """

    #: For any thread.
    vocab: Vocab
    projector: None = None  # it takes no media beside voices
    #: Samples a second.
    sample_rate: int
    #: Frames a second.
    frame_rate: float
    #: The languages that a task may name; none: the model has one, or finds out by itself.
    languages: Sequence[str]
    #: It can take a voice from a recording.
    takes_voices: bool
    #: Samples a second of such a recording; 0: it takes none.
    voice_rate: int
    #: Tokens in a text above which it may skip words; see `tokenize`.
    max_piece: int

    @abc.abstractmethod
    def tokenize(self, text: str) -> tuple[TokenId, ...]:
        """Make one of the pieces of a task of a text. From any thread.

        It may add a full stop and begin with a capital letter, where the model needs that. Empty:
        there is nothing to say.

        Raises InvalidRequestError: the text cannot be encoded.
        """

    @abc.abstractmethod
    def take_voice(self, recording: DecodedAudio) -> Voice:
        """Take the voice of a recording at `voice_rate`. From any thread; frames wait meanwhile.

        Raises:
            NotSupportedError: the model takes none.
            InvalidMediaError: it is too short.
            EncodeError: it failed.
        """

    @abc.abstractmethod
    def n_prompt(self, task: SpeechTask) -> int:
        """Count the rows of the longest prompt of a task. From any thread.

        Raises InvalidRequestError: the language or the voice is unknown to the model; `param` names
        the field.
        """

    @abc.abstractmethod
    def utterance(self, task: SpeechTask) -> Utterance:
        """Make what says a task that `n_prompt` did not refuse."""

    @abc.abstractmethod
    def decode(self, batch: Sequence[Rows]) -> list[int]:
        """Compute at most `n_batch` rows; returns which row the last one of each has become.

        Raises as `Backend.decode`.
        """

    @abc.abstractmethod
    def forget(self, seq: int, start: int = 0) -> None:
        """Remove the positions of a sequence from `start` on."""

    @abc.abstractmethod
    def interrupt_sound(self) -> None:
        """End the `Utterance.sound` that runs within milliseconds; without one, do nothing.

        From any thread.
        """
