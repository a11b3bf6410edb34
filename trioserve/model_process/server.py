"""`ChildServer`: a model in another process, as the app sees it."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar, Unpack, cast

import attrs

from trioserve.chat.messages import Messages as ParsedMessages, parse_messages
from trioserve.chat.params import ChatParams
from trioserve.concurrency import Gate, alongside
from trioserve.config import Config
from trioserve.errors import ServerSleepingError, TrioServeError
from trioserve.fair_limiter import offload
from trioserve.model_process.connection import Line, OpenCall, ask
from trioserve.model_process.questions import as_tuples
from trioserve.server.adapters import AdapterNames, AdapterScales
from trioserve.server.context import ANYONE, RequestContext, Tally
from trioserve.server.generation.requests import Queue
from trioserve.server.generation.text import ChatOpening
from trioserve.server.keywords import ContextFields, RenderFields, only_chat, only_context
from trioserve.server.limits.memory import BYTES_PER_TOKEN, MemoryBudget, MemoryReservation
from trioserve.server.limits.rates import Counted
from trioserve.server.model import LoadedModel
from trioserve.server.model_server import ModelServer
from trioserve.server.observers.observer import Observer
from trioserve.server.prompts.text import AnyPrompt, Messages, n_chars
from trioserve.server.speech.speech import PLAIN, SpeechParams, SpeechStream
from trioserve.server.stream import Stream
from trioserve.server.transcription.transcript import TranscriptionParams, TranscriptStream
from trioserve.tools.registry import ToolRegistry
from trioserve.types import GenerationParams, MediaSource, Prompt


class ChildAdapters(AdapterNames):
    """The LoRA adapters of a model in another process, as far as it has told them."""

    def __init__(self, config: Config, line: Line) -> None:
        super().__init__(config, lambda: model_of(line).names)
        self._line = line

    @property
    def paths(self) -> dict[str, str]:
        """See `AdapterNames`."""
        facts = self._line.known.adapters
        return super().paths if facts is None else facts.paths

    @property
    def scales(self) -> AdapterScales:
        """See `AdapterNames`."""
        if (facts := self._line.known.adapters) is None:
            raise ServerSleepingError
        return AdapterScales.of(facts.infos, facts.names, facts.ids, facts.scales)


def model_of(line: Line) -> LoadedModel:
    """The model at the end of a line. Raises ServerSleepingError: it was never loaded."""
    if (model := line.known.model) is None:
        raise ServerSleepingError
    return model


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _asked(method: _Method) -> _Method:
    """Make the method that calls one of `ModelServer` in the process."""
    is_of_client = "context" in inspect.signature(method).parameters

    async def call(self: ChildServer, *args: Any, **kwargs: Any) -> Any:
        if is_of_client and self._client:
            kwargs["context"] = self._named(kwargs.get("context", ANYONE))
        answer = await ask(self.line, method, *args, **kwargs)
        if is_of_client and (tally := kwargs.get("context", ANYONE).tally) is not None:
            tally.n_prompt += sum(getattr(answer, "n_tokens", ()))  # of texts that are embedded
        return answer

    return cast(_Method, call)


class ChildServer(ModelServer):
    """A model in another process.

    Prompts in results lack what their media show. A chat that becomes several prompts has its
    media read for each.

    Args:
        line: leads to the process.
        tools: that runs may use.
        client: of requests that name none.

    Attributes:
        line: leads to the process.
    """

    def __init__(
        self,
        line: Line,
        config: Config,
        *,
        tools: ToolRegistry,
        memory: MemoryBudget,
        observers: Sequence[Observer] = (),
        client: str = "",
    ) -> None:
        self.config, self.tools, self.memory = config, tools, memory
        self.observers, self.gate = list(observers), Gate()
        self.adapters, self.queue = ChildAdapters(config, line), Queue(self.status)
        self.line, self._client = line, client

    def _named(self, context: RequestContext) -> RequestContext:
        """Name the client of a call that names none."""
        if self._client and not context.client:
            context = attrs.evolve(context, client=self._client)
        return context

    # -- output

    @asynccontextmanager
    async def stream_all(
        self,
        prompts: Sequence[AnyPrompt],
        params: GenerationParams,
        *,
        n: int = 1,
        context: RequestContext = ANYONE,
    ) -> AsyncIterator[list[Stream]]:
        """See `ModelServer`."""
        asked = partial(self.line.open, ModelServer.stream_all, prompts, params)
        async with asked(n=n, context=self._named(context)) as call:
            with self._streams(call, context) as streams:
                yield streams

    @asynccontextmanager
    async def open_chats(
        self,
        messages: Messages,
        params: GenerationParams,
        chat: ChatParams,
        n: int,
        context: RequestContext,
    ) -> AsyncIterator[tuple[ChatOpening, list[Stream]]]:
        """See `ModelServer`."""
        given = (await _parsed(messages), params, chat, n, self._named(context))
        async with self.line.open(ModelServer.open_chats, *given) as call:
            with self._streams(call, context) as streams:
                yield call.value.opening, streams

    @contextmanager
    def _streams(self, call: OpenCall, context: RequestContext) -> Iterator[list[Stream]]:
        """Make the streams of the tasks that a call has opened."""
        tally = context.tally or Tally()
        with self.memory.hold(context.client) as held:
            streams: list[Stream] = []
            try:
                for mailbox, prompt in zip(call.mailboxes, call.prompts, strict=True):
                    held.grow(mailbox.n_prompt * BYTES_PER_TOKEN)
                    streams.append(Stream(prompt, mailbox, call.source, held))
                yield streams
            finally:
                for each in streams:
                    tally.add(self.model.info.name, each)

    async def read_media(
        self, messages: Messages, hold: MemoryReservation, context: RequestContext
    ) -> ParsedMessages:
        """See `ModelServer`."""
        return await _parsed(messages)

    @asynccontextmanager
    async def transcribing(
        self, source: MediaSource, params: TranscriptionParams, context: RequestContext
    ) -> AsyncIterator[TranscriptStream]:
        """See `ModelServer`."""
        given = (source, params, self._named(context))
        async with self.line.open(ModelServer.transcribing, *given) as call:
            stream = TranscriptStream(call.value)

            async def follow() -> None:
                try:
                    async for event in call.events:
                        stream.put(event)
                except TrioServeError as error:
                    stream.end(error)

            async with alongside(follow):
                yield stream

    @asynccontextmanager
    async def speaking(
        self, text: str, params: SpeechParams = PLAIN, context: RequestContext = ANYONE
    ) -> AsyncIterator[SpeechStream]:
        """See `ModelServer`."""
        given = (text, params, self._named(context))
        async with self.line.open(ModelServer.speaking, *given) as call:
            stream = SpeechStream(call.next_sound, call.value.rate, call.value.n_prompt)
            try:
                yield stream
            finally:
                tally, finished = context.tally or Tally(), stream.finished
                tally.n_output += 0 if finished is None else finished.n_frames
                tally.add_end(self.model.info.name, stream.n_prompt, finished)

    async def render(
        self, messages: Messages, chat: ChatParams | None = None, **fields: Unpack[RenderFields]
    ) -> str:
        """See `ModelServer`."""
        chat = only_chat(fields, chat)
        return await ask(self.line, ModelServer.render, await _parsed(messages), chat)

    async def chat_prompt(self, messages: Messages, chat: ChatParams) -> Prompt:
        """See `ModelServer`."""
        return await ask(self.line, ModelServer.chat_prompt, await _parsed(messages), chat)

    async def biases_of(self, biases: Any) -> Any:
        """See `ModelServer`."""
        return as_tuples(await ask(self.line, ModelServer.biases_of, biases))

    # -- the model

    @property
    def model(self) -> LoadedModel:
        """See `ModelServer`."""
        return model_of(self.line)

    @property
    def sleeping(self) -> bool:
        """See `ModelServer`."""
        return self.line.known.sleeping

    async def known_model(self, context: RequestContext = ANYONE) -> LoadedModel:
        """See `ModelServer`."""
        if self.line.known.model is None:
            async with self.loaded(context):
                pass
        return self.model

    def loaded(
        self, context: RequestContext = ANYONE, **fields: Unpack[ContextFields]
    ) -> AbstractAsyncContextManager[object]:
        """See `ModelServer`."""
        context = only_context(fields, context) if fields else context
        known = self.line.known
        if known.model is not None and not known.sleeping and context.keep_alive is None:
            return nullcontext()
        return self.line.open(ModelServer.loaded, self._named(context))

    async def count_request(self, client: str) -> Counted:
        """See `ModelServer`."""
        config = self.config
        if not (config.rate_limit_requests or config.rate_limit_tokens or config.keys_file):
            return Counted()
        return await ask(self.line, ModelServer.count_request, client)

    # -- calls that are sent as they are

    end_thinking = _asked(ModelServer.end_thinking)
    embed = _asked(ModelServer.embed)
    rerank = _asked(ModelServer.rerank)
    classify = _asked(ModelServer.classify)
    tokenize = _asked(ModelServer.tokenize)
    detokenize = _asked(ModelServer.detokenize)
    names_of = _asked(ModelServer.names_of)
    prompt_for = _asked(ModelServer.prompt_for)
    sleep = _asked(ModelServer.sleep)
    status = _asked(ModelServer.status)
    check_live = _asked(ModelServer.check_live)
    idle_seconds = _asked(ModelServer.idle_seconds)
    written_metrics = _asked(ModelServer.written_metrics)
    set_scales = _asked(ModelServer.set_scales)
    load_adapter = _asked(ModelServer.load_adapter)
    unload_adapter = _asked(ModelServer.unload_adapter)
    save_slot = _asked(ModelServer.save_slot)
    restore_slot = _asked(ModelServer.restore_slot)
    erase_slot = _asked(ModelServer.erase_slot)


async def _parsed(messages: Messages) -> ParsedMessages:
    if isinstance(messages, ParsedMessages):
        return messages
    return await offload(partial(parse_messages, messages), n_chars(messages))
