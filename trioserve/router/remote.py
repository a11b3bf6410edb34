"""`ChildModels`: models by name for a program, each in a separate process."""

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
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack

import numpy as np
import trio

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
from trioserve.concurrency import EnteredOnce, Feed
from trioserve.config import Config
from trioserve.errors import (
    InvalidMediaError,
    UnavailableError,
    UnsupportedFieldError,
)
from trioserve.models.catalog import Catalog, ModelEntry
from trioserve.router.client import ServerClient, ServerEvents, read_json, receive_all
from trioserve.router.fleet import Fleet, send_to_model
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
from trioserve.server.stream import ChatChunk, ChatCompletion, Completion
from trioserve.server.transcription.transcript import Segment, Summary, Transcript, Word
from trioserve.types import Chunk, Finished, FinishReason, Grammar, Prompt, Timings

if TYPE_CHECKING:
    from trioserve.server import Server
    from trioserve.server.protocol import AnyServer

#: A recording: a path, or the bytes of a file.
Recording = Audio | bytes | str | os.PathLike[str]

#: Fields without an effect here: a `RemoteStream` has no probabilities, and the other process
#: takes all requests for those of one client.
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


_Whole = TypeVar("_Whole")


class RemoteStream(Generic[_Whole]):
    """The output of one request, as it arrives: `Chunk` or `ChatChunk`.

    Iterate over it within the block that opened it; leaving the block cancels the request. Of a
    chat, the ids of tokens are not known.

    Raises:
        TrioServeError: from the iteration, when the request fails or its process ends.
    """

    def __init__(
        self,
        events: ServerEvents[dict[str, Any]],
        whole: Callable[[RemoteStream[_Whole], list[Chunk]], _Whole],
    ) -> None:
        self.finished: Finished | None = None
        #: The whole prompt, once the stream has ended.
        self.prompt_text = ""
        self._events = events
        self._whole = whole
        self._unread = Feed[Chunk | ChatChunk | Finished]()
        self._builder = MessageBuilder()

    @property
    def message(self) -> Message:
        """The message of a chat, as far as it has been read."""
        return self._builder.build()

    def __aiter__(self) -> AsyncIterator[Chunk | ChatChunk]:
        return self

    async def __anext__(self) -> Chunk | ChatChunk:
        while not (self._unread or self._unread.is_over):
            data = await anext(self._events, None)
            if data is None:
                self._unread.end(UnavailableError("The answer of the model's process has no end."))
                break
            for event in self._events_in(data):
                self._unread.put(event)
        event = await anext(self._unread)
        if isinstance(event, ChatChunk):
            for delta in event.deltas:
                self._builder.add(delta)
        elif isinstance(event, Finished):
            self.finished = event
            self._unread.end()
            raise StopAsyncIteration
        return event

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
        return self._whole(self, [event async for event in self if isinstance(event, Chunk)])

    def _events_in(self, data: Mapping[str, Any]) -> Iterator[Chunk | ChatChunk | Finished]:
        """Read an event of the stream."""
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


def _completion(stream: RemoteStream[Completion], chunks: list[Chunk]) -> Completion:
    assert stream.finished is not None
    return Completion(
        text="".join(chunk.text for chunk in chunks),
        tokens=tuple(chain.from_iterable(chunk.tokens for chunk in chunks)),
        probs=(),
        prompt=Prompt(()),
        finished=stream.finished,
    )


def _chat(stream: RemoteStream[ChatCompletion], _chunks: list[Chunk]) -> ChatCompletion:
    assert stream.finished is not None
    return ChatCompletion(
        message=stream.message,
        tokens=(),
        probs=(),
        prompt=Prompt(()),
        prompt_text=stream.prompt_text,
        finished=stream.finished,
    )


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


def read_transcript(answer: Mapping[str, Any]) -> Transcript:
    """Read an answer in the form ``verbose_json``."""
    language = answer["language"]
    words = [Word(text=one["word"], start=one["start"], end=one["end"])
             for one in answer.get("words", ())]  # fmt: skip
    segments = answer.get("segments", ())
    starts = [-inf, *(one["start"] for one in segments[1:]), inf]
    return Transcript(
        text=answer["text"],
        segments=tuple(
            _segment(one, tuple(word for word in words if start <= word.start < end))
            for one, (start, end) in zip(segments, pairwise(starts), strict=False)
        ),
        probs=(),
        duration=answer["duration"],
        summary=Summary(language=None if language == "unknown" else language),
    )


def _segment(one: Mapping[str, Any], words: tuple[Word, ...]) -> Segment:
    return Segment(
        text=one["text"],
        start=one["start"],
        end=one["end"],
        tokens=tuple(one["tokens"]),
        words=words,
        temperature=one["temperature"],
        avg_logprob=one["avg_logprob"],
        no_speech_prob=one["no_speech_prob"],
    )


class ChildModels(EnteredOnce, Mapping[str, "RemoteServer"]):
    """Models in separate processes: ``async with ChildModels(models_dir="m") as models:``.

    The models are those that ``trioserve --models-dir m`` offers, under the same names, and
    ``models[name]`` has the methods of a `Server`. Its process is started when it is first needed,
    and stopped when other models need the room, but never while a request uses it. A crash ends
    only the requests of that process.

    Leaving ends the processes and the requests that still run.

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
        config = Config(
            models_dir=None if models_dir is None else str(models_dir),
            models_preset=None if models_preset is None else str(models_preset),
        )
        self._find = partial(Catalog, config, flags)
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
    """A model in a separate process, with methods of `Server`: see `AnyServer`.

    Any Trio cancel scope around a call cancels its work there, also while the process starts.
    Prompts in results are empty, and the numbers of tokens of single texts are not known.
    """

    def __init__(self, fleet: Fleet, entry: ModelEntry) -> None:
        self._client = ServerClient(partial(send_to_model, fleet, entry))

    @asynccontextmanager
    async def stream_complete(
        self, prompt: str | Sequence[int], **fields: Unpack[CompletionFields]
    ) -> AsyncIterator[RemoteStream[Completion]]:
        """Continue a prompt, token by token. Leaving the block early cancels the request.

        Raises:
            TrioServeError: as `Server.stream_complete`; the process cannot be started, or has
                ended.
        """
        body = {**_http(fields), "prompt": prompt, "return_tokens": True}
        async with self._client.events("/completion", body, form=dict) as events:
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
        body = {**_http(fields), "messages": messages, "verbose": True}
        async with self._client.events("/v1/chat/completions", body, form=dict) as events:
            yield RemoteStream(events, _chat)

    async def chat(self, messages: Messages, **fields: Unpack[ChatFields]) -> ChatCompletion:
        """Answer a chat, and return the whole message. Raises as `stream_complete`."""
        async with self.stream_chat(messages, **fields) as stream:
            return await stream.read()

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
        body = {**_http(fields), "input": given, "priority": priority}
        chosen = {"dimensions": dimensions, "embd_normalize": normalize}
        body |= {name: value for name, value in chosen.items() if value is not None}
        answer = await self._client.ask("/v1/embeddings", body, form=dict)
        vectors = tuple(np.array(one["embedding"], np.float32) for one in answer["data"])
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
        body = {**_http(fields), "query": query, "documents": texts, "priority": priority}
        answer = await self._client.ask("/v1/rerank", body, form=dict)
        ranked = sorted(answer["results"], key=lambda one: int(one["index"]))
        return Ranking(tuple(one["relevance_score"] for one in ranked), (), Timings())

    async def transcribe(
        self, recording: Recording, **fields: Unpack[TranscriptionFields]
    ) -> Transcript:
        """Transcribe the speech in a recording: a path, or the bytes of a file.

        Probabilities of tokens are not there.

        Raises:
            TrioServeError: as `Server.transcribe`, and as `stream_complete`.
        """
        given = _http(fields)
        _refuse(frozenset({"skip_silence", "timed", "max_tokens"}), given)
        path = f"/v1/audio/{'translations' if given.pop('translate', False) else 'transcriptions'}"
        if given.pop("words", False):
            given["timestamp_granularities"] = ["word", "segment"]
        body = {**given, "response_format": "verbose_json", "file": recording}
        async with self._client.answer(path, body, write_form) as answer:
            return read_transcript(read_json(await receive_all(answer), dict))

    async def tokenize(
        self, prompt: str, *, add_special: bool = True, parse_special: bool = True
    ) -> tuple[int, ...]:
        """Convert text to token ids. Raises as `stream_complete`."""
        body = {"content": prompt, "add_special": add_special, "parse_special": parse_special}
        answer = await self._client.ask("/tokenize", body, form=dict)
        return tuple(answer["tokens"])

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """Convert token ids to text. Raises as `stream_complete`."""
        answer = await self._client.ask("/detokenize", {"tokens": tokens}, form=dict)
        return str(answer["content"])

    async def render(self, messages: Messages, **fields: Unpack[RenderFields]) -> str:
        """Render a chat with the model's template. Raises as `Server.render`."""
        body = {**_http(fields), "messages": messages}
        return str((await self._client.ask("/apply-template", body, form=dict))["prompt"])

    async def count_tokens(self, messages: Messages, **fields: Unpack[RenderFields]) -> int:
        """Count the tokens of a chat's prompt. Raises as `Server.count_tokens`."""
        body = {**_http(fields), "messages": messages}
        path = "/v1/chat/completions/input_tokens"
        return int((await self._client.ask(path, body, form=dict))["input_tokens"])


def _http(fields: Mapping[str, Any]) -> dict[str, Any]:
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
    return body


def _format(syntax: str, source: str) -> dict[str, Any]:
    return {"type": "grammar", "syntax": syntax, "definition": source}


#: Where a grammar stands in a request, by its kind, and how its source is read.
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


if TYPE_CHECKING:

    def _both_are_servers(one: Server, other: RemoteServer) -> tuple[AnyServer, AnyServer]:
        return one, other
