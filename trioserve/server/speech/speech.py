"""The parameters of speech, and what comes of it: a stream of sound, or all of it."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Generic, TypeAlias, TypeVar

import attrs
import numpy as np

from trioserve.fair_limiter import sound_threads
from trioserve.media.encode import Samples, SoundEncoder, SoundFormat, Tempo, with_lengths
from trioserve.server.speech.recordings import DEFAULT_VOICE
from trioserve.types import Sound, Spoken, Timings

_From = TypeVar("_From")
_To = TypeVar("_To")


@attrs.frozen(kw_only=True)
class SpeechParams:
    """How to speak a text."""

    #: One of `LoadedModel.voices`.
    voice: str = DEFAULT_VOICE
    #: A code such as "en"; empty: as the configuration says, or the model.
    language: str = ""
    #: 0.25 to 4; the pitch stays the same.
    speed: float = 1.0
    #: -1: another one each time.
    seed: int = -1
    #: How the tokens of models that have them are chosen; 0: as usual for the model.
    top_k: int = 0
    top_p: float = 0.0
    #: -100 to 100; higher goes first in the queue.
    priority: int = 0
    #: The field of the request that has the text, for errors.
    param: str = attrs.field(default="input", eq=False)


#: How a text is spoken where nothing is said about it.
PLAIN = SpeechParams()


@attrs.frozen(kw_only=True)
class Speech:
    """A text as sound."""

    samples: Samples  # of one channel, shape (n,), from -1 to 1
    rate: int  # samples a second
    n_prompt: int  # tokens of the text
    n_frames: int  # that the model has made
    timings: Timings

    @property
    def seconds(self) -> float:
        """The length in seconds."""
        return len(self.samples) / self.rate

    def encoded(self, format: SoundFormat = "wav") -> bytes:
        """Return the bytes of a file. A minute of speech takes up to a second: use a thread."""
        encoder = SoundEncoder(format, self.rate)
        data = encoder.feed(self.samples) + encoder.finish()
        return with_lengths(data, len(data))


class SpeechStream:
    """The sound of a text, as it is made: `Sound`, and at the end `Spoken`.

    Iterate over its samples within the block that opened it: arrays of float32, of one channel,
    shape (n,), from -1 to 1. Cancelling a call loses nothing; leaving the block ends the work. A
    reader that is slow delays the model, which never makes more than some ten seconds ahead.

    Raises:
        TrioServeError: from each call: the text could not be spoken to its end.
    """

    def __init__(
        self, take: Callable[[], Awaitable[Sound | Spoken]], rate: int, n_prompt: int
    ) -> None:
        self.rate = rate  # samples a second
        self.n_prompt = n_prompt  # tokens of the text
        self.finished: Spoken | None = None
        self._take = take

    async def next_event(self) -> Sound | Spoken:
        """Wait for the next event. The last one is `Spoken`."""
        if self.finished is not None:
            return self.finished
        event = await self._take()
        if isinstance(event, Spoken):
            self.finished = event
        return event

    def __aiter__(self) -> AsyncIterator[Samples]:
        return self

    async def __anext__(self) -> Samples:
        event = await self.next_event()
        if isinstance(event, Spoken):
            raise StopAsyncIteration
        return event.samples

    async def read(self) -> Speech:
        """Read the rest, and return it as a whole."""
        parts = [samples async for samples in self]
        assert self.finished is not None
        return Speech(
            samples=np.concatenate([np.empty(0, np.float32), *parts]),
            rate=self.rate,
            n_prompt=self.n_prompt,
            n_frames=self.finished.n_frames,
            timings=self.finished.timings,
        )


class Converted(Generic[_From, _To]):
    """Events that are changed in a worker thread, where each becomes any number of others.

    `take` waits for the next one. Cancelling it loses nothing.
    """

    def __init__(
        self, take: Callable[[], Awaitable[_From]], change: Callable[[_From], Sequence[_To]]
    ) -> None:
        self._source, self._change = take, change
        self._taken: _From | None = None  # and not changed yet
        self._unread: deque[_To] = deque()

    async def take(self) -> _To:
        """Take the next event. Raises what the source raises."""
        while not self._unread:
            if self._taken is None:
                self._taken = await self._source()
            change = partial(self._change, self._taken)
            self._unread.extend(await sound_threads().run_sync(change))
            self._taken = None
        return self._unread.popleft()


def at_speed(rate: int, speed: float) -> Callable[[Sound | Spoken], Sequence[Sound | Spoken]]:
    """Make a function that changes the speed of the sound in events, for `Converted`."""
    tempo: Tempo | None = None

    def change(event: Sound | Spoken) -> Sequence[Sound | Spoken]:
        nonlocal tempo
        tempo = tempo or Tempo(rate, speed)
        if isinstance(event, Sound):
            samples = tempo.feed(event.samples)
            return [attrs.evolve(event, samples=samples)] if len(samples) else []
        rest = tempo.finish()
        return [*([Sound(event.task_id, rest, 0)] if len(rest) else []), event]

    return change


@attrs.frozen
class Encoded:
    """The next bytes of encoded sound."""

    data: bytes


#: What a client is sent.
SpeechEvent: TypeAlias = Encoded | Spoken


class Encoding:
    """Encodes the sound in events, for `Converted`. Call `close` when no thread works with it."""

    def __init__(self, format: SoundFormat, rate: int) -> None:
        self._make = partial(SoundEncoder, format, rate)
        self._encoder: SoundEncoder | None = None

    def encode(self, event: Sound | Spoken) -> Sequence[SpeechEvent]:
        """Encode the sound of an event; the last one ends it."""
        ended = self.finish() if isinstance(event, Spoken) else ()
        return [*ended, *self.feed(event)]

    def feed(self, event: Sound | Spoken) -> Sequence[SpeechEvent]:
        """Encode the sound of an event; it may be followed by that of another text."""
        if isinstance(event, Spoken):
            return [event]
        if self._encoder is None:
            self._encoder = self._make()  # imports, for 0.2 s
        return _encoded(self._encoder.feed(event.samples))

    def finish(self) -> Sequence[SpeechEvent]:
        """Encode the end of all sound. It must be called at most once."""
        if self._encoder is None:
            self._encoder = self._make()
        return _encoded(self._encoder.finish())

    def close(self) -> None:
        """Free the encoder."""
        if self._encoder is not None:
            self._encoder.close()


def _encoded(data: bytes) -> Sequence[SpeechEvent]:
    return [Encoded(data)] if data else []
