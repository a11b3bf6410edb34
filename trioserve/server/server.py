"""`Server`: a model that answers a program's requests inside an ``async with`` block."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Unpack

from trioserve import llama
from trioserve.chat.messages import Audio
from trioserve.chat.params import ChatParams
from trioserve.concurrency import EnteredOnce
from trioserve.config import Config
from trioserve.server.context import RequestContext, refuse, take
from trioserve.server.core import ServerCore
from trioserve.server.generation.embeddings import Classification, Embeddings, Ranking
from trioserve.server.keywords import (
    ChatFields,
    CompletionFields,
    ContextFields,
    RenderFields,
    RunFields,
    TranscriptionFields,
    take_context,
)
from trioserve.server.lifecycle.engine import Driver, Loader, in_thread
from trioserve.server.lifecycle.sleep import ServerState
from trioserve.server.model import LoadedModel
from trioserve.server.observers.observer import Observer
from trioserve.server.observers.telemetry import Telemetry
from trioserve.server.prompts.text import AnyPrompt, Messages, PromptLike
from trioserve.server.runs.events import RunAnswer
from trioserve.server.runs.params import AnyTool, RunParams
from trioserve.server.runs.run import AgentRun
from trioserve.server.stream import ChatCompletion, ChatStream, Completion, Stream
from trioserve.server.transcription.transcript import Transcript, TranscriptionParams
from trioserve.types import EngineStatus, Prompt, TokenId


class Server(EnteredOnce):
    """A loaded model, ready for requests inside ``async with Server(config) as server:``.

    Entering loads the model in a worker thread. Leaving ends all running requests (their readers
    get a `ServerClosingError`), joins the inference thread and frees the memory; call `drain`
    before to let requests finish.

    A Trio cancel scope around a call is its deadline, and the way to cancel it from another task:
    the slot is free within a step. Keyword arguments set the parameters of a call; `ChatFields`
    and its neighbors list them.

    The server frees the memory of its model after `Config.sleep_idle_seconds` without requests, or
    when `sleep` is called. The next call that needs the model loads it again, and waits for that.
    Each such call may therefore raise `ModelLoadError`.

    Args:
        config: the model and its settings; the default is the bundled model.
        load: loads the model. The default loads a GGUF file with llama.cpp.
        drive: runs the engine. The default runs it on a thread.
        asleep: start without loading the model; the first request loads it.
        observers: called with the events of requests; see `telemetry` for batches of them.

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
        observers: Iterable[Observer] = (),
    ) -> None:
        self._make = partial(ServerCore, config, load=load, drive=drive, asleep=asleep)
        self._observers = observers
        self._running: ServerCore | None = None

    @classmethod
    def _of(cls, core: ServerCore) -> Server:
        """Make the interface of a core that runs."""
        server = cls()
        server._running = core
        return server

    @asynccontextmanager
    async def _live(self) -> AsyncIterator[None]:
        async with self._make() as self._running:
            self._running.observers.extend(self._observers)
            yield

    @property
    def _core(self) -> ServerCore:
        if self._running is None:
            raise RuntimeError("this Server is not open: enter it with `async with`")
        return self._running

    # -- completions and chats

    @asynccontextmanager
    async def stream_complete(
        self, prompt: AnyPrompt, **fields: Unpack[CompletionFields]
    ) -> AsyncIterator[Stream]:
        """Continue a prompt, token by token.

        ::

            async with server.stream_complete("Once upon a time") as completion:
                async for text in completion.text():
                    print(text, end="")

        Leaving the block before the end, for any reason, cancels the request: its slot is free
        within a step.

        Args:
            prompt: text, token ids, or a `MixedPrompt` with images or sound.
            fields: the parameters of the request.

        Raises:
            InvalidRequestError: the prompt or a parameter is invalid.
            QueueFullError: too many requests wait already.
            ServerClosingError: the server drains, or is closed.
        """
        given: dict[str, Any] = {**fields}
        context = take_context(given)
        params = await self._core.params(given, context=context)
        async with self._core.stream_all([prompt], params, context=context) as (stream,):
            yield stream

    async def complete(self, prompt: AnyPrompt, **fields: Unpack[CompletionFields]) -> Completion:
        """Continue a prompt, and return the whole output. Arguments are as in `stream_complete`.

        Raises:
            TrioServeError: as `stream_complete`, and when the request fails.
        """
        async with self.stream_complete(prompt, **fields) as stream:
            return await stream.read()

    @asynccontextmanager
    async def stream_chat(
        self, messages: Messages, **fields: Unpack[ChatFields]
    ) -> AsyncIterator[ChatStream]:
        """Answer a chat, token by token. Like `stream_complete`, with `ChatChunk` for `Chunk`.

        Args:
            messages: the chat, in OpenAI's form: ``[{"role": "user", "content": "Hi"}]``.
            fields: the parameters of the request.

        Raises:
            TemplateError: the template rejects the messages.
            TrioServeError: as `stream_complete`.
        """
        given: dict[str, Any] = {**fields}
        context, chat = take_context(given), take(ChatParams, given)
        params = await self._core.params(given, context=context)
        opened = self._core.stream_chats(messages, params, chat, context=context)
        async with opened as (stream,):
            yield stream

    async def chat(self, messages: Messages, **fields: Unpack[ChatFields]) -> ChatCompletion:
        """Answer a chat, and return the whole message. Arguments are as in `stream_chat`.

        Raises:
            TrioServeError: as `stream_chat`, and when the request fails.
        """
        async with self.stream_chat(messages, **fields) as stream:
            return await stream.read()

    # -- chats with tools

    @asynccontextmanager
    async def stream_run(
        self,
        messages: Messages,
        tools: Sequence[AnyTool] | None = None,
        *,
        client_tools: Sequence[Mapping[str, Any]] = (),
        **fields: Unpack[RunFields],
    ) -> AsyncIterator[AgentRun]:
        """Answer a chat, run the tools that the model calls, and let it answer again.

        This repeats until an answer has no calls: ``async with server.stream_run(...) as run:``.
        Calls of one answer run concurrently. Leaving the block before the end cancels the model and
        the tools, with all their tasks. Between two answers the run holds no slot, and the model
        may fall asleep.

        Args:
            messages: the chat, as for `stream_chat`.
            tools: the available tools: a `Tool`, a Python function (see `tool_of`), or the name of
                a configured tool, which may have wildcards as in ``"weather_*"``. None: all
                configured tools.
            client_tools: tools in OpenAI's form that the caller runs: a call of one of them ends
                the run, and `RunAnswer.client_calls` has the calls.
            fields: the parameters of each answer, and the limits of the run. A call required by
                `tool_choice` applies to the first answer.

        Raises:
            InvalidRequestError: a tool or a parameter is invalid.
            UnknownToolError: a tool of this name does not exist.
            TrioServeError: as `stream_chat`.
        """
        given: dict[str, Any] = {**fields, "tools": client_tools}
        context, run, chat = take_context(given), take(RunParams, given), take(ChatParams, given)
        params = await self._core.params(given, context=context)
        opened = self._core.stream_run(messages, tools, params, chat, run, context=context)
        async with opened as events:
            yield events

    async def run(
        self,
        messages: Messages,
        tools: Sequence[AnyTool] | None = None,
        *,
        client_tools: Sequence[Mapping[str, Any]] = (),
        **fields: Unpack[RunFields],
    ) -> RunAnswer:
        """Answer a chat and run tools, as `stream_run`, and return the result.

        There is no way to approve calls here: those that may change something are refused, unless
        `approve` is "all" or a function.

        Raises:
            TrioServeError: as `stream_run`, and when the model fails.
        """
        if fields.get("approve", "ask") == "ask":
            fields["approve"] = "none"
        opened = self.stream_run(messages, tools, client_tools=client_tools, **fields)
        async with opened as run:
            return await run.read()

    # -- embeddings

    async def embed(
        self,
        inputs: str | Sequence[AnyPrompt],
        *,
        dimensions: int | None = None,
        normalize: int | None = None,
        priority: int = 0,
        **fields: Unpack[ContextFields],
    ) -> Embeddings:
        """Compute an embedding of each text. Cancelling it frees the engine within a step.

        Args:
            inputs: a text, or a sequence of texts, of lists of token ids, and of `MixedPrompt`,
                which have images or sound.
            dimensions: cut each embedding to this many components, for models trained for that.
            normalize: the norm, as `Config.embd_normalize`, which is the default. With pooling
                "none", embeddings are not normalized.
            priority: -100 to 100; higher goes first in the queue.
            fields: the client.

        Raises:
            InvalidRequestError: a text has no tokens or too many, or a value is out of range.
            InvalidMediaError: media cannot be read, or the model does not support them.
            NotSupportedError: the server was not started with `embeddings`, or its model ranks.
            QueueFullError: too many requests wait already.
            ServerClosingError: the server drains, or is closed.
        """
        return await self._core.embed(
            inputs,
            dimensions=dimensions,
            normalize=normalize,
            priority=priority,
            context=_only_context(fields),
        )

    async def rerank(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        priority: int = 0,
        **fields: Unpack[ContextFields],
    ) -> Ranking:
        """Score how well each document fits a query; see `Ranking.best`. Arguments as in `embed`.

        With several queries, there is one for each document.

        Raises:
            InvalidRequestError: there are no documents, or one is too long.
            NotSupportedError: the server was not started with `reranking`.
            TrioServeError: as `embed`.
        """
        context = _only_context(fields)
        return await self._core.rerank(query, documents, priority=priority, context=context)

    async def classify(
        self,
        inputs: str | Sequence[str],
        *,
        priority: int = 0,
        **fields: Unpack[ContextFields],
    ) -> Classification:
        """Score each text for each class of a model that classifies. Arguments as in `embed`.

        Raises:
            InvalidRequestError: there are no texts, or one is too long.
            NotSupportedError: the model has no classification head.
            TrioServeError: as `embed`.
        """
        context = _only_context(fields)
        return await self._core.classify(inputs, priority=priority, context=context)

    # -- recordings

    async def transcribe(
        self,
        recording: Audio | bytes | str | os.PathLike[str],
        **fields: Unpack[TranscriptionFields],
    ) -> Transcript:
        """Transcribe a recording. Cancelling it ends the work.

        Args:
            recording: a path, or the bytes of a file.
            fields: how to transcribe it.

        Raises:
            InvalidMediaError: the recording cannot be read.
            InvalidRequestError: a parameter is not supported.
            NotSupportedError: the model takes no audio, and there is no `transcription_model`.
            TranscriberError: Whisper did not start, has failed, or has ended.
            TrioServeError: as `chat`.
        """
        given: dict[str, Any] = {**fields}
        params = take(TranscriptionParams, given)
        audio = recording if isinstance(recording, Audio) else Audio(recording)
        source = audio.source("recording")
        return await self._core.transcribe(source, params, context=_only_context(given))

    # -- tokens and rendered chats

    async def tokenize(
        self, prompt: PromptLike, *, add_special: bool = True, parse_special: bool = True
    ) -> tuple[TokenId, ...]:
        """Convert text to token ids. Ids in the input are kept.

        Long text is tokenized in a worker thread. Special tokens are added if it begins with text.

        Raises:
            InvalidRequestError: text cannot be encoded, or an id is not in the vocabulary.
        """
        return await self._core.tokenize(
            prompt, add_special=add_special, parse_special=parse_special
        )

    async def detokenize(self, tokens: Sequence[TokenId] | Prompt) -> str:
        """Convert token ids to text. Invalid bytes become U+FFFD.

        Media in a `Prompt` become ``[image]`` or the like.

        Raises:
            InvalidRequestError: an id is not in the vocabulary.
        """
        async with self._core.awake():
            return self._core.detokenize(tokens)

    async def render(self, messages: Messages, **fields: Unpack[RenderFields]) -> str:
        """Render a chat with the model's template. Media become markers: see `media_marker`.

        Raises:
            TemplateError: the template rejects the messages.
            UnsupportedFieldError: the model does not support one of the media.
            InvalidRequestError: a message is malformed.
        """
        return await self._core.render(messages, _only_chat(fields))

    async def count_tokens(self, messages: Messages, **fields: Unpack[RenderFields]) -> int:
        """Count the tokens of a chat's prompt, including those of its media.

        Raises:
            TrioServeError: as `render`; media cannot be loaded.
        """
        return len(await self._core.chat_prompt(messages, _only_chat(fields)))

    # -- the model

    def loaded(self, **fields: Unpack[ContextFields]) -> AbstractAsyncContextManager[object]:
        """Keep the model in memory during a block. Loads it if needed.

        All methods that need the model do this. Waiting calls continue in the order of arrival.
        Cancelling one of them does not stop the loading.

        Args:
            fields: `keep_alive` is how long the idle model stays in memory afterwards.

        Raises:
            ModelLoadError: the model cannot be loaded; the next call tries again.
            QueueFullError: too many requests wait already.
            ServerClosingError: the server sleeps, and drains or is closed.
        """
        return self._core.awake(_only_context(fields))

    async def sleep(self) -> None:
        """Free the model's memory as soon as no request runs, and wait for that.

        The next request loads the model again, with empty caches. When cancelled, the server stays
        awake, unless it is falling asleep already. Inside `loaded`, this would wait for itself.
        """
        await self._core.sleep()

    @property
    def state(self) -> ServerState:
        """The state of the model."""
        state: ServerState = self._core.state.value
        return state

    @property
    def model(self) -> LoadedModel:
        """The properties of the model, also while the server sleeps.

        Raises:
            ServerSleepingError: the server started asleep and has not loaded the model yet.
            ServerClosingError: the server closed before it loaded the model.
        """
        return self._core.model

    @property
    def telemetry(self) -> Telemetry:
        """Passes events to callbacks; see `Telemetry.subscribe`."""
        return self._core.telemetry

    async def drain(self) -> None:
        """Reject new requests, and wait until the running ones have finished.

        Requests that wait for the model to load are ended at once. When cancelled, the server
        keeps rejecting new requests, and running ones continue. Leaving the server's block ends
        them: their readers get a `ServerClosingError`.
        """
        await self._core.drain(math.inf)

    async def status(self) -> EngineStatus:
        """Get the slots and the queue, between two steps; during a long step, an earlier status.

        While the server sleeps, this is the last status, without the last tasks of slots. The
        counters continue after it wakes.

        Raises:
            ServerClosingError: the server is closed.
        """
        return await self._core.status()


def _only_context(fields: Mapping[str, Any]) -> RequestContext:
    given = {**fields}
    context = take_context(given)
    refuse(given)
    return context


def _only_chat(fields: Mapping[str, Any]) -> ChatParams:
    given = {**fields}
    chat = take(ChatParams, given)
    refuse(given)
    return chat
