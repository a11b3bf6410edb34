"""llama-server's own routes: completion, infill, tokens, templates, and control of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
from msgspec import UNSET, UnsetType

from trioserve.api.base import limits, readers, sse
from trioserve.api.base.answers import Answer, Success
from trioserve.api.base.caller import Caller
from trioserve.api.base.chat_request import TemplateRequest
from trioserve.api.base.fields import (
    NAME,
    STRING,
    MismatchError,
    PromptFields,
    RequestBody,
    field,
    json_type,
    list_schema,
    object_schema,
    objects,
)
from trioserve.api.base.generation import NOT_RUNNING, admit, stream_reply
from trioserve.api.base.generation_request import UNSUPPORTED_IN_LLAMA, GenerationRequest
from trioserve.api.base.models import Models
from trioserve.api.base.output import LiveTimings, Output, OutputWriter
from trioserve.api.base.readers import GivenPrompt, RawPrompt
from trioserve.api.base.reply import Json, Reply, json, long_json, size_of_outputs
from trioserve.api.base.request_schemas import of_fields
from trioserve.api.base.routes import Routes, about_answer, of_kind
from trioserve.api.base.scores import TokenProbs as WrittenProbs, candidates_of
from trioserve.api.openapi import gives, takes
from trioserve.errors import InvalidRequestError
from trioserve.server import RequestContext
from trioserve.server.generation.text import copies_of
from trioserve.server.model_server import ModelServer
from trioserve.server.prompts.infill import File, Gap, check_infill
from trioserve.server.prompts.text import AnyPrompt
from trioserve.server.stream import Completion, read_all
from trioserve.types import Chunk, Finished, GenerationParams, Progress, Prompt, TokenId, TokenProbs

# -- what requests may hold


@attrs.frozen(kw_only=True, slots=False)
class LlamaRequest(GenerationRequest):
    """The fields of the routes that continue a prompt."""

    unsupported = UNSUPPORTED_IN_LLAMA
    has_max_logprobs: ClassVar[bool] = False
    n_candidates: int = field("n_probs", "logprobs", read=readers.probs, default=0)
    return_tokens: bool = False
    response_fields: tuple[str, ...] = field(
        read=readers.strings_of(limits.MAX_RESPONSE_FIELDS), default=()
    )

    @property
    def asked_probs(self) -> tuple[int, str | None]:
        return self.n_candidates, None


@attrs.frozen(kw_only=True, slots=False)
class LlamaCompletionRequest(LlamaRequest):
    """``POST /completion``."""

    prompt_fields = PromptFields(turns=("prompt",))
    prompts: tuple[GivenPrompt, ...] = field("prompt", read=readers.prompts)


# -- /infill


#: The name of a file that has none, as in llama-server.
_NO_NAME = "tmp"


@json_type(list_schema(object_schema(text=STRING, filename=NAME), limits.MAX_EXTRA_FILES))
def _extra_files(value: Any) -> tuple[File, ...]:
    """Read `input_extra`: files, each with a text and perhaps a name."""
    files = []
    for each in objects(value):
        text, name = each.get("text"), each.get("filename", _NO_NAME)
        if not isinstance(text, str) or not isinstance(name, str):
            raise MismatchError("a list of objects with a 'text' and perhaps a 'filename'")
        files.append(File(name, text))
    return tuple(files)


@attrs.frozen(kw_only=True, slots=False)
class InfillRequest(LlamaRequest):
    """``POST /infill``: text with a gap. `prompt` is what the gap begins with."""

    prompt_fields = PromptFields(turns=("input_extra", "input_prefix"))
    input_prefix: RawPrompt = field(read=readers.content)
    input_suffix: RawPrompt = field(read=readers.content)
    input_extra: tuple[File, ...] = field(read=_extra_files, default=())
    prompt: str = ""


# -- tokens


@json_type(list_schema({"type": "integer"}, limits.MAX_TOKENS))
def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise MismatchError("a list of token ids")
    return tuple(value)


@json_type({**readers.RAW, "maxLength": limits.MAX_TEXT, "maxItems": limits.MAX_TOKENS})
def _text(value: Any) -> RawPrompt:
    """Read text, or a list of ids and strings."""
    content = readers.content(value)
    parts = (content,) if isinstance(content, str) else content
    if sum(len(part) for part in parts if isinstance(part, str)) > limits.MAX_TEXT:
        raise MismatchError(f"text of at most {limits.MAX_TEXT} characters")
    return content


@json_type(properties=of_fields(TemplateRequest))
def _chat(body: Mapping[str, Any]) -> TemplateRequest | None:
    return TemplateRequest.parse(body) if body.get("messages") is not None else None


@attrs.frozen(kw_only=True)
class TokenizeRequest(RequestBody):
    """``POST /tokenize``. `prompt` and `messages` ask for vLLM's form."""

    model: str | None = field(read=readers.model_name, default=None)
    content: RawPrompt = field(read=_text, default="")
    prompt: RawPrompt | None = field(read=_text, default=None)
    chat: TemplateRequest | None = field(whole=_chat)
    add_special: bool | None = field("add_special", "add_special_tokens", default=None)
    parse_special: bool = True
    with_pieces: bool = False
    return_token_strs: bool = False

    def __attrs_post_init__(self) -> None:
        if self.chat is None:
            return
        if self.prompt is not None:
            raise InvalidRequestError.at("messages", "and 'prompt' exclude each other.")
        if self.add_special:
            raise InvalidRequestError.at(
                "add_special_tokens", "does not go with 'messages', whose template adds them."
            )

    @property
    def is_vllm(self) -> bool:
        """True if the answer has vLLM's form."""
        return self.prompt is not None or self.chat is not None


@attrs.frozen(kw_only=True)
class DetokenizeRequest(RequestBody):
    """``POST /detokenize``."""

    model: str | None = field(read=readers.model_name, default=None)
    tokens: tuple[int, ...] = field(read=_token_ids, default=())


routes = Routes(of_model=True)


# -- text and tokens


class _Piece(Answer):
    id: int
    piece: str | list[int]


class Tokens(Answer):
    """The tokens of a text; what vLLM says of them, where that is asked for."""

    tokens: Sequence[int | _Piece]
    count: int | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET
    token_strs: Sequence[str] | UnsetType = UNSET


@routes.post("/tokenize")
@takes(TokenizeRequest)
@gives(Tokens)
async def tokenize(request: TokenizeRequest, caller: Caller, models: Models) -> Reply:
    """Turn text into token ids, or check ids."""
    server = await models.use(request.model, caller)
    await caller.keep_awake(server)
    prompt = await _prompt(server, request)
    tokens = prompt.tokens
    n_texts = request.with_pieces + request.return_token_strs
    named = [*zip(tokens, await server.names_of(tokens), strict=True)] if n_texts else []
    written = Tokens(sse.LazyList(_with_piece, named) if request.with_pieces else tokens)
    if request.is_vllm:
        written.count, written.max_model_len = len(prompt), server.model.n_ctx_seq
    if request.return_token_strs:
        written.token_strs = sse.LazyList(_name, named)
    return long_json(lambda: written, (1 + 32 * n_texts) * len(tokens))


async def _prompt(server: ModelServer, request: TokenizeRequest) -> Prompt:
    if request.chat is not None:
        return await server.chat_prompt(request.chat.messages, request.chat.chat_params)
    is_vllm = request.prompt is not None
    return Prompt(
        await server.tokenize(
            request.content if request.prompt is None else request.prompt,
            param="prompt" if is_vllm else "content",
            add_special=is_vllm if request.add_special is None else request.add_special,
            parse_special=request.parse_special,
        )
    )


def _with_piece(named: tuple[TokenId, bytes]) -> _Piece:
    token, name = named
    try:
        return _Piece(token, name.decode())
    except UnicodeDecodeError:
        return _Piece(token, list(name))


def _name(named: tuple[TokenId, bytes]) -> str:
    return named[1].decode(errors="replace")


class Content(Answer):
    """A text, twice: the latter is for clients of vLLM."""

    content: str
    prompt: str


class PromptOfChat(Answer):
    """The prompt that a chat makes."""

    prompt: str


@routes.post("/detokenize")
@takes(DetokenizeRequest)
@gives(Content)
async def detokenize(request: DetokenizeRequest, caller: Caller, models: Models) -> Reply:
    """Turn token ids into text."""
    server = await models.use(request.model, caller)

    text = await server.detokenize(request.tokens)
    return long_json(lambda: Content(text, text), len(text) // 16)


@routes.post("/apply-template")
@takes(TemplateRequest)
@gives(PromptOfChat)
async def apply_template(request: TemplateRequest, caller: Caller, models: Models) -> Reply:
    """Render a chat, and do no more."""
    server = await models.use(request.model, caller)
    await caller.keep_awake(server)
    prompt = await server.render(request.messages, request.chat_params)
    return long_json(lambda: PromptOfChat(prompt), len(prompt) // 32)


# -- completion


@routes.post("/completion", "/completions")
@takes(LlamaCompletionRequest)
@gives(Output | list[Output])
async def completion(request: LlamaCompletionRequest, caller: Caller, models: Models) -> Reply:
    """Continue one or more prompts."""
    server, params, context = await admit(request, caller, models)
    return await _answer(server, request, caller, request.prompts, params, context)


async def _answer(
    server: ModelServer,
    request: LlamaRequest,
    caller: Caller,
    prompts: Sequence[AnyPrompt],
    params: GenerationParams,
    context: RequestContext,
) -> Reply:
    """Continue prompts, and write the outputs: one is an object, more are a list.

    Raises:
        TrioServeError: one of them failed.
    """
    n = request.n_copies
    copies = copies_of(params, n) * len(prompts)
    opened = server.stream_all(prompts, params, n=n, context=context)
    if not request.stream:
        completions = await read_all(opened)
        written = [
            LlamaOutput(server, request, i, done.prompt, copies[i])
            for i, done in enumerate(completions)
        ]
        for each in written:
            await each.settle()

        def write() -> Any:
            pairs = zip(written, completions, strict=True)
            results = [one.whole(done) for one, done in pairs]
            return results[0] if len(results) == 1 else results

        return long_json(write, size_of_outputs(completions))
    streams = await caller.open(opened)
    outputs = [
        LlamaOutput(server, request, i, stream.prompt, copies[i])
        for i, stream in enumerate(streams)
    ]
    return await stream_reply(server, request, caller, streams, LlamaEvents(outputs))


class LlamaOutput:
    """Writes one output, in parts or whole."""

    def __init__(
        self,
        server: ModelServer,
        request: LlamaRequest,
        index: int,
        prompt: Prompt,
        params: GenerationParams,
    ) -> None:
        self._writer = OutputWriter(server, request, params)
        self._request, self._params = request, params
        self._index, self._prompt = index, prompt
        self._has_new_line = False
        self._timings = LiveTimings(len(prompt), request)

    async def settle(self) -> None:
        """Get the text of the prompt."""
        await self._writer.read(self._prompt, anyway=True)

    def whole(self, done: Completion) -> Output | dict[str, Any]:
        """Write an output that has ended."""
        self._has_new_line = "\n" in done.text
        return self._last(done.finished, done.text, done.tokens, done.probs)

    def part(self, event: Progress | Chunk | Finished) -> Output | dict[str, Any] | None:
        """Write an event of a stream; None: it says nothing to the client."""
        if isinstance(event, Finished):
            return self._last(event, "", ())
        if isinstance(event, Progress):
            extra = self._timings.progress(event)
            return None if extra is None else self._partial("", ()) | extra
        self._timings.on_output(len(event.tokens), event.drafts)
        if not event.tokens and not event.text:
            return None
        self._has_new_line = self._has_new_line or "\n" in event.text
        part = self._partial(event.text, event.tokens)
        if event.probs:
            part["completion_probabilities"] = self._probs(event.probs)
        return part | self._timings.now()

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

    def _probs(self, values: Sequence[TokenProbs]) -> Sequence[WrittenProbs] | UnsetType:
        post = self._params.post_sampling_probs
        return candidates_of(values, post_sampling=post) if values else UNSET

    def _last(
        self,
        finished: Finished,
        text: str,
        tokens: Sequence[TokenId],
        probs: Sequence[TokenProbs] = (),
    ) -> Output | dict[str, Any]:
        shown = tokens if self._request.return_tokens else ()
        result = self._writer.whole(self._index, self._prompt, finished, text=text, tokens=shown)
        result.has_new_line = self._has_new_line
        result.completion_probabilities = self._probs(probs)
        paths = self._request.response_fields
        return _select(result, paths) if paths else result


def _select(result: Output, paths: Sequence[str]) -> dict[str, Any]:
    """Keep the fields at these paths, such as ``generation_settings/seed``."""
    selected = {}
    for path in paths:
        value: Any = result
        for name in path.split("/"):
            fields = sse.fields_of(value) if isinstance(value, Answer) else value
            if not isinstance(fields, Mapping) or name not in fields:
                break
            value = fields[name]
        else:
            selected[path] = value
    return selected


class LlamaEvents(sse.EventWriter[sse.Event]):
    """Writes the events of one or more outputs as they come."""

    def __init__(self, outputs: Sequence[LlamaOutput]) -> None:
        self._outputs = outputs

    async def settle(self, event: sse.Event) -> None:
        for each in self._outputs:
            await each.settle()

    def encode(self, index: int, event: sse.Event) -> bytes:
        assert isinstance(event, Progress | Chunk | Finished)
        part = self._outputs[index].part(event)
        return b"" if part is None else sse.event(part)


# -- infill


@routes.post("/infill")
@of_kind(lambda server: check_infill(server.model))
@takes(InfillRequest)
@gives(Output | list[Output])
async def fill(request: InfillRequest, caller: Caller, models: Models) -> Reply:
    """Fill the gap between two texts."""
    server, params, context = await admit(request, caller, models)
    gap = Gap(
        prefix=request.input_prefix,
        suffix=request.input_suffix,
        extra=request.input_extra,
        beginning=request.prompt,
    )
    prompt = await server.prompt_for(gap, params.max_tokens)
    return await _answer(server, request, caller, [prompt], params, context)


# -- control of answers that are being streamed


_NOT_ENABLED = "reasoning control not enabled for this completion"


@attrs.frozen(kw_only=True)
class ControlRequest(RequestBody):
    """``POST /v1/chat/completions/control``."""

    id: str = field(read=readers.name, default="")
    action: str = field(read=readers.name, default="")


@routes.post("/v1/chat/completions/control")
@about_answer
@takes(ControlRequest)
@gives(Success)
async def control(request: ControlRequest, caller: Caller, models: Models) -> Reply:
    """End the reasoning of a running answer, or the answer."""
    if not request.id:
        raise InvalidRequestError("missing completion id", param="id")
    if request.action not in ("reasoning_end", "cancel"):
        raise InvalidRequestError("unknown control action", param="action")
    response = models.responses.find(request.id, caller.api_key)
    if response is None or response.has_ended:
        return _refuse(NOT_RUNNING)
    if request.action == "cancel":
        response.cancel()
        return json(Success(True))
    if not response.reasoning_control:
        return _refuse(_NOT_ENABLED)
    live = response.live
    if any([await stream.end_reasoning() for stream in live]):
        return json(Success(True))
    ended = all(stream.mailbox.is_over for stream in live)  # meanwhile; else the model has none
    return _refuse(NOT_RUNNING if ended else _NOT_ENABLED)


def _refuse(message: str) -> Json:
    return json(Success(False, message))
