"""OpenAI's routes: ``/v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

import time
from typing import Any

from quart import Blueprint
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api import errors, parked, payload, sse
from trioserve.api.fields import read_body
from trioserve.api.generation import options_for, pings_for
from trioserve.api.http import current_request, json_response
from trioserve.api.openai_events import ChatEvents, CompletionEvents, logprobs_of
from trioserve.api.prompts import complete_all, open_all
from trioserve.api.schema import ChatRequest, CompletionRequest
from trioserve.api.service import current_server
from trioserve.api.terms import Terms, terms_of
from trioserve.chat.deltas import Message
from trioserve.server import Server
from trioserve.stream import ChatCompletion, Completion
from trioserve.types import Options

blueprint = Blueprint("openai", __name__)


# -- chat


@blueprint.post("/v1/chat/completions")
@blueprint.post("/chat/completions")
async def chat_completions() -> Response:
    """Answer a chat: at once, as a stream, or later on a route of its own (`parked`)."""
    wanted = ChatRequest.parse(await read_body())
    server = current_server()
    options, terms = await options_for(server, wanted), terms_of(wanted)
    if parked.is_asked_for():
        server.check_queue()  # the page that will come for it could not read a 429
        return parked.park(parked.Parked(wanted, options, terms))
    if wanted.stream:
        feed, events, pings = await open_chat(server, wanted, options, terms)
        return await sse.respond(current_request(), feed, events, errors.last_event, pings)
    arguments = _chat_arguments(wanted) | terms.arguments()
    done = await server.chat(wanted.messages, options, **arguments)
    return json_response(whole_chat(server, wanted, options, done))


async def open_chat(
    server: Server, wanted: ChatRequest, options: Options, terms: Terms
) -> tuple[sse.Feed, ChatEvents, sse.Pings]:
    """Start to answer a chat. It ends with the current request, at the latest.

    Raises:
        TrioServeError: as `Server.stream_chat`.
    """
    arguments = _chat_arguments(wanted) | terms.arguments()
    stream = await current_request().resources.enter_async_context(
        server.stream_chat(wanted.messages, options, **arguments)
    )
    stream.mailbox.on_stalled = current_request().abort
    events = ChatEvents(server.info.name, wanted, options, stream)
    return sse.feed_of(stream), events, pings_for(server, wanted, [stream])


def _chat_arguments(wanted: ChatRequest) -> dict[str, Any]:
    tools = wanted.offered_tools
    return {
        "tools": tools or None,
        "add_generation_prompt": wanted.ending.add_generation_prompt,
        "go_on": wanted.ending.go_on,
        "template_kwargs": wanted.template_kwargs,
        "reasoning_format": wanted.reasoning_format,
        "parse_tools": bool(tools),
    }


def whole_chat(
    server: Server, wanted: ChatRequest, options: Options, done: ChatCompletion
) -> dict[str, Any]:
    """Write an answer that has ended."""
    finish = payload.finish_reason(done.finished.reason, tool_calls=bool(done.message.tool_calls))
    choice: dict[str, Any] = {
        "finish_reason": finish,
        "index": 0,
        "message": message(done.message),
    }
    if done.probs:
        choice["logprobs"] = logprobs_of(done.probs, wanted, options)
    return {
        "choices": [choice],
        "created": int(time.time()),
        "model": server.info.name,
        "system_fingerprint": payload.FINGERPRINT,
        "object": "chat.completion",
        "usage": payload.usage(len(done.prompt), [done.finished.timings]),
        "id": payload.new_id("chatcmpl"),
        "timings": payload.timings(done.finished.timings),
    }


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


# -- text


@blueprint.post("/v1/completions")
async def completions() -> Response:
    """Continue one or more prompts."""
    wanted = CompletionRequest.parse(await read_body())
    server = current_server()
    options, terms = await options_for(server, wanted), terms_of(wanted)
    if not wanted.stream:
        done = await complete_all(server, wanted.prompts, options, terms)
        return json_response(whole_completion(server, wanted, options, done))
    request = current_request()
    opened = await open_all(request, server, wanted.prompts, options, terms)
    feed = await sse.open_feed(request.resources, opened)
    echoes = [_echo(server, wanted, stream.prompt) for stream in opened]
    prompts = [stream.prompt for stream in opened]
    events = CompletionEvents(server.info.name, wanted, options, prompts, echoes)
    pings = pings_for(server, wanted, opened)
    return await sse.respond(request, feed, events, errors.last_event, pings)


def _echo(server: Server, wanted: CompletionRequest, prompt: tuple[int, ...]) -> str:
    return server.detokenize(prompt) if wanted.echo else ""


def whole_completion(
    server: Server, wanted: CompletionRequest, options: Options, done: list[Completion]
) -> dict[str, Any]:
    """Write outputs that have ended. The timings are those of the first one."""
    timings = [each.finished.timings for each in done]
    return {
        "choices": [
            {
                "text": _echo(server, wanted, each.prompt) + each.text,
                "index": index,
                "logprobs": logprobs_of(each.probs, wanted, options) if each.probs else None,
                "finish_reason": payload.finish_reason(each.finished.reason),
            }
            for index, each in enumerate(done)
        ],
        "created": int(time.time()),
        "model": server.info.name,
        "system_fingerprint": payload.FINGERPRINT,
        "object": "text_completion",
        "usage": payload.usage(sum(len(each.prompt) for each in done), timings),
        "id": payload.new_id("cmpl"),
        "timings": payload.timings(timings[0]),
    }
