"""The input of ``/v1/responses``: from its items to the messages of a chat.

Items of the assistant that follow one another (reasoning, a message, calls) are one message of a
chat, as in llama-server. Each message remembers which field it came from, for error messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import attrs

from trioserve.api.base.chat_request import as_content
from trioserve.api.base.fields import mapping, named, objects, optional, required, text
from trioserve.api.openai.responses.client_tools import CLIENT_TOOLS, ClientTool
from trioserve.api.openai.responses.parts import INPUT, OUTPUT, THOUGHTS, read_content, read_parts
from trioserve.chat.compaction import Compaction
from trioserve.chat.messages import (
    INPUT_ARGUMENT,
    MAX_ARGUMENTS,
    MAX_MESSAGES,
    check_count,
    text_part,
)
from trioserve.errors import InvalidRequestError, UnsupportedFieldError
from trioserve.left_out import leave_out
from trioserve.tools.web.tools import FETCH, SEARCH
from trioserve.whole_numbers import whole_number

Item: TypeAlias = Mapping[str, Any]

#: Adds an item, which stands at a path.
Reader: TypeAlias = Callable[["Conversation", Item, str], None]

#: About how many tokens a file has.
_PER_FILE = 256

# -- items


_ROLES = {"user": INPUT, "system": INPUT, "developer": INPUT, "assistant": OUTPUT}

#: The field of an item that names the step it is from, in an answer of several: one message.
STEP = "trioserve_step"

#: The prefixes of items of calls that the server has made, before the ids of the calls.
MCP_CALL = "mcp_"
WEB_CALL = "ws_"

#: The names of a chat's fields in error messages.
_IN_CHAT = re.compile(
    r"'(?P<field>messages|response_format)'"
    r"|messages\[(?P<message>\d+)\][\w.\[\]]*"
    r"|tools\[(?P<tool>\d+)\](?:\.function)?|(?P<flat>tool_choice)\.(?:function|allowed_tools)"
)
_NAMES = {"messages": "input", "response_format": "text.format", "prompt": "input"}


@attrs.define
class Conversation:
    """The messages of a chat, and for each the field that it begins with: ``input[2]``."""

    messages: list[dict[str, Any]] = attrs.field(factory=list)
    places: list[str] = attrs.field(factory=list)
    #: Tools that items add, each with its place; and the places of all tools of the chat.
    tools: list[tuple[str, dict[str, Any]]] = attrs.field(factory=list)
    tool_places: list[str] = attrs.field(factory=list)
    #: The functions of calls that name a namespace, and that.
    in_namespaces: list[tuple[dict[str, Any], str]] = attrs.field(factory=list)
    trigger: str = ""  # the place of the item that asks for a compaction
    #: The messages of the user that no compaction replaces, as they are in the request.
    users: list[Item] = attrs.field(factory=list)
    #: The message of the last step that the server took, and the name of that step.
    _step: tuple[str, dict[str, Any]] | None = None

    def add(self, place: str, role: str, content: Any, **fields: Any) -> None:
        """Append a message, and its place in the request."""
        if role not in ("assistant", "tool"):
            self._step = None
        self.messages.append({"role": role, "content": content, **fields})
        self.places.append(place)

    def answer(self, place: str, item: Item) -> dict[str, Any]:
        """Give the message of the assistant that an item belongs to.

        That is the last one, unless results stand in between: then the item must name its step.
        """
        step = item.get(STEP)
        if self._step is not None and step == self._step[0]:
            return self._step[1]
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.add(place, "assistant", [])
        if isinstance(step, str):
            self._step = (step, self.messages[-1])
        return self.messages[-1]

    def compact(self, place: str, compaction: Compaction) -> None:
        """Put what a compaction holds in the place of what it replaces."""
        stays = compaction.stays(self.messages)
        self.users = self.users if compaction.spares_users else []
        self.messages = [self.messages[i] for i in stays]
        self.places = [self.places[i] for i in stays]
        for message in compaction.messages():
            fields = {**message}
            role, content = fields.pop("role"), fields.pop("content")
            if role == "assistant" and isinstance(content, str):  # what follows may be a part of it
                content = [text_part(content)]
            self.add(place, role, content, **fields)

    @contextmanager
    def naming_items(self) -> Iterator[None]:
        """Make errors about the chat name the fields of this API."""
        try:
            yield
        except InvalidRequestError as error:
            error.message = _IN_CHAT.sub(self._rename, error.message)
            if error.param is not None:
                param = _IN_CHAT.sub(self._rename, error.param)
                error.param = _NAMES.get(param, param)
            raise

    def _rename(self, match: re.Match[str]) -> str:
        if match["field"]:
            return f"'{_NAMES[match['field']]}'"
        if match["flat"]:
            return match["flat"]
        places = self.tool_places if match["tool"] else self.places
        i = whole_number(match["tool"] or match["message"], most=len(places) - 1)
        # Tools that the server runs come after the others, and a client may name a tool like this.
        return match[0].removesuffix(".function") if i is None else places[i]


def last_of(messages: Sequence[Item], n_tokens: int) -> Sequence[Item]:
    """The last messages that have about this number of tokens, of four characters each."""
    for i in range(len(messages), 0, -1):
        content = messages[i - 1]["content"] or ""
        texts = [content] if isinstance(content, str) else [one.get("text") for one in content]
        n_tokens -= sum(_PER_FILE if text is None else len(text) // 4 for text in texts)
        if n_tokens < 0:
            return messages[i:]
    return messages


def read_input(body: Mapping[str, Any], before: Sequence[Item] = ()) -> Conversation:
    """Read ``instructions`` and ``input``, with stored items before the client's.

    Raises:
        UnsupportedFieldError: an item or a part of one is of a type that cannot be given here.
        InvalidRequestError: something is missing or of the wrong type.
        Both name the field in `param`, such as ``input[2].content[0].text``.
    """
    chat = Conversation()
    if (instructions := body.get("instructions")) is not None:
        chat.add("instructions", "system", named(text, instructions, "instructions"))
    given = body.get("input")
    if isinstance(given, list):
        what = "items with those that are stored" if before else "items"
        check_count(len(before) + len(given), MAX_MESSAGES, "input", what)
    for item in before:
        if kind_of(item) != TRIGGER:  # which was answered
            _read_item(chat, item, "previous_response_id")
    if isinstance(given, str):
        chat.add("input", "user", given)
        chat.users.append({"role": "user", "content": given})
    elif isinstance(given, list):
        for i, item in enumerate(given):
            _read_item(chat, item, f"input[{i}]")
    elif given is not None or not before:
        problem = "is required" if given is None else "must be a string or a list of items"
        raise InvalidRequestError.at("input", f"{problem}.")
    if not chat.messages:
        raise InvalidRequestError.at("input", "must not be empty.")
    for message in chat.messages:
        message["content"] = as_content(message["content"])
    return chat


#: The type of an item that asks for a compaction of those before it.
TRIGGER = "compaction_trigger"

#: The type of an item that stands for a stored one, and what is said of one that stands for none.
REFERENCE = "item_reference"
NOT_STORED = "refers to an item that is not stored; send the item itself."


def kind_of(item: Item) -> Any:
    """The type of an item; clients leave out that of messages and references."""
    if (kind := item.get("type")) is not None:
        return kind
    return "message" if "role" in item else REFERENCE if "id" in item else None


def _read_item(chat: Conversation, item: object, path: str) -> None:
    if not isinstance(item, Mapping):
        raise InvalidRequestError.at(path, "must be an object.")
    if chat.trigger:
        raise InvalidRequestError.at(chat.trigger, "must be the last item.")
    if (id_ := item.get("id")) is not None and not (isinstance(id_, str) and id_):
        raise InvalidRequestError.at(f"{path}.id", "must be a string, and not empty.")
    if (kind := kind_of(item)) == REFERENCE:
        raise UnsupportedFieldError.at(path, NOT_STORED)
    if isinstance(kind, str) and kind in _LEFT_OUT:
        leave_out(f"items of type {kind}", "they are for models and tools of OpenAI's servers")
        return
    if not isinstance(kind, str) or kind not in _READERS:
        types = ", ".join(_READERS)
        raise UnsupportedFieldError.at(
            f"{path}.type", f"is {kind!r:.80}; it must be one of {types}."
        )
    _READERS[kind](chat, item, path)


def _read_message(chat: Conversation, item: Item, path: str) -> None:
    role = required(item, "role", text, path)
    if role not in _ROLES:
        raise InvalidRequestError.at(f"{path}.role", f"must be one of {', '.join(_ROLES)}.")
    content = read_content(item, "content", path, _ROLES[role])
    if role != "assistant":
        chat.add(path, role, content)
        chat.users += [item] if role == "user" else []
        return
    parts = chat.answer(path, item)["content"]
    parts += [text_part(content)] if isinstance(content, str) else content


def _read_call(chat: Conversation, item: Item, path: str) -> None:
    name = required(item, "name", text, path)
    _add_call(chat, item, path, (required(item, "call_id", text, path), name))


def _add_call(
    chat: Conversation, item: Item, path: str, call: tuple[str, str], arguments: Any = None
) -> None:
    """Add a call by its id and name, with arguments, or those of the item."""
    id_, name = call
    if arguments is None:
        written = _arguments(item, path)
    else:
        written = json.dumps(arguments, ensure_ascii=False)
    function = {"name": name, "arguments": written}
    if (namespace := optional(item, "namespace", text, path)) is not None:
        chat.in_namespaces.append((function, namespace))
    made = {"id": id_, "type": "function", "function": function}
    chat.answer(path, item).setdefault("tool_calls", []).append(made)


def _read_custom_call(chat: Conversation, item: Item, path: str) -> None:
    call = (required(item, "call_id", text, path), required(item, "name", text, path))
    _add_call(chat, item, path, call, {INPUT_ARGUMENT: required(item, "input", text, path)})


def _reader_of_calls(name: str, tool: ClientTool) -> Reader:
    def read(chat: Conversation, item: Item, path: str) -> None:
        if item.get("execution") == "server":
            leave_out(f"items of type {tool.item}", "the client did not make these calls")
            return
        call = (_call_id(item, path), tool.name or name)
        _add_call(chat, item, path, call, tool.read(item, path))

    return read


def _reader_of_outputs(tool: ClientTool) -> Reader:
    def read(chat: Conversation, item: Item, path: str) -> None:
        if item.get("tools") is not None:
            _read_tools(chat, item, path)
        if item.get("execution") != "server":
            chat.add(path, "tool", tool.read_output(item, path), tool_call_id=_call_id(item, path))

    return read


def _call_id(item: Item, path: str) -> str:
    """Read the id of a call. That of a local shell's is in `id`, in the results of some clients."""
    if item.get("call_id") is None and item.get("id") is not None:
        return required(item, "id", text, path)
    return required(item, "call_id", text, path)


def _read_agent_message(chat: Conversation, item: Item, path: str) -> None:
    """Read what another agent says. Parts that it has encrypted cannot be read."""
    parts = required(item, "content", objects, path)
    readable = [part for part in parts if part.get("type") != "encrypted_content"]
    if len(readable) < len(parts):
        leave_out("encrypted messages of agents", "their text cannot be read here")
    chat.add(path, "user", read_parts(readable, f"{path}.content", INPUT))


def _read_tools(chat: Conversation, item: Item, path: str) -> None:
    """Read tools that the model has from here on. They are offered with the others."""
    tools = required(item, "tools", objects, path)
    chat.tools += [(f"{path}.tools[{i}]", tool) for i, tool in enumerate(tools)]


def _read_made_call(chat: Conversation, item: Item, path: str) -> None:
    """Read a call that the server has made, and its result. One that was cut off has none."""
    id_ = required(item, "id", text, path).removeprefix(MCP_CALL)
    if (fields := optional(item, "error", mapping, path)) is not None:
        if "content" in fields:  # of any form
            content = fields["content"]
            output = content if isinstance(content, str) else json.dumps(content)
        else:
            output = required(fields, "message", text, f"{path}.error")
    elif item.get("output") is None:
        return
    else:
        output = required(item, "output", text, path)
    _add_call(chat, item, path, (id_, required(item, "name", text, path)))
    chat.add(path, "tool", output, tool_call_id=id_, name=item["name"])


def _read_web_call(chat: Conversation, item: Item, path: str) -> None:
    """Read a call of a tool of the web. One that another server has made has no output."""
    if item.get("output") is None:
        leave_out("items of type web_search_call", "another server has made these calls")
        return
    output = required(item, "output", text, path)
    id_ = required(item, "id", text, path).removeprefix(WEB_CALL)
    action, path = required(item, "action", mapping, path), f"{path}.action"
    name, arguments = SEARCH, {"query": optional(action, "query", text, path) or ""}
    if action.get("type") != "search":
        words = optional(action, "pattern", text, path)
        name, arguments = FETCH, {"url": optional(action, "url", text, path) or ""}
        arguments |= {"find": words} if words else {}
    _add_call(chat, item, path, (id_, name), arguments)
    chat.add(path, "tool", output, tool_call_id=id_, name=name)


def _arguments(item: Item, path: str) -> str:
    """Read the arguments of a call. None at all are an empty object; the model may cut them off."""
    arguments = required(item, "arguments", text, path)
    check_count(len(arguments), MAX_ARGUMENTS, f"{path}.arguments", "characters")
    return arguments or "{}"


def _read_result(chat: Conversation, item: Item, path: str) -> None:
    output = read_content(item, "output", path, INPUT)
    chat.add(path, "tool", output, tool_call_id=required(item, "call_id", text, path))


def _read_reasoning(chat: Conversation, item: Item, path: str) -> None:
    """Read what the model thought; without it, what it told of that."""
    texts = _thoughts(item, "content", path) or _thoughts(item, "summary", path)
    if not texts:
        if item.get("encrypted_content"):
            leave_out("encrypted reasoning", "its text cannot be read here")
        return
    message = chat.answer(path, item)
    before = [message["reasoning_content"]] if "reasoning_content" in message else []
    message["reasoning_content"] = "\n".join(before + texts)


def _thoughts(item: Item, name: str, path: str) -> list[str]:
    given = [] if item.get(name) is None else item[name]
    return [part["text"] for part in read_parts(given, f"{path}.{name}", THOUGHTS)]


def _read_compaction(chat: Conversation, item: Item, path: str) -> None:
    """Read a compaction. One that holds nothing stands for one that failed."""
    if not (written := optional(item, "encrypted_content", text, path)):
        leave_out("empty compactions", "the conversation is as it was")
        return
    chat.compact(path, Compaction.read(written, f"{path}.encrypted_content"))


def _read_trigger(chat: Conversation, item: Item, path: str) -> None:
    chat.trigger = path


#: Items of OpenAI's servers. The model here has seen nothing like them.
_LEFT_OUT = frozenset(
    {
        *("code_interpreter_call", "file_search_call", "image_generation_call"),
        *("mcp_approval_request", "mcp_approval_response", "mcp_list_tools"),
        *("configuration_update", "program", "program_output"),
    }
)

_READERS: Mapping[str, Reader] = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_result,
    "custom_tool_call": _read_custom_call,
    "custom_tool_call_output": _read_result,
    "mcp_call": _read_made_call,
    "web_search_call": _read_web_call,
    "reasoning": _read_reasoning,
    "additional_tools": _read_tools,
    "agent_message": _read_agent_message,
    **dict.fromkeys(("compaction", "compaction_summary", "context_compaction"), _read_compaction),
    TRIGGER: _read_trigger,
    **{tool.item: _reader_of_calls(name, tool) for name, tool in CLIENT_TOOLS.items()},
    **{tool.output_item: _reader_of_outputs(tool) for tool in CLIENT_TOOLS.values()},
}
