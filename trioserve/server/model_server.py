"""`ModelServer`: a model that answers requests, in this process or in another one."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Unpack

from trioserve.chat.messages import Audio
from trioserve.chat.params import ChatParams
from trioserve.server.adapters import AdapterNames
from trioserve.server.context import ANYONE, RequestContext, take_fields
from trioserve.server.generation.embeddings import Classification, Cut, Embeddings, Ranking
from trioserve.server.generation.requests import Queue
from trioserve.server.generation.slots import Moved
from trioserve.server.keywords import (
    ContextFields,
    SpeechFields,
    TranscriptionFields,
    only_context,
    take_context,
)
from trioserve.server.limits.rates import Counted
from trioserve.server.prompts.text import AnyPrompt, Messages, PromptLike
from trioserve.server.runs.events import RunAnswer
from trioserve.server.runs.loop import Asked, open_run
from trioserve.server.runs.params import AnyTool, RunFields, RunParams
from trioserve.server.runs.run import AgentRun
from trioserve.server.speech.speech import PLAIN, Speech, SpeechParams, SpeechStream
from trioserve.server.text_server import TextServer
from trioserve.server.transcription.transcript import (
    Transcript,
    TranscriptionParams,
    TranscriptStream,
)
from trioserve.types import EngineStatus, GenerationParams, MediaSource


class ModelServer(TextServer):
    """All that a model does: text, tools, embeddings, recordings, speech, adapters and slots.

    Attributes:
        adapters: its LoRA adapters, by name.
        queue: the requests that wait for a slot.
    """

    adapters: AdapterNames
    queue: Queue

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
        context, run = take_context(given, context), take_fields(RunParams, given, run)
        chat = take_fields(ChatParams, given, chat)
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
        params = take_fields(TranscriptionParams, given)
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

    # -- speech

    async def speak(self, text: str, **fields: Unpack[SpeechFields]) -> Speech:
        """Speak a text, and return all of the sound. Cancelling it frees the slot within a step.

        Args:
            text: what to say, of any length: it is cut into pieces at sentences.
            fields: how to speak it.

        Raises:
            InvalidRequestError: there is nothing to say, a voice or a language is unknown, or a
                character is not in the vocabulary of the model.
            NotSupportedError: no model that speaks is configured, see `Config.tts`.
            TrioServeError: as `chat`.
        """
        given: dict[str, Any] = {**fields}
        params = take_fields(SpeechParams, given)
        async with self.speaking(text, params, only_context(given)) as stream:
            return await stream.read()

    @abstractmethod
    def speaking(
        self, text: str, params: SpeechParams = PLAIN, context: RequestContext = ANYONE
    ) -> AbstractAsyncContextManager[SpeechStream]:
        """Speak a text as a stream: ``async with server.speaking(...) as stream:``.

        Iterating over it gives samples as they are made. Leaving the block cancels the work.

        Raises:
            TrioServeError: as `speak`.
        """

    # -- the state of the model

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
        """The seconds that the model stays in memory without requests; infinite: for good."""

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
