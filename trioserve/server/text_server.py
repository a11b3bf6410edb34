"""`TextServer`: a model that completes text and answers chats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Unpack

from trioserve.chat.messages import Messages as ParsedMessages
from trioserve.chat.params import ChatParams
from trioserve.concurrency import Gate
from trioserve.config import Config
from trioserve.server.context import ANYONE, RequestContext, take_fields, take_params
from trioserve.server.generation.text import ChatOpening, check_copies
from trioserve.server.keywords import (
    ChatFields,
    CompletionFields,
    ContextFields,
    RenderFields,
    only_chat,
    take_context,
)
from trioserve.server.limits.memory import MemoryBudget, MemoryReservation
from trioserve.server.model import LoadedModel
from trioserve.server.observers.observer import Observer
from trioserve.server.prompts.infill import Gap
from trioserve.server.prompts.text import AnyPrompt, Messages, PromptLike
from trioserve.server.stream import ChatCompletion, ChatStream, Completion, Stream
from trioserve.tools.registry import ToolRegistry
from trioserve.types import GenerationParams, Prompt, TokenId


class TextServer(ABC):
    """A model that completes text and answers chats.

    A Trio cancel scope around a call is its deadline, and the way to cancel it from another task:
    the slot is free within a step. Keyword arguments set the parameters of a call; `ChatFields` and
    its neighbors list them. They change objects given as `params`, `chat` and `context`.

    Attributes:
        config: of the model.
        tools: that runs may use.
        gate: admits requests and runs with tools.
        memory: the budget of what requests hold in this process.
        observers: of the runs.
    """

    config: Config
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
        context, chat = take_context(given), take_fields(ChatParams, given)
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

    @abstractmethod
    async def read_media(
        self, messages: Messages, hold: MemoryReservation, context: RequestContext
    ) -> ParsedMessages:
        """Read what a chat that becomes several prompts brings, where that saves reading it again.

        `hold` reserves memory for it. Raises TrioServeError: something cannot be read.
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
        """True if the model is not in memory, and is loaded when a request needs it."""

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
