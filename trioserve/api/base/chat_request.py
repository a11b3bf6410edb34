"""The fields of chat requests: messages, tools, tools that the server runs, end of the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import attrs

from trioserve.api.base import limits, readers
from trioserve.api.base.custom_tools import CustomTools
from trioserve.api.base.fields import (
    ARGUMENTS,
    DATA,
    NAME,
    SCHEMA,
    STRING,
    MismatchError,
    PromptFields,
    boolean,
    field,
    integer_in,
    json_type,
    list_schema,
    object_schema,
    or_null,
    structure,
)
from trioserve.api.base.generation_request import UNSUPPORTED_IN_CHAT, GenerationRequest
from trioserve.api.base.request_schemas import of_class
from trioserve.api.base.thinking import ThinkingRequest
from trioserve.chat.messages import (
    DETAILS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    Messages,
    Tools,
    parse_messages,
    parse_tools,
)
from trioserve.chat.params import (
    MODES,
    ChatParams,
    ContinueFinalMessage,
    ToolChoice,
    parse_tool_choice,
)
from trioserve.errors import InvalidRequestError

# -- tools that the server runs


#: The field.
RUN_TOOLS = "trioserve_run_tools"


@attrs.frozen(kw_only=True)
class RunToolsOptions:
    """The tools that the server runs. The configuration sets the defaults."""

    #: Names of tools, or patterns such as ``weather_*``; None: all that the server has.
    tools: tuple[str, ...] | None = field(
        read=readers.strings_of(limits.MAX_RUN_TOOLS, limits.MAX_TOOL_PATTERN), default=None
    )
    #: The maximum number of answers of the model.
    max_steps: int | None = field(read=integer_in(1, None), default=None)
    #: Calls that write: a person approves them, all run, or none runs.
    approval: Literal["ask", "all", "none"] | None = None
    #: The folder that relative paths begin in, and where the tools run.
    cwd: str | None = field(read=readers.text_of(limits.MAX_PATH), default=None)
    runtime: str | None = field(read=readers.text_of(limits.MAX_NAME), default=None)


_KNOWN = tuple(attrs.fields_dict(RunToolsOptions))


@json_type(
    {
        "anyOf": [
            {"type": "boolean"},
            {
                **of_class(RunToolsOptions),
                "additionalProperties": False,
                "maxProperties": len(_KNOWN),
            },
        ],
        "description": "The server runs the tools that the model calls, and the model continues.",
    }
)
def run_tools(value: Any) -> RunToolsOptions | None:
    """Read the field: false is nothing, true is an object without fields.

    Raises:
        InvalidRequestError: a field within is unknown, has the wrong type or makes no sense.
    """
    if not isinstance(value, dict):
        try:
            return RunToolsOptions() if boolean(value) else None
        except MismatchError:
            raise MismatchError("true, false or an object") from None
    for name in value:
        if name not in _KNOWN:
            raise InvalidRequestError.at(
                f"{RUN_TOOLS}.{name:.80}", f"is not known; there are {', '.join(_KNOWN)}."
            )
    return structure(RunToolsOptions, value, f"{RUN_TOOLS}.")


# -- messages and tools

_PARTS = {
    "text": STRING,
    "image_url": object_schema(url=DATA, detail={"enum": list(DETAILS)})
    | {
        **DATA,
        "type": ["object", "string"],
        "description": "A data URL, base64, or an http, https or file URL.",
    },
    "input_audio": object_schema(data=DATA, format=NAME),
    "video_url": object_schema(url=DATA) | {**DATA, "type": ["object", "string"]},
    "file": object_schema(file_data=DATA, filename=NAME),
}
_PART = object_schema("type", type={**NAME, "examples": list(_PARTS)}, **_PARTS)
_MESSAGE = object_schema(
    "role",
    role={**NAME, "examples": ["system", "user", "assistant", "tool"]},
    content=list_schema(_PART, MAX_PARTS) | {**STRING, "type": ["string", "array", "null"]},
    reasoning_content=or_null(STRING),
    tool_calls=or_null(list_schema(ARGUMENTS, MAX_PARTS)),
    tool_call_id=or_null(NAME),
)
_TOOL = object_schema(
    "type",
    type={**NAME, "examples": ["function", "custom"]},
    function=object_schema("name", name=NAME, description=or_null(STRING), parameters=SCHEMA),
    custom=object_schema("name", name=NAME, description=or_null(STRING), format=SCHEMA),
)


def as_content(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Make the content of a message: no part, or a single one of text, is plain text."""
    if isinstance(content, str) or len(content) > 1:
        return content
    if content and content[0]["type"] != "text":
        return content
    return str(content[0]["text"]) if content else ""


# -- how the prompt ends


@attrs.frozen
class Continuation:
    """The end of the prompt: the head of an answer, or a message that is continued.

    With `echo` the answer repeats the message that it continues.
    """

    add_generation_prompt: bool = True
    continue_final_message: ContinueFinalMessage | None = None
    echo: bool = False


@json_type({"anyOf": [{"type": "boolean"}, {"enum": ["content", "reasoning_content"]}]})
def _part(value: Any) -> ContinueFinalMessage | bool:
    """Take a boolean, or the part of the message that is continued; false: none is."""
    if isinstance(value, bool):
        return "auto" if value else False
    if value not in ("content", "reasoning_content"):
        raise MismatchError('true, false, "content" or "reasoning_content"')
    return cast(ContinueFinalMessage, value)


def _ends_with_assistant(messages: Any) -> bool:
    roles = [message["role"] for message in messages[-2:]]
    if roles == ["assistant", "assistant"]:
        raise InvalidRequestError.at("messages", "must not end with two messages of the assistant.")
    return roles[-1:] == ["assistant"]


# -- the routes


def _read_tools(value: Any) -> Tools:
    return parse_tools(CustomTools().in_chat(value))


@json_type()
def _custom_tools(body: Mapping[str, Any]) -> frozenset[str]:
    """The names of the custom tools, whose calls have a text in place of arguments."""
    found: set[str] = set()
    for tool in body["tools"] if isinstance(body.get("tools"), list) else ():
        match tool:
            case {"type": "custom", "custom": {"name": str(name)}}:
                found.add(name)
    return frozenset(found)


@attrs.frozen(kw_only=True, slots=False)
class TemplateRequest(ThinkingRequest):
    """``POST /apply-template``: the fields that the prompt of a chat is made of."""

    model: str | None = field(read=readers.model_name, default=None)
    messages: Messages = field(
        read=parse_messages, schema=list_schema(_MESSAGE, MAX_MESSAGES, minItems=1)
    )
    tools: Tools = field(read=_read_tools, schema=list_schema(_TOOL, MAX_TOOLS), factory=Tools)
    custom_tools: frozenset[str] = field(whole=_custom_tools)
    add_generation_prompt: bool | None = None
    continue_final_message: ContinueFinalMessage | bool | None = field(read=_part, default=None)
    echo: bool | None = None
    continuation: Continuation = attrs.field(init=False)
    verbosity: str | None = None

    @continuation.default
    def _continuation(self) -> Continuation:
        """Say how the prompt ends.

        Unless `continue_final_message` is given, a final message of the assistant's is continued,
        and the answer repeats it, as in llama-server.
        """
        add, part = self.add_generation_prompt, self.continue_final_message
        if part is None and _ends_with_assistant(self.messages):
            return Continuation(False, "auto", self.echo is not False)
        if part is None or isinstance(part, bool):
            return Continuation(add is not False)
        if add:
            raise InvalidRequestError.at(
                "continue_final_message", "and 'add_generation_prompt' exclude each other."
            )
        return Continuation(False, part, self.echo is True)

    @property
    def tool_names(self) -> list[str]:
        """The names of the client's tools."""
        return [tool["function"]["name"] for tool in self.tools]

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The variables of the template."""
        told = {} if self.verbosity is None else {"verbosity": self.verbosity}
        return super().template_kwargs | told

    @property
    def chat_params(self) -> ChatParams:
        return ChatParams(
            tools=self.tools,
            add_generation_prompt=self.continuation.add_generation_prompt,
            continue_final_message=self.continuation.continue_final_message,
            **self.thinking_params,
        )


@attrs.frozen(kw_only=True, slots=False)
class ChatRequest(TemplateRequest, GenerationRequest):
    """``POST /v1/chat/completions``."""

    unsupported = UNSUPPORTED_IN_CHAT
    prompt_fields = PromptFields(head=("tools", "functions"), turns=("messages",))
    tool_choice: ToolChoice = field(
        read=parse_tool_choice,
        schema={"anyOf": [{"enum": list(MODES)}, ARGUMENTS]},
        factory=ToolChoice,
    )
    parallel_tool_calls: bool | None = None
    parse_tool_calls: bool = True
    reasoning_format: str | None = None
    reasoning_budget_message: str | None = None
    reasoning_control: bool = False
    logprobs: bool = False
    top_logprobs: int | None = field(read=readers.probs, default=None)
    n_candidates: int = field("n_probs", read=readers.probs, default=0)
    prompt_logprobs: int | None = field(read=readers.probs, default=None)
    run_tools: RunToolsOptions | None = field(RUN_TOOLS, read=run_tools, default=None)

    @property
    def asked_probs(self) -> tuple[int, str | None]:
        """See `GenerationRequest.asked_probs`. llama-server's default is 20."""
        if not self.logprobs:
            return self.n_candidates, "n_probs"
        top = self.top_logprobs
        return (20, None) if top is None else (max(1, top), "top_logprobs")

    @property
    def chat_params(self) -> ChatParams:
        chat = super().chat_params
        return attrs.evolve(
            chat,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_format=chat.reasoning_format or self.reasoning_format,
            reasoning_message=self.reasoning_budget_message,
            reasoning_control=self.reasoning_control,
            parse_tools=(bool(self.tools) or self.run_tools is not None) and self.parse_tool_calls,
        )

    def __attrs_post_init__(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError.at("top_logprobs", "needs 'logprobs' to be true.")
        for other, given in (("stream", self.stream), (RUN_TOOLS, self.run_tools is not None)):
            if given and self.prompt_logprobs is not None:
                raise InvalidRequestError.at(
                    "prompt_logprobs", f"and '{other}' exclude each other."
                )
        if self.run_tools is not None:
            _check_run(self, self.run_tools)


def _check_run(request: ChatRequest, run: RunToolsOptions) -> None:
    if request.n > 1:
        raise InvalidRequestError.at("n", f"must be 1 with '{RUN_TOOLS}'.")
    if request.continuation.continue_final_message is not None:
        raise InvalidRequestError.at(
            "messages", f"must not end with a message that is continued, with '{RUN_TOOLS}'."
        )
    if request.custom_tools:
        raise InvalidRequestError.at("tools", f"must not be custom, with '{RUN_TOOLS}'.")
    if not request.parse_tool_calls:
        raise InvalidRequestError(
            f"'{RUN_TOOLS}' needs 'parse_tool_calls' to be true.", param="parse_tool_calls"
        )
    if run.approval == "ask" and not request.stream:
        raise InvalidRequestError.at(
            f"{RUN_TOOLS}.approval",
            "is \"ask\", which needs a stream to ask for approval in; set 'stream' to true.",
        )
