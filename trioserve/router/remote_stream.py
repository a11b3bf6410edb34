"""`RemoteStream`: the answer of a process to a request for a stream, as events of a `Server`."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from itertools import chain
from typing import Any

from trioserve.chat.deltas import (
    ContentDelta,
    Delta,
    Message,
    MessageBuilder,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from trioserve.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    NotSupportedError,
    TooManyRequestsError,
    TrioServeError,
    UnavailableError,
)
from trioserve.router.forward import Answer
from trioserve.server.stream import ChatChunk, ChatCompletion, Completion
from trioserve.types import Chunk, Finished, FinishReason, Prompt, Timings

#: The classes of errors, by the ``type`` that they have in JSON.
_ERRORS: Mapping[str, type[TrioServeError]] = {
    kind.type: kind
    for kind in (DeadlineExceededError, InvalidRequestError, NotSupportedError, UnavailableError)
}

#: Seconds after which one may come back who was refused.
_RETRY_AFTER = 1.0


def error_of(fields: Mapping[str, Any]) -> TrioServeError:
    """Make an error of what an answer or an event has as its ``error``."""
    message, param = str(fields["message"]), fields.get("param")
    if fields["type"] == TooManyRequestsError.type:
        return TooManyRequestsError(message, retry_after=_RETRY_AFTER)
    usual = TrioServeError if param is None else InvalidRequestError
    return _ERRORS.get(fields["type"], usual)(message, param=param)


class RemoteStream:
    """The events of one request, as they come: `Chunk` or `ChatChunk`, and at last `Finished`.

    Iterate over it within the block that opened it; leaving the block cancels the request. Of a
    chat, the ids of tokens are not known.

    Raises:
        TrioServeError: from the iteration, when the request fails or its process ends.
    """

    def __init__(self, answer: Answer) -> None:
        self.finished: Finished | None = None
        #: The whole prompt, once the stream has ended.
        self.prompt_text = ""
        self._answer = answer
        self._buffer = b""
        self._unread: deque[Chunk | ChatChunk | Finished] = deque()
        self._builder = MessageBuilder()

    @property
    def message(self) -> Message:
        """The message of a chat, as far as it has been read."""
        return self._builder.build()

    def __aiter__(self) -> AsyncIterator[Chunk | ChatChunk | Finished]:
        return self

    async def __anext__(self) -> Chunk | ChatChunk | Finished:
        if self.finished is not None:
            raise StopAsyncIteration
        while not self._unread:
            data = await self._answer.receive()
            if not data:
                raise UnavailableError("The answer of the model's process has no end.")
            self._buffer += data
            *events, self._buffer = self._buffer.split(b"\n\n")
            self._unread.extend(chain.from_iterable(map(self._events_in, events)))
        event = self._unread.popleft()
        if isinstance(event, ChatChunk):
            for delta in event.deltas:
                self._builder.add(delta)
        elif isinstance(event, Finished):
            self.finished = event
        return event

    async def read(self) -> Completion:
        """Read all that is left of a prompt's continuation. Raises what the iteration raises."""
        chunks = [event async for event in self if isinstance(event, Chunk)]
        assert self.finished is not None
        return Completion(
            text="".join(chunk.text for chunk in chunks),
            tokens=tuple(chain.from_iterable(chunk.tokens for chunk in chunks)),
            probs=(),
            prompt=Prompt(()),
            finished=self.finished,
        )

    async def read_chat(self) -> ChatCompletion:
        """Read all that is left of an answer. The message has what was read before, too."""
        async for _ in self:
            pass
        assert self.finished is not None
        return ChatCompletion(
            message=self.message,
            tokens=(),
            probs=(),
            prompt=Prompt(()),
            prompt_text=self.prompt_text,
            finished=self.finished,
        )

    def _events_in(self, block: bytes) -> Iterator[Chunk | ChatChunk | Finished]:
        """Read an event of the stream. A comment, and the line that ends a chat, have none."""
        if not block.startswith(b"data: {"):
            return
        data = json.loads(block.removeprefix(b"data: "))
        if "error" in data:
            raise error_of(data["error"])
        if "choices" in data:
            for choice in data["choices"]:
                if deltas := tuple(self._deltas_in(choice["delta"])):
                    yield ChatChunk(deltas, ())
            last = data.get("__verbose")
        else:
            if data["content"] or data["tokens"]:
                yield Chunk(0, data["content"], tuple(data["tokens"]))
            last = data if data["stop"] else None
        if last is not None:
            self.prompt_text = last["prompt"]
            yield _finished(last)

    def _deltas_in(self, delta: Mapping[str, Any]) -> Iterator[Delta]:
        if text := delta.get("reasoning_content"):
            yield ReasoningDelta(text)
        if text := delta.get("content"):
            yield ContentDelta(text)
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "name" in function:
                yield ToolCallStart(call["index"], call["id"], function["name"])
            if function["arguments"]:
                yield ToolCallArguments(call["index"], function["arguments"])


def _finished(last: Mapping[str, Any]) -> Finished:
    timings = last["timings"]
    known = {
        name: timings[name]
        for name in ("cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms")
    }
    return Finished(
        task_id=0,
        reason=FinishReason(last["stop_type"]),
        stopping_word=last["stopping_word"],
        timings=Timings(**known),
        truncated=last["truncated"],
        slot_id=last["id_slot"],
    )
