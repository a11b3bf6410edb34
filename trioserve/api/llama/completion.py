"""llama-server's own routes, for completion, tokens and templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any

from quart import Blueprint
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base import sse, writers
from trioserve.api.base.body import read_body_as
from trioserve.api.base.chat_request import TemplateRequest
from trioserve.api.base.fields import structure
from trioserve.api.base.generation import (
    admit,
    open_streams,
    read_chat,
    respond_stream,
)
from trioserve.api.base.openapi import takes
from trioserve.api.base.own_form import own_form
from trioserve.api.base.request import long_response, size_of_outputs
from trioserve.api.base.service import awake_server
from trioserve.api.llama.request import (
    DetokenizeRequest,
    LlamaCompletionRequest,
    LlamaRequest,
    TokenizeRequest,
)
from trioserve.server import RequestContext, Server
from trioserve.server.choices import copies_of
from trioserve.server.media_prompts import AnyPrompt
from trioserve.server.stream import Completion
from trioserve.types import Chunk, Finished, GenerationParams, Progress, Prompt, TokenId, TokenProbs

blueprint = Blueprint("llama", __name__)


# -- text and tokens


@blueprint.post("/tokenize")
@takes(TokenizeRequest)
async def tokenize() -> Response:
    """Turn text into token ids, or check ids."""
    request = await read_body_as(partial(structure, TokenizeRequest))
    server = await awake_server(request.model)
    tokens = await server.tokenize(
        request.content,
        param="content",
        add_special=request.add_special,
        parse_special=request.parse_special,
    )
    if not request.with_pieces:
        return await long_response(lambda: {"tokens": tokens}, len(tokens))
    detokenize = server.model.vocab.detokenize

    def with_piece(token: TokenId) -> dict[str, Any]:
        return {"id": token, "piece": _text_or_bytes(detokenize([token]))}

    return await long_response(
        lambda: {"tokens": sse.LazyList(with_piece, tokens)}, 32 * len(tokens)
    )


def _text_or_bytes(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


@blueprint.post("/detokenize")
@takes(DetokenizeRequest)
async def detokenize() -> Response:
    """Turn token ids into text."""
    request = await read_body_as(partial(structure, DetokenizeRequest))
    server, tokens = await awake_server(request.model), request.tokens
    return await long_response(lambda: {"content": server.detokenize(tokens)}, len(tokens))


@blueprint.post("/apply-template")
@takes(TemplateRequest)
async def apply_template() -> Response:
    """Render a chat, and do no more."""
    request = await read_chat(TemplateRequest.parse)
    server = await awake_server(request.model)
    prompt = await server.render(request.messages, request.chat_params)
    return await long_response(lambda: {"prompt": prompt}, len(prompt) // 32)


# -- completion


@blueprint.post("/completion")
@blueprint.post("/completions")
@takes(LlamaCompletionRequest)
async def completion() -> Response:
    """Continue one or more prompts."""
    request = await read_body_as(LlamaCompletionRequest.parse)
    server, params, context = await admit(request)
    return await answer(server, request, request.prompts, params, context)


async def answer(
    server: Server,
    request: LlamaRequest,
    prompts: Sequence[AnyPrompt],
    params: GenerationParams,
    context: RequestContext,
) -> Response:
    """Continue prompts, and write the outputs: one is an object, more are a list.

    Raises:
        TrioServeError: one of them failed.
    """
    n = request.n_copies
    copies = copies_of(params, n) * len(prompts)
    if not request.stream:
        completions = await server.completions.complete(prompts, params, context, n=n)

        def write() -> Any:
            results = [
                Output(server, request, i, done.prompt, copies[i]).whole(done)
                for i, done in enumerate(completions)
            ]
            return results[0] if len(results) == 1 else results

        return await long_response(write, size_of_outputs(completions))
    streams = await open_streams(server.completions.stream(prompts, params, context, n=n))
    outputs = [
        Output(server, request, i, stream.prompt, copies[i]) for i, stream in enumerate(streams)
    ]
    return await respond_stream(server, request, streams, CompletionEvents(outputs))


class Output:
    """Writes one output, in parts or whole."""

    def __init__(
        self,
        server: Server,
        request: LlamaRequest,
        index: int,
        prompt: Prompt,
        params: GenerationParams,
    ) -> None:
        self._server, self._request, self._params = server, request, params
        self._index, self._prompt = index, prompt
        self._has_new_line = False
        self._timings = writers.LiveTimings(len(prompt), monotonic)

    def whole(self, done: Completion) -> dict[str, Any]:
        """Write an output that has ended."""
        self._has_new_line = "\n" in done.text
        extra = self._probs(done.probs)
        return self._last(done.finished, done.text, done.tokens, extra)

    def part(self, event: Progress | Chunk | Finished) -> dict[str, Any]:
        """Write an event of a stream."""
        if isinstance(event, Finished):
            return self._last(event, "", (), {})
        if isinstance(event, Progress):
            self._timings.on_progress(event)
            extra = self._timings.with_progress(event, timed=self._request.timings_per_token)
            return self._partial("", ()) | extra
        self._timings.on_output(len(event.tokens), event.drafts)
        self._has_new_line = self._has_new_line or "\n" in event.text
        part = self._partial(event.text, event.tokens) | self._probs(event.probs)
        if self._request.timings_per_token:
            part["timings"] = writers.timings(self._timings.now())
        return part

    def is_silent(self, event: Progress | Chunk | Finished) -> bool:
        """Whether an event is for us alone, or says nothing."""
        if isinstance(event, Progress):
            self._timings.on_progress(event)
            return not self._request.return_progress
        return isinstance(event, Chunk) and not event.tokens and not event.text

    def _partial(self, text: str, tokens: Sequence[TokenId]) -> dict[str, Any]:
        return {
            "index": self._index,
            "content": text,
            "tokens": tokens,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": self._timings.n_predicted,
            "tokens_evaluated": len(self._prompt),
        }

    def _probs(self, values: Sequence[TokenProbs]) -> dict[str, Any]:
        if not values:
            return {}
        post = self._params.post_sampling_probs
        return {"completion_probabilities": writers.probs(values, post_sampling=post)}

    def _last(
        self, finished: Finished, text: str, tokens: Sequence[TokenId], extra: Mapping[str, Any]
    ) -> dict[str, Any]:
        shown = tokens if self._request.return_tokens else ()
        result = own_form(
            self._server,
            self._request,
            self._params,
            self._prompt,
            finished,
            text=text,
            tokens=shown,
            index=self._index,
        )
        result["has_new_line"] = self._has_new_line
        return _select(result | dict(extra), self._request.response_fields)


def _select(result: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Keep the fields at these paths, such as ``generation_settings/seed``; no paths: all."""
    if not paths:
        return dict(result)
    selected = {}
    for path in paths:
        value: Any = result
        for name in path.split("/"):
            if not isinstance(value, Mapping) or name not in value:
                break
            value = value[name]
        else:
            selected[path] = value
    return selected


class CompletionEvents:
    """Writes the events of one or more outputs as they come."""

    def __init__(self, outputs: Sequence[Output]) -> None:
        self._outputs = outputs

    def encode(self, index: int, event: sse.Event) -> bytes:
        """Write an event of one output."""
        assert isinstance(event, Progress | Chunk | Finished)
        output = self._outputs[index]
        return b"" if output.is_silent(event) else sse.event(output.part(event))

    def end(self) -> bytes:
        """Write nothing: the last part of each output says that it is the last."""
        return b""
