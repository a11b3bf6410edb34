"""`Server`: a model that answers requests, as long as an ``async with`` block runs."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs

from trioserve.chat.messages import Audio
from trioserve.chat.params import ChatParams
from trioserve.errors import ServerClosingError
from trioserve.server.context import RequestContext, refuse, take_chat, take_context
from trioserve.server.generation.chats import Chats
from trioserve.server.generation.completions import Completions
from trioserve.server.generation.embeddings import Embeddings, Ranking
from trioserve.server.prompts.chats import Messages
from trioserve.server.prompts.media import AnyPrompt
from trioserve.server.runs.events import RunAnswer
from trioserve.server.runs.loop import Question, check_chat, open_run
from trioserve.server.runs.params import AnyTool, RunParams, RunTools, take_run, tools_of
from trioserve.server.runs.run import Run
from trioserve.server.stream import ChatCompletion, ChatStream, Completion, Stream
from trioserve.server.texts import ServerTexts
from trioserve.server.transcription import Transcript, TranscriptionParams
from trioserve.types import GenerationParams


class Server(ServerTexts):
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

    @property
    def completions(self) -> Completions:
        """Continues prompts: any number of them, each any number of times."""
        return self.parts.generation().completions

    @property
    def chats(self) -> Chats:
        """Answers chats, each any number of times."""
        return self.parts.generation().chats

    # -- prompts that are continued

    @asynccontextmanager
    async def stream(
        self,
        prompt: AnyPrompt,
        params: GenerationParams | None = None,
        *,
        context: RequestContext | None = None,
        **fields: Any,
    ) -> AsyncIterator[Stream]:
        """Continue a prompt, token by token: ``async with server.stream("Once") as events:``.

        Leaving the block before the end, for whatever reason, cancels the request: its slot is
        free within a step.

        Args:
            prompt: text, token ids, or a `MixedPrompt` with images or sound in it.
            params: how to continue it.
            context: who asks, and until when.
            fields: single fields, by name.

        Raises:
            InvalidRequestError: the prompt or a parameter is wrong.
            QueueFullError: too many requests wait already.
            DeadlineExceededError: there is no time left; from the iteration, when it has passed.
            ServerClosingError: the server drains, or is closed.
        """
        context = take_context(fields, context)
        (await self.known_model(context)).check_generates()
        params = await self.params(fields, params)
        async with (
            self.awake(context),
            self.completions.stream([prompt], params, context) as (stream,),
        ):
            yield stream

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
        *,
        context: RequestContext | None = None,
        **fields: Any,
    ) -> AsyncIterator[ChatStream]:
        """Answer a chat, token by token. Like `stream`, with `ChatChunk` in place of `Chunk`.

        Args:
            messages: the chat, in OpenAI's form: ``[{"role": "user", "content": "Hi"}]``.
            params: how to answer.
            chat: tools, reasoning, and what else belongs to chats.
            context: who asks, and until when.
            fields: single fields, by name.

        Raises:
            TemplateError: the template refuses the messages.
            TrioServeError: as `stream`.
        """
        chat, context = take_chat(fields, chat), take_context(fields, context)
        (await self.known_model(context)).check_generates()
        params = await self.params(fields, params)
        async with (
            self.awake(context),
            self.chats.stream(messages, params, chat, context) as (stream,),
        ):
            yield stream

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
        if not self.ready:
            raise ServerClosingError
        end = partial(self.parts.generation().engine.end_thinking, stream.task_id)
        return await self.parts.dispatcher.call(end)

    # -- chats in which tools are run

    @asynccontextmanager
    async def stream_run(
        self,
        messages: Messages,
        tools: Sequence[AnyTool] | None = None,
        params: GenerationParams | None = None,
        chat: ChatParams | None = None,
        run: RunParams | None = None,
        *,
        context: RequestContext | None = None,
        **fields: Any,
    ) -> AsyncIterator[Run]:
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
            context: who asks, and until when all of it is to be done.
            fields: single fields, by name.

        Raises:
            InvalidRequestError: a tool or a parameter is wrong.
            UnknownToolError: there is no tool of this name.
            TrioServeError: as `stream_chat`.
        """
        run, context = take_run(fields, run), take_context(fields, context)
        chat = take_chat(fields, chat)
        model = await self.known_model(context)
        model.check_generates()
        check_chat(chat, self.config, model)
        params = await self.params(fields, params)
        chosen = RunTools.of(tools_of(tools, self.tools), chat.tools or ())
        self.tools.check(run.place)
        with self.memory.hold(context.client) as hold:
            async with self.awake(context):
                loaded = await self.parts.prompts.load(messages, hold, context.deadline)
            question = Question(
                messages=loaded,
                params=params,
                chat=chat,
                context=context,
                max_steps=run.max_steps or self.config.tool_max_steps,
                n_ctx=model.n_ctx_seq,
            )
            async with open_run(self, question, chosen, run, self.common, self.runs) as opened:
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
        run = take_run(fields, run)
        if run.approve == "ask":
            run = attrs.evolve(run, approve="none")
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
        context: RequestContext | None = None,
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
            context: who asks, and until when.
            fields: single fields of the context, by name.

        Raises:
            InvalidRequestError: a text has no tokens or too many, or a value is out of range.
            InvalidMediaError: media cannot be read, or the model cannot take them.
            NotSupportedError: the server was not started with `embeddings`, or its model ranks.
            QueueFullError: too many requests wait already.
            DeadlineExceededError: the time of the request has passed.
            ServerClosingError: the server drains, or is closed.
        """
        context = take_context(fields, context)
        refuse(fields)
        inputs = [inputs] if isinstance(inputs, str) else inputs
        (await self.known_model(context)).check_embeds()
        async with self.awake(context):
            embedder = self.parts.embedder()
            return await embedder.embed(inputs, dimensions, normalize, priority, context)

    async def rerank(
        self,
        query: str,
        documents: str | Sequence[str],
        *,
        priority: int = 0,
        context: RequestContext | None = None,
        **fields: Any,
    ) -> Ranking:
        """Score how well each document fits a query; see `Ranking.best`. Arguments as in `embed`.

        Raises:
            InvalidRequestError: there are no documents, or one is too long.
            NotSupportedError: the server was not started with `reranking`.
            TrioServeError: as `embed`.
        """
        context = take_context(fields, context)
        refuse(fields)
        documents = [documents] if isinstance(documents, str) else documents
        (await self.known_model(context)).check_ranks()
        async with self.awake(context):
            return await self.parts.ranker().rerank(query, documents, priority, context)

    # -- recordings

    async def transcribe(
        self,
        recording: Audio | bytes | str | os.PathLike[str],
        params: TranscriptionParams | None = None,
        *,
        context: RequestContext | None = None,
        **fields: Any,
    ) -> Transcript:
        """Write down what is spoken in a recording. Cancelling it ends the work.

        Args:
            recording: a path, or the bytes of a file.
            params: how to transcribe it.
            context: who asks, and until when.
            fields: single fields of both, by name.

        Raises:
            InvalidMediaError: the recording cannot be read.
            InvalidRequestError: a parameter cannot be obeyed.
            NotSupportedError: the model does not hear, and there is no `transcription_model`.
            TranscriberError: Whisper could not start, has failed, or has ended.
            TrioServeError: as `chat`.
        """
        context = take_context(fields, context)
        names = attrs.fields_dict(TranscriptionParams).keys() & fields.keys()
        changes = {name: fields.pop(name) for name in names}
        refuse(fields)
        params = attrs.evolve(params or TranscriptionParams(), **changes)
        audio = recording if isinstance(recording, Audio) else Audio(recording)
        (await self.known_model(context)).check_transcribes()
        async with (
            self.awake(context),
            self.parts.transcriptions().stream(
                audio.source("recording"), params, context
            ) as stream,
        ):
            return await stream.read()
