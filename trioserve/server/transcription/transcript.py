"""What is asked of a transcriber, and what it makes: text, segments with times, and a count."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol, TypeAlias

import attrs

from trioserve.server.context import RequestContext
from trioserve.types import DecodedAudio, TokenId, TokenProbs


@attrs.frozen(kw_only=True)
class TranscriptionParams:
    """How a recording is to be transcribed."""

    #: Write it in English, whatever is spoken.
    translate: bool = False
    #: What is spoken, as a code such as "en"; None: the transcriber finds out.
    language: str | None = None
    #: Words that may occur, or the text that comes before the recording.
    prompt: str = ""
    temperature: float = 0.0
    #: The most tokens of the whole transcript.
    max_tokens: int | None = None
    #: Whether silence is left out even where the transcriber would listen to it.
    skip_silence: bool = False
    #: Whether the times of segments matter: they are shorter then.
    timed: bool = False
    #: Whether each word is to have its times.
    words: bool = False
    #: Whether each token is to have its probability.
    logprobs: bool = False


@attrs.frozen(kw_only=True)
class Word:
    """A word, and the seconds at which it begins and ends."""

    text: str
    start: float
    end: float


@attrs.frozen(kw_only=True)
class Text:
    """The next piece of a transcript, which may be empty. All of them joined are the whole."""

    text: str
    probs: tuple[TokenProbs, ...] = ()


@attrs.frozen(kw_only=True)
class Segment:
    """A part of the recording that has been transcribed. Its text has been told before."""

    text: str
    start: float  # seconds
    end: float
    tokens: tuple[TokenId, ...] = ()
    words: tuple[Word, ...] = ()
    temperature: float = 0.0
    #: The mean of the logprobs of its tokens.
    avg_logprob: float = 0.0
    #: How probable it is that nobody speaks; 0 where the transcriber does not tell.
    no_speech_prob: float = 0.0


@attrs.frozen(kw_only=True)
class Summary:
    """The end of a transcript."""

    #: What was spoken, as a code; None: the transcriber does not tell.
    language: str | None = None
    #: Tokens of the prompts, those of sound among them, and tokens that were generated. None:
    #: the transcriber does not count tokens.
    usage: TranscriptUsage | None = None


@attrs.frozen(kw_only=True)
class TranscriptUsage:
    """The tokens that a transcript took."""

    n_text: int = 0  # of the prompts
    n_audio: int = 0  # of the prompts
    n_output: int = 0


TranscriptEvent: TypeAlias = Text | Segment | Summary


class Transcriber(Protocol):
    """What turns sound into text."""

    @property
    def rate(self) -> int:
        """Samples a second of the sound that it takes."""

    def check(self, params: TranscriptionParams) -> None:
        """Refuse what it cannot do. Raises InvalidRequestError, which names the field."""

    def transcribe(
        self, audio: DecodedAudio, params: TranscriptionParams, context: RequestContext
    ) -> AsyncGenerator[TranscriptEvent, None]:
        """Transcribe a recording. The last event is a `Summary`.

        Closing the generator, or cancelling an iteration, ends the work.

        Raises:
            TrioServeError: from the iteration: it failed, or the deadline has passed.
        """

    async def aclose(self) -> None:
        """End what it runs. Nothing is transcribed any more."""


@attrs.frozen(kw_only=True)
class Transcript:
    """A whole transcript."""

    text: str
    segments: tuple[Segment, ...]
    probs: tuple[TokenProbs, ...]
    duration: float  # of the recording, in seconds
    summary: Summary

    @property
    def words(self) -> list[Word]:
        """The words of all segments."""
        return [word for segment in self.segments for word in segment.words]
