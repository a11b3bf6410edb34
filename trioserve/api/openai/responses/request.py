"""The body of ``POST /v1/responses``, and its conversion to a chat request.

As in llama-server, a request of this API is converted to a chat request. Fields that only this API
has are read here. All others, such as ``temperature``, mean the same as for a chat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from trioserve.api.base import readers
from trioserve.api.base.chat_request import RUN_TOOLS, ChatRequest
from trioserve.api.base.fields import (
    MismatchError,
    Only,
    RequestBody,
    field,
    json_type,
    mapping,
    named,
    objects,
    of_fields,
    strings,
    text,
)
from trioserve.api.openai.responses.input import Conversation, read_input
from trioserve.chat.messages import MAX_MESSAGES, MAX_TOOLS, check_count
from trioserve.errors import InvalidRequestError, UnsupportedFieldError

#: Known fields without effect; see `RequestBody.unsupported`.
_UNSUPPORTED: Mapping[str, Only] = {
    "background": Only(False),
    "context_management": Only([]),
    "conversation": Only(),
    "image": Only({}),
    "moderation": Only(),
    "n": Only(1),
    "n_cmpl": Only(1),
    "previous_response_id": Only(""),
    "prompt": Only(),
    "reasoning_format": Only("auto", "deepseek", "none"),
    "truncation": Only("disabled"),
    "verbose": Only(False),
}

_LOGPROBS = "message.output_text.logprobs"

#: What may be asked to be included. Reasoning always is, as it is and not encrypted.
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")


# -- readers of single fields


@attrs.frozen(kw_only=True)
class ReasoningOptions(RequestBody):
    """How the model reasons."""

    unsupported: ClassVar[Mapping[str, Only]] = {
        "context": Only("auto"),
        "generate_summary": Only("auto"),
        "mode": Only("standard"),
        "summary": Only("auto"),
    }
    effort: str | None = None


@attrs.frozen(kw_only=True)
class ResponsesStreamOptions(RequestBody):
    """Options of a streamed response."""

    unsupported: ClassVar[Mapping[str, Only]] = {"include_obfuscation": Only(False)}


@json_type(
    {
        "type": "object",
        "properties": {"format": {"type": "object"}, "verbosity": {"type": "string"}},
    }
)
def _text_config(value: Any) -> dict[str, Any]:
    fields = mapping(value)
    if (verbosity := fields.get("verbosity")) is not None:
        named(text, verbosity, "text.verbosity")
    if (format := fields.get("format")) is not None:
        named(mapping, format, "text.format")
    return fields


@json_type({"type": "array", "items": {"type": "string", "enum": list(_INCLUDED)}})
def _include(value: Any) -> tuple[str, ...]:
    for i, name in enumerate(strings(value)):
        if name not in _INCLUDED:
            raise UnsupportedFieldError(
                f"'include' has {name!r:.80}; of what can be included, this server has "
                f"{' and '.join(_INCLUDED)}.",
                param=f"include[{i}]",
            )
    return strings(value)


@json_type({"type": "array", "items": {"type": "object"}, "maxItems": MAX_TOOLS})
def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Read functions in the flat form that this API has for them. The chat checks the rest."""
    check_count(len(objects(value)), MAX_TOOLS, "tools", "tools")
    for i, tool in enumerate(objects(value)):
        if tool.get("type") != "function":
            raise UnsupportedFieldError.at(
                f"tools[{i}].type",
                f"is {tool.get('type')!r:.80}; this server has no such built-in tool, and takes "
                'those of type "function".',
            )
    return objects(value)


@json_type({"type": ["string", "object"]})
def _tool_choice(value: Any) -> str | dict[str, Any]:
    """Read a choice, and give it as it was given. The chat checks what it names."""
    if isinstance(value, dict):
        if value.get("type") not in ("function", "allowed_tools"):
            raise UnsupportedFieldError.at(
                "tool_choice.type",
                f'is {value.get("type")!r:.80}; it must be "function" or "allowed_tools".',
            )
        return value
    if value not in ("auto", "none", "required"):
        raise MismatchError('"auto", "none", "required" or an object')
    return str(value)


# -- the request

#: Fields of a chat whose place others take here.
_REPLACED = ("messages", "logprobs")


@json_type(
    properties={
        name: schema for name, schema in of_fields(ChatRequest).items() if name not in _REPLACED
    }
)
def _for_chats(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in _REPLACED}


@attrs.frozen(kw_only=True)
class ResponsesRequest(RequestBody):
    """``POST /v1/responses``. `for_chats` holds what a chat request understands as it is."""

    unsupported = _UNSUPPORTED
    for_chats: dict[str, Any] = field(whole=_for_chats)
    input: Conversation = field(
        whole=json_type(
            properties={
                "input": {"type": ["string", "array"], "maxItems": MAX_MESSAGES},
                "instructions": {"type": "string"},
            }
        )(read_input)
    )
    instructions: str | None = None
    max_output_tokens: int | None = field(read=readers.max_tokens, default=None)
    max_tool_calls: int | None = field(read=readers.count, default=None)
    metadata: dict[str, str] = attrs.field(factory=dict)
    tools: tuple[dict[str, Any], ...] = field(read=_tools, default=())
    tool_choice: str | dict[str, Any] = field(read=_tool_choice, default="auto")
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = attrs.field(factory=ReasoningOptions)
    text: dict[str, Any] = field(read=_text_config, factory=dict)
    include: tuple[str, ...] = field(read=_include, default=())
    top_logprobs: int = field(read=readers.probs, default=0)
    stream_options: ResponsesStreamOptions = attrs.field(factory=ResponsesStreamOptions)
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @classmethod
    def parse_with_chat(cls, body: Mapping[str, Any]) -> tuple[ResponsesRequest, ChatRequest]:
        """Read a body, and make the chat request of it.

        Raises:
            InvalidRequestError: `param` names the field at fault.
        """
        request = cls.parse(body)
        if request.top_logprobs and _LOGPROBS not in request.include:
            raise InvalidRequestError.at("top_logprobs", f"needs {_LOGPROBS!r} in 'include'.")
        fields = request._in_chat()
        with request.input.naming_items():
            chat = ChatRequest.parse(fields)
        if chat.run_tools is not None and request.max_tool_calls is not None:
            raise UnsupportedFieldError.at(
                "max_tool_calls",
                f"is not supported where the server runs tools; '{RUN_TOOLS}.max_steps' limits "
                "them.",
            )
        if chat.grammar is not None and chat.grammar.param == "response_format":
            chat = attrs.evolve(chat, grammar=attrs.evolve(chat.grammar, param="text.format"))
        return request, chat

    def _in_chat(self) -> dict[str, Any]:
        """The body of a chat request that asks for the same."""
        own = {
            "messages": self.input.messages,
            "tools": [_chat_tool(tool) for tool in self.tools],
            "tool_choice": self._chat_tool_choice(),
            "response_format": self._format(),
            "logprobs": _LOGPROBS in self.include,
            "top_logprobs": self.top_logprobs if _LOGPROBS in self.include else None,
            "stream_options": None,
        }
        others = {
            "max_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning.effort,
            "verbosity": self.text.get("verbosity"),
        }
        own |= {name: value for name, value in others.items() if value is not None}
        return self.for_chats | own

    def _format(self) -> Any:
        """What the text must look like; llama-server takes the name of chats, too."""
        ours, of_chats = self.text.get("format"), self.for_chats.get("response_format")
        if ours is not None and of_chats is not None:
            raise InvalidRequestError.at("text.format", "and 'response_format' exclude each other.")
        return of_chats if ours is None else ours

    def _chat_tool_choice(self) -> Any:
        choice = self.tool_choice
        if isinstance(choice, str):
            return choice
        if choice["type"] == "function":
            return _chat_tool(choice)
        tools = choice.get("tools")
        if isinstance(tools, list):
            tools = [_chat_tool(tool) if isinstance(tool, dict) else tool for tool in tools]
        allowed = {"mode": choice.get("mode"), "tools": tools}
        return {"type": "allowed_tools", "allowed_tools": allowed}


#: The fields of a function that the model sees.
_TOLD = ("name", "description", "parameters")


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a function to the form of chats."""
    function = {name: tool[name] for name in _TOLD if name in tool}
    if tool.get("strict") is True:  # the model need not see that it is not
        function["strict"] = True
    return {"type": "function", "function": function}
