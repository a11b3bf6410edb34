"""The transcriber that uses the loaded model, window by window."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import attrs
import numpy as np
import trio
from numpy.typing import NDArray

from trioserve.chat.deltas import ContentDelta
from trioserve.chat.messages import Messages, media_part
from trioserve.chat.params import ChatParams
from trioserve.errors import MemoryFullError, TooManyRequestsError, UnsupportedFieldError
from trioserve.fair_limiter import Workers
from trioserve.server.context import RequestContext
from trioserve.server.generation.text import TextGenerator
from trioserve.server.stream import ChatChunk, ChatStream
from trioserve.server.transcription.transcript import (
    Segment,
    Send,
    Summary,
    Text,
    TranscriptionParams,
    TranscriptUsage,
)
from trioserve.types import (
    DecodedAudio,
    GenerationParams,
    MediaSource,
    Progress,
    TokenId,
    content_id,
)

_Floats = NDArray[np.float32]

#: Seconds of a frame for loudness measurements.
_FRAME = 0.02

#: Number of frames whose mean loudness locates a pause.
_PAUSE = 11

#: The most loudness of silence (RMS, -60 dB of full scale).
_SILENCE = 1e-3

#: A frame belongs to a pause if its loudness is below this share of that of the loud frames.
_QUIET = 0.05

#: The shortest window, as a share of the longest one.
_SHORTEST = 0.6


@attrs.frozen
class Window:
    """A part of a recording: its samples, and its first and last sound in seconds."""

    first: int  # samples
    stop: int
    start: float
    end: float

    def cut_from(self, audio: DecodedAudio) -> DecodedAudio:
        """Copy the window's samples to a new recording. It takes some milliseconds."""
        samples = audio.samples[4 * self.first : 4 * self.stop]
        return DecodedAudio(
            rate=audio.rate,
            samples=samples,
            id=content_id(b"sound %d" % audio.rate, samples),
        )


def windows_of(audio: DecodedAudio, longest: float) -> list[Window]:
    """Cut a recording into windows of at most `longest` seconds, at the quietest places.

    Windows of silence are dropped, because models invent words for them. It takes some tens of
    milliseconds for an hour.
    """
    samples = np.frombuffer(audio.samples, np.float32)
    size = max(1, round(audio.rate * _FRAME))
    loudness = _loudness(samples, size)
    most = max(1, int(longest * audio.rate) // size)
    floor = max(_SILENCE, _QUIET * float(np.quantile(loudness, 0.95)))
    windows = []
    for first, stop in _cut(loudness, most):
        if (heard := np.flatnonzero(loudness[first:stop] >= _SILENCE)).size == 0:
            continue
        loud = np.flatnonzero(loudness[first:stop] >= floor)
        within = loud if loud.size else heard
        windows.append(
            Window(
                first * size,
                min(stop * size, len(samples)),
                (first + int(within[0])) * size / audio.rate,
                min((first + int(within[-1]) + 1) * size, len(samples)) / audio.rate,
            )
        )
    return windows


def _loudness(samples: _Floats, size: int) -> _Floats:
    """The loudness of each frame of `size` samples; the last one may be shorter."""
    n_whole = len(samples) // size
    whole = samples[: n_whole * size].reshape(n_whole, size)
    squares = np.einsum("ij,ij->i", whole, whole) / size
    if len(rest := samples[n_whole * size :]):
        squares = np.append(squares, np.dot(rest, rest) / len(rest))
    loudness: _Floats = np.sqrt(squares)
    return loudness


def _cut(loudness: _Floats, most: int) -> Sequence[tuple[int, int]]:
    """Split frames into ranges of at most `most` frames, at the quietest places."""
    around = np.convolve(loudness, np.full(_PAUSE, 1 / _PAUSE, np.float32), mode="same")
    ranges, first = [], 0
    while len(loudness) - first > most:
        shortest = first + max(1, int(most * _SHORTEST))
        choice = around[shortest : first + most + 1]
        stop = shortest + len(choice) - 1 - int(np.argmin(choice[::-1]))  # the last minimum
        ranges.append((first, stop))
        first = stop
    return [*ranges, (first, len(loudness))]


#: Above this, most characters of Unicode belong to scripts without spaces between sentences.
_FIRST_WITHOUT_SPACES = "\u2e80"
_HANGUL = ("\uac00", "\ud7a3")


class Joiner:
    """Joins the text of windows. White space around that of a window is replaced by one space."""

    def __init__(self) -> None:
        self._last = ""  # the last character that was returned
        self._held = ""  # white space that is returned before the next text of the window
        self._is_new = True  # no text of this window was returned yet

    def next_window(self) -> None:
        """Start the next window."""
        self._held = ""
        self._is_new = True

    def feed(self, text: str) -> str:
        """Add a piece of a window; returns the text to send now."""
        if self._is_new:
            text = text.lstrip()
        body = text.rstrip()
        if not body:
            self._held += text
            return ""
        before = self._held
        if self._is_new and self._last and not any(map(_needs_no_space, (self._last, body[0]))):
            before = " "
        self._held = text[len(body) :]
        self._last, self._is_new = body[-1], False
        return before + body


def _needs_no_space(character: str) -> bool:
    is_hangul = _HANGUL[0] <= character <= _HANGUL[1]
    return character >= _FIRST_WITHOUT_SPACES and not is_hangul


#: Seconds of a window: as in the training of models; and shorter where segment times matter.
_LONGEST = 30.0
_LONGEST_TIMED = 10.0

#: The most tokens for each second of sound, and for a window in addition. Speech needs fewer: more
#: tokens are repetition.
_TOKENS_PER_SECOND = 32
_TOKENS_BESIDE = 64

#: The most seconds between attempts to get a place in the queue.
_PATIENCE = 5.0

_TRANSLATE = "Translate the speech in the audio to English text"

#: Models of this family take the instruction in the system message, not in the user's.
_LFM2_TOOLS = "<|tool_list_start|>"
_LFM2_SYSTEM = "Perform ASR."

#: No reasoning: it is not a part of the transcript.
_PLAIN = ChatParams(
    template_kwargs={"enable_thinking": False},
    reasoning_format="deepseek",
    parse_tools=False,
)


@attrs.define(eq=False, slots=False)
class ModelTranscriber:
    """Sends the model a recording window by window, each in a separate chat.

    One window runs at a time, so a recording uses at most one slot. The next window waits while
    another request has that slot.
    """

    _text: TextGenerator
    _workers: Workers
    _defaults: GenerationParams  # the default parameters of requests
    _template: str  # source of the model's chat template
    rate: int  # the sample rate of the model's audio input, in Hz
    _instruction: str  # the prompt for the model

    def check(self, params: TranscriptionParams) -> None:
        """Check that the model supports the parameters. Raises UnsupportedFieldError."""
        if params.words:
            raise UnsupportedFieldError.at(
                "timestamp_granularities",
                'must not have "word": the loaded model does not tell '
                "the times of words. A server with --transcription-model does.",
            )

    async def transcribe(
        self, audio: DecodedAudio, params: TranscriptionParams, context: RequestContext, send: Send
    ) -> None:
        """See `Transcriber.transcribe`.

        Raises:
            TooManyRequestsError: too many requests wait, or the client has no tokens left. Raised
                for the first window only; later windows wait for a place.
            MemoryFullError: likewise, the memory budget has no room.
            TrioServeError: as `ModelServer.stream_chat`.
        """
        longest = _LONGEST_TIMED if params.timed else _LONGEST
        windows = await self._workers.offload(partial(windows_of, audio, longest))
        joiner, usage = Joiner(), TranscriptUsage()
        for i, window in enumerate(windows):
            n_left = None if params.max_tokens is None else params.max_tokens - usage.n_output
            if n_left == 0:
                break
            sound = await self._workers.offload(partial(window.cut_from, audio))
            joiner.next_window()
            heard = _Heard(window, joiner, params.temperature)
            async with AsyncExitStack() as stack:
                with context.preparing():
                    stream = await self._ask(
                        stack, sound, params, context, n_left, may_be_refused=i == 0
                    )
                async for event in stream:
                    await send(heard.take(event))
            usage = _add(usage, stream)
            await send(heard.segment)
        await send(Summary(language=params.language, usage=usage))

    async def aclose(self) -> None:
        """Do nothing: only requests run."""

    async def _ask(
        self,
        stack: AsyncExitStack,
        sound: DecodedAudio,
        params: TranscriptionParams,
        context: RequestContext,
        n_left: int | None,
        *,
        may_be_refused: bool,
    ) -> ChatStream:
        """Open the stream of a window's text; `stack` closes it."""
        messages = self._messages(sound, params)
        generation = self._generation(sound, params, n_left)
        while True:
            try:
                async with AsyncExitStack() as opening:
                    answer, (stream,) = await self._text.open_chats(
                        opening, messages, generation, _PLAIN, context, 1
                    )
                    stack.push_async_exit(opening.pop_all())
                    format = self._text.model.template.format
                    return answer.answer(stream, format, (), self._text.end_thinking)
            except (TooManyRequestsError, MemoryFullError) as error:
                if may_be_refused:
                    raise
                await trio.sleep(min(error.retry_after, _PATIENCE))

    def _messages(self, sound: DecodedAudio, params: TranscriptionParams) -> Messages:
        by_system = _LFM2_TOOLS in self._template and not params.translate
        text = "" if by_system else _TRANSLATE if params.translate else self._instruction
        if params.language is not None:
            text = f"{text} (language: {params.language})".lstrip()
        if params.prompt:
            text += f"\nThese words may occur in it, or come before it: {params.prompt}\n"
            text = text.lstrip()
        content: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
        content.append(media_part(MediaSource(kind="audio", decoded=sound, param="file")))
        system = [{"role": "system", "content": _LFM2_SYSTEM}] if by_system else []
        return Messages([*system, {"role": "user", "content": content}])

    def _generation(
        self, sound: DecodedAudio, params: TranscriptionParams, n_left: int | None
    ) -> GenerationParams:
        limits = [_TOKENS_BESIDE + int(_TOKENS_PER_SECOND * sound.seconds)]
        limits += [limit for limit in (n_left, self._defaults.max_tokens) if limit is not None]
        return attrs.evolve(
            self._defaults,
            sampling=attrs.evolve(self._defaults.sampling, temperature=params.temperature),
            max_tokens=min(limit for limit in limits if limit >= 0),
            n_probs=1 if params.logprobs or params.timed else 0,
        )


@attrs.define(eq=False)
class _Heard:
    """The transcript of one window."""

    _window: Window
    _joiner: Joiner
    _temperature: float
    _texts: list[str] = attrs.field(init=False, factory=list)
    _tokens: list[TokenId] = attrs.field(init=False, factory=list)
    _logprobs: list[float] = attrs.field(init=False, factory=list)

    def take(self, event: Progress | ChatChunk) -> Text:
        """Handle an event; returns the text to send for it."""
        if not isinstance(event, ChatChunk):
            return Text(text="")
        self._tokens += event.tokens
        self._logprobs += [each.chosen.logprob for each in event.probs]
        deltas = [each.text for each in event.deltas if isinstance(each, ContentDelta)]
        text = self._joiner.feed("".join(deltas))
        self._texts.append(text)
        return Text(text=text, probs=event.probs)

    @property
    def segment(self) -> Segment:
        """The whole window as a segment."""
        return Segment(
            text="".join(self._texts).strip(),
            start=self._window.start,
            end=self._window.end,
            tokens=tuple(self._tokens),
            temperature=self._temperature,
            avg_logprob=sum(self._logprobs) / len(self._logprobs) if self._logprobs else 0.0,
        )


def _add(usage: TranscriptUsage, stream: ChatStream) -> TranscriptUsage:
    """Add the tokens of a finished window."""
    assert stream.finished is not None
    n_text = len(stream.prompt.tokens)
    return TranscriptUsage(
        n_text=usage.n_text + n_text,
        n_audio=usage.n_audio + len(stream.prompt) - n_text,
        n_output=usage.n_output + stream.finished.timings.predicted_n,
    )
