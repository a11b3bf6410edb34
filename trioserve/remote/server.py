"""`RemoteServer`: a model of another server for a program, over HTTP."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain, pairwise
from math import inf
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar, Unpack

import attrs
import msgspec
import numpy as np

from trioserve.chat.deltas import (
    ContentDelta,
    Delta,
    Message,
    MessageBuilder,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from trioserve.chat.messages import Audio, text_part
from trioserve.concurrency import EnteredOnce
from trioserve.errors import InvalidMediaError, UnavailableError, UnsupportedFieldError
from trioserve.media.encode import RATE
from trioserve.remote import answers
from trioserve.remote.answers import AnswerEvent, CompletionEvent, Ending
from trioserve.remote.client import (
    ServerClient,
    ServerEvents,
    connected_to,
    read_json,
    receive_all,
)
from trioserve.server.generation.embeddings import Embeddings, Ranking
from trioserve.server.keywords import (
    ChatFields,
    CompletionFields,
    ContextFields,
    RenderFields,
    SpeechFields,
    TranscriptionFields,
)
from trioserve.server.model_server import ModelServer
from trioserve.server.prompts.media import MixedPrompt
from trioserve.server.prompts.text import Messages
from trioserve.server.speech.speech import Speech
from trioserve.server.stream import ChatChunk, ChatCompletion, Completion
from trioserve.server.transcription.transcript import Segment, Summary, Transcript, Word
from trioserve.types import Chunk, Finished, FinishReason, Grammar, Prompt, Timings

#: A recording: a path, or the bytes of a file.
Recording = Audio | bytes | str | os.PathLike[str]

#: Fields without an effect here: a `RemoteStream` has no probabilities, and the other server takes
#: all requests for those of one client.
_UNTOLD = frozenset(
    {
        "best_of", "client", "logprobs", "n", "n_probs", "prompt_logprobs", "request_id",
        "return_progress", "top_logprobs", "traceparent", "tracestate",
    }
)  # fmt: skip

#: Fields of the HTTP interface, by their names in a program, where they differ.
_HTTP_NAMES = {
    "draft_max": "speculative.n_max",
    "reasoning_budget": "reasoning_budget_tokens",
    "reasoning_message": "reasoning_budget_message",
    "template_kwargs": "chat_template_kwargs",
}


_T = TypeVar("_T")
_Whole = TypeVar("_Whole")


class Compacted(msgspec.Struct):
    """A chat that was compacted: the summary, and the messages to continue with."""

    summary: str
    messages: list[dict[str, Any]]


class RemoteStream(Generic[_Whole]):
    """The output of one request, as it arrives: `Chunk` or `ChatChunk`.

    Iterate over it within the block that opened it; leaving the block cancels the request. Of a
    chat, the ids of tokens are not known.

    Raises:
        TrioServeError: from the iteration, when the request fails or its server ends.
    """

    def __init__(
        self,
        events: ServerEvents[AnswerEvent] | ServerEvents[CompletionEvent],
        whole: Callable[[RemoteStream[_Whole], Finished, list[Chunk]], _Whole],
    ) -> None:
        self.finished: Finished | None = None
        self._events = events
        self._whole = whole
        self._builder = MessageBuilder()
        self._n_calls = 0
        self._ending: Ending | None = None

    @property
    def message(self) -> Message:
        """The message of a chat, as far as it has been read."""
        return self._builder.build()

    @property
    def prompt_text(self) -> str:
        """The whole prompt, once the stream has ended. A server of another kind may not tell it."""
        return "" if self._ending is None else self._ending.prompt

    def __aiter__(self) -> AsyncIterator[Chunk | ChatChunk]:
        return self

    async def __anext__(self) -> Chunk | ChatChunk:
        async for event in self._events:
            if isinstance(event, CompletionEvent):
                self._ending = event if event.stop else None
                if event.content or event.tokens:
                    return Chunk(0, event.content, tuple(event.tokens))
            elif deltas := tuple(self._deltas_of(event)):
                return ChatChunk(deltas, ())
        self.finished = self._end()
        raise StopAsyncIteration

    async def text(self) -> AsyncIterator[str]:
        """Iterate over the text alone; of a chat, without reasoning and tool calls."""
        async for event in self:
            if isinstance(event, Chunk):
                yield event.text
                continue
            for delta in event.deltas:
                if isinstance(delta, ContentDelta):
                    yield delta.text

    async def read(self) -> _Whole:
        """Read to the end. Raises what the iteration raises."""
        chunks = [event async for event in self if isinstance(event, Chunk)]
        return self._whole(self, self._end(), chunks)

    def _end(self) -> Finished:
        """Tell how the output has ended. Raises UnavailableError: it has not."""
        last = self._ending
        if last is None:
            raise UnavailableError(f"{self._events.name} sends an answer that has no end.")
        return Finished(
            task_id=0,
            reason=last.stop_type,
            stopping_word=last.stopping_word,
            timings=last.timings,
            truncated=last.truncated,
            slot_id=last.id_slot,
        )

    def _deltas_of(self, event: AnswerEvent) -> Iterator[Delta]:
        """Read an event of a chat, and add it to the message."""
        for choice in event.choices:
            if choice.finish_reason:
                is_cut = choice.finish_reason == "length"
                self._ending = Ending(FinishReason.LIMIT if is_cut else FinishReason.EOS)
            for delta in self._deltas_in(choice.delta):
                self._builder.add(delta)
                yield delta
        if event.ending is not None:
            self._ending = event.ending
        elif self._ending is not None and (timings := event.timings or event.counted):
            self._ending.timings = timings

    def _deltas_in(self, delta: answers.Delta) -> Iterator[Delta]:
        if delta.reasoning_content:
            yield ReasoningDelta(delta.reasoning_content)
        if delta.content:
            yield ContentDelta(delta.content)
        for call in delta.tool_calls or ():
            if call.function.name and call.index == self._n_calls:
                self._n_calls += 1
                yield ToolCallStart(call.index, call.id or "", call.function.name)
            if not 0 <= call.index < self._n_calls:
                raise UnavailableError(f"{self._events.name} sends tool calls in no order.")
            if call.function.arguments:
                yield ToolCallArguments(call.index, call.function.arguments)


def _completion(
    _stream: RemoteStream[Completion], finished: Finished, chunks: list[Chunk]
) -> Completion:
    return Completion(
        text="".join(chunk.text for chunk in chunks),
        tokens=tuple(chain.from_iterable(chunk.tokens for chunk in chunks)),
        probs=(),
        prompt=Prompt(()),
        finished=finished,
    )


def _chat(
    stream: RemoteStream[ChatCompletion], finished: Finished, _chunks: list[Chunk]
) -> ChatCompletion:
    return ChatCompletion(
        message=stream.message,
        tokens=(),
        probs=(),
        prompt=Prompt(()),
        prompt_text=stream.prompt_text,
        finished=finished,
    )


def write_form(body: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Write a form; returns its type, and the form. Reads the recording in the field ``file``.

    Raises:
        InvalidMediaError: the recording cannot be read.
    """
    boundary, parts = secrets.token_hex(16), list[bytes]()
    for name, value in body.items():
        file = '; filename="recording"' if name == "file" else ""
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'
        for one in value if isinstance(value, tuple | list) else [value]:
            if file:
                data = _read_recording(one)
            else:
                data = (str(one).lower() if isinstance(one, bool) else str(one)).encode()
            parts += [head.encode(), data, b"\r\n"]
    parts.append(f"--{boundary}--\r\n".encode())
    return f"multipart/form-data; boundary={boundary}".encode(), b"".join(parts)


def _read_recording(recording: Recording) -> bytes:
    file = recording.file if isinstance(recording, Audio) else recording
    if isinstance(file, bytes):
        return file
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise InvalidMediaError(f"{file!r} cannot be read: {error.strerror}.") from error


class _Vector(msgspec.Struct):
    embedding: list[float]
    index: int = 0


class _Vectors(msgspec.Struct):
    data: list[_Vector]


class _Score(msgspec.Struct):
    index: int
    relevance_score: float


class _Scores(msgspec.Struct):
    results: list[_Score]


class _Word(msgspec.Struct):
    word: str
    start: float
    end: float


class _Heard(msgspec.Struct):
    """A transcript in the form ``verbose_json``."""

    text: str
    language: str = "unknown"
    duration: float = 0.0
    segments: list[Segment] = []
    words: list[_Word] = []

    def transcript(self) -> Transcript:
        """Give it with the words in their segments."""
        words = [Word(text=one.word, start=one.start, end=one.end) for one in self.words]
        starts = [-inf, *(one.start for one in self.segments[1:]), inf]
        return Transcript(
            text=self.text,
            segments=tuple(
                attrs.evolve(one, words=tuple(word for word in words if start <= word.start < end))
                for one, (start, end) in zip(self.segments, pairwise(starts), strict=False)
            ),
            probs=(),
            duration=self.duration,
            summary=Summary(language=None if self.language == "unknown" else self.language),
        )


class RemoteServer(EnteredOnce):
    """A model of another server, with methods of `Server`: see `AnyServer`.

    ``async with RemoteServer("http://127.0.0.1:8080") as server:`` speaks HTTP to a server of
    trioserve, or to a llama-server as far as that has the routes and fields. Any Trio cancel scope
    around a call cancels its work there, also while the model is loaded. Prompts in results are
    empty, and the numbers of tokens of single texts are not known.

    Args:
        url: the server's address, without ``/v1``.
        model: the name of the model, for a server with several.
        api_key: of the server, if it has any.
        socket_path: the Unix socket that it listens on, if it does.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        socket_path: str | None = None,
    ) -> None:
        self._connect = partial(connected_to, url, socket_path=socket_path, api_key=api_key)
        self._connected: ServerClient | None = None
        self._named = {} if model is None else {"model": model}

    @classmethod
    def over(cls, client: ServerClient, model: str | None = None) -> RemoteServer:
        """Make one that needs no block, because its client is made already."""
        server = cls("", model=model)
        server._connected = client
        return server

    @asynccontextmanager
    async def _live(self) -> AsyncIterator[None]:
        async with self._connect() as self._connected:
            yield

    @property
    def _client(self) -> ServerClient:
        if self._connected is None:
            raise RuntimeError("a RemoteServer answers inside its block")
        return self._connected

    @asynccontextmanager
    async def stream_complete(
        self, prompt: str | Sequence[int], **fields: Unpack[CompletionFields]
    ) -> AsyncIterator[RemoteStream[Completion]]:
        """Continue a prompt, token by token. Leaving the block early cancels the request.

        Raises:
            TrioServeError: as `Server.stream_complete`; the server does not answer, or has ended.
        """
        body = {**self._http(fields), "prompt": prompt, "return_tokens": True}
        async with self._client.events("/completion", body, form=CompletionEvent) as events:
            yield RemoteStream(events, _completion)

    async def complete(
        self, prompt: str | Sequence[int], **fields: Unpack[CompletionFields]
    ) -> Completion:
        """Continue a prompt, and return the whole output. Raises as `stream_complete`."""
        async with self.stream_complete(prompt, **fields) as stream:
            return await stream.read()

    @asynccontextmanager
    async def stream_chat(
        self, messages: Messages, **fields: Unpack[ChatFields]
    ) -> AsyncIterator[RemoteStream[ChatCompletion]]:
        """Answer a chat, token by token. Like `stream_complete`, with `ChatChunk` for `Chunk`."""
        body = {
            **self._http(fields), "messages": messages, "verbose": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        if "json_schema" in body:  # which servers of other kinds do not know
            schema = {"name": "answer", "schema": body.pop("json_schema")}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        async with self._client.events("/v1/chat/completions", body, form=AnswerEvent) as events:
            yield RemoteStream(events, _chat)

    async def chat(self, messages: Messages, **fields: Unpack[ChatFields]) -> ChatCompletion:
        """Answer a chat, and return the whole message. Raises as `stream_complete`."""
        async with self.stream_chat(messages, **fields) as stream:
            return await stream.read()

    async def compact(self, messages: Messages) -> Compacted:
        """Compact a chat: the server's model writes a summary. Raises as `stream_complete`."""
        body = {**self._named, "messages": messages}
        return await self._client.ask("/v1/chat/completions/compact", body, form=Compacted)

    async def embed(
        self,
        inputs: str | Sequence[str | MixedPrompt],
        *,
        dimensions: int | None = None,
        normalize: int | None = None,
        priority: int = 0,
        **fields: Unpack[ContextFields],
    ) -> Embeddings:
        """Compute an embedding of each text. Raises as `Server.embed`, and as `stream_complete`."""
        given = inputs if isinstance(inputs, str) else [_as_input(one) for one in inputs]
        body = {**self._http(fields), "input": given, "priority": priority}
        chosen = {"dimensions": dimensions, "embd_normalize": normalize}
        body |= {name: value for name, value in chosen.items() if value is not None}
        answer = await self._client.ask("/v1/embeddings", body, form=_Vectors)
        found = sorted(answer.data, key=lambda one: one.index)
        vectors = tuple(np.array(one.embedding, np.float32) for one in found)
        return Embeddings(vectors, (), Timings())

    async def rerank(
        self,
        query: str,
        documents: str | Sequence[str],
        *,
        priority: int = 0,
        **fields: Unpack[ContextFields],
    ) -> Ranking:
        """Score how well each document fits a query; higher is better. Raises as `embed`."""
        texts = [documents] if isinstance(documents, str) else documents
        body = {**self._http(fields), "query": query, "documents": texts, "priority": priority}
        answer = await self._client.ask("/v1/rerank", body, form=_Scores)
        ranked = sorted(answer.results, key=lambda one: one.index)
        return Ranking(tuple(one.relevance_score for one in ranked), (), Timings())

    async def transcribe(
        self, recording: Recording, **fields: Unpack[TranscriptionFields]
    ) -> Transcript:
        """Transcribe the speech in a recording: a path, or the bytes of a file.

        Probabilities of tokens are not there.

        Raises:
            TrioServeError: as `Server.transcribe`, and as `stream_complete`.
        """
        given = self._http(fields)
        _refuse(frozenset({"skip_silence", "timed", "max_tokens"}), given)
        path = f"/v1/audio/{'translations' if given.pop('translate', False) else 'transcriptions'}"
        if given.pop("words", False):
            given["timestamp_granularities"] = ["word", "segment"]
        body = {**given, "response_format": "verbose_json", "file": recording}
        return (await self._client.ask(path, body, write_form, form=_Heard)).transcript()

    async def speak(self, text: str, **fields: Unpack[SpeechFields]) -> Speech:
        """Speak a text, and return all of the sound; the numbers of frames are not known.

        Raises:
            TrioServeError: as `Server.speak`, and as `stream_complete`.
        """
        given = self._http(fields)
        _refuse(frozenset({"param"}), given)
        body = {**given, "input": text, "response_format": "pcm"}
        async with self._client.answer("/v1/audio/speech", body) as answer:
            data = await receive_all(answer, name=self._client.name)
        samples = np.frombuffer(data[: len(data) & ~1], "<i2").astype(np.float32)
        return Speech(
            samples=samples / np.float32(2**15),
            rate=RATE,
            n_prompt=0,
            n_frames=0,
            timings=Timings(),
        )

    async def tokenize(
        self, prompt: str, *, add_special: bool = True, parse_special: bool = True
    ) -> tuple[int, ...]:
        """Convert text to token ids. Raises as `stream_complete`."""
        body = {"content": prompt, "add_special": add_special, "parse_special": parse_special}
        return tuple(await self._one("/tokenize", body, "tokens", list[int]))

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """Convert token ids to text. Raises as `stream_complete`."""
        return await self._one("/detokenize", {"tokens": tokens}, "content", str)

    async def render(self, messages: Messages, **fields: Unpack[RenderFields]) -> str:
        """Render a chat with the model's template. Raises as `Server.render`."""
        body = {**self._http(fields), "messages": messages}
        return await self._one("/apply-template", body, "prompt", str)

    async def count_tokens(self, messages: Messages, **fields: Unpack[RenderFields]) -> int:
        """Count the tokens of a chat's prompt. Raises as `Server.count_tokens`."""
        body = {**self._http(fields), "messages": messages}
        path = "/v1/chat/completions/input_tokens"
        return await self._one(path, body, "input_tokens", int)

    async def _one(self, path: str, body: Mapping[str, Any], name: str, form: type[_T]) -> _T:
        """Send a request; returns the field of its answer that has this name."""
        body = {**body, **self._named}
        answer = await self._client.ask(path, body, form=dict[str, msgspec.Raw])
        return read_json(bytes(answer.get(name, b"")), form, self._client.name)

    def _http(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Write the parameters of a program as fields of the HTTP interface."""
        body = {_HTTP_NAMES.get(name, name): value for name, value in fields.items()}
        if isinstance(grammar := body.get("grammar"), Grammar):
            del body["grammar"]
            if grammar.kind not in _GRAMMARS:
                raise UnsupportedFieldError(
                    f"A {grammar.kind} grammar cannot be sent.", param="grammar"
                )
            name, read = _GRAMMARS[grammar.kind]
            body[name] = read(grammar.source)
        if "lora" in body:
            body["lora"] = [{"id": id_, "scale": scale} for id_, scale in body["lora"]]
        _refuse(_UNTOLD, body)
        return body | self._named


def _format(syntax: str, source: str) -> dict[str, Any]:
    return {"type": "grammar", "syntax": syntax, "definition": source}


#: The field of a grammar in a request, by its kind, and the reader of its source.
_GRAMMARS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "gbnf": ("grammar", str),
    "json_schema": ("json_schema", json.loads),
    "json_object": ("response_format", lambda _source: {"type": "json_object"}),
    "lark": ("response_format", partial(_format, "lark")),
    "regex": ("response_format", partial(_format, "regex")),
}


def _refuse(names: frozenset[str], fields: Mapping[str, Any]) -> None:
    for name in sorted(names & fields.keys()):
        raise UnsupportedFieldError.at(name, "has no effect here.")


def _as_input(text: str | MixedPrompt) -> Any:
    if not isinstance(text, MixedPrompt):
        return text
    parts = [text_part(part) if isinstance(part, str) else part for part in text.parts]
    return {"content": parts}


#: A model in this process, in another one, or of another server.
AnyServer: TypeAlias = ModelServer | RemoteServer
