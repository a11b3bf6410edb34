"""`Server`: a model that answers requests inside an ``async with`` block."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from typing import Any, Unpack

import trio

from trioserve import llama
from trioserve.chat.messages import Messages as ParsedMessages
from trioserve.chat.params import ChatParams
from trioserve.concurrency import EnteredOnce, alongside
from trioserve.config import Config
from trioserve.errors import ConfigError, NotSupportedError, RateLimitError
from trioserve.server.context import ANYONE, RequestContext
from trioserve.server.generation.embeddings import (
    Classification,
    Cut,
    Embedder,
    Embeddings,
    Ranking,
)
from trioserve.server.generation.requests import Queue, ServerResources, cache_owner
from trioserve.server.generation.slots import Moved
from trioserve.server.generation.text import ChatOpening
from trioserve.server.keys import Keys
from trioserve.server.keywords import ContextFields, RenderFields, only_chat, only_context
from trioserve.server.lifecycle.engine import Driver, Loader, in_thread
from trioserve.server.lifecycle.sleep import ModelLifecycle, ServerState
from trioserve.server.limits.memory import MemoryReservation
from trioserve.server.limits.rates import Counted
from trioserve.server.model import LoadedModel
from trioserve.server.model_server import ModelServer
from trioserve.server.observers.metrics import render_process
from trioserve.server.observers.observer import Observer
from trioserve.server.prompts.infill import Gap
from trioserve.server.prompts.text import AnyPrompt, Messages, PromptLike
from trioserve.server.speech.speech import PLAIN, SpeechParams, SpeechStream
from trioserve.server.stream import Stream
from trioserve.server.transcription.transcript import TranscriptionParams, TranscriptStream
from trioserve.server.usage import Usage
from trioserve.tools.registry import ToolRegistry, open_registry
from trioserve.types import EngineStatus, GenerationParams, MediaSource, Prompt, TokenId


class Server(EnteredOnce, ModelServer):
    """A loaded model, ready for requests inside ``async with Server(config) as server:``.

    Entering loads the model in a worker thread. Leaving ends all running requests (their readers
    get a `ServerClosingError`), joins the inference thread and frees the memory; call `drain`
    before to let requests finish.

    The server frees the memory of its model after `Config.sleep_idle_seconds` without requests, or
    when `sleep` is called. The next call that needs the model loads it again, and waits for that.
    Each such call may therefore raise `ModelLoadError`.

    Args:
        config: the model and its settings; the default is the bundled model.
        load: loads the model. The default loads a GGUF file with llama.cpp.
        drive: runs the engine. The default runs it on a thread.
        asleep: start without loading the model; the first request loads it.
        room: a context manager around the model's time in memory, which makes room for it.
        observers: called with the events of requests; see `telemetry` for batches of them.
        keys: the API keys, which another one keeps up to date; by default the server's own.
        usage: counts what they use; by default for this server, and in memory only.

    Raises:
        ConfigError: the model needs a separate process; or on entry, when the file of API keys
            cannot be used.
        ModelLoadError: on entry, when the model cannot be loaded.
        HubError: on entry, when the model cannot be downloaded.
        BridgeError: on entry, when no descriptors are left.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        load: Loader = llama.load,
        drive: Driver = in_thread,
        asleep: bool = False,
        room: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
        observers: Iterable[Observer] = (),
        keys: Keys | None = None,
        usage: Usage | None = None,
    ) -> None:
        self.config = config or Config()
        if self.config.rpc and load is llama.load:
            raise ConfigError("rpc: a machine that fails ends the process, so such a model needs "
                              "a separate one: use the command, or ChildModels")  # fmt: skip
        all_keys = keys or Keys(self.config)
        self._own_keys = all_keys if keys is None else None
        resources = ServerResources(self.config, all_keys, usage)
        self.resources = resources
        self.memory, self.metrics = resources.memory, resources.metrics
        self.observers, self.telemetry = resources.observers, resources.telemetry
        self.observers.extend(observers)
        #: The configured tools, while the server runs. They work without the model.
        self.tools = ToolRegistry()
        #: Loads the model, puts it to sleep and wakes it.
        self.lifecycle = ModelLifecycle(resources, load, drive, room, asleep)
        self.adapters, self.gate = self.lifecycle.adapters, resources.gate
        self.queue = Queue(self.status)

    @asynccontextmanager
    async def _live(self) -> AsyncIterator[None]:
        self.lifecycle.open()
        jobs = [self.memory.keep_trim, self.lifecycle.run]
        if self._own_keys is not None:
            await self._own_keys.open()
            jobs.append(self._own_keys.follow)
        async with (
            self.resources.traced(),
            open_registry(self.config) as self.tools,
            alongside(*jobs),
        ):
            if not self.lifecycle.sleeping:
                async with self.loaded():
                    pass
            await self.tools.listed()
            try:
                yield
            finally:
                self.lifecycle.close()

    # -- requests

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
        async with AsyncExitStack() as stack:
            with self.lifecycle.gate.open(), context.preparing():
                services = await stack.enter_async_context(self.lifecycle.use(context))
                streams = await services.text.stream(stack, prompts, params, context, n)
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
        async with AsyncExitStack() as stack:
            with self.lifecycle.gate.open(), context.preparing():
                services = await stack.enter_async_context(self.lifecycle.use(context))
                open_chats = services.text.open_chats
                opened = await open_chats(stack, messages, params, chat, context, n)
            yield opened

    async def end_thinking(self, task_id: int) -> bool:
        """See `ModelServer`."""
        return await self.lifecycle.services.text.end_thinking(task_id)

    async def read_media(
        self, messages: Messages, hold: MemoryReservation, context: RequestContext
    ) -> ParsedMessages:
        """See `ModelServer`."""
        async with self.lifecycle.use(context) as services:
            return await services.media.load_once(await services.prompts.parse(messages), hold)

    @asynccontextmanager
    async def _embedder(
        self, context: RequestContext, check: Callable[[LoadedModel], None]
    ) -> AsyncIterator[Embedder]:
        async with (
            self.lifecycle.use(context, check) as services,
            services.embedder(context) as embedder,
        ):
            yield embedder

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
        context = only_context(fields, context)
        with self.lifecycle.gate.open():
            async with self._embedder(context, LoadedModel.check_embeds) as embedder:
                return await embedder.embed(inputs, dimensions, normalize, priority, context)

    async def rerank(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        most: int | None = None,
        cut: Cut | None = None,
        priority: int = 0,
        context: RequestContext = ANYONE,
        **fields: Unpack[ContextFields],
    ) -> Ranking:
        """See `ModelServer`."""
        context = only_context(fields, context)
        with self.lifecycle.gate.open():
            async with self._embedder(context, LoadedModel.check_ranks) as embedder:
                cuts = most, cut
                return await embedder.rerank(query, documents, cuts, priority, context)

    async def classify(
        self,
        inputs: str | Sequence[PromptLike],
        *,
        priority: int = 0,
        context: RequestContext = ANYONE,
        **fields: Unpack[ContextFields],
    ) -> Classification:
        """See `ModelServer`."""
        context = only_context(fields, context)
        with self.lifecycle.gate.open():
            async with self._embedder(context, LoadedModel.check_classifies) as embedder:
                return await embedder.classify(inputs, priority, context)

    @asynccontextmanager
    async def transcribing(
        self, source: MediaSource, params: TranscriptionParams, context: RequestContext
    ) -> AsyncIterator[TranscriptStream]:
        """See `ModelServer`."""
        async with (
            self.lifecycle.use(context, LoadedModel.check_transcribes) as services,
            services.transcriptions.stream(source, params, context) as stream,
        ):
            yield stream

    @asynccontextmanager
    async def speaking(
        self, text: str, params: SpeechParams = PLAIN, context: RequestContext = ANYONE
    ) -> AsyncIterator[SpeechStream]:
        """See `ModelServer`."""
        async with (
            self.lifecycle.use(context, LoadedModel.check_speaks) as services,
            services.speaker.stream(text, params, context) as stream,
        ):
            yield stream

    # -- tokens and rendered chats

    async def biases_of(self, biases: Any) -> Any:
        """See `ModelServer`."""
        async with self.lifecycle.use(ANYONE) as services:
            return await services.tokenizer.biases_of(biases)

    async def tokenize(
        self,
        prompt: PromptLike,
        *,
        param: str = "prompt",
        add_special: bool = True,
        parse_special: bool = True,
    ) -> tuple[TokenId, ...]:
        """See `ModelServer`."""
        async with self.lifecycle.use(ANYONE) as services:
            made = await services.tokenizer.prompt_of(
                prompt, add_special=add_special, parse_special=parse_special, aside=True
            )
        made.check(self.model.vocab.n_tokens, param)
        return made.tokens

    async def detokenize(self, tokens: Sequence[TokenId] | Prompt) -> str:
        """See `ModelServer`."""
        async with self.lifecycle.use(ANYONE) as services:
            return services.tokenizer.detokenize(tokens)

    async def names_of(self, tokens: Sequence[TokenId]) -> Sequence[bytes]:
        """See `ModelServer`."""
        async with self.lifecycle.use(ANYONE) as services:
            names = services.model.vocab.names
            return [names[token] for token in tokens]

    async def prompt_for(self, gap: Gap, max_tokens: int) -> Sequence[TokenId]:
        """See `ModelServer`."""
        async with self.lifecycle.use(ANYONE) as services:
            return await services.infill.prompt_for(gap, max_tokens)

    async def render(
        self, messages: Messages, chat: ChatParams | None = None, **fields: Unpack[RenderFields]
    ) -> str:
        """See `ModelServer`."""
        chat = only_chat(fields, chat)
        async with self.lifecycle.use(ANYONE) as services:
            return await services.prompts.render_marked(messages, chat)

    async def chat_prompt(self, messages: Messages, chat: ChatParams) -> Prompt:
        """See `ModelServer`."""
        with self.lifecycle.gate.open():
            async with self.lifecycle.use(ANYONE) as services:
                return await services.prompts.chat_prompt(messages, chat)

    # -- the model

    @property
    def model(self) -> LoadedModel:
        """See `ModelServer`."""
        return self.lifecycle.model

    @property
    def sleeping(self) -> bool:
        """See `ModelServer`."""
        return self.lifecycle.sleeping

    async def known_model(self, context: RequestContext = ANYONE) -> LoadedModel:
        """See `ModelServer`."""
        return await self.lifecycle.known_model(context)

    @property
    def state(self) -> ServerState:
        """The state of the model."""
        state: ServerState = self.lifecycle.state.value
        return state

    def loaded(
        self, context: RequestContext = ANYONE, **fields: Unpack[ContextFields]
    ) -> AbstractAsyncContextManager[object]:
        """See `ModelServer`."""
        return self.lifecycle.use(only_context(fields, context) if fields else context)

    async def sleep(self) -> None:
        """See `ModelServer`."""
        await self.lifecycle.end()

    async def drain(self, timeout: float = math.inf) -> None:
        """Reject new requests, and let running ones finish within `timeout` seconds.

        After that, remaining requests are ended: their readers get a `ServerClosingError`. Requests
        that wait for the model to load are ended at once. When cancelled, the server keeps
        rejecting new requests, and running ones continue.
        """
        await self.lifecycle.drain(timeout)

    async def status(self) -> EngineStatus:
        """See `ModelServer`."""
        return await self.lifecycle.status()

    async def check_live(self) -> None:
        """See `ModelServer`."""
        self.lifecycle.check_live()

    async def idle_seconds(self) -> float:
        """See `ModelServer`."""
        return self.lifecycle.idle_until - trio.current_time()

    async def written_metrics(self, *, as_json: bool = False) -> str:
        """See `ModelServer`."""
        if self.metrics is None:
            raise NotSupportedError("This model has no metrics. Start it with `--metrics`")
        now = await self.status()
        if as_json:
            return json.dumps(self.metrics.snapshot(now))
        own = await trio.to_thread.run_sync(render_process)
        return (self.metrics.render(now) + own).decode()

    # -- LoRA adapters

    async def set_scales(self, scales: Mapping[int, float]) -> None:
        """See `ModelServer`."""
        self.adapters.scales.set(scales)

    async def load_adapter(self, name: str, path: str, context: RequestContext = ANYONE) -> None:
        """See `ModelServer`."""
        await self.lifecycle.adapters.load(name, path, context)

    async def unload_adapter(self, name: str, context: RequestContext = ANYONE) -> None:
        """See `ModelServer`."""
        await self.lifecycle.adapters.unload(name, context)

    # -- slots and limits

    async def save_slot(self, slot_id: int, filename: str, client: str = "") -> Moved:
        """See `ModelServer`."""
        return await self.lifecycle.services.slots.save(slot_id, filename, self._owner(client))

    async def restore_slot(self, slot_id: int, filename: str, client: str = "") -> Moved:
        """See `ModelServer`."""
        return await self.lifecycle.services.slots.restore(slot_id, filename, self._owner(client))

    async def erase_slot(self, slot_id: int, client: str = "") -> int:
        """See `ModelServer`."""
        return await self.lifecycle.services.slots.erase(slot_id, self._owner(client))

    def _owner(self, client: str) -> str:
        return cache_owner(self.config, client)

    async def count_request(self, client: str) -> Counted:
        """See `ModelServer`."""
        if (limits := self.resources.rate_limits) is None:
            return Counted()
        error = None
        try:
            limits.admit(client)
        except RateLimitError as reached:
            error = reached
        return Counted(partial(limits.remaining, client), error)
