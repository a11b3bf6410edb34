"""What an app may ask of the process of a model: the calls of `ModelServer`, as functions.

They run in the process. The annotations of their parameters and results are the types of what the
two sides send. A call that lasts, as a stream does, answers by itself; others by what they return.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar, get_type_hints

import attrs
import msgspec
import trio
from msgspec import Struct

from trioserve.chat.params import ChatParams
from trioserve.model_process.messages import (
    MediaPart,
    Opened,
    PromptFacts,
    SentError,
    SentPrompt,
    context_in,
    messages_in,
    prompt_in,
)
from trioserve.server.context import RequestContext
from trioserve.server.generation.embeddings import Classification, Embeddings, Ranking
from trioserve.server.generation.slots import Moved
from trioserve.server.generation.text import ChatOpening
from trioserve.server.limits.rates import Remaining
from trioserve.server.prompts.infill import File, Gap
from trioserve.server.server import Server
from trioserve.server.stream import Stream
from trioserve.server.transcription.transcript import (
    Summary,
    TranscriptEvent,
    TranscriptionParams,
)
from trioserve.types import EngineStatus, GenerationParams, TokenId

_Function = TypeVar("_Function", bound=Callable[..., Awaitable[Any]])


class Running(Protocol):
    """A call that runs, as its function sees it."""

    server: Server

    def answer(self, value: object) -> None:
        """Answer the call, and go on with it."""

    async def forward(self, streams: Sequence[Stream], opening: ChatOpening | None = None) -> None:
        """Answer with streams, and send their events until all have ended."""

    def tell(self, event: TranscriptEvent) -> None:
        """Send an event of a transcript."""

    def adapters_changed(self) -> None:
        """Send the LoRA adapters, which the call has changed."""


@attrs.frozen
class Question:
    """A call, as it is sent: what answers it, its arguments, and the type of its answer."""

    work: Callable[..., Awaitable[Any]]
    fields: type[Struct]
    gives: Any
    lasts: bool


#: All calls, by name.
QUESTIONS: dict[str, Question] = {}


def _add(function: _Function, gives: Any) -> _Function:
    hints = get_type_hints(function)
    name, names = function.__name__, [*inspect.signature(function).parameters][1:]
    fields = msgspec.defstruct(name, [(each, hints[each]) for each in names], array_like=True)
    QUESTIONS[name] = Question(function, fields, gives or hints["return"], lasts=gives is not None)
    return function


def _call(function: _Function) -> _Function:
    return _add(function, None)


def _lasting(gives: Any) -> Callable[[_Function], _Function]:
    return lambda function: _add(function, gives)


# -- output


@_lasting(Opened)
async def stream_all(
    call: Running,
    prompts: list[SentPrompt],
    params: GenerationParams,
    n: int,
    context: RequestContext,
) -> None:
    """Continue prompts."""
    given = [prompt_in(each) for each in prompts]
    opened = call.server.stream_all(given, params, n=n, context=context_in(context))
    async with opened as streams:
        await call.forward(streams)


@_lasting(Opened)
async def open_chats(
    call: Running,
    messages: list[dict[str, Any]],
    params: GenerationParams,
    chat: ChatParams,
    n: int,
    context: RequestContext,
) -> None:
    """Answer a chat."""
    opened = call.server.open_chats(messages_in(messages), params, chat, n, context_in(context))
    async with opened as (opening, streams):
        await call.forward(streams, opening)


@_call
async def end_thinking(call: Running, task_id: int) -> bool:
    """End the reasoning of a running answer."""
    return await call.server.end_thinking(task_id)


@_lasting(float)
async def transcribe(
    call: Running, source: MediaPart, params: TranscriptionParams, context: RequestContext
) -> None:
    """Transcribe a recording. The answer is its length in seconds."""
    opened = call.server.transcribing(source.source, params, context_in(context))
    async with opened as stream:
        call.answer(stream.duration)
        event = None
        while not isinstance(event, Summary):
            call.tell(event := await anext(stream))


@_lasting(None)
async def keep(call: Running, context: RequestContext) -> None:
    """Keep the model in memory."""
    async with call.server.loaded(context_in(context)):
        call.answer(None)
        await trio.sleep_forever()


# -- embeddings


@_call
async def embed(
    call: Running,
    inputs: str | list[SentPrompt],
    dimensions: int | None,
    normalize: int | None,
    priority: int,
    context: RequestContext,
) -> Embeddings:
    """Compute embeddings."""
    return await call.server.embed(
        inputs if isinstance(inputs, str) else [prompt_in(each) for each in inputs],
        dimensions=dimensions,
        normalize=normalize,
        priority=priority,
        context=context_in(context),
    )


@_call
async def rerank(
    call: Running,
    query: str | list[str],
    documents: str | list[str],
    most: int | None,
    priority: int,
    context: RequestContext,
) -> Ranking:
    """Score documents."""
    context = context_in(context)
    return await call.server.rerank(query, documents, most=most, priority=priority, context=context)


@_call
async def classify(
    call: Running, inputs: str | list[SentPrompt], priority: int, context: RequestContext
) -> Classification:
    """Score texts for classes."""
    given: Any = inputs if isinstance(inputs, str) else [prompt_in(each) for each in inputs]
    return await call.server.classify(given, priority=priority, context=context_in(context))


# -- tokens and rendered chats


@_call
async def biases_of(call: Running, biases: Any) -> Any:
    """Find the tokens of texts in a bias."""
    pairs = tuple(map(tuple, biases)) if isinstance(biases, list) else biases
    return await call.server.biases_of(pairs)


@_call
async def tokenize(
    call: Running, prompt: str | list[TokenId | str], param: str, special: tuple[bool, bool]
) -> tuple[TokenId, ...]:
    """Convert text to token ids."""
    add, parse = special
    return await call.server.tokenize(prompt, param=param, add_special=add, parse_special=parse)


@_call
async def detokenize(call: Running, tokens: list[TokenId]) -> str:
    """Convert token ids to text."""
    return await call.server.detokenize(tokens)


@_call
async def text_of(call: Running, prompt: PromptFacts) -> str:
    """Convert a prompt to text."""
    return await call.server.detokenize(prompt.prompt)


@_call
async def names_of(call: Running, tokens: list[TokenId]) -> Sequence[bytes]:
    """Find the bytes of tokens."""
    return await call.server.names_of(tokens)


@_call
async def prompt_for(
    call: Running,
    around: tuple[str | list[TokenId | str], str | list[TokenId | str]],
    extra: tuple[File, ...],
    beginning: str,
    max_tokens: int,
) -> Sequence[TokenId]:
    """Make the prompt that fills a gap."""
    prefix, suffix = around
    gap = Gap(prefix=prefix, suffix=suffix, extra=extra, beginning=beginning)
    return await call.server.prompt_for(gap, max_tokens)


@_call
async def render(call: Running, messages: list[dict[str, Any]], chat: ChatParams) -> str:
    """Render a chat."""
    return await call.server.render(messages_in(messages), chat)


@_call
async def chat_prompt(
    call: Running, messages: list[dict[str, Any]], chat: ChatParams
) -> PromptFacts:
    """Make the prompt of a chat."""
    return PromptFacts.of(await call.server.chat_prompt(messages_in(messages), chat))


# -- the model


@_call
async def sleep(call: Running) -> None:
    """Free the model's memory."""
    await call.server.sleep()


@_call
async def status(call: Running) -> EngineStatus:
    """Get the slots and the queue."""
    return await call.server.status()


@_call
async def is_live(call: Running) -> None:
    """Check that the engine works. Raises UnavailableError."""
    call.server.lifecycle.check_live()


@_call
async def idle_seconds(call: Running) -> float:
    """Get how long the model stays in memory if no request comes; infinite: for good."""
    return call.server.lifecycle.idle_until - trio.current_time()


@_call
async def metrics(call: Running, as_json: bool) -> str:
    """Write the metrics of the model: in Prometheus' format, or as JSON."""
    measured, now = call.server.metrics, await call.server.status()
    assert measured is not None
    if as_json:
        return msgspec.json.encode(measured.snapshot(now)).decode()
    return measured.render(now).decode()


@_call
async def count_request(
    call: Running, client: str
) -> tuple[dict[str, Remaining], SentError | None]:
    """Count a request for the rate limits."""
    counted = await call.server.count_request(client)
    error = None if counted.error is None else SentError.of(counted.error)
    return dict(counted.left()), error


@_call
async def move_slot(call: Running, action: str, slot_id: int, filename: str, client: str) -> Moved:
    """Save a slot to a file, restore it from one, or erase it."""
    server = call.server
    if action == "erase":
        return Moved(await server.erase_slot(slot_id, client), 0, 0.0)
    move = server.save_slot if action == "save" else server.restore_slot
    return await move(slot_id, filename, client)


# -- LoRA adapters


@_call
async def set_scales(call: Running, scales: dict[int, float]) -> None:
    """Change the default scales."""
    await call.server.adapters.set(scales)
    call.adapters_changed()


@_call
async def load_adapter(call: Running, name: str, path: str, context: RequestContext) -> None:
    """Load an adapter."""
    await call.server.adapters.load(name, path, context=context_in(context))
    call.adapters_changed()


@_call
async def unload_adapter(call: Running, name: str, context: RequestContext) -> None:
    """Free an adapter."""
    await call.server.adapters.unload(name, context=context_in(context))
    call.adapters_changed()
