"""`ChildServer`: a model in a process of its own, as the app sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from functools import partial
from typing import Any, Unpack

import attrs
import trio

from trioserve.chat.messages import Messages as ParsedMessages, parse_messages
from trioserve.chat.params import ChatParams
from trioserve.concurrency import Gate, alongside
from trioserve.config import Config
from trioserve.errors import RateLimitError, ServerSleepingError, TrioServeError
from trioserve.fair_limiter import offload
from trioserve.model_process import calls
from trioserve.model_process.connection import Line, OpenCall, ask
from trioserve.model_process.messages import (
    MediaPart,
    Opened,
    PromptFacts,
    SentPrompt,
    read_value,
    sent_context,
    sent_prompt,
)
from trioserve.server.adapters import AdapterNames, AdapterScales
from trioserve.server.context import ANYONE, RequestContext
from trioserve.server.generation.embeddings import Classification, Embeddings, Ranking
from trioserve.server.generation.requests import Queue
from trioserve.server.generation.slots import Moved
from trioserve.server.generation.text import ChatOpening
from trioserve.server.keywords import ContextFields, RenderFields, only_chat, only_context
from trioserve.server.limits.memory import BYTES_PER_TOKEN, MemoryBudget, MemoryReservation
from trioserve.server.limits.rates import Counted
from trioserve.server.model import LoadedModel
from trioserve.server.model_server import ModelServer
from trioserve.server.observers.observer import Observer
from trioserve.server.prompts.infill import Gap
from trioserve.server.prompts.text import AnyPrompt, Messages, PromptLike, n_chars
from trioserve.server.stream import Stream
from trioserve.server.transcription.transcript import (
    Segment,
    Summary,
    Text,
    TranscriptionParams,
    TranscriptStream,
)
from trioserve.tools.registry import ToolRegistry
from trioserve.types import EngineStatus, GenerationParams, MediaSource, Prompt, TokenId


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

    async def set(self, scales: Mapping[int, float]) -> None:
        """See `AdapterNames`."""
        await ask(self._line, calls.set_scales, dict(scales))

    async def load(self, name: str, path: str, *, context: RequestContext = ANYONE) -> None:
        """See `AdapterNames`."""
        await ask(self._line, calls.load_adapter, name, path, sent_context(context))

    async def unload(self, name: str, *, context: RequestContext = ANYONE) -> None:
        """See `AdapterNames`."""
        await ask(self._line, calls.unload_adapter, name, sent_context(context))


def model_of(line: Line) -> LoadedModel:
    """The model at the end of a line. Raises ServerSleepingError: it was never loaded."""
    if (model := line.known.model) is None:
        raise ServerSleepingError
    return model


class ChildServer(ModelServer):
    """A model in a process of its own.

    Prompts in results lack what their media show. A chat that becomes several prompts has its
    media read for each.

    Args:
        line: leads to the process.
        config: of the model.
        tools: that runs may use.
        memory: the budget of what requests hold in this process.
        observers: of the runs.
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

    def _sent(self, context: RequestContext) -> RequestContext:
        if self._client and not context.client:
            context = attrs.evolve(context, client=self._client)
        return sent_context(context)

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
        given = [sent_prompt(each) for each in prompts]
        work = self.line.open(calls.stream_all, given, params, n, self._sent(context))
        async with work as call:
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
        given = await _sent(messages)
        work = self.line.open(calls.open_chats, given, params, _plain(chat), n, self._sent(context))
        async with work as call:
            with self._streams(call, context) as streams:
                yield call.value.opening, streams

    @contextmanager
    def _streams(self, call: OpenCall, context: RequestContext) -> Iterator[list[Stream]]:
        """Make the streams of the tasks that a call has opened."""
        opened: Opened = call.value
        with self.memory.hold(context.client) as held:
            streams = []
            for mailbox, (_, facts) in zip(call.mailboxes, opened.tasks, strict=True):
                held.grow(mailbox.n_prompt * BYTES_PER_TOKEN)
                streams.append(Stream(facts.prompt, mailbox, call.source, held))
            yield streams

    async def end_thinking(self, task_id: int) -> bool:
        """See `ModelServer`."""
        return await ask(self.line, calls.end_thinking, task_id)

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
        given = await trio.to_thread.run_sync(MediaPart.of, source)
        work = self.line.open(calls.transcribe, given, params, self._sent(context))
        async with work as call:
            stream = TranscriptStream(call.value)

            async def follow() -> None:
                try:
                    async for kind, event in call.events:
                        stream.put(read_value(event, _EVENTS[kind]))
                except TrioServeError as error:
                    stream.end(error)

            async with alongside(follow):
                yield stream

    # -- embeddings

    async def embed(
        self,
        inputs: str | Sequence[AnyPrompt],
        *,
        dimensions: int | None = None,
        normalize: int | None = None,
        priority: int = 0,
        context: RequestContext = ANYONE,
        **fields: Unpack[ContextFields],
    ) -> Embeddings:
        """See `ModelServer`."""
        sent = self._sent(only_context(fields, context))
        given = _inputs(inputs)
        return await ask(self.line, calls.embed, given, dimensions, normalize, priority, sent)

    async def rerank(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        most: int | None = None,
        priority: int = 0,
        context: RequestContext = ANYONE,
        **fields: Unpack[ContextFields],
    ) -> Ranking:
        """See `ModelServer`."""
        one = query if isinstance(query, str) else list(query)
        others = documents if isinstance(documents, str) else list(documents)
        sent = self._sent(only_context(fields, context))
        return await ask(self.line, calls.rerank, one, others, most, priority, sent)

    async def classify(
        self,
        inputs: str | Sequence[PromptLike],
        *,
        priority: int = 0,
        context: RequestContext = ANYONE,
        **fields: Unpack[ContextFields],
    ) -> Classification:
        """See `ModelServer`."""
        sent = self._sent(only_context(fields, context))
        return await ask(self.line, calls.classify, _inputs(inputs), priority, sent)

    # -- tokens and rendered chats

    async def biases_of(self, biases: Any) -> Any:
        """See `ModelServer`."""
        if isinstance(biases, Mapping):
            biases = list(biases.items())
        found = await ask(self.line, calls.biases_of, biases)
        return tuple(map(tuple, found)) if isinstance(found, list) else found

    async def tokenize(
        self,
        prompt: PromptLike,
        *,
        param: str = "prompt",
        add_special: bool = True,
        parse_special: bool = True,
    ) -> tuple[TokenId, ...]:
        """See `ModelServer`."""
        special = (add_special, parse_special)
        return await ask(self.line, calls.tokenize, _text(prompt), param, special)

    async def detokenize(self, tokens: Sequence[TokenId] | Prompt) -> str:
        """See `ModelServer`."""
        if not isinstance(tokens, Prompt):
            return await ask(self.line, calls.detokenize, list(tokens))
        return await ask(self.line, calls.text_of, PromptFacts.of(tokens))

    async def names_of(self, tokens: Sequence[TokenId]) -> Sequence[bytes]:
        """See `ModelServer`."""
        return await ask(self.line, calls.names_of, list(tokens))

    async def prompt_for(self, gap: Gap, max_tokens: int) -> Sequence[TokenId]:
        """See `ModelServer`."""
        around = (_text(gap.prefix), _text(gap.suffix))
        return await ask(self.line, calls.prompt_for, around, gap.extra, gap.beginning, max_tokens)

    async def render(
        self, messages: Messages, chat: ChatParams | None = None, **fields: Unpack[RenderFields]
    ) -> str:
        """See `ModelServer`."""
        chat = _plain(only_chat(fields, chat))
        return await ask(self.line, calls.render, await _sent(messages), chat)

    async def chat_prompt(self, messages: Messages, chat: ChatParams) -> Prompt:
        """See `ModelServer`."""
        given = await _sent(messages)
        return (await ask(self.line, calls.chat_prompt, given, _plain(chat))).prompt

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
        return self.line.open(calls.keep, self._sent(context))

    async def sleep(self) -> None:
        """See `ModelServer`."""
        await ask(self.line, calls.sleep)

    async def status(self) -> EngineStatus:
        """See `ModelServer`."""
        return await ask(self.line, calls.status)

    # -- slots and limits

    async def save_slot(self, slot_id: int, filename: str, client: str = "") -> Moved:
        """See `ModelServer`."""
        return await ask(self.line, calls.move_slot, "save", slot_id, filename, client)

    async def restore_slot(self, slot_id: int, filename: str, client: str = "") -> Moved:
        """See `ModelServer`."""
        return await ask(self.line, calls.move_slot, "restore", slot_id, filename, client)

    async def erase_slot(self, slot_id: int, client: str = "") -> int:
        """See `ModelServer`."""
        return (await ask(self.line, calls.move_slot, "erase", slot_id, "", client)).n_tokens

    async def count_request(self, client: str) -> Counted:
        """See `ModelServer`."""
        config = self.config
        if not (config.rate_limit_requests or config.rate_limit_tokens or config.keys_file):
            return Counted()
        left, error = await ask(self.line, calls.count_request, client)
        found = None if error is None else error.error
        return Counted(lambda: left, found if isinstance(found, RateLimitError) else None)


#: The events of a transcript, by the names of their classes.
_EVENTS = {each.__name__: each for each in (Text, Segment, Summary)}


async def _parsed(messages: Messages) -> ParsedMessages:
    if isinstance(messages, ParsedMessages):
        return messages
    return await offload(partial(parse_messages, messages), n_chars(messages))


async def _sent(messages: Messages) -> list[dict[str, Any]]:
    """Write messages in normal form."""
    return list(await _parsed(messages))


def _plain(chat: ChatParams) -> ChatParams:
    """Make dicts and lists of what a program may have given as other types."""
    tools = None if chat.tools is None else [dict(each) for each in chat.tools]
    return attrs.evolve(chat, tools=tools, template_kwargs=dict(chat.template_kwargs))


def _text(prompt: PromptLike) -> str | list[TokenId | str]:
    if isinstance(prompt, str):
        return prompt
    return list(prompt.tokens if isinstance(prompt, Prompt) else prompt)


def _inputs(inputs: str | Sequence[AnyPrompt]) -> str | list[SentPrompt]:
    return inputs if isinstance(inputs, str) else [sent_prompt(each) for each in inputs]
