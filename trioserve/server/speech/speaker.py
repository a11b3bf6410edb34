"""`Speaker`: speaks texts with an engine."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, nullcontext
from functools import partial

import attrs

from trioserve.engine import SpeechEngine
from trioserve.errors import InvalidRequestError
from trioserve.fair_limiter import Workers
from trioserve.server.context import RequestContext
from trioserve.server.generation.requests import Requests
from trioserve.server.observers.observer import SPEECH
from trioserve.server.speech.speech import Converted, SpeechParams, SpeechStream, at_speed
from trioserve.server.speech.voices import Languages, Voices
from trioserve.server.stream import Stream
from trioserve.types import Event, Failed, Sound, SpeechTask, Spoken, TokenId

#: The most frames of a text: a model that does not find the end is stopped. Slow speakers need a
#: third of it.
_SECONDS_PER_TOKEN, _SECONDS_BESIDE = 1.0, 5.0

#: Characters to cut and tokenize twice, in the unit of `fair_limiter.SMALL`.
_COST = 4


@attrs.define(eq=False, slots=False)
class Speaker:
    """Cuts texts into pieces that the model can take, and speaks them."""

    _engine: SpeechEngine
    _requests: Requests
    _workers: Workers
    voices: Voices
    languages: Languages

    @asynccontextmanager
    async def stream(
        self, text: str, params: SpeechParams, context: RequestContext
    ) -> AsyncIterator[SpeechStream]:
        """Speak a text during a block. Leaving the block before the end cancels the work.

        Raises:
            InvalidRequestError: there is nothing to speak, or a parameter is wrong; names it.
            DeadlineExceededError: the deadline has passed.
            TrioServeError: as `Requests.open`.
        """
        with self._admitted(context):
            self._requests.check_room(context)
        rate = self._engine.backend.sample_rate
        with context.preparing():
            task = await self._workers.offload(
                partial(self._task, text, params, context), _COST * len(text)
            )
        with ExitStack() as stack:
            with self._admitted(context):
                stream = stack.enter_context(self._requests.open(task, context, SPEECH))
            stream.mailbox.n_samples = round(rate / self._engine.backend.frame_rate)
            take = _Events(stream).take
            if params.speed != 1:
                take = Converted(take, at_speed(rate, params.speed)).take
            yield SpeechStream(take, rate, len(task.prompt))

    def _admitted(self, context: RequestContext) -> AbstractContextManager[None]:
        """Let a request in, in a block, that continues another one."""
        gate = self._requests.resources.gate
        return gate.inside(has_begun=True) if context.has_begun else nullcontext()

    def _task(self, text: str, params: SpeechParams, context: RequestContext) -> SpeechTask:
        backend, resources = self._engine.backend, self._requests.resources
        language = self.languages.name_of(params.language)
        pieces = self._pieces(text, params)
        n_tokens = sum(map(len, pieces))
        seconds = _SECONDS_BESIDE + n_tokens * _SECONDS_PER_TOKEN
        return SpeechTask(
            id=next(resources.task_ids),
            pieces=pieces,
            voice=self.voices.find(params.voice),
            language=language,
            seed=params.seed,
            top_k=params.top_k,
            top_p=params.top_p,
            max_frames=round(seconds * backend.frame_rate),
            client=context.client,
            weight=resources.weight_of(context.client),
            priority=params.priority,
            param=params.param,
        )

    def _pieces(self, text: str, params: SpeechParams) -> list[tuple[TokenId, ...]]:
        """Tokenize the pieces of a text that have anything to say."""
        from trioserve.server.speech.pieces import Cutter

        tokenize, most = self._engine.backend.tokenize, self._engine.backend.max_piece
        language = self.languages.code_of(params.language)
        cutter = Cutter(lambda piece: len(tokenize(piece)), most, language)
        try:
            pieces = [tokens for piece in cutter.cut(text) if (tokens := tokenize(piece))]
        except InvalidRequestError as error:
            error.param = params.param
            raise
        if not pieces:
            raise InvalidRequestError.at(params.param, "has nothing to say.")
        return pieces


@attrs.define(eq=False)
class _Events:
    """The events of a task."""

    _stream: Stream
    _unread: deque[Event] = attrs.field(init=False, factory=deque)

    async def take(self) -> Sound | Spoken:
        if not self._unread:
            await self._stream.mailbox.wait()
            self._unread.extend(self._stream.take())
        event = self._unread[0]
        if isinstance(event, Failed):  # it stays, to be raised again
            raise event.error.again()
        assert isinstance(event, Sound | Spoken)
        self._unread.popleft()
        return event
