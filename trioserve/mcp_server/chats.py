"""A chat, asked for as a stream: so that its text can be told while it comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from trioserve.errors import TrioServeError, UnavailableError
from trioserve.mcp_server.models import Models, Reason, Tell, read


class Chatted(msgspec.Struct, kw_only=True):
    """An answer."""

    text: str
    model: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    reasoning: str = ""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    """A chunk of an answer, or an error."""

    model: str = ""
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Reason | None = None


async def chat(
    models: Models, request: Mapping[str, Any], tell: Tell, comes: Callable[[str], None]
) -> Chatted:
    """Have a model answer a chat. When cancelled, it stops.

    Args:
        models: those that there are.
        request: as for ``/v1/chat/completions``.
        tell: takes what the call is waiting for.
        comes: takes the text as it comes, that of reasoning, too.

    Raises:
        TrioServeError: it does not answer.
    """
    body = {**request, "stream": True, "stream_options": {"include_usage": True}}
    reader = _Reader(comes)
    async with models.answer("/v1/chat/completions", body, tell) as reply:
        while data := await reply.receive():
            reader.feed(data)
    return reader.answer()


class _Reader:
    """Puts an answer together from the events of its stream."""

    def __init__(self, comes: Callable[[str], None]) -> None:
        self._comes = comes
        self._buffer = b""
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._model = ""
        self._finish_reason: str | None = None
        self._usage = _Usage()

    def feed(self, data: bytes) -> None:
        """Take what came. Raises TrioServeError: it is an error, or no event of a chat."""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            content = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and content != b"[DONE]":  # others are comments
                self._take(read(content, _Event))

    def _take(self, event: _Event) -> None:
        if event.error is not None:
            raise TrioServeError(event.error.message)
        self._model = event.model or self._model
        self._usage = event.usage or self._usage
        for choice in event.choices:
            self._finish_reason = choice.finish_reason or self._finish_reason
            for piece, parts in (
                (choice.delta.reasoning_content, self._reasoning),
                (choice.delta.content, self._text),
            ):
                if piece:
                    parts.append(piece)
                    self._comes(piece)

    def answer(self) -> Chatted:
        """The whole answer. Raises UnavailableError: it has no end."""
        if self._finish_reason is None:
            raise UnavailableError("The answer of the server has no end.")
        return Chatted(
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            model=self._model,
            finish_reason=self._finish_reason,
            prompt_tokens=self._usage.prompt_tokens,
            completion_tokens=self._usage.completion_tokens,
        )
