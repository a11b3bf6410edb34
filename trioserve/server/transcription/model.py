"""The transcriber that has the loaded model write down what it hears."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import attrs
import trio

from trioserve.chat.deltas import ContentDelta
from trioserve.chat.media_parts import media_part
from trioserve.chat.messages import Messages
from trioserve.chat.params import ChatParams
from trioserve.errors import MemoryFullError, TooManyRequestsError, UnsupportedFieldError
from trioserve.server.chats import Chats
from trioserve.server.context import RequestContext
from trioserve.server.stream import ChatChunk, ChatStream
from trioserve.server.transcription.joining import Joiner
from trioserve.server.transcription.transcript import (
    Segment,
    Summary,
    Text,
    TranscriptEvent,
    TranscriptionParams,
    TranscriptUsage,
)
from trioserve.server.transcription.windows import Window, windows_of
from trioserve.server.workers import Stop, Workers
from trioserve.types import (
    DecodedAudio,
    Finished,
    GenerationParams,
    MediaSource,
    Progress,
    TokenId,
)

#: Seconds of a window: what models are trained with; and where the times of segments matter.
_LONGEST = 30.0
_LONGEST_TIMED = 10.0

#: Nobody speaks so fast: more tokens for each second of sound, and beside them, are repetition.
_TOKENS_PER_SECOND = 32
_TOKENS_BESIDE = 64

#: The most seconds to wait before asking for a place again, where there was none.
_PATIENCE = 5.0

_TRANSLATE = "Translate the speech in the audio to English text"

#: Models of this family are told by the system what to do, and not by the user.
_LFM2_TOOLS = "<|tool_list_start|>"
_LFM2_SYSTEM = "Perform ASR."

#: No reasoning: the transcript is what the model hears, and not what it thinks of it.
_PLAIN = ChatParams(
    template_kwargs={"enable_thinking": False},
    reasoning_format="deepseek",
    reasoning_budget=0,
    parse_tools=False,
)


class ModelTranscriber:
    """Shows the model a recording window by window, each in a chat of its own.

    One window runs at a time, so a long recording never has more than one slot. While another
    request has that slot, the next window waits.

    Args:
        chats: asks the model.
        workers: cut the recording.
        defaults: the parameters of a request that sets none.
        template: source of the model's chat template.
        rate: samples a second of the sound that the model takes.
        instruction: what the model is told to do.
    """

    def __init__(
        self,
        chats: Chats,
        workers: Workers,
        defaults: GenerationParams,
        *,
        template: str,
        rate: int,
        instruction: str,
    ) -> None:
        self.rate = rate
        self._chats = chats
        self._workers = workers
        self._defaults = defaults
        self._by_system = _LFM2_TOOLS in template
        self._instruction = instruction

    def check(self, params: TranscriptionParams) -> None:
        """Refuse what the model cannot do. Raises UnsupportedFieldError."""
        if params.words:
            raise UnsupportedFieldError(
                "'timestamp_granularities' must not have \"word\": the loaded model does not tell "
                "the times of words. A server with --transcription-model does.",
                param="timestamp_granularities",
            )

    async def transcribe(
        self, audio: DecodedAudio, params: TranscriptionParams, context: RequestContext
    ) -> AsyncGenerator[TranscriptEvent, None]:
        """See `Transcriber.transcribe`.

        Raises:
            TooManyRequestsError: too many requests wait already, or the client has no tokens left.
                Once the first window has run, the others wait for a place instead.
            MemoryFullError: likewise, there is no room.
            TrioServeError: as `Server.stream_chat`.
        """
        self.check(params)
        longest = _LONGEST_TIMED if params.timed else _LONGEST
        windows = await self._workers.run_in_thread(lambda _: windows_of(audio, longest))
        joiner, usage = Joiner(), TranscriptUsage()
        for i, window in enumerate(windows):
            n_left = None if params.max_tokens is None else params.max_tokens - usage.n_output
            if n_left == 0:
                break
            sound = await self._workers.run_in_thread(partial(_cut, window, audio))
            heard = _Heard(window, joiner, params.temperature)
            async with AsyncExitStack() as stack:
                stream = await self._ask(
                    stack, sound, params, context, n_left, may_be_refused=i == 0
                )
                async for event in stream:
                    yield heard.take(event)
            usage = _add(usage, stream)
            yield heard.segment
        yield Summary(language=params.language, usage=usage)

    async def aclose(self) -> None:
        """Nothing runs beside the requests."""

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
        """Open the stream of a window's text, which `stack` closes."""
        messages = self._messages(sound, params)
        generation = self._generation(sound, params, n_left)
        while True:
            try:
                (stream,) = await stack.enter_async_context(
                    self._chats.stream(messages, generation, _PLAIN, context)
                )
            except (TooManyRequestsError, MemoryFullError) as error:
                if may_be_refused:
                    raise
                again = trio.current_time() + min(error.retry_after, _PATIENCE)
                await trio.sleep_until(min(again, context.deadline))
            else:
                return stream

    def _messages(self, sound: DecodedAudio, params: TranscriptionParams) -> Messages:
        by_system = self._by_system and not params.translate
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


def _cut(window: Window, audio: DecodedAudio, _stop: Stop) -> DecodedAudio:
    return window.cut_from(audio)


class _Heard:
    """What has been heard in a window."""

    def __init__(self, window: Window, joiner: Joiner, temperature: float) -> None:
        self._window = window
        self._joiner = joiner
        self._temperature = temperature
        self._texts: list[str] = []
        self._tokens: list[TokenId] = []
        self._logprobs: list[float] = []
        joiner.next_window()

    def take(self, event: Progress | ChatChunk | Finished) -> Text:
        """Take what the model has written; returns what is to be told of it."""
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
        """All of it."""
        return Segment(
            text="".join(self._texts).strip(),
            start=self._window.start,
            end=self._window.end,
            tokens=tuple(self._tokens),
            temperature=self._temperature,
            avg_logprob=sum(self._logprobs) / len(self._logprobs) if self._logprobs else 0.0,
        )


def _add(usage: TranscriptUsage, stream: ChatStream) -> TranscriptUsage:
    """Add the tokens of a window, which has ended."""
    assert stream.finished is not None
    n_text = len(stream.prompt.tokens)
    return TranscriptUsage(
        n_text=usage.n_text + n_text,
        n_audio=usage.n_audio + len(stream.prompt) - n_text,
        n_output=usage.n_output + stream.finished.timings.predicted_n,
    )
