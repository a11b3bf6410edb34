"""`AnyServer`: what `Server` and `RemoteServer` both offer to a program."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar, Unpack

from trioserve.chat.messages import Audio
from trioserve.server.generation.embeddings import Embeddings, Ranking
from trioserve.server.keywords import (
    ChatFields,
    CompletionFields,
    ContextFields,
    RenderFields,
    TranscriptionFields,
)
from trioserve.server.prompts.media import MixedPrompt
from trioserve.server.prompts.text import Messages
from trioserve.server.stream import ChatCompletion, Completion
from trioserve.server.transcription.transcript import Transcript
from trioserve.types import Finished, TokenId

_Whole = TypeVar("_Whole", covariant=True)


class AnyStream(Protocol[_Whole]):
    """An output as it arrives: see `Stream` and `ChatStream`."""

    @property
    def finished(self) -> Finished | None:
        """How the output ended, once it has been read to its end."""

    def __aiter__(self) -> AsyncIterator[Any]: ...

    def text(self) -> AsyncIterator[str]:
        """Iterate over the text alone."""

    async def read(self) -> _Whole:
        """Read the rest, and return the whole output."""


class AnyServer(Protocol):
    """A model in this process or in another one. `Server` describes each method."""

    def stream_complete(
        self, prompt: str | Sequence[TokenId], **fields: Unpack[CompletionFields]
    ) -> AbstractAsyncContextManager[AnyStream[Completion]]:
        """Continue a prompt, token by token."""

    async def complete(
        self, prompt: str | Sequence[TokenId], **fields: Unpack[CompletionFields]
    ) -> Completion:
        """Continue a prompt, and return the whole output."""

    def stream_chat(
        self, messages: Messages, **fields: Unpack[ChatFields]
    ) -> AbstractAsyncContextManager[AnyStream[ChatCompletion]]:
        """Answer a chat, token by token."""

    async def chat(self, messages: Messages, **fields: Unpack[ChatFields]) -> ChatCompletion:
        """Answer a chat, and return the whole message."""

    async def embed(
        self,
        inputs: str | Sequence[str | MixedPrompt],
        *,
        dimensions: int | None = None,
        normalize: int | None = None,
        priority: int = 0,
        **fields: Unpack[ContextFields],
    ) -> Embeddings:
        """Compute an embedding of each text."""

    async def rerank(
        self,
        query: str,
        documents: str | Sequence[str],
        *,
        priority: int = 0,
        **fields: Unpack[ContextFields],
    ) -> Ranking:
        """Score how well each document fits a query."""

    async def transcribe(
        self,
        recording: Audio | bytes | str | os.PathLike[str],
        **fields: Unpack[TranscriptionFields],
    ) -> Transcript:
        """Transcribe a recording."""

    async def tokenize(
        self, prompt: str, *, add_special: bool = True, parse_special: bool = True
    ) -> tuple[TokenId, ...]:
        """Convert text to token ids."""

    async def detokenize(self, tokens: Sequence[TokenId]) -> str:
        """Convert token ids to text."""

    async def render(self, messages: Messages, **fields: Unpack[RenderFields]) -> str:
        """Render a chat with the model's template."""

    async def count_tokens(self, messages: Messages, **fields: Unpack[RenderFields]) -> int:
        """Count the tokens of a chat's prompt."""
