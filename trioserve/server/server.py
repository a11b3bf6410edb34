"""`Server`: a model that answers requests inside an ``async with`` block."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from trioserve import llama
from trioserve.chat.messages import Audio
from trioserve.chat.params import ChatParams
from trioserve.concurrency import EnteredOnce, alongside, deadline_scope
from trioserve.config import Config
from trioserve.errors import ConfigError, ServerClosingError
from trioserve.server.context import RequestContext, refuse, take, take_context, take_params
from trioserve.server.former import former_attribute
from trioserve.server.generation.embeddings import Embeddings, Ranking
from trioserve.server.generation.requests import ServerResources
from trioserve.server.generation.slots import SlotFiles
from trioserve.server.generation.text import check_copies
from trioserve.server.lifecycle.engine import Driver, Loader, in_thread
from trioserve.server.lifecycle.sleep import ModelLifecycle
from trioserve.server.limits.admission import Queue
from trioserve.server.model import AdapterScales, LoadedModel
from trioserve.server.prompts.infill import InfillPrompts
from trioserve.server.prompts.text import AnyPrompt, Messages, PromptLike
from trioserve.server.runs.events import RunAnswer
from trioserve.server.runs.loop import Question, check_chat, open_run
from trioserve.server.runs.params import AnyTool, RunParams, RunTools, tools_of
from trioserve.server.runs.run import AgentRun
from trioserve.server.stream import ChatCompletion, ChatStream, Completion, Stream
from trioserve.server.transcription.transcript import (
    Transcript,
    TranscriptionParams,
    Transcriptions,
)
from trioserve.tools.registry import ToolRegistry, open_registry
from trioserve.types import EngineStatus, GenerationParams, Prompt, TokenId


class Server(EnteredOnce):
    """A loaded model, ready for requests inside ``async with Server(config) as server:``.

    Entering loads the model in a worker thread. Leaving ends all running requests (their readers
    get a `ServerClosingError`), joins the inference thread and frees the memory; call `drain`
    before to let requests finish. Cancelling a call with a Trio scope cancels its work in the
    engine.

    The parameters of a request are in `GenerationParams` and, for chats, `ChatParams`; the client
    and the deadline are in a `RequestContext`. Keyword arguments set single fields of all three,
    and take precedence: ``server.chat(messages, tools=[...], temperature=0, timeout=5)``.
    `timeout` is in seconds from now.

    The server frees the memory of its model after `Config.sleep_idle_seconds` without requests, or
    when `sleep` is called. The next call that needs the model loads it again, and waits for that.
    Each such call may therefore raise `ModelLoadError`.

    Args:
        config: the model and its settings; the default is the bundled model.
        load: loads the model. The default loads a GGUF file with llama.cpp.
        drive: runs the engine. The default runs it on a thread.
        asleep: start without loading the model; the first request loads it.
        room: a context manager around the model's time in memory, which makes room for it.

    Raises:
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
    ) -> None:
        self.config = config or Config()
        if self.config.rpc and load is llama.load:
            raise ConfigError("rpc: a machine that fails ends the process, so such a model needs "
                              "a separate one: use the command, or ChildModels")  # fmt: skip
        self.resources = ServerResources(self.config)
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
        self.lifecycle = ModelLifecycle(self.resources, load, drive, room, asleep=asleep)
        #: The state of the model, as a value to wait for. Do not change it.
        self.state = self.lifecycle.state

    @asynccontextmanager
    async def _live(self) -> AsyncIterator[None]:
        async with (
            self.resources.traced(),
            open_registry(self.config) as self.tools,
            alongside(self.memory.keep_trim, self.lifecycle.run),
        ):
            if not self.sleeping:
                await self.wake()
            await self.tools.listed()
            try:
                yield
            finally:
                self.lifecycle.runs.end(ServerClosingError("The server was closed."))
            await self.lifecycle.close()

    # -- completions

    @asynccontextmanager
    async def stream(
        self,
        prompt: AnyPrompt,
        params: GenerationParams | None = None,
        **fields: Any,
    ) -> AsyncIterator[Stream]:
        """Continue a prompt, token by token: ``async with server.stream("Once") as events:``.

        Leaving the block before the end, for any reason, cancels the request: its slot is free
        within a step.

        Args:
            prompt: text, token ids, or a `MixedPrompt` with images or sound.
            params: the generation parameters.
            fields: single fields, by name, and `context`: the client and the deadline.

        Raises:
            InvalidRequestError: the prompt or a parameter is invalid.
            QueueFullError: too many requests wait already.
            DeadlineExceededError: the deadline has passed; also from the iteration.
            ServerClosingError: the server drains, or is closed.
        """
        async with self.stream_all([prompt], params, **fields) as (stream,):
            yield stream

    @asynccontextmanager
    async def stream_all(
        self,
        prompts: Sequence[AnyPrompt],
        params: GenerationParams | None = None,
        *,
        n: int = 1,
        **fields: Any,
    ) -> AsyncIterator[list[Stream]]:
        """Continue each prompt `n` times, concurrently. Otherwise like `stream`.

        The outputs of one prompt are adjacent, in the order of their seeds.
        """
        context = take_context(fields)
        params = await self.params(fields, params, n=n)
        async with (
            self.lifecycle.use(context) as services,
            services.text.stream(prompts, params, context, n) as streams,
        ):
            yield streams

    async def complete(
        self, prompt: AnyPrompt, params: GenerationParams | None = None, **fields: Any
    ) -> Completion:
        """Continue a prompt, and return the whole output. Arguments are those of `stream`.

        Raises:
            TrioServeError: as `stream`, and when the request fails.
        """
        async with self.stream(prompt, params, **fields) as stream:
            return await stream.read()

    # -- chats

    @asynccontextmanager
    async def stream_chat(
        self,
        messages: Messages,
        params: GenerationParams | None = None,
        chat: ChatParams | None = None,
        **fields: Any,
    ) -> AsyncIterator[ChatStream]:
        """Answer a chat, token by token. Like `stream`, with `ChatChunk` in place of `Chunk`.

        Args:
            messages: the chat, in OpenAI's form: ``[{"role": "user", "content": "Hi"}]``.
            params: the generation parameters.
            chat: tools, reasoning, and other parameters of chats.
            fields: single fields, by name, and `context`: the client and the deadline.

        Raises:
            TemplateError: the template rejects the messages.
            TrioServeError: as `stream`.
        """
        async with self.stream_chats(messages, params, chat, **fields) as (stream,):
            yield stream

    @asynccontextmanager
    async def stream_chats(
        self,
        messages: Messages,
        params: GenerationParams | None = None,
        chat: ChatParams | None = None,
        *,
        n: int = 1,
        **fields: Any,
    ) -> AsyncIterator[list[ChatStream]]:
        """Answer a chat `n` times, concurrently. Otherwise like `stream_chat`."""
        chat, context = take(ChatParams, fields, chat), take_context(fields)
        params = await self.params(fields, params, n=n)
        async with (
            self.lifecycle.use(context) as services,
            services.text.stream_chats(messages, params, chat, context, n) as streams,
        ):
            yield streams

    async def chat(
        self,
        messages: Messages,
        params: GenerationParams | None = None,
        chat: ChatParams | None = None,
        **fields: Any,
    ) -> ChatCompletion:
        """Answer a chat, and return the whole message. Arguments are those of `stream_chat`.

        Raises:
            TrioServeError: as `stream_chat`, and when the request fails.
        """
        async with self.stream_chat(messages, params, chat, **fields) as stream:
            return await stream.read()

    async def end_reasoning(self, stream: Stream | ChatStream) -> bool:
        """End the reasoning of an answer now, if it is in progress. May be cancelled.

        Returns whether that was possible: the answer still runs, the model supports reasoning, and
        `reasoning_control` or a budget was set.

        Raises:
            ServerClosingError: the server is closed.
        """
        if not self.lifecycle.ready:
            raise ServerClosingError
        return await self.lifecycle.services.text.end_reasoning(stream.task_id)

    # -- chats with tools

    @asynccontextmanager
    async def stream_run(
        self,
        messages: Messages,
        tools: Sequence[AnyTool] | None = None,
        params: GenerationParams | None = None,
        chat: ChatParams | None = None,
        run: RunParams | None = None,
        **fields: Any,
    ) -> AsyncIterator[AgentRun]:
        """Answer a chat, run the tools that the model calls, and let it answer again.

        This repeats until an answer has no calls: ``async with server.stream_run(...) as events:``.
        Calls of one answer run concurrently. Leaving the block before the end cancels the model and
        the tools, with all their tasks. Between two answers the run holds no slot, and the model
        may fall asleep.

        Args:
            messages: the chat, as for `stream_chat`.
            tools: the available tools: a `Tool`, a Python function (see `tool_of`), or the name of
                a configured tool, which may have wildcards as in ``"weather_*"``. None: all
                configured tools.
            params: the generation parameters of each answer.
            chat: as for `stream_chat`. Its `tools` are the caller's: a call of one of them ends the
                run, and `RunAnswer.client_calls` has the calls. A call required by `tool_choice`
                applies to the first answer.
            run: the limits of the run and of its tools.
            fields: single fields, by name, and `context`: the client and the run's deadline.

        Raises:
            InvalidRequestError: a tool or a parameter is invalid.
            UnknownToolError: a tool of this name does not exist.
            TrioServeError: as `stream_chat`.
        """
        run, context = take(RunParams, fields, run), take_context(fields)
        chat = take(ChatParams, fields, chat)
        params = await self.params(fields, params)
        check_chat(chat, self.config, self.model)
        chosen = RunTools.of(tools_of(tools, self.tools), chat.tools or ())
        self.tools.check(run.place)
        with self.memory.hold(context.client) as hold:
            async with self.lifecycle.use(context) as services:
                with deadline_scope(context.deadline):
                    loaded = await services.prompts.load(messages, hold)
            question = Question(loaded, params, chat, context, run)
            async with open_run(self, question, chosen) as opened:
                yield opened

    async def run(
        self,
        messages: Messages,
        tools: Sequence[AnyTool] | None = None,
        run: RunParams | None = None,
        **fields: Any,
    ) -> RunAnswer:
        """Answer a chat and run tools, as `stream_run`, and return the result.

        There is no way to approve calls here: those that may change something are refused, unless
        `approve` is "all" or a function.

        Raises:
            TrioServeError: as `stream_run`, and when the model fails.
        """
        run = take(RunParams, fields, run)
        if run.approve == "ask":
            run = take(RunParams, {"approve": "none"}, run)
        async with self.stream_run(messages, tools, run=run, **fields) as opened:
            return await opened.read()

    # -- embeddings

    async def embed(
        self,
        inputs: str | Sequence[AnyPrompt],
        *,
        dimensions: int | None = None,
        normalize: int | None = None,
        priority: int = 0,
        **fields: Any,
    ) -> Embeddings:
        """Compute an embedding of each text. Cancelling it frees the engine within a step.

        Args:
            inputs: a text, or a sequence of texts, of lists of token ids, and of `MixedPrompt`,
                which have images or sound.
            dimensions: cut each embedding to this many components, for models trained for that.
            normalize: the norm, as `Config.embd_normalize`, which is the default. With pooling
                "none", embeddings are not normalized.
            priority: -100 to 100; higher goes first in the queue.
            fields: single fields of the context, by name, or `context`: the client and deadline.

        Raises:
            InvalidRequestError: a text has no tokens or too many, or a value is out of range.
            InvalidMediaError: media cannot be read, or the model does not support them.
            NotSupportedError: the server was not started with `embeddings`, or its model ranks.
            QueueFullError: too many requests wait already.
            DeadlineExceededError: the deadline has passed.
            ServerClosingError: the server drains, or is closed.
        """
        context = take_context(fields)
        refuse(fields)
        async with self.lifecycle.use(context, LoadedModel.check_embeds) as services:
            return await services.embedder.embed(inputs, dimensions, normalize, priority, context)

    async def rerank(
        self,
        query: str,
        documents: str | Sequence[str],
        *,
        priority: int = 0,
        **fields: Any,
    ) -> Ranking:
        """Score how well each document fits a query; see `Ranking.best`. Arguments as in `embed`.

        Raises:
            InvalidRequestError: there are no documents, or one is too long.
            NotSupportedError: the server was not started with `reranking`.
            TrioServeError: as `embed`.
        """
        context = take_context(fields)
        refuse(fields)
        async with self.lifecycle.use(context, LoadedModel.check_ranks) as services:
            return await services.embedder.rerank(query, documents, priority, context)

    # -- recordings

    async def transcribe(
        self,
        recording: Audio | bytes | str | os.PathLike[str],
        params: TranscriptionParams | None = None,
        **fields: Any,
    ) -> Transcript:
        """Transcribe a recording. Cancelling it ends the work.

        Args:
            recording: a path, or the bytes of a file.
            params: how to transcribe it.
            fields: single fields, by name, and `context`: the client and the deadline.

        Raises:
            InvalidMediaError: the recording cannot be read.
            InvalidRequestError: a parameter is not supported.
            NotSupportedError: the model takes no audio, and there is no `transcription_model`.
            TranscriberError: Whisper did not start, has failed, or has ended.
            TrioServeError: as `chat`.
        """
        context = take_context(fields)
        params = take(TranscriptionParams, fields, params)
        refuse(fields)
        audio = recording if isinstance(recording, Audio) else Audio(recording)
        source = audio.source("recording")
        async with (
            self.lifecycle.use(context, LoadedModel.check_transcribes) as services,
            services.transcriptions.stream(source, params, context) as stream,
        ):
            return await stream.read()

    # -- parameters, tokens and rendered chats

    async def params(
        self, fields: Mapping[str, Any], base: GenerationParams | None = None, *, n: int = 1
    ) -> GenerationParams:
        """Make parameters from fields of `GenerationParams` and `SamplingParams`, by name.

        Unset fields are as in `base`, or as in the server's configuration. `logit_bias` may name
        text in place of a token id. `n` is the number of outputs of each prompt.

        Raises:
            InvalidRequestError: a field is unknown, has the wrong type or is out of range.
            NotSupportedError: the server generates no text.
        """
        model = await self.lifecycle.known_model()
        if model.pooling is not None:
            model.check_generates()
        check_copies(n, model.n_slots)
        fields = dict(fields)
        if fields.get("logit_bias") is not None:
            async with self.lifecycle.use(RequestContext()) as services:
                biases = await services.tokenizer.biases_of(fields["logit_bias"])
            fields["logit_bias"] = biases
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
        async with self.lifecycle.use(RequestContext()) as services:
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

    async def render(
        self, messages: Messages, chat: ChatParams | None = None, **fields: Any
    ) -> str:
        """Render a chat with the model's template. Media become markers: see `media_marker`.

        Raises:
            TemplateError: the template rejects the messages.
            UnsupportedFieldError: the model does not support one of the media.
            InvalidRequestError: a message is malformed.
        """
        chat = take(ChatParams, fields, chat)
        refuse(fields)
        async with self.lifecycle.use(RequestContext()) as services:
            return await services.prompts.render_marked(messages, chat)

    async def count_tokens(
        self, messages: Messages, chat: ChatParams | None = None, **fields: Any
    ) -> int:
        """Count the tokens of a chat's prompt, including those of its media.

        Arguments and errors are those of `render`, and those of loading media.
        """
        chat = take(ChatParams, fields, chat)
        refuse(fields)
        async with self.lifecycle.use(RequestContext()) as services:
            return await services.prompts.count_tokens(messages, chat)

    # -- sleep

    @property
    def sleeping(self) -> bool:
        """Whether the model is not in memory. True until a request has loaded it again."""
        return self.lifecycle.sleeping

    def awake(
        self, context: RequestContext | None = None, **fields: Any
    ) -> AbstractAsyncContextManager[object]:
        """Keep the model in memory during a block. Loads it if needed.

        All methods that need the model do this. Waiting calls continue in the order of arrival.
        Cancelling one of them does not stop the loading.

        Args:
            context: the deadline of the wait, and how long the idle model stays in memory
                afterwards.
            fields: single fields of the context, by name.

        Raises:
            ModelLoadError: the model cannot be loaded; the next call tries again.
            DeadlineExceededError: the deadline passed before the model was loaded.
            QueueFullError: too many requests wait already.
            ServerClosingError: the server sleeps, and drains or is closed.
        """
        context = take_context(fields, context)
        refuse(fields)
        return self.lifecycle.use(context)

    async def wake(self, context: RequestContext | None = None, **fields: Any) -> None:
        """Load the model if the server sleeps. Arguments and errors are those of `awake`."""
        async with self.awake(context, **fields):
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

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Find a renamed attribute, and warn."""
            return former_attribute(self, name)
