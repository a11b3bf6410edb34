"""`ChildModels`: models by name for a program, each in a process of its own."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import trio

from trioserve.chat.documents import text_part
from trioserve.chat.media_parts import Attachment, Audio, Image, Video
from trioserve.errors import DeadlineExceededError, UnsupportedFieldError
from trioserve.models.catalog import Catalog, ModelEntry
from trioserve.router.connected import asked
from trioserve.router.fleet import Fleet
from trioserve.router.forward import Answer
from trioserve.router.remote_stream import RemoteStream, error_of
from trioserve.router.remote_transcript import Recording, read_transcript, write_form
from trioserve.router.wire import Outgoing
from trioserve.server.chat_prompts import Messages
from trioserve.server.concurrency import EnteredOnce
from trioserve.server.embedding_results import Array
from trioserve.server.media_prompts import MixedPrompt
from trioserve.server.stream import ChatCompletion, Completion
from trioserve.server.transcription import Transcript
from trioserve.types import MediaKind, MediaSource

#: Fields for what a `RemoteStream` does not tell.
_UNTOLD = frozenset({"best_of", "logprobs", "n", "n_probs", "return_progress", "top_logprobs"})

_ATTACHMENTS: Mapping[MediaKind, type[Attachment]] = {
    "image": Image, "audio": Audio, "video": Video,
}  # fmt: skip

#: Fields that decide how a transcript is written, which is done here.
_OF_FORM = frozenset({"file", "include", "response_format", "stream"})


class ChildModels(EnteredOnce, Mapping[str, "RemoteServer"]):
    """Models in processes of their own: ``async with ChildModels(models_dir="m") as models:``.

    The models are those that ``trioserve --models-dir m`` offers, under the same names, and
    ``models[name]`` has what programs ask of a `Server`. Its process is started when it is first
    needed, and stopped where others need the room, but never while a request uses it. One that
    crashes takes its own requests with it, and no others.

    Leaving ends the processes, and with them the requests that still run.

    Args:
        models_dir: a directory of GGUF files.
        models_preset: an INI file with flags for each model.
        flags: flags of the command line, for all models.
        max_loaded: how many processes may run at the same time; 0: any number.
        max_memory: bytes that they may need together, by llama.cpp's estimate; 0: any number.

    Raises:
        ConfigError: on entry, when a directory, the presets or a flag cannot be used.
    """

    def __init__(
        self,
        models_dir: str | Path | None = None,
        *,
        models_preset: str | Path | None = None,
        flags: Sequence[str] = (),
        max_loaded: int = 4,
        max_memory: int = 0,
    ) -> None:
        self._find = partial(
            Catalog,
            models_dir=None if models_dir is None else Path(models_dir),
            models_preset=None if models_preset is None else Path(models_preset),
            own_args=flags,
        )
        self._open = partial(Fleet, max_models=max_loaded, max_memory=max_memory)
        self._fleet: Fleet | None = None

    def __getitem__(self, name: str) -> RemoteServer:
        return RemoteServer(self._entered, self._entered.catalog.entries[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entered.catalog.entries)

    def __len__(self) -> int:
        return len(self._entered.catalog.entries)

    @property
    def _entered(self) -> Fleet:
        if self._fleet is None:
            raise RuntimeError("the models are known inside the block")
        return self._fleet

    @asynccontextmanager
    async def _live(self) -> AsyncIterator[None]:
        catalog = await trio.to_thread.run_sync(self._find)
        async with self._open(catalog) as self._fleet:
            yield


class RemoteServer:
    """A model in a process of its own. Any Trio cancel scope around a call cancels its work there.

    Fields are those of the requests of the HTTP interface, such as `temperature`, `max_tokens` or
    `tools`. `timeout` is in seconds from now, and counts while the process is started, too.
    """

    def __init__(self, fleet: Fleet, entry: ModelEntry) -> None:
        self._fleet = fleet
        self._entry = entry

    @asynccontextmanager
    async def stream(
        self, prompt: str | Sequence[int], **fields: Any
    ) -> AsyncIterator[RemoteStream]:
        """Continue a prompt, token by token. Leaving the block early cancels the request.

        Raises:
            TrioServeError: as `Server.stream`; the process cannot be started, or has ended.
        """
        body = {**fields, "prompt": prompt, "return_tokens": True}
        async with self._stream("/completion", body) as stream:
            yield stream

    async def complete(self, prompt: str | Sequence[int], **fields: Any) -> Completion:
        """Continue a prompt, and return all of it at the end. Raises as `stream`."""
        async with self.stream(prompt, **fields) as stream:
            return await stream.read()

    @asynccontextmanager
    async def stream_chat(self, messages: Messages, **fields: Any) -> AsyncIterator[RemoteStream]:
        """Answer a chat, token by token. Like `stream`, with `ChatChunk` in place of `Chunk`."""
        body = {**fields, "messages": messages, "verbose": True}
        async with self._stream("/v1/chat/completions", body) as stream:
            yield stream

    async def chat(self, messages: Messages, **fields: Any) -> ChatCompletion:
        """Answer a chat, and return the message at the end. Raises as `stream`."""
        async with self.stream_chat(messages, **fields) as stream:
            return await stream.read_chat()

    async def embed(
        self, inputs: str | Sequence[str | MixedPrompt], **fields: Any
    ) -> tuple[Array, ...]:
        """Make an embedding of each text. Raises as `Server.embed`, and as `stream`."""
        given = inputs if isinstance(inputs, str) else [_as_input(one) for one in inputs]
        answer = await self._ask("/v1/embeddings", {**fields, "input": given})
        return tuple(np.array(one["embedding"], np.float32) for one in answer["data"])

    async def rerank(
        self, query: str, documents: Sequence[str], **fields: Any
    ) -> tuple[float, ...]:
        """Score how well each document fits a query; higher is better. Raises as `embed`."""
        body = {**fields, "query": query, "documents": documents}
        answer = await self._ask("/v1/rerank", body)
        ranked = sorted(answer["results"], key=lambda one: int(one["index"]))
        return tuple(one["relevance_score"] for one in ranked)

    async def transcribe(
        self, recording: Recording, *, translate: bool = False, **fields: Any
    ) -> Transcript:
        """Write down what is spoken in a recording: a path, or the bytes of a file.

        The times of words are there if ``timestamp_granularities=["word"]`` asks for them;
        probabilities of tokens are not.

        Args:
            recording: the recording.
            translate: write it in English, whatever is spoken.
            fields: of the form, such as `language`, `prompt`, `temperature` and `timeout`.

        Raises:
            TrioServeError: as `Server.transcribe`, and as `stream`.
        """
        _refuse(_OF_FORM, fields)
        path = f"/v1/audio/{'translations' if translate else 'transcriptions'}"
        if granularities := fields.get("timestamp_granularities"):
            fields["timestamp_granularities"] = [*granularities, "segment"]
        body = {**fields, "response_format": "verbose_json", "file": recording}
        async with self._answer(path, body, write_form) as answer:
            return read_transcript(json.loads(await answer.receive_all()))

    async def tokenize(self, text: str, **fields: Any) -> tuple[int, ...]:
        """Turn text into token ids. Raises as `stream`."""
        answer = await self._ask("/tokenize", {"add_special": True, **fields, "content": text})
        return tuple(answer["tokens"])

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """Turn token ids into text. Raises as `stream`."""
        answer = await self._ask("/detokenize", {"tokens": tokens})
        return str(answer["content"])

    @asynccontextmanager
    async def _stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[RemoteStream]:
        _refuse(_UNTOLD, body)
        async with self._answer(path, {**body, "stream": True}) as answer:
            yield RemoteStream(answer)

    async def _ask(self, path: str, body: dict[str, Any]) -> Any:
        async with self._answer(path, body) as answer:
            return json.loads(await answer.receive_all())

    @asynccontextmanager
    async def _answer(
        self,
        path: str,
        body: dict[str, Any],
        write: Callable[[dict[str, Any]], tuple[bytes, bytes]] | None = None,
    ) -> AsyncIterator[Answer]:
        """Send a request to the process; gives the answer, which is good.

        `write` makes of the body its type and what is sent, in a thread. The default is JSON.
        """
        timeout = body.get("timeout")
        deadline = math.inf if timeout is None else trio.current_time() + timeout

        async def send() -> Outgoing:
            if timeout is not None:
                body["timeout"] = max(deadline - trio.current_time(), 0.001)
            kind, data = await trio.to_thread.run_sync(write or _write_json, body)
            return Outgoing("POST", path, ((b"content-type", kind),), data)

        async with AsyncExitStack() as stack:
            with trio.move_on_at(deadline) as scope:
                answer = await stack.enter_async_context(asked(self._fleet, self._entry, send))
            if scope.cancelled_caught:
                raise DeadlineExceededError("The request's deadline has passed.")
            if answer.status != 200:
                raise error_of(json.loads(await answer.receive_all())["error"])
            yield answer


def _refuse(names: frozenset[str], fields: Mapping[str, Any]) -> None:
    for name in sorted(names & fields.keys()):
        raise UnsupportedFieldError(f"'{name}' has no effect here.", param=name)


def _as_input(text: str | MixedPrompt) -> Any:
    if not isinstance(text, MixedPrompt):
        return text
    parts = [text_part(part) if isinstance(part, str) else part for part in text.parts]
    return {"content": parts}


def _write_json(body: dict[str, Any]) -> tuple[bytes, bytes]:
    """Write a body as JSON; reads the files of images and sound. It may take long.

    Raises:
        InvalidMediaError: a file cannot be read.
        UnsupportedFieldError: something cannot be sent to another process.
    """
    return b"application/json", json.dumps(body, default=_encode_one).encode()


def _encode_one(value: object) -> Any:
    if isinstance(value, MediaSource) and value.kind is not None:
        file = value.data if value.data is not None else value.path
        value = value if file is None else _ATTACHMENTS[value.kind](file)
    if isinstance(value, Attachment):
        return value.as_part()
    raise UnsupportedFieldError(
        f"A {type(value).__name__} cannot be sent to the process of a model."
    )
