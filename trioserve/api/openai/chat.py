"""OpenAI's routes: ``/v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs
from quart import Blueprint
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base import errors, payload, sse
from trioserve.api.base.body import read_body
from trioserve.api.base.chat_request import ChatRequest
from trioserve.api.base.generation import copies_of, options_for, pings_for, read_chat
from trioserve.api.base.openapi import takes
from trioserve.api.base.prompts import Job, all_of, complete_all, jobs_for, open_all
from trioserve.api.base.request import current_request, json_response
from trioserve.api.base.service import current_server
from trioserve.api.base.terms import Terms, terms_of
from trioserve.api.llama import control, infill
from trioserve.api.llama.infill import Gap
from trioserve.api.openai.events import (
    ChatEvents,
    CompletionEvents,
    chat_logprobs,
    text_logprobs,
)
from trioserve.api.openai.request import CompletionRequest
from trioserve.api.streams import parked
from trioserve.chat.deltas import Message, MessageBuilder
from trioserve.chat.template.continuation import final_message_deltas
from trioserve.errors import InvalidRequestError
from trioserve.server import Server
from trioserve.server.stream import ChatCompletion, Completion
from trioserve.types import GenerationParams

blueprint = Blueprint("openai", __name__)


# -- chat


@blueprint.post("/v1/chat/completions")
@blueprint.post("/chat/completions")
@takes(ChatRequest)
async def chat_completions() -> Response:
    """Answer a chat: at once, as a stream, or later on a route of its own (`parked`)."""
    wanted = ChatRequest.parse(await read_chat())
    server = current_server()
    options, terms = await options_for(server, wanted), terms_of(wanted)
    if parked.is_asked_for():
        server.check_queue()  # the page that will come for it could not read a 429
        return parked.park(parked.Parked(wanted, options, terms))
    if wanted.stream:
        feed, events, pings = await open_chat(server, wanted, options, terms)
        return await sse.respond(current_request(), feed, events, errors.last_event, pings)
    arguments = chat_arguments(wanted) | terms.arguments()
    done = await all_of(
        [
            partial(server.chat, wanted.messages, copy, **arguments)
            for copy in copies_of(options, wanted.n_copies)
        ]
    )
    return json_response(whole_chat(server, wanted, options, done))


async def open_chat(
    server: Server, wanted: ChatRequest, options: GenerationParams, terms: Terms
) -> tuple[sse.Feed, ChatEvents, sse.Pings]:
    """Start to answer a chat. It ends with the current request, at the latest.

    Raises:
        TrioServeError: as `Server.stream_chat`.
    """
    arguments = chat_arguments(wanted) | terms.arguments()
    request, streams = current_request(), []
    for copy in copies_of(options, wanted.n_copies):
        stream = await request.resources.enter_async_context(
            server.stream_chat(wanted.messages, copy, **arguments)
        )
        request.sends(stream.mailbox)
        streams.append(stream)
    events = ChatEvents(server.info.name, wanted, options, streams)
    request.resources.enter_context(
        control.running(events.id, streams, reasoning=wanted.reasoning_control)
    )
    feed = await sse.open_feed(request.resources, streams)
    return feed, events, pings_for(server, wanted, streams)


def chat_arguments(wanted: ChatRequest) -> dict[str, Any]:
    """What `Server.stream_chat` and `Server.chat` take for a request."""
    return {
        "tools": wanted.tools or None,
        "tool_choice": wanted.tool_choice,
        "parallel_tool_calls": wanted.parallel_tool_calls,
        "add_generation_prompt": wanted.continuation.add_generation_prompt,
        "continue_final_message": wanted.continuation.continue_final_message,
        "template_kwargs": wanted.template_kwargs,
        "reasoning_format": wanted.reasoning_format,
        "reasoning_budget": wanted.reasoning_budget,
        "reasoning_message": wanted.reasoning_budget_message,
        "reasoning_control": wanted.reasoning_control,
        "parse_tools": bool(wanted.tools) and wanted.parse_tool_calls,
    }


def whole_chat(
    server: Server, wanted: ChatRequest, options: GenerationParams, done: Sequence[ChatCompletion]
) -> dict[str, Any]:
    """Write an answer whose choices have all ended. The timings are those of the first."""
    timings = [each.finished.timings for each in done]
    done = [_with_echo(wanted, each) for each in done]
    return {
        "choices": [_choice(wanted, options, i, each) for i, each in enumerate(done)],
        "created": int(time.time()),
        "model": server.info.name,
        "system_fingerprint": payload.FINGERPRINT,
        "object": "chat.completion",
        "usage": payload.usage(len(done[0].prompt), timings, copies=len(done)),
        "id": payload.new_id("chatcmpl"),
        "timings": payload.timings(timings[0]),
    }


def _with_echo(wanted: ChatRequest, done: ChatCompletion) -> ChatCompletion:
    """Put what the client has begun before what the model has added, if it is to be there."""
    if not wanted.continuation.echo:
        return done
    whole = MessageBuilder()
    for delta in final_message_deltas(wanted.messages):
        whole.add(delta)
    before, added = whole.build(), done.message
    joined = attrs.evolve(
        added,
        content=before.content + added.content,
        reasoning_content=before.reasoning_content + added.reasoning_content,
    )
    return attrs.evolve(done, message=joined)


def _choice(
    wanted: ChatRequest, options: GenerationParams, index: int, done: ChatCompletion
) -> dict[str, Any]:
    called = bool(done.message.tool_calls)
    choice: dict[str, Any] = {
        "finish_reason": payload.finish_reason(done.finished.reason, tool_calls=called),
        "index": index,
        "message": message(done.message),
    }
    if done.probs:
        choice["logprobs"] = chat_logprobs(done.probs, wanted, options)
    return choice


def message(value: Message) -> dict[str, Any]:
    """Write the message of an assistant."""
    written: dict[str, Any] = {"role": "assistant", "content": value.content}
    if value.reasoning_content:
        written["reasoning_content"] = value.reasoning_content
    if value.tool_calls:
        written["content"] = value.content or None
        written["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
                "id": call.id,
            }
            for call in value.tool_calls
        ]
    return written


# -- the prompt alone


@blueprint.post("/v1/chat/completions/input_tokens")
@blueprint.post("/chat/completions/input_tokens")
@takes(ChatRequest)
async def count_tokens() -> Response:
    """Count the tokens of a chat's prompt, and generate nothing."""
    return await counted(ChatRequest.parse(await read_chat()))


async def counted(wanted: ChatRequest) -> Response:
    """Make the response that tells how many tokens the prompt of a chat has."""
    server = current_server()
    arguments = chat_arguments(wanted)
    prompt = await server.render(
        wanted.messages,
        **{name: arguments[name] for name in _RENDERED},
    )
    tokens = await server.tokenize_rendered(prompt)
    return json_response({"input_tokens": len(tokens), "object": "response.input_tokens"})


#: What of `chat_arguments` shows in the prompt.
_RENDERED = ("tools", "add_generation_prompt", "continue_final_message", "template_kwargs")


# -- text


@blueprint.post("/v1/completions")
@takes(CompletionRequest)
async def completions() -> Response:
    """Continue one or more prompts, or fill the gap between each and the suffix."""
    wanted = CompletionRequest.parse(await read_body())
    server = current_server()
    options, terms = await options_for(server, wanted), terms_of(wanted)
    jobs = await _jobs(server, wanted, options)
    if not wanted.stream:
        done = await complete_all(server, jobs, terms)
        return json_response(whole_completion(server, wanted, options, done))
    request = current_request()
    opened = await open_all(request, server, jobs, terms)
    feed = await sse.open_feed(request.resources, opened)
    prompts = [job.prompt.tokens for job in jobs]
    echoes = [_echo(server, wanted, prompt) for prompt in prompts]
    events = CompletionEvents(server.info.name, wanted, options, prompts, echoes)
    pings = pings_for(server, wanted, opened)
    return await sse.respond(request, feed, events, errors.last_event, pings)


async def _jobs(server: Server, wanted: CompletionRequest, options: GenerationParams) -> list[Job]:
    if not wanted.suffix:
        return await jobs_for(server, wanted.prompts, options, wanted.n_copies)
    if missing := infill.missing(server):
        raise InvalidRequestError(
            f"'suffix' needs a model that fills gaps, and this one does not: {missing}.",
            param="suffix",
        )
    prompts = [
        await infill.prompt_for(server, Gap(prefix=prompt, suffix=wanted.suffix), options)
        for prompt in wanted.prompts
    ]
    return await jobs_for(server, prompts, options, wanted.n_copies)


def _echo(server: Server, wanted: CompletionRequest, prompt: tuple[int, ...]) -> str:
    return server.detokenize(prompt) if wanted.echo else ""


def whole_completion(
    server: Server, wanted: CompletionRequest, options: GenerationParams, done: Sequence[Completion]
) -> dict[str, Any]:
    """Write outputs that have ended. The timings are those of the first one."""
    timings = [each.finished.timings for each in done]
    prompts = [each.prompt for each in done[:: wanted.n_copies]]
    return {
        "choices": [
            {
                "text": _echo(server, wanted, each.prompt) + each.text,
                "index": index,
                "logprobs": text_logprobs(each.probs, options) if wanted.logprobs else None,
                "finish_reason": payload.finish_reason(each.finished.reason),
            }
            for index, each in enumerate(best_of(done, wanted.n_copies, wanted.n))
        ],
        "created": int(time.time()),
        "model": server.info.name,
        "system_fingerprint": payload.FINGERPRINT,
        "object": "text_completion",
        "usage": payload.usage(sum(map(len, prompts)), timings, copies=wanted.n_copies),
        "id": payload.new_id("cmpl"),
        "timings": payload.timings(timings[0]),
    }


def best_of(done: Sequence[Completion], n_copies: int, n: int) -> list[Completion]:
    """Keep, of the outputs of each prompt, the `n` whose tokens are most probable on average."""
    if n_copies == n:
        return list(done)
    best = []
    for start in range(0, len(done), n_copies):
        best += sorted(done[start : start + n_copies], key=_mean_logprob, reverse=True)[:n]
    return best


def _mean_logprob(done: Completion) -> float:
    logprobs = [each.chosen.logprob for each in done.probs]
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf
