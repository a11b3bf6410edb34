"""`Server`: a model that answers requests, as long as an ``async with`` block runs."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from trioserve import llama
from trioserve.alongside import alongside
from trioserve.chat.messages import Audio
from trioserve.chat.params import ChatParams
from trioserve.config import Config
from trioserve.errors import ConfigError, ServerClosingError
from trioserve.server.concurrency import EnteredOnce, deadline_scope
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

    Entering loads the model in a worker thread. Leaving ends what still runs (its readers get a
    `ServerClosingError`), joins the inference thread and frees the memory; call `drain` before to
    let requests finish. Any Trio cancel scope around a call cancels its work in the engine.

    What a request asks for is in two objects, `GenerationParams` and, for chats, `ChatParams`; who
    asks and until when is in a `RequestContext`. Single fields of all three may be passed by name,
    and win: ``server.chat(messages, tools=[...], temperature=0, timeout=5)``. `timeout` is in
    seconds from now.

    A server that was idle for `Config.sleep_idle_seconds`, or was told to `sleep`, frees the
    memory of its model. What needs the model loads it again, and waits for that; so each such call
    may raise `ModelLoadError`.

    Args:
        config: what to load and how; the default is the bundled model.
        load: loads the model. The default loads a GGUF file with llama.cpp.
        drive: runs the engine. The default gives it a thread.
        asleep: begin asleep: load the model when it is first needed.
        room: makes room for the model before it is loaded, as a block around its time in memory.

    Raises:
        ModelLoadError: on entry, when the model cannot be loaded.
        HubError: on entry, when it cannot be downloaded.
        BridgeError: on entry, when the system has no descriptors left.
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
                              "one of its own: use the command, or ChildModels")  # fmt: skip
        self.resources = ServerResources(self.config)
        #: What requests may hold, those of other connections that are not read yet included.
        self.memory = self.resources.memory
        #: Counts what the requests do; none unless the configuration says so.
        self.metrics = self.resources.metrics
        #: Who is told when a request starts and ends.
        self.observers = self.resources.observers
        #: Tells functions of a program what happens; see `Telemetry.subscribe`.
        self.telemetry = self.resources.telemetry
        #: The tools that the configuration allows, while the server runs. They need no model.
        self.tools = ToolRegistry()
        #: Loads the model, has it sleep and wakes it.
        self.lifecycle = ModelLifecycle(self.resources, load, drive, room, asleep=asleep)
        #: What the model does, as a value that can be waited for. Do not change it.
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
                self.lifecycle.runs.end_all("The server was closed.")
            await self.lifecycle.close()

    # -- prompts that are continued

    @asynccontextmanager
    async def stream(
        self,
        prompt: AnyPrompt,
        params: GenerationParams | None = None,
        **fields: Any,
    ) -> AsyncIterator[Stream]:
        """Continue a prompt, token by token: ``async with server.stream("Once") as events:``.

        Leaving the block before the end, for whatever reason, cancels the request: its slot is
        free within a step.

        Args:
            prompt: text, token ids, or a `MixedPrompt` with images or sound in it.
            params: how to continue it.
            fields: single fields, by name, and `context`: who asks, and until when.

        Raises:
            InvalidRequestError: the prompt or a parameter is wrong.
            QueueFullError: too many requests wait already.
            DeadlineExceededError: there is no time left; from the iteration, when it has passed.
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
        """Continue each prompt `n` times, all at the same time. Otherwise like `stream`.

        The outputs of one prompt stand together, in the order of their seeds.
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
        """Continue a prompt, and return all of it at the end. Arguments are those of `stream`.

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
            params: how to answer.
            chat: tools, reasoning, and what else belongs to chats.
            fields: single fields, by name, and `context`: who asks, and until when.

        Raises:
            TemplateError: the template refuses the messages.
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
        """Answer a chat `n` times, all at the same time. Otherwise like `stream_chat`."""
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
        """Answer a chat, and return the message at the end. Arguments: those of `stream_chat`.

        Raises:
            TrioServeError: as `stream_chat`, and when the request fails.
        """
        async with self.stream_chat(messages, params, chat, **fields) as stream:
            return await stream.read()

    async def end_reasoning(self, stream: Stream | ChatStream) -> bool:
        """Have an answer end its reasoning now, if it is in it. May be cancelled.

        Returns whether it could: the answer still runs, the model can think, and
        `reasoning_control` or a budget was set.

        Raises:
            ServerClosingError: the server is closed.
        """
        if not self.lifecycle.ready:
            raise ServerClosingError
        return await self.lifecycle.services.text.end_reasoning(stream.task_id)

    # -- chats in which tools are run

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

        So it goes on until an answer calls none: ``async with server.stream_run(...) as events:``.
        Calls of one answer run at the same time. Leaving the block before the end cancels the
        model and the tools, with all that these have started. Between two answers the run holds no
        slot, and the model may fall asleep.

        Args:
            messages: the chat, as for `stream_chat`.
            tools: what may be called: a `Tool`, a Python function (see `tool_of`), or the name of a
                tool that the configuration has, which may have wildcards as in ``"weather_*"``.
                None: all that the configuration has.
            params: how to give each answer.
            chat: as for `stream_chat`. Its `tools` are the caller's: where one of them is called,
                the run ends, and `RunAnswer.client_calls` has the calls. What `tool_choice`
                requires is for the first answer.
            run: how many answers there may be, and what the tools may do.
            fields: single fields, by name, and `context`: who asks, and until when all is done.

        Raises:
            InvalidRequestError: a tool or a parameter is wrong.
            UnknownToolError: there is no tool of this name.
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
        """Answer a chat and run tools, as `stream_run`, and return all of it at the end.

        There is nobody to ask here: calls that may change something are refused, unless `approve`
        is "all" or a function.

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
        """Make an embedding of each text. Cancelling it frees the engine within a step.

        Args:
            inputs: a text, or any number of texts, of lists of token ids, and of `MixedPrompt`,
                which have images or sound in them.
            dimensions: keep so many numbers of each embedding, for models trained for that.
            normalize: the norm, as `Config.embd_normalize`, which is the default. With pooling
                "none" there is no norm.
            priority: -100 to 100; higher goes first in the queue.
            fields: single fields of the context, by name, or `context`: who asks, and until when.

        Raises:
            InvalidRequestError: a text has no tokens or too many, or a value is out of range.
            InvalidMediaError: media cannot be read, or the model cannot take them.
            NotSupportedError: the server was not started with `embeddings`, or its model ranks.
            QueueFullError: too many requests wait already.
            DeadlineExceededError: the time of the request has passed.
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
        """Write down what is spoken in a recording. Cancelling it ends the work.

        Args:
            recording: a path, or the bytes of a file.
            params: how to transcribe it.
            fields: single fields, by name, and `context`: who asks, and until when.

        Raises:
            InvalidMediaError: the recording cannot be read.
            InvalidRequestError: a parameter cannot be obeyed.
            NotSupportedError: the model does not hear, and there is no `transcription_model`.
            TranscriberError: Whisper could not start, has failed, or has ended.
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

        What is not set is as in `base`, or as the server's configuration says. A `logit_bias` may
        name text in place of a token id. There are to be `n` outputs of each prompt.

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
        """Turn text into token ids; see `Vocab.tokenize`. Ids in it stay as they are.

        Long text goes to a worker thread. Special tokens are added where it begins with text.

        Raises:
            InvalidRequestError: text cannot be encoded, or an id is not in the vocabulary; `param`
                names the field that it came from.
        """
        async with self.lifecycle.use(RequestContext()) as services:
            made = await services.tokenizer.prompt_of(
                prompt, add_special=add_special, parse_special=parse_special, aside=True
            )
        made.check(self.model.vocab.n_tokens, param)
        return made.tokens

    def detokenize(self, tokens: Sequence[TokenId] | Prompt) -> str:
        """Turn token ids into text. Bytes that are no character become U+FFFD.

        Of a `Prompt` with media, it has ``[image]`` or the like in their places.

        Raises:
            InvalidRequestError: an id is not in the vocabulary.
            ServerSleepingError: the server sleeps; `awake` wakes it.
        """
        return self.lifecycle.services.tokenizer.detokenize(tokens)

    async def render(
        self, messages: Messages, chat: ChatParams | None = None, **fields: Any
    ) -> str:
        """Render a chat with the model's template. Media become markers: see `media_marker`.

        Raises:
            TemplateError: the template refuses the messages.
            UnsupportedFieldError: the model does not take one of the media.
            InvalidRequestError: a message is malformed.
        """
        chat = take(ChatParams, fields, chat)
        refuse(fields)
        async with self.lifecycle.use(RequestContext()) as services:
            return await services.prompts.render_marked(messages, chat)

    async def count_tokens(
        self, messages: Messages, chat: ChatParams | None = None, **fields: Any
    ) -> int:
        """Count the tokens of a chat's prompt, with those of its media.

        Arguments and errors are those of `render`, and those of loading media.
        """
        chat = take(ChatParams, fields, chat)
        refuse(fields)
        async with self.lifecycle.use(RequestContext()) as services:
            return await services.prompts.count_tokens(messages, chat)

    # -- sleep

    @property
    def sleeping(self) -> bool:
        """Whether the model is not in memory. So it is until a request has loaded it again."""
        return self.lifecycle.sleeping

    def awake(
        self, context: RequestContext | None = None, **fields: Any
    ) -> AbstractAsyncContextManager[object]:
        """Have the model in memory for as long as a block lasts. It is loaded if need be.

        All that needs the model does this by itself. Those who wait go on in the order in which
        they came. A cancelled one does not end the loading.

        Args:
            context: until when to wait, and for how long the model stays idle in memory afterwards.
            fields: single fields of the context, by name.

        Raises:
            ModelLoadError: the model cannot be loaded; the next call has it tried again.
            DeadlineExceededError: the time has passed before it was.
            QueueFullError: too many wait already.
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
        """Free the model's memory as soon as no request runs; returns when that is done.

        The next request loads the model again. What the caches held is gone by then. When
        cancelled, the server stays awake, unless it is falling asleep already. Inside `awake` it
        would wait for itself.
        """
        await self.lifecycle.end()

    @property
    def slots(self) -> SlotFiles:
        """Saves, restores and erases what slots have computed. Raises as `model`, while asleep."""
        return self.lifecycle.services.slots

    @property
    def adapters(self) -> AdapterScales:
        """The LoRA adapters, and which of them requests get. Raises as `slots`."""
        return self.lifecycle.services.adapters

    @property
    def queue(self) -> Queue:
        """Who waits where. Raises as `slots`."""
        return self.lifecycle.services.queue

    @property
    def transcriptions(self) -> Transcriptions:
        """Transcribes recordings piece by piece. Raises as `slots`."""
        return self.lifecycle.services.transcriptions

    @property
    def infill(self) -> InfillPrompts:
        """Makes prompts that ask the model to fill a gap. Raises as `slots`."""
        return self.lifecycle.services.infill

    @property
    def model(self) -> LoadedModel:
        """What is known of the model, also while the server sleeps.

        Raises:
            ServerSleepingError: it was never loaded, because the server began asleep.
            ServerClosingError: it was never loaded.
        """
        return self.lifecycle.model

    async def drain(self, timeout: float) -> None:
        """Refuse new requests and let the running ones finish, for `timeout` seconds at most.

        Those that run on are ended: their readers get a `ServerClosingError`. So are, at once,
        those that wait for the model to be loaded. When cancelled, the server stays closed for new
        requests and nothing is ended.
        """
        await self.lifecycle.drain(timeout)

    async def status(self) -> EngineStatus:
        """Look at the slots and the queue, between two steps; in a long step, at an earlier look.

        While the server sleeps, they are as they were before, without the last tasks of slots. The
        counters go on where they were when it wakes.

        Raises:
            ServerClosingError: the server is closed.
        """
        return await self.lifecycle.status()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Find what has another name now, and warn."""
            return former_attribute(self, name)
