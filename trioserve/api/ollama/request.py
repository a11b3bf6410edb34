"""The request classes of Ollama's routes for text, made by `fields.structure`.

Beside Ollama's fields they take those that all routes share, such as ``seed`` or ``timeout``; what
``options`` says wins. What is fixed when a model is loaded is a flag of the server, and an option
that would change it is refused.

The messages are OpenAI's but for a few names. Calls may come without ids, and results with no more
than the name of their tool; templates need both to have an id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, ClassVar

import attrs

from trioserve.api.base import readers
from trioserve.api.base.fields import (
    ARGUMENTS,
    DATA,
    NAME,
    SCHEMA,
    STRING,
    Only,
    PromptFields,
    RequestBody,
    field,
    integer,
    integer_in,
    json_type,
    list_schema,
    named,
    object_schema,
    objects,
    or_null,
    required,
    strings,
    text,
)
from trioserve.api.base.generation_request import GenerationRequest
from trioserve.api.base.models import can_think
from trioserve.api.base.thinking import ThinkingRequest
from trioserve.chat.messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    Message,
    Messages,
    Tools,
    check_count,
    media_part,
    parse_messages,
    parse_tools,
    source_of,
    text_part,
)
from trioserve.chat.params import ChatParams
from trioserve.errors import InvalidRequestError
from trioserve.left_out import leave_out
from trioserve.server.model_server import ModelServer
from trioserve.types import Grammar

# -- ``options``


@json_type({"type": "integer", "description": "0 and less: no limit."})
def _num_predict(value: Any) -> int:
    n = integer(value)
    return -1 if n <= 0 else readers.max_tokens(n)


_GONE = "llama.cpp no longer has it"


def _by_flag(flag: str, *values: Any) -> Only:
    """Leave out what is fixed when a model is loaded. `values` would change nothing."""
    return Only(*values, harmless=f"the flag {flag} sets it for all requests")


@attrs.frozen(kw_only=True)
class ContextOptions(RequestBody):
    """The option of requests that generate nothing."""

    #: Options that are fixed when a model is loaded. The accepted values are Ollama's defaults.
    unsupported: ClassVar[Mapping[str, Only]] = {
        "num_batch": _by_flag("--batch-size"),
        "num_gpu": _by_flag("--n-gpu-layers", -1),
        "main_gpu": _by_flag("--main-gpu", 0),
        "num_thread": _by_flag("--threads", 0),
        "use_mmap": _by_flag("--load-mode", True),
        "use_mlock": _by_flag("--load-mode", False),
        "numa": _by_flag("--numa", False),
        "f16_kv": _by_flag("--cache-type-k"),
        "embedding_only": _by_flag("--embeddings", False),
        "low_vram": Only(False, harmless=_GONE),
        "logits_all": Only(False, harmless=_GONE),
        "vocab_only": Only(False, harmless=_GONE),
        "penalize_newline": Only(True, harmless=_GONE),
        "tfs_z": Only(1, 1.0, harmless=_GONE),
    }
    n_ctx: int | None = field("num_ctx", read=integer_in(1), default=None)

    def check(self, n_ctx: int) -> None:
        """Log that a context is not as long as it should be, if it is not."""
        if self.n_ctx is not None and self.n_ctx > n_ctx:
            leave_out(
                "options.num_ctx",
                f"a request has a context of {n_ctx} tokens, which --ctx-size sets",
            )


@attrs.frozen(kw_only=True)
class OllamaOptions(ContextOptions):
    """The options of requests that generate."""

    max_tokens: int | None = field("num_predict", read=_num_predict, default=None)
    n_keep: int | None = field("num_keep", read=readers.budget, default=None)
    seed: int | None = field(read=readers.seed, default=None)
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_last_n: int | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    stop: tuple[str, ...] | None = field(read=readers.words, default=None)

    @property
    def params(self) -> dict[str, Any]:
        """The fields of `GenerationParams` and `SamplingParams` that are set."""
        fields = attrs.asdict(self, recurse=False)
        return {
            name: fields[name] for name in fields if name != "n_ctx" and fields[name] is not None
        }


# -- messages


#: Fields of a message that have other names in the normal form.
_NAMES = {"thinking": "reasoning_content", "tool_name": "name"}

#: Stands for an image in a text.
_PLACE = "[img]"

_CALL = object_schema(
    "function",
    id=or_null(NAME),
    function=object_schema(
        "name", name=NAME, arguments={**ARGUMENTS, **STRING, "type": ["object", "string"]}
    ),
)
_MESSAGE = object_schema(
    "role",
    role={**NAME, "examples": ["system", "user", "assistant", "tool"]},
    content=or_null(STRING),
    thinking=or_null(STRING),
    images=or_null(list_schema(DATA, MAX_PARTS)),
    tool_calls=or_null(list_schema(_CALL, MAX_PARTS)),
    tool_name=or_null(NAME),
    tool_call_id=or_null(NAME),
)


@json_type(list_schema(_MESSAGE, MAX_MESSAGES))
def read_messages(value: Any) -> Messages:
    """Read `messages`; there may be none.

    Raises:
        MismatchError: it is no list of objects.
        InvalidMediaError: an image is not valid base64.
        InvalidRequestError: something is missing or has the wrong type. Both name it.
    """
    if not (given := objects(value)):
        return Messages()
    renamed = [_renamed(message, f"messages[{i}]") for i, message in enumerate(given)]
    return _with_ids(parse_messages(renamed))


def _renamed(message: Mapping[str, Any], path: str) -> Message:
    fields = {name: value for name, value in message.items() if name not in (*_NAMES, "images")}
    for theirs, ours in _NAMES.items():
        if (value := message.get(theirs)) is not None:
            fields[ours] = named(text, value, f"{path}.{theirs}")
    if fields.get("content") is None:
        fields["content"] = ""
    if (given := message.get("images")) is not None:
        images = named(strings, given, f"{path}.images")
        content = required(fields, "content", text, path)
        fields["content"] = with_images(content, images, f"{path}.images")
    return fields


def with_images(said: str, images: Sequence[str], path: str) -> str | list[dict[str, Any]]:
    """Make the content of a message. As in Ollama, images replace the ``[img]`` marks of the text.

    Images without a mark precede the text.

    Raises:
        InvalidMediaError: an image is not valid base64; `param` names it.
    """
    if not images:
        return said
    check_count(len(images), MAX_PARTS, path, "images")
    parts = [
        media_part(source_of(image, "image", f"{path}[{i}]")) for i, image in enumerate(images)
    ]
    texts = said.split(_PLACE, len(parts))
    n_placed = len(texts) - 1
    content = parts[n_placed:]
    for piece, image in zip_longest(texts, parts[:n_placed]):
        content += [text_part(piece)] if piece else []
        content += [] if image is None else [image]
    return content


def _with_ids(messages: Messages) -> Messages:
    """Give an id to calls that have none, and to results: that of the call that they answer."""
    written: list[Message] = []
    unanswered: list[tuple[str, str]] = []  # the name and the id of each call
    n_calls = 0
    for message in messages:
        if calls := message.get("tool_calls"):
            # Nine letters and digits: some templates take no other ids.
            calls = [
                {"id": f"call{i:05d}", **call} for i, call in enumerate(calls, start=n_calls + 1)
            ]
            n_calls += len(calls)
            unanswered = [(call["function"]["name"], call["id"]) for call in calls]
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool" and unanswered:
            message = _answering(message, unanswered)
        written.append(message)
    return Messages(written)


def _answering(message: Message, unanswered: list[tuple[str, str]]) -> Message:
    """Find the call that a result belongs to, and take it from the list."""
    id_, name = message.get("tool_call_id"), message.get("name")
    found = next(
        (one for one in unanswered if (one[1] == id_ if id_ else name in (None, one[0]))), None
    )
    if found is None:
        return message
    unanswered.remove(found)
    return {"name": found[0], "tool_call_id": found[1], **message}


@json_type()
def continues_final_message(body: Mapping[str, Any]) -> bool:
    """Judge if the assistant continues the last message, which `read_messages` has checked.

    Raises:
        InvalidRequestError: it calls a tool, and so waits for a result.
    """
    messages = body.get("messages")
    if body.get("continue_final_message") is False or not messages:  # as the configuration has it
        return False
    last = messages[-1]
    if last["role"] == "assistant" and last.get("tool_calls"):
        path = f"messages[{len(messages) - 1}]"
        raise InvalidRequestError.at(path, "calls a tool, and needs its result.")
    return bool(last["role"] == "assistant")


# -- tools

_TOOL = object_schema(
    "function",
    type=or_null(NAME),
    function=object_schema(
        "name", name=NAME, description=or_null(STRING), parameters=or_null(SCHEMA)
    ),
)


@json_type(list_schema(_TOOL, MAX_TOOLS))
def read_tools(value: Any) -> Tools:
    """Read `tools`; their type may be left out, as there is only one.

    Raises:
        MismatchError: it is no list of objects.
        InvalidRequestError: something is missing or has the wrong type; `param` names it.
    """
    return parse_tools(
        [{**tool, "type": tool.get("type") or "function"} for tool in objects(value)]
    )


# -- the routes


#: Candidates for each token, as in Ollama.
_MAX_TOP_LOGPROBS = 20

_NO_PLACE = "these streams have no place for it"

#: Known fields without effect, and which of their values change nothing. Null never does.
UNSUPPORTED: Mapping[str, Only] = {
    "_debug_render_only": Only(False),
    "shift": Only(harmless="the flag --context-shift sets it for all requests"),
    "n": Only(1),
    "n_cmpl": Only(1),
    "queue_comments": Only(False, harmless=_NO_PLACE),
    "return_progress": Only(False, harmless=_NO_PLACE),
    "stream_options": Only({}, {"include_usage": True}, harmless=_NO_PLACE),
    "timings_per_token": Only(False, harmless=_NO_PLACE),
    "trioserve_run_tools": Only(False),
    "truncate": Only(False, harmless="a prompt that is too long is an error"),
    "verbose": Only(False, harmless=_NO_PLACE),
}
UNSUPPORTED_IN_GENERATE: Mapping[str, Only] = {
    **UNSUPPORTED,
    "context": Only([]),
    "height": Only(0),
    "steps": Only(0),
    "template": Only(""),
    "width": Only(0),
}


@json_type(properties={"format": {"anyOf": [{"enum": ["", "json"]}, SCHEMA]}})
def _format(body: Mapping[str, Any]) -> Grammar | None:
    """Read ``format``: the word "json", or a JSON Schema."""
    given = body.get("format")
    if given is None or given == "":
        return None
    if given == "json":
        return Grammar("json_object", param="format")
    if not isinstance(given, dict):
        raise InvalidRequestError.at("format", 'must be "json" or a JSON Schema.')
    return Grammar("json_schema", json.dumps(given), param="format")


@attrs.frozen(kw_only=True, slots=False)
class OllamaRequest(ThinkingRequest, GenerationRequest):
    """The fields of ``/api/chat`` and ``/api/generate``."""

    model_names = ("model", "name")
    stream: bool = True
    grammar: Grammar | None = field(whole=_format)
    options: OllamaOptions = attrs.field(factory=OllamaOptions)
    logprobs: bool = False
    top_logprobs: int | None = field(read=integer_in(0, _MAX_TOP_LOGPROBS), default=None)

    @property
    def asked_probs(self) -> tuple[int, str | None]:
        """See `GenerationRequest.asked_probs`; one candidate is the token that was chosen."""
        n = max(1, self.top_logprobs or 0) if self.logprobs else 0
        return n, None if self.top_logprobs is None else "top_logprobs"

    def given_params(self) -> dict[str, Any]:
        """The fields of `GenerationParams` and `SamplingParams` that the request sets."""
        return super().given_params() | self.options.params

    def check(self, server: ModelServer) -> None:
        """Refuse what the model or the server's configuration does not support.

        Raises:
            InvalidRequestError: naming the field.
        """
        self.options.check(server.model.n_ctx_seq)
        if self.think and not can_think(server.model.template):
            raise InvalidRequestError.at(
                "think",
                f"is not for this model: {server.model.info.name!r} does not support thinking.",
            )

    def __attrs_post_init__(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError.at("top_logprobs", "needs 'logprobs' to be true.")


@attrs.frozen(kw_only=True, slots=False)
class OllamaChatRequest(OllamaRequest):
    """``POST /api/chat``. Without messages it loads the model."""

    unsupported = UNSUPPORTED
    prompt_fields = PromptFields(head=("tools",), turns=("messages",))
    messages: Messages = field(read=read_messages, factory=Messages)
    continue_final_message: bool = field(whole=continues_final_message)
    tools: Tools = field(read=read_tools, factory=Tools)

    @property
    def chat_params(self) -> ChatParams:
        return ChatParams(
            **self.thinking_params,
            tools=self.tools,
            add_generation_prompt=not self.continue_final_message,
            continue_final_message="auto" if self.continue_final_message else None,
            parse_tools=bool(self.tools),
        )


@json_type()
def _messages(body: Mapping[str, Any]) -> Messages:
    """Make the chat that a prompt is, unless it is `raw` or has a `suffix`."""
    prompt, system = body.get("prompt") or "", body.get("system") or ""
    content = with_images(prompt, body.get("images") or (), "images")
    said = (("system", system), ("user", content))
    return Messages({"role": role, "content": each} for role, each in said if each)


@attrs.frozen(kw_only=True, slots=False)
class OllamaGenerateRequest(OllamaRequest):
    """``POST /api/generate``. Without a prompt it loads the model."""

    unsupported = UNSUPPORTED_IN_GENERATE
    prompt_fields = PromptFields(head=("system",), turns=("prompt", "images"))
    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: bool = False
    images: tuple[str, ...] = field(read=strings, schema=list_schema(DATA, MAX_PARTS), default=())
    messages: Messages = field(whole=_messages)

    @property
    def chat_params(self) -> ChatParams:
        return ChatParams(**self.thinking_params, parse_tools=False)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        without_template = "raw" if self.raw else "suffix" if self.suffix else ""
        for name in ("suffix", "system", "think", "images") if without_template else ():
            if name != without_template and getattr(self, name):
                raise InvalidRequestError.at(name, f"does not go with '{without_template}'.")
