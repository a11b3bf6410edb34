"""`ModelServer`: a model that answers requests, in this process or in another one."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Unpack

from trioserve.chat.messages import Audio, Messages as ParsedMessages
from trioserve.chat.params import ChatParams
from trioserve.concurrency import Gate
from trioserve.config import Config
from trioserve.server.adapters import AdapterNames
from trioserve.server.context import ANYONE, RequestContext, take, take_params
from trioserve.server.generation.embeddings import Classification, Cut, Embeddings, Ranking
from trioserve.server.generation.requests import Queue
from trioserve.server.generation.slots import Moved
from trioserve.server.generation.text import ChatOpening, check_copies
from trioserve.server.keywords import (
    ChatFields,
    CompletionFields,
    ContextFields,
    RenderFields,
    RunFields,
    TranscriptionFields,
    only_chat,
    only_context,
    take_context,
)
from trioserve.server.limits.memory import MemoryBudget, MemoryReservation
from trioserve.server.limits.rates import Counted
from trioserve.server.model import LoadedModel
from trioserve.server.observers.observer import Observer
from trioserve.server.prompts.infill import Gap
from trioserve.server.prompts.text import AnyPrompt, Messages, PromptLike
from trioserve.server.runs.events import RunAnswer
from trioserve.server.runs.loop import Asked, open_run
from trioserve.server.runs.params import AnyTool, RunParams
from trioserve.server.runs.run import AgentRun
from trioserve.server.stream import ChatCompletion, ChatStream, Completion, Stream
from trioserve.server.transcription.transcript import (
    Transcript,
    TranscriptionParams,
    TranscriptStream,
)
from trioserve.tools.registry import ToolRegistry
from trioserve.types import EngineStatus, GenerationParams, MediaSource, Prompt, TokenId


class ModelServer(ABC):
    """A model that answers requests.

    A Trio cancel scope around a call is its deadline, and the way to cancel it from another task:
    the slot is free within a step. Keyword arguments set the parameters of a call; `ChatFields` and
    its neighbors list them. They change objects given as `params`, `chat` and `context`.

    Attributes:
        config: of the model.
        adapters: its LoRA adapters, by name.
        queue: the requests that wait for a slot.
        tools: that runs may use.
        gate: admits requests and runs with tools.
        memory: the budget of what requests hold in this process.
        observers: of the runs.
    """

    config: Config
    adapters: AdapterNames
    queue: Queue
    tools: ToolRegistry
    gate: Gate
    memory: MemoryBudget
    observers: list[Observer]

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
        params = await self.params(given, context=context)
        async with self.stream_all([prompt], params, context=context) as (stream,):
            yield stream

    async def complete(self, prompt: AnyPrompt, **fields: Unpack[CompletionFields]) -> Completion:
        """Continue a prompt, and return the whole output. Arguments are as in `stream_complete`.

        Raises:
            TrioServeError: as `stream_complete`, and when the request fails.
        """
        async with self.stream_complete(prompt, **fields) as stream:
            return await stream.read()

    @abstractmethod
    def stream_all(
        self,
        prompts: Sequence[AnyPrompt],
        params: GenerationParams,
        *,
        n: int = 1,
        context: RequestContext = ANYONE,
    ) -> AbstractAsyncContextManager[list[Stream]]:
        """Continue each prompt `n` times, concurrently. Leaving the block cancels all requests.

        The outputs of one prompt are adjacent, in the order of their seeds. Raises as
        `Server.stream_complete`.
        """

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
        params = await self.params(given, context=context)
        async with self.stream_chats(messages, params, chat, context=context) as (stream,):
            yield stream

    async def chat(self, messages: Messages, **fields: Unpack[ChatFields]) -> ChatCompletion:
        """Answer a chat, and return the whole message. Arguments are as in `stream_chat`.

        Raises:
            TrioServeError: as `stream_chat`, and when the request fails.
        """
        async with self.stream_chat(messages, **fields) as stream:
            return await stream.read()

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
        """Answer a chat `n` times, concurrently. Raises as `stream_chat`."""
        async with self.open_chats(messages, params, chat, n, context) as (opening, streams):
            format, tools = self.model.template.format, chat.tools or ()
            yield [opening.answer(each, format, tools, self.end_thinking) for each in streams]

    @abstractmethod
    def open_chats(
        self,
        messages: Messages,
        params: GenerationParams,
        chat: ChatParams,
        n: int,
        context: RequestContext,
    ) -> AbstractAsyncContextManager[tuple[ChatOpening, list[Stream]]]:
        """Answer a chat as `stream_chats` does, and leave the output as text."""

    @abstractmethod
    async def end_thinking(self, task_id: int) -> bool:
        """End the reasoning of a running answer; see `ChatStream.end_reasoning`."""

    # -- chats with tools

    @asynccontextmanager
    async def stream_run(
        self,
        messages: Messages,
        tools: Sequence[AnyTool] | None = None,
        *,
        client_tools: Sequence[Mapping[str, Any]] = (),
        params: GenerationParams | None = None,
        chat: ChatParams | None = None,
        run: RunParams | None = None,
        context: RequestContext = ANYONE,
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
            params: the parameters of each answer.
            chat: those of its chat. A call required by `tool_choice` applies to the first one.
            run: the limits of the run.
            context: says whose run it is.
            fields: change fields of these.

        Raises:
            InvalidRequestError: a tool or a parameter is invalid.
            UnknownToolError: a tool of this name does not exist.
            TrioServeError: as `stream_chat`.
        """
        given: dict[str, Any] = {**fields}
        if client_tools:
            given["tools"] = client_tools
        context, run = take_context(given, context), take(RunParams, given, run)
        chat = take(ChatParams, given, chat)
        params = await self.params(given, params, context=context)
        async with open_run(self, messages, tools, Asked(params, chat, context, run)) as opened:
            yield opened

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

    @abstractmethod
    async def read_media(
        self, messages: Messages, hold: MemoryReservation, context: RequestContext
    ) -> ParsedMessages:
        """Read what a chat that becomes several prompts brings, where that saves reading it again.

        `hold` reserves memory for it. Raises TrioServeError: something cannot be read.
        """

    # -- embeddings and recordings

    @abstractmethod
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
        """Compute an embedding of each text. Cancelling it frees the engine within a step.

        Args:
            inputs: a text, or a sequence of texts, of lists of token ids, and of `MixedPrompt`,
                which have images or sound.
            dimensions: cut each embedding to this many components, for models trained for that.
            normalize: the norm, as `Config.embd_normalize`, which is the default. With pooling
                "none", embeddings are not normalized.
            priority: -100 to 100; higher goes first in the queue.
            context: the client and the deadline.
            fields: change fields of the context.

        Raises:
            InvalidRequestError: a text has no tokens or too many, or a value is out of range.
            InvalidMediaError: media cannot be read, or the model does not support them.
            NotSupportedError: the server was not started with `embeddings`, or its model ranks.
            QueueFullError: too many requests wait already.
            ServerClosingError: the server drains, or is closed.
        """

    @abstractmethod
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
        """Score how well each document fits a query; see `Ranking.best`. Arguments as in `embed`.

        With several queries, there is one for each document. Of each document, the first `most`
        tokens count, or all; `cut` shortens those that are too long together with the query.

        Raises:
            NotSupportedError: the server was not started with `reranking`.
            TrioServeError: as `embed`.
        """

    @abstractmethod
    async def classify(
        self,
        inputs: str | Sequence[PromptLike],
        *,
        priority: int = 0,
        context: RequestContext = ANYONE,
        **fields: Unpack[ContextFields],
    ) -> Classification:
        """Score each text for each class of a model that classifies. Arguments as in `embed`.

        Raises:
            InvalidRequestError: there are no texts, or one is too long.
            NotSupportedError: the model has no classification head.
            TrioServeError: as `embed`.
        """

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
        context = only_context(given)
        audio = recording if isinstance(recording, Audio) else Audio(recording)
        async with self.transcribing(audio.source("recording"), params, context) as stream:
            return await stream.read()

    @abstractmethod
    def transcribing(
        self, source: MediaSource, params: TranscriptionParams, context: RequestContext
    ) -> AbstractAsyncContextManager[TranscriptStream]:
        """Transcribe a recording as a stream. Leaving the block cancels the work.

        Raises:
            TrioServeError: as `transcribe`.
        """

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
        model = await self.known_model(context)
        if model.pooling is not None:
            model.check_generates()
        check_copies(n)
        fields = dict(fields)
        if fields.get("logit_bias") is not None:
            with context.preparing():
                fields["logit_bias"] = await self.biases_of(fields["logit_bias"])
        return take_params(fields, base or model.defaults)

    @abstractmethod
    async def biases_of(self, biases: Any) -> Any:
        """Find the tokens of the texts that a `logit_bias` names; see `Tokenizer.biases_of`."""

    @abstractmethod
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

    @abstractmethod
    async def detokenize(self, tokens: Sequence[TokenId] | Prompt) -> str:
        """Convert token ids to text. Invalid bytes become U+FFFD, media ``[image]`` or the like.

        Raises:
            InvalidRequestError: an id is not in the vocabulary.
        """

    @abstractmethod
    async def names_of(self, tokens: Sequence[TokenId]) -> Sequence[bytes]:
        """Find the bytes of tokens; those of control tokens are their names."""

    @abstractmethod
    async def prompt_for(self, gap: Gap, max_tokens: int) -> Sequence[TokenId]:
        """Make the prompt that asks the model to fill a gap.

        Raises:
            NotSupportedError: the model fills no gaps.
            InvalidRequestError: a token is not in the vocabulary.
        """

    @abstractmethod
    async def render(
        self, messages: Messages, chat: ChatParams | None = None, **fields: Unpack[RenderFields]
    ) -> str:
        """Render a chat with the model's template. Media become markers: see `media_marker`.

        Raises:
            TemplateError: the template rejects the messages.
            UnsupportedFieldError: the model does not support one of the media.
            InvalidRequestError: a message is malformed.
        """

    async def count_tokens(self, messages: Messages, **fields: Unpack[RenderFields]) -> int:
        """Count the tokens of a chat's prompt, including those of its media.

        Raises:
            TrioServeError: as `render`; media cannot be loaded.
        """
        return len(await self.chat_prompt(messages, only_chat(fields)))

    @abstractmethod
    async def chat_prompt(self, messages: Messages, chat: ChatParams) -> Prompt:
        """Make the prompt of a chat. Its length counts the cells of media, too."""

    # -- the model

    @property
    @abstractmethod
    def model(self) -> LoadedModel:
        """The properties of the model, also while the server sleeps.

        Raises:
            ServerSleepingError: the server started asleep and has not loaded the model yet.
            ServerClosingError: the server closed before it loaded the model.
        """

    @property
    @abstractmethod
    def sleeping(self) -> bool:
        """Whether the model is not in memory, and is loaded when a request needs it."""

    @abstractmethod
    async def known_model(self, context: RequestContext = ANYONE) -> LoadedModel:
        """The model's properties. Loads the model if it was never loaded."""

    @abstractmethod
    def loaded(
        self, context: RequestContext = ANYONE, **fields: Unpack[ContextFields]
    ) -> AbstractAsyncContextManager[object]:
        """Keep the model in memory during a block. Loads it if needed.

        All methods that need the model do this. Waiting calls continue in the order of arrival.
        Cancelling one of them does not stop the loading.

        Args:
            context: the client and the deadline.
            fields: change fields of the context: `keep_alive` is how long the idle model stays in
                memory afterwards.

        Raises:
            ModelLoadError: the model cannot be loaded; the next call tries again.
            QueueFullError: too many requests wait already.
            ServerClosingError: the server sleeps, and drains or is closed.
        """

    @abstractmethod
    async def sleep(self) -> None:
        """Free the model's memory as soon as no request runs, and wait for that.

        The next request loads the model again, with empty caches. When cancelled, the server stays
        awake, unless it is falling asleep already. Inside `loaded`, this would wait for itself.
        """

    @abstractmethod
    async def status(self) -> EngineStatus:
        """Get the slots and the queue, between two steps; during a long step, an earlier status.

        While the server sleeps, this is the last status, without the last tasks of slots. The
        counters continue after it wakes. Raises ServerClosingError when the server is closed.
        """

    @abstractmethod
    async def check_live(self) -> None:
        """Check that the engine works, if the model is loaded. Raises UnavailableError."""

    @abstractmethod
    async def idle_seconds(self) -> float:
        """How long the model stays in memory if no request comes; infinite: for good."""

    @abstractmethod
    async def written_metrics(self, *, as_json: bool = False) -> str:
        """Write the metrics: for Prometheus with those of the process, or as a JSON object.

        Raises:
            NotSupportedError: they are not configured.
        """

    # -- LoRA adapters

    @abstractmethod
    async def set_scales(self, scales: Mapping[int, float]) -> None:
        """Change the default scales for later requests; an adapter that is not named gets 0.

        Raises:
            InvalidRequestError: an adapter does not exist; nothing has changed.
        """

    @abstractmethod
    async def load_adapter(self, name: str, path: str, context: RequestContext = ANYONE) -> None:
        """Load an adapter from a file in the folder. Requests that run are not affected.

        The model and the adapter are first loaded in another process if the file is new. When
        cancelled, the adapter is loaded or not, as a whole.

        Raises:
            InvalidRequestError: the name is taken, the file is not in the folder, or it cannot be
                used; `param` names the field.
            NotSupportedError: the server was started without a folder, or the model generates no
                text.
        """

    @abstractmethod
    async def unload_adapter(self, name: str, context: RequestContext = ANYONE) -> None:
        """Free an adapter that no request uses.

        Raises:
            UnknownModelError: there is no adapter of the name.
            InvalidRequestError: it was loaded with the model.
            AdapterInUseError: a request runs or waits with it.
            NotSupportedError: as `load_adapter`.
        """

    # -- slots and limits

    @abstractmethod
    async def save_slot(self, slot_id: int, filename: str, client: str = "") -> Moved:
        """Save the sequence that a slot ran last; see `SlotFiles.save`."""

    @abstractmethod
    async def restore_slot(self, slot_id: int, filename: str, client: str = "") -> Moved:
        """Load a saved sequence; see `SlotFiles.restore`."""

    @abstractmethod
    async def erase_slot(self, slot_id: int, client: str = "") -> int:
        """Erase the sequence that a slot ran last; see `SlotFiles.erase`."""

    @abstractmethod
    async def count_request(self, client: str) -> Counted:
        """Count a request for the rate limits."""
