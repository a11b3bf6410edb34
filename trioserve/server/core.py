"""`ServerCore`: what answers requests, for the APIs. Programs use `Server`, which has one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)
from typing import Any

import trio

from trioserve import llama
from trioserve.chat.params import ChatParams
from trioserve.concurrency import EnteredOnce, alongside
from trioserve.config import Config
from trioserve.errors import ConfigError, ServerClosingError
from trioserve.server.adapters import AdapterNames, AdapterScales
from trioserve.server.context import ANYONE, RequestContext, take_params
from trioserve.server.generation.embeddings import Classification, Embeddings, Ranking
from trioserve.server.generation.requests import ServerResources
from trioserve.server.generation.slots import SlotFiles
from trioserve.server.generation.text import check_copies
from trioserve.server.keys import Keys
from trioserve.server.lifecycle.engine import Driver, Loader, in_thread
from trioserve.server.lifecycle.sleep import ModelLifecycle
from trioserve.server.limits.admission import Queue
from trioserve.server.model import LoadedModel
from trioserve.server.prompts.infill import InfillPrompts
from trioserve.server.prompts.text import AnyPrompt, Messages, PromptLike
from trioserve.server.runs.loop import Question, check_chat, open_run
from trioserve.server.runs.params import AnyTool, RunParams, RunTools, tools_of
from trioserve.server.runs.run import AgentRun
from trioserve.server.stream import ChatStream, Stream
from trioserve.server.transcription.transcript import (
    Transcript,
    TranscriptionParams,
    Transcriptions,
)
from trioserve.server.usage import Usage
from trioserve.tools.registry import ToolRegistry, open_registry
from trioserve.types import EngineStatus, GenerationParams, MediaSource, Prompt, TokenId


class ServerCore(EnteredOnce):
    """Answers requests inside its ``async with`` block. Parameters are objects, checked already.

    Entering loads the model in a worker thread. Leaving ends all running requests (their readers
    get a `ServerClosingError`), joins the inference thread and frees the memory.

    The memory of the model is freed after `Config.sleep_idle_seconds` without requests, or by
    `sleep`. The next call that needs the model loads it again and may raise `ModelLoadError`.

    Args:
        config: the model and its settings; the default is the bundled model.
        load: loads the model. The default loads a GGUF file with llama.cpp.
        drive: runs the engine. The default runs it on a thread.
        asleep: start without loading the model; the first request loads it.
        room: a context manager around the model's time in memory, which makes room for it.
        keys: the API keys, which another one keeps up to date; by default the server's own.
        usage: counts what they use; by default for this server, and in memory only.

    Raises:
        ConfigError: on entry, when the file of API keys cannot be used.
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
        keys: Keys | None = None,
        usage: Usage | None = None,
    ) -> None:
        self.config = config or Config()
        if self.config.rpc and load is llama.load:
            raise ConfigError("rpc: a machine that fails ends the process, so such a model needs "
                              "a separate one: use the command, or ChildModels")  # fmt: skip
        self._keeps_keys = keys is None
        self.resources = ServerResources(self.config, keys or Keys(self.config), usage or Usage())
        #: The memory budget of requests, including unread requests of other connections.
        self.memory = self.resources.memory
        #: Request metrics; None unless the configuration enables them.
        self.metrics = self.resources.metrics
        #: Observers of requests.
        self.observers = self.resources.observers
        #: Passes events to callbacks of a program; see `Telemetry.subscribe`.
        self.telemetry = self.resources.telemetry
        #: The configured tools, while the server runs. They work without the model.
        self.tools = ToolRegistry()
        #: Loads the model, puts it to sleep and wakes it.
        self.lifecycle = ModelLifecycle(self.resources, load, drive, room, asleep)
        #: The state of the model, as a value to wait for. Do not change it.
        self.state = self.lifecycle.state

    @asynccontextmanager
    async def _live(self) -> AsyncIterator[None]:
        jobs = [self.memory.keep_trim, self.lifecycle.run]
        if self._keeps_keys:
            await self.resources.keys.open()
            jobs.append(self.resources.keys.follow)
        async with (
            self.resources.traced(),
            open_registry(self.config) as self.tools,
            alongside(*jobs),
        ):
            if not self.sleeping:
                await self.wake()
            await self.tools.listed()
            try:
                yield
            finally:
                self.lifecycle.close()

    def _admitted(self, context: RequestContext) -> AbstractContextManager[None]:
        """Prepare a request, or do all of it, in a block that draining waits for."""
        return self.lifecycle.gate.open(has_begun=context.has_begun)

    # -- completions and chats

    @asynccontextmanager
    async def stream_all(
        self,
        prompts: Sequence[AnyPrompt],
        params: GenerationParams,
        *,
        n: int = 1,
        context: RequestContext = ANYONE,
    ) -> AsyncIterator[list[Stream]]:
        """Continue each prompt `n` times, concurrently. Leaving the block cancels all requests.

        The outputs of one prompt are adjacent, in the order of their seeds. Raises as
        `Server.stream_complete`.
        """
        async with AsyncExitStack() as stack:
            with self._admitted(context), context.preparing():
                services = await stack.enter_async_context(self.lifecycle.use(context))
                streams = await services.text.stream(stack, prompts, params, context, n)
            yield streams

    @asynccontextmanager
    async def stream_chats(
        self,
        messages: Messages,
        params: GenerationParams,
        chat: ChatParams,
        *,
        n: int = 1,
        context: RequestContext = ANYONE,
    ) -> AsyncIterator[list[ChatStream]]:
        """Answer a chat `n` times, concurrently. Raises as `Server.stream_chat`."""
        async with AsyncExitStack() as stack:
            with self._admitted(context), context.preparing():
                services = await stack.enter_async_context(self.lifecycle.use(context))
                generator = services.text
                streams = await generator.stream_chats(stack, messages, params, chat, context, n)
            yield streams

    @asynccontextmanager
    async def stream_run(
        self,
        messages: Messages,
        tools: Sequence[AnyTool] | None,
        params: GenerationParams,
        chat: ChatParams,
        run: RunParams,
        *,
        context: RequestContext = ANYONE,
    ) -> AsyncIterator[AgentRun]:
        """Answer a chat and run the tools that the model calls. See `Server.stream_run`."""
        check_chat(chat, self.config, self.model)
        chosen = RunTools.of(tools_of(tools, self.tools, self.model.n_ctx_seq), chat.tools or ())
        self.tools.check(run.place)
        loading = trio.CancelScope()
        with (
            self.memory.hold(context.client) as hold,
            self.lifecycle.gate.open(lambda _error: loading.cancel(), has_begun=context.has_begun),
        ):
            with context.preparing(), loading:
                async with self.lifecycle.use(context) as services:
                    loaded = await services.prompts.load(messages, hold)
            if loading.cancelled_caught:
                raise ServerClosingError
            question = Question(loaded, params, chat, context, run)
            async with open_run(self, question, chosen) as opened:
                yield opened

    # -- embeddings and recordings

    async def embed(
        self,
        inputs: str | Sequence[AnyPrompt],
        *,
        dimensions: int | None = None,
        normalize: int | None = None,
        priority: int = 0,
        context: RequestContext = ANYONE,
    ) -> Embeddings:
        """Compute an embedding of each text. See `Server.embed`."""
        with self._admitted(context):
            async with self.lifecycle.use(context, LoadedModel.check_embeds) as services:
                embed = services.embedder.embed
                return await embed(inputs, dimensions, normalize, priority, context)

    async def rerank(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        most: int | None = None,
        priority: int = 0,
        context: RequestContext = ANYONE,
    ) -> Ranking:
        """Score how well each document fits a query. See `Server.rerank`.

        Of each document, at most the first `most` tokens count; None: all.
        """
        with self._admitted(context):
            async with self.lifecycle.use(context, LoadedModel.check_ranks) as services:
                return await services.embedder.rerank(query, documents, most, priority, context)

    async def classify(
        self,
        inputs: str | Sequence[PromptLike],
        *,
        priority: int = 0,
        context: RequestContext = ANYONE,
    ) -> Classification:
        """Score each text for each class. See `Server.classify`."""
        with self._admitted(context):
            async with self.lifecycle.use(context, LoadedModel.check_classifies) as services:
                return await services.embedder.classify(inputs, priority, context)

    async def transcribe(
        self,
        source: MediaSource,
        params: TranscriptionParams,
        *,
        context: RequestContext = ANYONE,
    ) -> Transcript:
        """Transcribe a recording. See `Server.transcribe`."""
        async with (
            self.lifecycle.use(context, LoadedModel.check_transcribes) as services,
            services.transcriptions.stream(source, params, context) as stream,
        ):
            return await stream.read()

    # -- parameters, tokens and rendered chats

    async def params(
        self,
        fields: Mapping[str, Any],
        base: GenerationParams | None = None,
        *,
        n: int = 1,
        context: RequestContext = ANYONE,
    ) -> GenerationParams:
        """Make parameters from fields of `GenerationParams` and `SamplingParams`, by name.

        Unset fields are as in `base`, or as in the server's configuration. `logit_bias` may name
        text in place of a token id. `n` is the number of outputs of each prompt. The deadline
        of the context includes the wait for a model that was never loaded.

        Raises:
            InvalidRequestError: a field is unknown, has the wrong type or is out of range.
            NotSupportedError: the server generates no text.
        """
        with context.preparing():
            model = await self.lifecycle.known_model(context)
            if model.pooling is not None:
                model.check_generates()
            check_copies(n, model.n_slots)
            fields = dict(fields)
            if fields.get("logit_bias") is not None:
                async with self.lifecycle.use(context) as services:
                    fields["logit_bias"] = await services.tokenizer.biases_of(fields["logit_bias"])
        return take_params(fields, base or model.defaults)

    async def tokenize(
        self,
        prompt: PromptLike,
        *,
        param: str = "prompt",
        add_special: bool = True,
        parse_special: bool = True,
    ) -> tuple[TokenId, ...]:
        """Convert text to token ids; see `Vocab.tokenize`. Ids in the input are kept.

        Long text is tokenized in a worker thread. Special tokens are added if it begins with text.

        Raises:
            InvalidRequestError: text cannot be encoded, or an id is not in the vocabulary; `param`
                names the field.
        """
        async with self.lifecycle.use(ANYONE) as services:
            made = await services.tokenizer.prompt_of(
                prompt, add_special=add_special, parse_special=parse_special, aside=True
            )
        made.check(self.model.vocab.n_tokens, param)
        return made.tokens

    def detokenize(self, tokens: Sequence[TokenId] | Prompt) -> str:
        """Convert token ids to text. Invalid bytes become U+FFFD.

        Media in a `Prompt` become ``[image]`` or the like.

        Raises:
            InvalidRequestError: an id is not in the vocabulary.
            ServerSleepingError: the server sleeps; `awake` loads the model.
        """
        return self.lifecycle.services.tokenizer.detokenize(tokens)

    async def render(self, messages: Messages, chat: ChatParams) -> str:
        """Render a chat with the model's template. See `Server.render`."""
        async with self.lifecycle.use(ANYONE) as services:
            return await services.prompts.render_marked(messages, chat)

    async def chat_prompt(self, messages: Messages, chat: ChatParams) -> Prompt:
        """Make the prompt of a chat. Its length counts the cells of media, too."""
        with self._admitted(ANYONE):
            async with self.lifecycle.use(ANYONE) as services:
                return await services.prompts.chat_prompt(messages, chat)

    # -- sleep

    @property
    def sleeping(self) -> bool:
        """Whether the model is not in memory. True until a request has loaded it again."""
        return self.lifecycle.sleeping

    def awake(self, context: RequestContext = ANYONE) -> AbstractAsyncContextManager[object]:
        """Keep the model in memory during a block. Loads it if needed. See `Server.loaded`."""
        return self.lifecycle.use(context)

    async def wake(self) -> None:
        """Load the model if the server sleeps. Raises as `Server.loaded`."""
        async with self.awake():
            pass

    async def sleep(self) -> None:
        """Free the model's memory as soon as no request runs, and wait for that.

        The next request loads the model again, with empty caches. When cancelled, the server stays
        awake, unless it is falling asleep already. Inside `awake`, this would wait for itself.
        """
        await self.lifecycle.end()

    @property
    def slots(self) -> SlotFiles:
        """Saves, restores and erases slots. Raises as `model`, and while asleep."""
        return self.lifecycle.services.slots

    # -- LoRA adapters

    @property
    def adapter_names(self) -> AdapterNames:
        """The LoRA adapters by name, also while the server sleeps."""
        return self.lifecycle.adapter_names

    def adapter_of(self, model: str | None) -> str | None:
        """The adapter that a name of a model means; None: it means the model without one.

        Raises:
            UnknownModelError: there is no such adapter.
            ServerSleepingError: as `model`.
        """
        return self.adapter_names.named(model, self._names)

    async def load_adapter(self, name: str, path: str, *, context: RequestContext = ANYONE) -> None:
        """Load an adapter from a file in `Config.lora_dir`. Requests that run are not affected.

        Raises:
            InvalidRequestError: the name is taken, or the file cannot be used.
            NotSupportedError: there is no such folder, or the model generates no text.
        """
        self.adapter_names.check()
        with self._admitted(context):
            async with self.lifecycle.use(context, LoadedModel.check_generates) as services:
                await self.adapter_names.load(services, name, path, self._names)

    async def unload_adapter(self, name: str, *, context: RequestContext = ANYONE) -> None:
        """Free an adapter that `load_adapter` has loaded.

        Raises:
            UnknownModelError: there is none of this name.
            AdapterInUseError: a request runs or waits with it.
            NotSupportedError: as `load_adapter`.
        """
        self.adapter_names.check()
        with self._admitted(context):
            async with self.lifecycle.use(context, LoadedModel.check_generates) as services:
                await self.adapter_names.unload(services, name)

    @property
    def _names(self) -> Sequence[str]:
        return (self.model.info.name, *self.config.aliases)

    @property
    def adapters(self) -> AdapterScales:
        """The LoRA adapters, and their default scales. Raises as `slots`."""
        return self.lifecycle.services.adapters

    @property
    def queue(self) -> Queue:
        """The positions of waiting requests. Raises as `slots`."""
        return self.lifecycle.services.queue

    @property
    def transcriptions(self) -> Transcriptions:
        """Transcribes recordings as streams. Raises as `slots`."""
        return self.lifecycle.services.transcriptions

    @property
    def infill(self) -> InfillPrompts:
        """Makes prompts to fill a gap in a text. Raises as `slots`."""
        return self.lifecycle.services.infill

    @property
    def model(self) -> LoadedModel:
        """The properties of the model, also while the server sleeps.

        Raises:
            ServerSleepingError: the server started asleep and has not loaded the model yet.
            ServerClosingError: the server closed before it loaded the model.
        """
        return self.lifecycle.model

    async def drain(self, timeout: float) -> None:
        """Reject new requests, and let running ones finish within `timeout` seconds.

        After that, remaining requests are ended: their readers get a `ServerClosingError`. Requests
        that wait for the model to load are ended at once. When cancelled, the server keeps
        rejecting new requests, and running ones continue.
        """
        await self.lifecycle.drain(timeout)

    async def status(self) -> EngineStatus:
        """Get the slots and the queue, between two steps; during a long step, an earlier status.

        While the server sleeps, this is the last status, without the last tasks of slots. The
        counters continue after it wakes.

        Raises:
            ServerClosingError: the server is closed.
        """
        return await self.lifecycle.status()
