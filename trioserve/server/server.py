"""`Server`: a model that answers requests, as long as an ``async with`` block runs."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs

from trioserve.chat.markers import media_marker
from trioserve.chat.media_parts import Audio
from trioserve.chat.params import ChatParams
from trioserve.errors import ServerClosingError
from trioserve.server.arguments import generation_params, refuse, take_chat, take_context
from trioserve.server.chat_prompts import Messages
from trioserve.server.chats import Chats
from trioserve.server.completions import Completions
from trioserve.server.context import RequestContext
from trioserve.server.embedding_results import Embeddings, Ranking
from trioserve.server.life import ServerLife
from trioserve.server.media_prompts import AnyPrompt
from trioserve.server.stream import ChatCompletion, ChatStream, Completion, Stream
from trioserve.server.tokens import PromptLike
from trioserve.server.transcription import Transcript, TranscriptionParams
from trioserve.types import GenerationParams, Prompt, TokenId


class Server(ServerLife):
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

    # -- text and tokens

    async def params(
        self, fields: Mapping[str, Any], base: GenerationParams | None = None
    ) -> GenerationParams:
        """Make parameters from fields of `GenerationParams` and `SamplingParams`, by name.

        What is not set is as in `base`, or as the server's configuration says. A `logit_bias` may
        name text in place of a token id.

        Raises:
            InvalidRequestError: a field is unknown, has the wrong type or is out of range.
        """
        if fields.get("logit_bias") is not None:
            async with self.awake():
                biases = await self.parts.tokenizer.biases_of(fields["logit_bias"])
            fields = {**fields, "logit_bias": biases}
        return generation_params(base or (await self.known_model()).defaults, fields)

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
        async with self.awake():
            made = await self.parts.tokenizer.prompt_of(
                prompt, add_special=add_special, parse_special=parse_special, aside=True
            )
        made.check(self.model.vocab.n_tokens, param)
        return made.tokens

    def detokenize(self, tokens: Sequence[TokenId]) -> str:
        """Turn token ids into text. Bytes that are no character become U+FFFD.

        Raises:
            InvalidRequestError: an id is not in the vocabulary.
            ServerSleepingError: the server sleeps; `awake` wakes it.
        """
        return self.parts.tokenizer.detokenize(tokens)

    def text_of(self, prompt: Prompt) -> str:
        """Write the prompt of an output as text, with ``[image]`` or the like for media.

        Raises:
            ServerSleepingError: the server sleeps; `awake` wakes it.
        """
        return self.parts.tokenizer.text_of(prompt)

    async def render(
        self, messages: Messages, chat: ChatParams | None = None, **fields: Any
    ) -> str:
        """Render a chat with the model's template. Media become markers: see `media_marker`.

        Raises:
            TemplateError: the template refuses the messages.
            UnsupportedFieldError: the model does not take one of the media.
            InvalidRequestError: a message is malformed.
        """
        chat = take_chat(fields, chat)
        refuse(fields)
        async with self.awake():
            prompts = self.parts.prompts
            with prompts.hold() as hold:
                parsed = await prompts.parse(messages)
                marked = await prompts.mark(parsed, hold, marker=media_marker())
            return await prompts.render(marked.messages, chat)

    async def count_tokens(
        self, messages: Messages, chat: ChatParams | None = None, **fields: Any
    ) -> int:
        """Count the tokens of a chat's prompt, with those of its media.

        Arguments and errors are those of `render`, and those of loading media.
        """
        chat = take_chat(fields, chat)
        refuse(fields)
        async with self.awake():
            return await self.parts.prompts.count_tokens(messages, chat)

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
        free within a tick.

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
        """Make an embedding of each text. Cancelling it frees the engine within a tick.

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
