"""OpenAI's routes: ``/v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import attrs
from msgspec import UNSET, UnsetType

from trioserve.api.base import readers
from trioserve.api.base.answers import Answer, InputTokens
from trioserve.api.base.caller import Caller
from trioserve.api.base.chat_request import RUN_TOOLS, ChatRequest
from trioserve.api.base.custom_tools import input_of
from trioserve.api.base.fields import PromptFields, field
from trioserve.api.base.generation import (
    admit,
    counted_tokens,
    gap_prompt,
    source_reply,
    stream_reply,
)
from trioserve.api.base.generation_request import UNSUPPORTED, GenerationRequest
from trioserve.api.base.models import Models
from trioserve.api.base.output import (
    FINGERPRINT,
    VERBOSE,
    Output,
    OutputWriter,
    Timings,
    new_id,
    timings_of,
)
from trioserve.api.base.readers import GivenPrompt
from trioserve.api.base.reply import EventSource, Reply, long_json, size_of_outputs
from trioserve.api.base.routes import Routes
from trioserve.api.base.scores import PromptLogprobs, prompt_logprobs
from trioserve.api.base.text_tokens import probs_of, probs_of_text
from trioserve.api.base.usage import Usage, usage_of
from trioserve.api.openai.events import (
    ChatEvents,
    CompletionEvents,
    Reason,
    finish_reason,
    run_reason,
    usage as run_usage,
)
from trioserve.api.openai.logprobs import (
    ChatLogprobs,
    TextLogprobs,
    chat_logprobs,
    echoed_logprobs,
    text_logprobs,
)
from trioserve.api.openai.runs import open_run, read_run, run_reply
from trioserve.api.openai.spoken import SpokenAnswer, SpokenChatRequest, SpokenEvents, spoken_chat
from trioserve.api.openapi import gives, takes
from trioserve.chat.compaction import written as written_messages
from trioserve.chat.deltas import Message, MessageBuilder
from trioserve.chat.template.continuation import final_message_deltas
from trioserve.errors import InvalidRequestError, UnsupportedFieldError
from trioserve.media.encode import with_lengths
from trioserve.server import RequestContext
from trioserve.server.compaction import Compacted, CompactionPlan, limit_of, stream_compacted
from trioserve.server.generation.text import best_of
from trioserve.server.model_server import ModelServer
from trioserve.server.prompts.media import MixedPrompt
from trioserve.server.prompts.text import AnyPrompt
from trioserve.server.runs.events import RunAnswer
from trioserve.server.stream import ChatCompletion as ReadChat, Completion as ReadText, read_all
from trioserve.types import FinishReason, GenerationParams, Prompt

# -- what requests for text may hold; for chats, see `trioserve.api.base.chat_request`

_NOT_CHOSEN_BY = (
    "goes by the probabilities before sampling, and 'post_sampling_probs' asks for others."
)
_NOT_ECHOED = "has no meaning for the tokens of the prompt, which 'echo' adds."


@attrs.frozen(kw_only=True, slots=False)
class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``."""

    unsupported = UNSUPPORTED
    prompt_fields = PromptFields(turns=("prompt",))
    prompts: tuple[GivenPrompt, ...] = field("prompt", read=readers.prompts)
    n_candidates: int = field("n_probs", read=readers.probs, default=0)
    logprobs: int | None = field(read=readers.probs, default=None)
    suffix: str = ""
    echo: bool = False
    best_of: int | None = field(read=readers.copies, default=None)
    prompt_logprobs: int | None = field(read=readers.probs, default=None)

    @property
    def n_copies(self) -> int:
        """The number of outputs of each prompt, from which `best_of` chooses."""
        return self.n if self.best_of is None else self.best_of

    @property
    def asked_probs(self) -> tuple[int, str | None]:
        """The number of candidates to report for each token, and the field that asks for them."""
        if self.n_candidates:
            return self.n_candidates, "n_probs"
        reports = self.reports_logprobs or self.n_copies > self.n
        return max(self.n_top, int(reports)), "logprobs"

    @property
    def n_top(self) -> int:
        """The number of candidates in the answer for each token, beside the token itself."""
        return self.n_candidates or self.logprobs or 0

    @property
    def reports_logprobs(self) -> bool:
        """True if the answer has log probabilities: with 0 candidates, those of its tokens."""
        return self.n_candidates > 0 or self.logprobs is not None

    @property
    def echoes_scores(self) -> bool:
        """True if the answer begins with the prompt and the scores of its tokens."""
        return self.echo and self.reports_logprobs

    def given_params(self) -> dict[str, Any]:
        """The fields of `GenerationParams` and `SamplingParams` that the request sets."""
        params = super().given_params()
        if self.echoes_scores:
            params["prompt_logprobs"] = max(self.n_top, self.prompt_logprobs or 0)
        return params

    def __attrs_post_init__(self) -> None:
        chooses, is_post = self.n_copies > self.n, self.scalars.get("post_sampling_probs")
        has_media = any(isinstance(prompt, MixedPrompt) for prompt in self.prompts)
        is_scored = self.prompt_logprobs is not None
        for is_wrong, param, problem in (
            (self.n_copies < self.n, "best_of", "must be at least 'n'."),
            (chooses and self.stream, "best_of", "cannot be streamed."),
            (chooses and is_post, "best_of", _NOT_CHOSEN_BY),
            (self.echo and self.suffix, "echo", "and 'suffix' exclude each other."),
            (is_scored and self.stream, "prompt_logprobs", "and 'stream' exclude each other."),
            (self.echoes_scores and is_post, "post_sampling_probs", _NOT_ECHOED),
            (
                self.echoes_scores and has_media,
                "echo",
                "with 'logprobs' takes prompts without media.",
            ),
        ):
            if is_wrong:
                raise InvalidRequestError.at(param, problem)


# -- routes


routes = Routes(of_model=True)


class _CalledFunction(Answer):
    name: str
    arguments: str


class _CalledTool(Answer):
    name: str
    input: str


class ToolCall(Answer, kw_only=True):
    """A call of a tool."""

    type: Literal["function", "custom"]
    function: _CalledFunction | UnsetType = UNSET
    custom: _CalledTool | UnsetType = UNSET
    id: str


class AssistantMessage(Answer, kw_only=True):
    """The message of the model."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: Sequence[ToolCall] | UnsetType = UNSET
    audio: SpokenAnswer | UnsetType = UNSET


class _ChatChoice(Answer):
    finish_reason: Reason
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class _CompletionChoice(Answer):
    text: str
    index: int
    logprobs: TextLogprobs | None
    finish_reason: Reason
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class _Whole(Answer, kw_only=True, rename={"verbose": VERBOSE}):
    """The common fields of chats and completions. The timings are those of the first output."""

    prefix: ClassVar[str]  # of its id
    choices: Sequence[Any]
    created: int
    model: str
    system_fingerprint: str = FINGERPRINT
    object: str = ""
    usage: Usage
    id: str
    timings: Timings
    verbose: Output | UnsetType = UNSET


_W = TypeVar("_W", bound=_Whole)


class ChatCompletion(_Whole, kw_only=True):
    """A chat that is answered."""

    prefix = "chatcmpl"
    choices: Sequence[_ChatChoice]
    object: Literal["chat.completion"] = "chat.completion"
    trioserve_messages: Sequence[Mapping[str, Any]] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(_Whole, kw_only=True):
    """Prompts that are continued."""

    prefix = "cmpl"
    choices: Sequence[_CompletionChoice]
    object: Literal["text_completion"] = "text_completion"


# -- chat


@routes.post("/v1/chat/completions", "/chat/completions")
@takes(SpokenChatRequest)
@gives(ChatCompletion)
async def chat_completions(request: SpokenChatRequest, caller: Caller, models: Models) -> Reply:
    """Answer a chat, at once or as a stream."""
    server, params, context = await admit(request, caller, models)
    if request.is_spoken:
        return await _speak_chat(server, request, caller, models, params, context)
    if request.run_tools is not None:
        return await _run_chat(server, request, caller, models, params, context)
    opened = server.stream_chats(
        request.messages, params, request.chat_params, n=request.n_copies, context=context
    )
    writer = OutputWriter(server, request, params)
    if not request.stream:
        answers = await read_all(opened)
        await writer.read(answers[0].prompt, answers[0].tokens)
        return long_json(
            lambda: whole_chat(writer, request, params, answers), size_of_outputs(answers)
        )
    streams = await caller.open(opened)
    events = ChatEvents(request, params, writer, streams[0].prompt, len(streams))
    models.responses.add(events.id, request, caller, streams)
    return await stream_reply(server, request, caller, streams, events)


async def _speak_chat(
    server: ModelServer,
    request: SpokenChatRequest,
    caller: Caller,
    models: Models,
    params: GenerationParams,
    context: RequestContext,
) -> Reply:
    """Answer a chat, and speak the answer while it is written."""
    request.voice_of(server.model)  # before any work
    chats = server.stream_chats(request.messages, params, request.chat_params, context=context)
    (chat,) = await caller.open(chats)
    spoken = await caller.open(spoken_chat(server, chat, request, context))
    writer = OutputWriter(server, request, params)
    if request.stream:
        events = SpokenEvents(request, params, writer, chat.prompt)
        models.responses.add(events.id, request, caller, [chat])
        source: EventSource[Any] = EventSource.of(spoken.events.__anext__)
        return await source_reply(server, request, caller, source, [chat], events)
    answer, sound = await spoken.read(caller.held)
    await writer.read(answer.prompt, answer.tokens)

    def whole() -> ChatCompletion:
        written = whole_chat(writer, request, params, [answer])
        said: AssistantMessage = written.choices[0].message
        if sound:
            said.audio = SpokenAnswer.of(with_lengths(sound, len(sound)), answer.message.content)
            said.content = None
        return written

    return long_json(whole, size_of_outputs([answer]) + len(sound) // 24)


async def _run_chat(
    server: ModelServer,
    request: ChatRequest,
    caller: Caller,
    models: Models,
    params: GenerationParams,
    context: RequestContext,
) -> Reply:
    """Answer a chat whose tools the server runs."""
    run = await open_run(server, request, caller, params, context)
    writer = OutputWriter(server, request, params)
    if request.stream:
        events = ChatEvents(request, params, writer)
        return await run_reply(server, request, caller, models, run, events, events.id)
    answer, chat = await read_run(run, caller)
    await writer.read(chat.prompt, chat.tokens)
    n_chars = sum(len(str(message.get("content"))) for message in answer.messages)
    return long_json(
        lambda: whole_run(writer, request, params, answer, chat),
        size_of_outputs([chat]) + n_chars // 32,
    )


def whole_run(
    writer: OutputWriter,
    request: ChatRequest,
    params: GenerationParams,
    answer: RunAnswer,
    chat: ReadChat,
) -> ChatCompletion:
    """Write the answer of a run that has ended, with its last chat."""
    written = whole_chat(writer, request, params, [chat])
    written.choices[0].finish_reason = run_reason(answer)
    written.usage, written.trioserve_messages = run_usage(answer), answer.messages
    return written


def whole_chat(
    writer: OutputWriter,
    request: ChatRequest,
    params: GenerationParams,
    answers: Sequence[ReadChat],
) -> ChatCompletion:
    """Write an answer whose choices have all ended."""
    answers = [_with_echo(request, each) for each in answers]

    def choice(index: int, answer: ReadChat) -> _ChatChoice:
        reason = finish_reason(answer.finished.reason, tool_calls=bool(answer.message.tool_calls))
        written = _ChatChoice(reason, index, message(answer.message, request.custom_tools), None)
        if params.n_probs:
            probs = probs_of(answer.chunks)
            written.logprobs = chat_logprobs(probs, request, params)
        return written

    choices = [choice(index, each) for index, each in enumerate(answers)]
    whole = _whole(ChatCompletion, choices, writer, request, answers)
    if request.prompt_logprobs is not None and (scores := answers[0].scores) is not None:
        whole.prompt_logprobs = prompt_logprobs(scores, request.prompt_logprobs)
    return whole


def _whole(
    kind: type[_W],
    choices: Sequence[Any],
    writer: OutputWriter,
    request: ChatRequest | CompletionRequest,
    outputs: Sequence[ReadChat | ReadText],
) -> _W:
    """Write an answer with these choices."""
    first, n = outputs[0], request.n_copies
    timings = [each.finished.timings for each in outputs]
    more = writer.verbose(0, first.prompt, first.finished, first.tokens)
    return kind(
        choices=choices,
        created=int(time.time()),
        model=writer.model,
        usage=usage_of(sum(len(each.prompt) for each in outputs[::n]), timings, copies=n),
        id=new_id(kind.prefix),
        timings=timings_of(timings[0]),
        verbose=more.get(VERBOSE, UNSET),
    )


def _with_echo(request: ChatRequest, answer: ReadChat) -> ReadChat:
    """Put what the client has begun before what the model has added, if it is to be there."""
    if not request.continuation.echo:
        return answer
    whole = MessageBuilder()
    for delta in final_message_deltas(request.messages):
        whole.add(delta)
    before, added = whole.build(), answer.message
    joined = attrs.evolve(
        added,
        content=before.content + added.content,
        reasoning_content=before.reasoning_content + added.reasoning_content,
    )
    return attrs.evolve(answer, message=joined)


def message(value: Message, custom_tools: Container[str] = ()) -> AssistantMessage:
    """Write the message of an assistant."""
    calls = [
        ToolCall(type="custom", custom=_CalledTool(call.name, input_of(call.arguments)), id=call.id)
        if call.name in custom_tools
        else ToolCall(
            type="function", function=_CalledFunction(call.name, call.arguments), id=call.id
        )
        for call in value.tool_calls
    ]
    return AssistantMessage(
        content=(value.content or None) if calls else value.content,
        reasoning_content=value.reasoning_content or UNSET,
        tool_calls=calls or UNSET,
    )


# -- the prompt alone


@routes.post("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens")
@takes(ChatRequest)
@gives(InputTokens)
async def count_tokens(request: ChatRequest, caller: Caller, models: Models) -> Reply:
    """Count the tokens of a chat's prompt, without generating."""
    return await counted_tokens(request, caller, models)


# -- compaction, for clients that keep messages


class CompactedMessages(Answer, kw_only=True):
    """A summary of a chat, and the messages to continue with."""

    object: Literal["chat.compaction"] = "chat.compaction"
    summary: str
    messages: list[dict[str, Any]]
    usage: Usage


@routes.post("/v1/chat/completions/compact", "/chat/completions/compact")
@takes(ChatRequest)
@gives(CompactedMessages)
async def compact(request: ChatRequest, caller: Caller, models: Models) -> Reply:
    """Compact a chat: give a summary, and the messages to continue with."""
    given = {"stream": request.stream, "n": request.n > 1, RUN_TOOLS: bool(request.run_tools)}
    for name in (name for name, is_given in given.items() if is_given):
        raise UnsupportedFieldError.at(name, "is not supported here; leave it out.")
    server, params, context = await admit(request, caller, models)
    plan = CompactionPlan(limit=limit_of(server, params), answers=False)
    chat = attrs.evolve(request.chat_params, continue_final_message=None)
    opened = stream_compacted(server, request.messages, params, chat, plan, context)
    found = [event async for event in await caller.open(opened) if isinstance(event, Compacted)]
    (compacted,) = found
    compaction = compacted.compaction
    assert compaction is not None, "a plan that may not fail"
    stays = [request.messages[i] for i in compaction.stays(request.messages)]
    answer = CompactedMessages(
        summary=compaction.summary,
        messages=written_messages([*stays, *compaction.messages()]),
        usage=usage_of(compacted.n_prompt, [compacted.timings]),
    )
    return long_json(lambda: answer, caller.held.n_bytes // 32)


# -- text


@routes.post("/v1/completions")
@takes(CompletionRequest)
@gives(Completion)
async def completions(request: CompletionRequest, caller: Caller, models: Models) -> Reply:
    """Continue one or more prompts, or fill the gap between each and the suffix."""
    server, params, context = await admit(request, caller, models)
    prompts: Sequence[AnyPrompt] = request.prompts
    if request.suffix:
        prompts = [await gap_prompt(server, each, request.suffix, params) for each in prompts]
    n = request.n_copies
    opened = server.stream_all(prompts, params, n=n, context=context)
    writer = OutputWriter(server, request, params)
    if not request.stream:
        outputs = await read_all(opened)
        await writer.read(outputs[0].prompt, outputs[0].tokens)
        await _read_echoes(writer, request, [each.prompt for each in outputs])
        return long_json(
            lambda: whole_completion(writer, request, params, outputs), size_of_outputs(outputs)
        )
    streams = await caller.open(opened)
    tokens = [stream.prompt for stream in streams]
    await _read_echoes(writer, request, tokens)
    echoes = [_echo(writer, request, i // request.n_copies, each) for i, each in enumerate(tokens)]
    events = CompletionEvents(request, params, writer, tokens, echoes, request.n_top)
    return await stream_reply(server, request, caller, streams, events)


async def _read_echoes(
    writer: OutputWriter, request: CompletionRequest, prompts: Sequence[Prompt]
) -> None:
    """Get the texts of prompts that were given as tokens, if the answer begins with them."""
    for index, prompt in enumerate(prompts):
        if request.echo and not isinstance(request.prompts[index // request.n_copies], str):
            await writer.read(prompt, anyway=True)


def _echo(writer: OutputWriter, request: CompletionRequest, index: int, prompt: Prompt) -> str:
    """Write a prompt before its output: text as it came, tokens by their names."""
    if not request.echo:
        return ""
    given = request.prompts[index]
    return given if isinstance(given, str) else writer.text(prompt) or ""


def whole_completion(
    writer: OutputWriter,
    request: CompletionRequest,
    params: GenerationParams,
    outputs: Sequence[ReadText],
) -> Completion:
    """Write outputs that have ended."""

    def logprobs(output: ReadText, echo: str) -> TextLogprobs | None:
        if not request.reports_logprobs:
            return None
        if output.scores is None or not request.echo:
            return text_logprobs(probs_of_text(output), params, request.n_top)
        # A client that cuts the output off the end counts its tokens, also those without text.
        ends_in_text = output.finished.reason is FinishReason.WORD
        values = probs_of_text(output) if ends_in_text else output.probs
        written = text_logprobs(values, params, request.n_top, offset=len(echo))
        return echoed_logprobs(echo, output.prompt, output.scores, request.n_top, written)

    def choice(index: int, output: ReadText) -> _CompletionChoice:
        echo = _echo(writer, request, index // request.n, output.prompt)
        written = _CompletionChoice(
            echo + output.text, index, logprobs(output, echo), finish_reason(output.finished.reason)
        )
        if request.prompt_logprobs is not None and (scores := output.scores) is not None:
            written.prompt_logprobs = prompt_logprobs(scores, request.prompt_logprobs)
        return written

    chosen = best_of(outputs, request.n_copies, request.n)
    choices = [choice(index, each) for index, each in enumerate(chosen)]
    return _whole(Completion, choices, writer, request, outputs)
