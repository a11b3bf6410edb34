"""The body of ``POST /v1/responses``, and its conversion to a chat request.

As in llama-server, a request of this API is converted to a chat request. Fields that only this API
has are read here. All others, such as ``temperature``, mean the same as for a chat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import attrs

from trioserve.api.base import limits, readers
from trioserve.api.base.chat_request import RUN_TOOLS, ChatRequest
from trioserve.api.base.fields import (
    ARGUMENTS,
    NAME,
    PART,
    SCHEMA,
    STRING,
    MismatchError,
    Only,
    PromptFields,
    RequestBody,
    field,
    integer_in,
    json_type,
    list_schema,
    mapping,
    named,
    object_schema,
    objects,
    optional,
    strings,
    structure,
    text,
)
from trioserve.api.base.request_schemas import of_class, of_fields
from trioserve.api.base.stored import NOT_STORED, StoredAs
from trioserve.api.base.thinking import ReasoningOptions
from trioserve.api.base.web import HostedTools
from trioserve.api.openai.responses.input import Conversation, read_input
from trioserve.api.openai.responses.tools import Offer
from trioserve.chat.messages import MAX_MESSAGES, MAX_TOOLS, NOT_HOSTED, check_count
from trioserve.chat.params import MODES
from trioserve.errors import InvalidRequestError, UnsupportedFieldError
from trioserve.left_out import leave_out

#: Known fields without effect; see `RequestBody.unsupported`.
_UNSUPPORTED: Mapping[str, Only] = {
    "access_programs": Only({}, harmless="all that is here may be used"),
    "background_options": Only({}, harmless="it runs as soon as there is a place"),
    "image": Only({}),
    "moderation": Only(),
    "n": Only(1),
    "n_cmpl": Only(1),
    "prompt": Only(),
    "prompt_logprobs": Only(),
    "reasoning_format": Only("auto", "deepseek", "none"),
    "verbose": Only(False),
}

_LOGPROBS = "message.output_text.logprobs"

#: The parts of calls of the web that may be included.
SOURCES, RESULTS = "web_search_call.action.sources", "web_search_call.results"

#: The known values of `include`. Reasoning is always included, and never encrypted.
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content", SOURCES, RESULTS)

# -- readers of single fields


@attrs.frozen(kw_only=True)
class ResponsesStreamOptions(RequestBody):
    """Options of a streamed response."""

    unsupported: ClassVar[Mapping[str, Only]] = {
        "include_obfuscation": Only(False, harmless="events have no padding")
    }


@json_type({"type": "object", "properties": {"format": SCHEMA, "verbosity": NAME}})
def _text_config(value: Any) -> dict[str, Any]:
    fields = mapping(value)
    optional(fields, "verbosity", text, "text")
    optional(fields, "format", mapping, "text")
    return fields


@json_type(list_schema({**NAME, "examples": list(_INCLUDED)}, limits.MAX_INCLUDED))
def _include(value: Any) -> tuple[str, ...]:
    for name in strings(value):
        if name not in _INCLUDED:
            leave_out(f"include: {name}", "there is no such item, or it has this anyway")
    return strings(value)


@json_type({**ARGUMENTS, **NAME, "type": ["string", "object"]})
def _tool_choice(value: Any) -> str | dict[str, Any]:
    """Read a choice, and give it as it was given. The chat checks what it names."""
    if isinstance(value, dict):
        kind = value.get("type")
        return str(kind) if kind in MODES else value
    if value not in ("auto", "none", "required"):
        raise MismatchError('"auto", "none", "required" or an object')
    return str(value)


# -- what is compacted


@attrs.frozen(kw_only=True)
class ContextEntry:
    """``context_management``: the tokens of a prompt from which on it is compacted; None: those
    that leave no room for an answer.
    """

    type: Literal["compaction"]
    compact_threshold: int | None = field(read=integer_in(1), default=None)


@json_type(list_schema(of_class(ContextEntry), limits.MAX_INCLUDED))
def _context_management(value: Any) -> tuple[ContextEntry, ...]:
    each = enumerate(objects(value))
    return tuple(structure(ContextEntry, one, f"context_management[{i}].") for i, one in each)


# -- what is stored


@json_type({"anyOf": [NAME, object_schema("id", id=NAME)]})
def _conversation(value: Any) -> str:
    """Read the id of a conversation, which may be in an object."""
    id_ = mapping(value).get("id") if isinstance(value, dict) else value
    if not text(id_):
        raise MismatchError("the id of a conversation")
    return text(id_)


@attrs.frozen(kw_only=True, slots=False)
class StoringRequest(RequestBody):
    """The fields of a request that are about stored ones; see `trioserve.api.stored`."""

    store: bool = True
    background: bool = False
    previous_response_id: str | None = field(read=readers.name, default=None)
    conversation: str | None = field(read=_conversation, default=None)

    def __attrs_post_init__(self) -> None:
        if self.background and not self.store:
            raise InvalidRequestError.at("background", "needs 'store'.")
        if self.previous_response_id and self.conversation:
            raise InvalidRequestError.at(
                "previous_response_id", "and 'conversation' exclude each other."
            )


# -- the request

#: Fields of a chat whose place others take here.
_REPLACED = ("messages", "logprobs", "prompt_logprobs")


@json_type(
    properties={
        name: schema for name, schema in of_fields(ChatRequest).items() if name not in _REPLACED
    }
)
def _for_chats(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in _REPLACED}


@attrs.frozen(kw_only=True)
class ResponsesRequest(StoringRequest):
    """``POST /v1/responses``. `for_chats` holds what a chat request understands as it is."""

    unsupported = _UNSUPPORTED
    prompt_fields = PromptFields(head=("instructions", "tools"), turns=("input",))
    for_chats: dict[str, Any] = field(whole=_for_chats)
    input: Conversation = field(
        whole=json_type(
            properties={
                "input": list_schema(PART, MAX_MESSAGES) | {**STRING, "type": ["string", "array"]},
                "instructions": STRING,
            }
        )(read_input)
    )
    instructions: str | None = None
    max_output_tokens: int | None = field(read=readers.max_tokens, default=None)
    max_tool_calls: int | None = field(read=readers.count, default=None)
    metadata: dict[str, str] = attrs.field(factory=dict)
    #: In the flat form that this API has for them; see `Offer`.
    tools: tuple[dict[str, Any], ...] = field(
        read=objects, schema=list_schema(SCHEMA, MAX_TOOLS), default=()
    )
    tool_choice: str | dict[str, Any] = field(read=_tool_choice, default="auto")
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = attrs.field(factory=ReasoningOptions)
    text: dict[str, Any] = field(read=_text_config, factory=dict)
    include: tuple[str, ...] = field(read=_include, default=())
    top_logprobs: int = field(read=readers.probs, default=0)
    stream_options: ResponsesStreamOptions = attrs.field(factory=ResponsesStreamOptions)
    truncation: Literal["auto", "disabled"] = "disabled"
    context_management: tuple[ContextEntry, ...] = field(read=_context_management, default=())
    user: str | None = field(read=readers.name, default=None)
    safety_identifier: str | None = field(read=readers.name, default=None)
    prompt_cache_key: str | None = field(read=readers.name, default=None)
    #: True if the request asks for a compaction alone.
    compacts: ClassVar[bool] = False
    stored: StoredAs = attrs.field(init=False, default=NOT_STORED)
    chat: ChatRequest = attrs.field(init=False)
    offer: Offer = attrs.field(init=False)
    hosted: HostedTools = attrs.field(init=False)

    @hosted.default
    def _hosted(self) -> HostedTools:
        return self.offer.web(self.max_tool_calls)

    @offer.default
    def _offer(self) -> Offer:
        given = ((f"tools[{i}]", tool) for i, tool in enumerate(self.tools))
        return Offer([*given, *self.input.tools])

    @classmethod
    def parse(cls, body: Mapping[str, Any], stored: StoredAs = NOT_STORED) -> Self:
        """Read a body, and make the chat request of it.

        Raises:
            InvalidRequestError: `param` names the field at fault.
        """
        request = structure(cls, body, input=read_input(body, stored.before))
        if request.top_logprobs and _LOGPROBS not in request.include:
            raise InvalidRequestError.at("top_logprobs", f"needs {_LOGPROBS!r} in 'include'.")
        request.input.tool_places = request.offer.places
        for function, namespace in request.input.in_namespaces:
            function["name"] = request.offer.name_of(namespace, function["name"])
        fields = request._in_chat()
        with request.input.naming_items():
            chat = ChatRequest.parse(fields)
        if chat.run_tools is not None and request.context_management:
            raise UnsupportedFieldError.at(
                "context_management", "is not supported where the server runs tools."
            )
        if chat.run_tools is not None and request.max_tool_calls is not None:
            raise UnsupportedFieldError.at(
                "max_tool_calls",
                f"is not supported where the server runs tools; '{RUN_TOOLS}.max_steps' limits "
                "them.",
            )
        if chat.grammar is not None and chat.grammar.param.startswith("response_format"):
            param = chat.grammar.param.replace("response_format", "text.format", 1)
            chat = attrs.evolve(chat, grammar=attrs.evolve(chat.grammar, param=param))
        object.__setattr__(request, "stored", stored)
        object.__setattr__(request, "chat", chat)
        return request

    def _in_chat(self) -> dict[str, Any]:
        """The body of a chat request that asks for the same."""
        own = {
            "messages": self.input.messages,
            "tools": self.offer.functions,
            "tool_choice": self._chat_tool_choice(),
            "response_format": self._format(),
            "logprobs": _LOGPROBS in self.include,
            "top_logprobs": self.top_logprobs if _LOGPROBS in self.include else None,
            "stream_options": None,
        }
        others = {"max_tokens": self.max_output_tokens, "verbosity": self.text.get("verbosity")}
        own |= {name: value for name, value in others.items() if value is not None}
        if self.compacts or self.input.trigger:
            own |= {"continue_final_message": False, "echo": None, RUN_TOOLS: None}
        return self.for_chats | own

    def _format(self) -> Any:
        """The format of the text; llama-server takes the name of chats, too."""
        ours, of_chats = self.text.get("format"), self.for_chats.get("response_format")
        if ours is not None and of_chats is not None:
            raise InvalidRequestError.at("text.format", "and 'response_format' exclude each other.")
        return of_chats if ours is None else ours

    def _chat_tool_choice(self) -> Any:
        choice = self.tool_choice
        if isinstance(choice, str):
            return choice
        if choice.get("type") != "allowed_tools":
            if (chosen := self.offer.chosen(choice, "tool_choice")) is None:
                raise UnsupportedFieldError.at(
                    "tool_choice", f"is {choice['type']!r:.80}, and {NOT_HOSTED}."
                )
            return chosen
        tools = named(objects, choice.get("tools"), "tool_choice.tools")
        check_count(len(tools), MAX_TOOLS, "tool_choice.tools", "tools")
        each = [self.offer.chosen(tool, f"tool_choice.tools[{i}]") for i, tool in enumerate(tools)]
        if each and not any(each):
            raise UnsupportedFieldError.at(
                "tool_choice.tools", f"has none that is here: {NOT_HOSTED}."
            )
        allowed = {"mode": choice.get("mode"), "tools": [tool for tool in each if tool is not None]}
        return {"type": "allowed_tools", "allowed_tools": allowed}


@attrs.frozen(kw_only=True)
class CompactRequest(ResponsesRequest):
    """``POST /v1/responses/compact``."""

    compacts = True
