"""Checks Anthropic's messages, and converts them to the normal form of `trioserve.chat`.

A message is a list of blocks: text, images, documents, search results. Consecutive messages of one
role are one turn. A tool result becomes a separate message, and thinking becomes
`reasoning_content`.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeAlias

import attrs

from trioserve.api.anthropic.client_tools import Member
from trioserve.api.base import sse
from trioserve.api.base.chat_request import as_content
from trioserve.api.base.fields import (
    PART,
    STRING,
    MismatchError,
    boolean,
    json_type,
    list_schema,
    mapping,
    named,
    object_schema,
    objects,
    one_of,
    optional,
    required,
    text,
)
from trioserve.chat.compaction import Compaction
from trioserve.chat.data_urls import UNTYPED, data_of
from trioserve.chat.messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    NOT_HOSTED,
    Message,
    Messages,
    check_count,
    document_part,
    heading,
    later,
    media_part,
    source_of,
    text_part,
    write_document,
)
from trioserve.chat.uploads import upload_of
from trioserve.errors import InvalidMediaError, InvalidRequestError, UnsupportedFieldError
from trioserve.left_out import leave_out
from trioserve.tools.web.tools import NOTHING, head_of
from trioserve.types import DocumentSource, MediaSource

# -- blocks


#: A block and where it stands in the request: ``messages[0].content[1]``.
Block: TypeAlias = tuple[str, Mapping[str, Any]]

#: A part of a message in normal form.
Part: TypeAlias = dict[str, Any]

#: The types of blocks that become parts of a message.
KINDS = ("text", "image", "document", "search_result")


def content_of(value: Any) -> str | tuple[dict[str, Any], ...]:
    """Take what a field `content` may hold. Raises MismatchError: it is something else."""
    try:
        return value if isinstance(value, str) else objects(value)
    except MismatchError:
        raise MismatchError("a string or a list of blocks") from None


def blocks_of(content: str | tuple[dict[str, Any], ...], path: str) -> list[Block]:
    """Give the blocks of a content. A string is a block of text."""
    if isinstance(content, str):
        return [(path, {"type": "text", "text": content})]
    check_count(len(content), MAX_PARTS, path, "blocks")
    return [(f"{path}[{j}]", block) for j, block in enumerate(content)]


def text_of(block: Mapping[str, Any], path: str) -> str:
    """Read a block of text."""
    _leave_out_citations(block)
    return required(block, "text", text, path)


def texts_of(blocks: Iterable[Block], owner: str) -> list[str]:
    """Take the texts of blocks that can be nothing else."""
    texts = []
    for path, block in blocks:
        if (kind := required(block, "type", text, path)) != "text":
            raise unsupported(kind, path, owner)
        texts.append(text_of(block, path))
    return texts


def parts_of(blocks: Iterable[Block], owner: str, kinds: Collection[str] = KINDS) -> list[Part]:
    """Read blocks of the types in `KINDS`, or those of them that `owner` may have.

    Raises:
        UnsupportedFieldError: a block is of another type; `owner` cannot have it.
        InvalidMediaError: a file is not valid base64, is of the wrong type, or cannot be read.
        InvalidRequestError: something is missing or has the wrong type. All name it.
    """
    parts: list[Part] = []
    for path, block in blocks:
        kind = required(block, "type", text, path)
        if kind not in kinds:
            raise unsupported(kind, path, owner)
        parts += _READERS[kind](block, path)
    return parts


def unsupported(kind: str, path: str, owner: str) -> UnsupportedFieldError:
    """Make the error of a block whose type is not one for `owner`."""
    return UnsupportedFieldError.at(
        f"{path}.type", f"is {kind!r:.80}, which is not supported in {owner}."
    )


def _leave_out_citations(block: Mapping[str, Any]) -> None:
    citations = block.get("citations")
    if citations and citations != {"enabled": False}:
        leave_out("citations", "answers have none")


# -- images


def _image(block: Mapping[str, Any], path: str) -> list[Part]:
    if block.get("transformations"):
        raise UnsupportedFieldError.at(f"{path}.transformations", "is not supported; leave it out.")
    source, kind, path = _source(block, path)
    if kind == "url":
        found = source_of(required(source, "url", text, path), "image", f"{path}.url")
        return [media_part(found)]
    if kind == "file":
        data = upload_of(source, path).data
        return [media_part(MediaSource(kind="image", data=data, param=f"{path}.file_id"))]
    if kind != "base64":
        raise _unknown_source(kind, path, "base64", "url", "file")
    media_type = required(source, "media_type", text, path)
    if not media_type.lower().startswith("image/") and media_type.lower() not in UNTYPED:
        raise InvalidRequestError.at(
            f"{path}.media_type", "must be the type of an image, such as image/png."
        )
    data = data_of(required(source, "data", text, path), f"{path}.data")
    return [media_part(MediaSource(kind="image", data=data, param=f"{path}.data"))]


# -- documents


def _document(block: Mapping[str, Any], path: str) -> list[Part]:
    """Read a document: its title and what is said about it stand before it."""
    _leave_out_citations(block)
    name = optional(block, "title", text, path) or ""
    about = optional(block, "context", text, path) or ""
    source, kind, path = _source(block, path)
    match kind:
        case "text":
            said = required(source, "data", text, path)
            return [text_part(write_document(said, name=name, about=about))]
        case "content":
            content = required(source, "content", content_of, path)
            if isinstance(content, str):
                return [text_part(write_document(content, name=name, about=about))]
            head = [text_part("\n".join(heading(name, about)))] if name or about else []
            blocks = blocks_of(content, f"{path}.content")
            return head + parts_of(blocks, "a document", ("text", "image"))
        case "base64":
            param = f"{path}.data"
            data = data_of(required(source, "data", text, path), param)
            return [_read_document(data, name, about, param)]
        case "file":
            upload = upload_of(source, path)
            return [_read_document(upload.data, name or upload.name, about, f"{path}.file_id")]
        case "url":
            param = f"{path}.url"
            url = source_of(required(source, "url", text, path), None, param).url
            if url is None:
                raise InvalidMediaError.at(param, "must be a URL of http, https or file.")
            return [later(DocumentSource(url=url, name=name, about=about, param=param))]
    raise _unknown_source(kind, path, "base64", "text", "content", "url", "file")


def _read_document(data: bytes, name: str, about: str, param: str) -> Part:
    if (part := document_part(data, name=name, about=about, param=param)) is None:
        raise InvalidMediaError.at(param, "is neither a PDF nor a text.")
    return part


def _search_result(block: Mapping[str, Any], path: str) -> list[Part]:
    """Read what a search has found: its title and where it is from stand before it."""
    _leave_out_citations(block)
    title, source = (required(block, name, text, path) for name in ("title", "source"))
    content = required(block, "content", content_of, path)
    said = texts_of(blocks_of(content, f"{path}.content"), "the result of a search")
    about = f"Search result: {title}\nSource: {source}"
    return [text_part(write_document("\n\n".join(said), about=about))]


def _browser_state(block: Mapping[str, Any], path: str) -> list[Part]:
    """Read which tabs a browser has, and what has happened to them and to downloads."""
    lines = ["\nTabs:"]  # after what else the result says
    for i, tab in enumerate(required(block, "tabs", objects, path)):
        id_, *page = (
            required(tab, name, text, f"{path}.tabs[{i}]") for name in ("tab_id", "title", "url")
        )
        is_active = optional(tab, "active", boolean, f"{path}.tabs[{i}]")
        lines.append(" ".join([f"[{id_}]", *filter(None, page), *["(active)"] * bool(is_active)]))
    for change in optional(block, "state_changes", objects, path) or ():
        about = (f"{name}: {value}" for name, value in change.items() if name != "type")
        lines.append(f"{change.get('type')} ({', '.join(about)})")
    return [text_part("\n".join(lines))]


# -- sources


def _source(block: Mapping[str, Any], path: str) -> tuple[Mapping[str, Any], str, str]:
    """Give the source of a block, its type, and its place."""
    source, path = required(block, "source", mapping, path), f"{path}.source"
    return source, required(source, "type", text, path), path


def _unknown_source(kind: str, path: str, *known: str) -> UnsupportedFieldError:
    problem = f"is {kind!r:.80}; it must be one of {', '.join(known)}."
    return UnsupportedFieldError.at(f"{path}.type", problem)


_READERS: Mapping[str, Callable[[Mapping[str, Any], str], list[Part]]] = {
    "text": lambda block, path: [text_part(text_of(block, path))],
    "image": _image,
    "document": _document,
    "search_result": _search_result,
    "tool_reference": lambda block, path: [text_part(required(block, "tool_name", text, path))],
    "browser_state": _browser_state,
}

#: Blocks of tools and models of Anthropic's servers. The model has seen nothing like them here.
_HOSTED = re.compile(
    r"server_tool_use|mcp_tool_(use|result|listing)|container_upload|\w+_tool_result|fallback"
)

#: Blocks that `tools` reads.
_OF_TOOLS = ("tool_addition", "tool_removal")


#: Stands before the id of a call that this server has made.
SERVER_CALL = "srvtoolu_trio_"


def _is_said(block: Mapping[str, Any]) -> bool:
    """True if the model reads a block. Others are left out."""
    kind = block.get("type")
    if not isinstance(kind, str) or not _HOSTED.fullmatch(kind) or is_own(block):
        return kind not in _OF_TOOLS
    leave_out(f"blocks of type {kind}", NOT_HOSTED)
    return False


def is_own(block: Mapping[str, Any]) -> bool:
    """True for a call that this server has made, and for its result."""
    id_ = block.get("id" if block.get("type") == "server_tool_use" else "tool_use_id")
    return isinstance(id_, str) and id_.startswith(SERVER_CALL)


def _found(block: Mapping[str, Any], path: str) -> str:
    """Read the result of a tool of this server, as the model has read it."""
    content, path = block.get("content"), f"{path}.content"
    if isinstance(content, list):
        texts = [named(_signed, each.get("encrypted_content"), path) for each in objects(content)]
        return "".join(texts) or NOTHING
    read = named(mapping, content, path)
    if "error_code" in read:
        return f"{ERROR_MARK}{required(read, 'error_code', text, path)}"
    document, path = required(read, "content", mapping, path), f"{path}.content"
    source, url = required(document, "source", mapping, path), required(read, "url", text, path)
    said = required(source, "data", text, f"{path}.source")
    return head_of(url, optional(document, "title", text, path) or "") + said


#: Stands before the result of a tool that failed, as templates have no field for that.
ERROR_MARK = "Error: "


# -- thinking that was not shown

_SIGNATURE = "trioserve"


def sign(thinking: str, *, shown: bool) -> str:
    """Make the signature of a thinking block; it carries the thinking where that is not shown."""
    if shown:
        return _SIGNATURE
    return f"{_SIGNATURE}.{base64.b64encode(thinking.encode()).decode()}"


def _signed(signature: Any) -> str:
    """Decode the thinking in a signature that this server made; empty for any other signature."""
    head, _, data = text(signature).partition(".")
    try:
        return base64.b64decode(data, validate=True).decode() if head == _SIGNATURE else ""
    except (binascii.Error, UnicodeDecodeError):
        raise MismatchError("as it was received") from None


# -- messages


_BLOCKS = list_schema(PART, MAX_PARTS) | {**STRING, "type": ["string", "array"]}


_MESSAGE = object_schema(
    "role", "content", role={"enum": ["user", "assistant", "system"]}, content=_BLOCKS
)


@json_type(
    properties={"system": _BLOCKS, "messages": list_schema(_MESSAGE, MAX_MESSAGES, minItems=1)}
)
def read_messages(body: Mapping[str, Any]) -> Messages:
    """Read ``system`` and ``messages`` of a request.

    Raises:
        UnsupportedFieldError: a block is of a kind that this server cannot read.
        InvalidRequestError: something is missing or has the wrong type. Both name it.
    """
    messages: list[Message] = []
    if (system := body.get("system")) is not None:
        messages.append({"role": "system", "content": _system(system)})
    names: dict[str, str] = {}
    for role, blocks in _turns(required(body, "messages", objects)):
        if role != "system" and blocks:
            compaction, blocks = _compaction(blocks)
            if compaction is not None:
                messages = _compacted(messages, compaction, names)
            if not blocks:
                continue
        if role == "assistant":
            messages += _assistant(blocks, names)
        else:
            messages += _user(role, blocks, names)
    return Messages(messages)


def _compacted(
    messages: list[Message], compaction: Compaction, names: dict[str, str]
) -> list[Message]:
    """Replace messages by a compaction, and note the names of the tools whose calls it keeps."""
    stays = [messages[i] for i in compaction.stays(messages)]
    for call in (one for message in compaction.kept for one in message.get("tool_calls", ())):
        names[call.get("id", "")] = call["function"]["name"]
    return stays + compaction.messages()


def _compaction(blocks: list[Block]) -> tuple[Compaction | None, list[Block]]:
    """The last compaction of a turn that has a summary, and the blocks after it.

    A compaction without one has failed, and stands for nothing.
    """
    rest: list[Block] = []
    for path, block in reversed(blocks):
        if block.get("type") != "compaction":
            rest.append((path, block))
            continue
        summary = optional(block, "content", text, path)
        if summary == "":
            raise InvalidRequestError.at(f"{path}.content", "must not be empty.")
        if summary is not None:
            found = Compaction(summary=summary)
            sealed = optional(block, "encrypted_content", text, path) or ""
            if sealed and not Compaction.is_one(sealed):
                leave_out("what other servers have sealed", "the summary beside it is read")
            elif sealed:
                kept = Compaction.read(sealed, f"{path}.encrypted_content")
                found = attrs.evolve(kept, summary=summary)
            return found, rest[::-1]
    return None, rest[::-1]


@json_type()
def continues_final_message(body: Mapping[str, Any]) -> bool:
    """Judge if the assistant continues the last message, which `read_messages` has checked.

    Raises:
        InvalidRequestError: it calls a tool, and so waits for a result.
    """
    if body.get("continue_final_message") is False:  # as the configuration may have it
        return False
    if body.get("compaction") is not None:  # which is all that follows
        return False
    messages = body["messages"]
    if messages[-1]["role"] != "assistant":
        return False
    blocks = blocks_of(messages[-1]["content"], f"messages[{len(messages) - 1}].content")
    for path, block in blocks:
        if block["type"] == "tool_use":
            raise InvalidRequestError.at(path, "needs a 'tool_result' after it.")
    if not blocks:
        return True
    goes_on = "tool_use_id" in blocks[-1][1] and is_own(blocks[-1][1])
    return not goes_on and any(block["type"] != "compaction" for _, block in blocks)


_ROLE = one_of("user", "assistant", "system")


def _turns(messages: tuple[dict[str, Any], ...]) -> list[tuple[str, list[Block]]]:
    """Gather the blocks of messages, those of neighbours with one role together."""
    if not messages:
        raise InvalidRequestError.at("messages", "must not be empty.")
    check_count(len(messages), MAX_MESSAGES, "messages", "messages")
    turns: list[tuple[str, list[Block]]] = []
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        role = required(message, "role", _ROLE, path)
        blocks = blocks_of(required(message, "content", content_of, path), f"{path}.content")
        if turns and turns[-1][0] == role:
            _part(turns[-1][1], blocks)
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    return turns


def _part(before: list[Block], after: list[Block]) -> None:
    """Put an empty line between two messages that become one, where text meets text."""
    if before and after and before[-1][1].get("type") == after[0][1].get("type") == "text":
        path, last = before[-1]
        before[-1] = (path, {**last, "text": text_of(last, path) + "\n\n"})


#: A head that some clients put before a system prompt, with a number that changes each time.
_BILLING = re.compile(r"\A(x-anthropic-billing-header:[^\n]*?cch=)[^;\n]{5}(?=;)")


def _system(value: Any) -> str:
    """Read a system prompt. What would keep its prefix from being found again is made constant."""
    blocks = blocks_of(named(content_of, value, "system"), "system")
    texts = texts_of(blocks, "a system prompt")
    return "".join(_BILLING.sub(r"\1fffff", each) for each in texts)


def _assistant(blocks: list[Block], names: dict[str, str]) -> list[dict[str, Any]]:
    """Read a turn of the assistant, and note the names of the tools that it calls by their ids.

    It is one message, or several with results of tools of this server between them.
    """
    said: list[Part] = []
    thinking: list[str] = []
    calls: list[dict[str, Any]] = []
    messages: list[dict[str, Any]] = []
    for path, block in blocks:
        if not _is_said(block):
            continue
        if is_own(block) and "tool_use_id" in block:
            if said or thinking or calls:
                messages.append(_said(said, thinking, calls))
                said, thinking, calls = [], [], []
            id_ = block["tool_use_id"]
            messages.append(_tool_message(id_, _found(block, path), names))
            continue
        match required(block, "type", text, path):
            case "text":
                said.append({"type": "text", "text": text_of(block, path)})
            case "thinking":
                shown = required(block, "thinking", text, path)
                thinking.append(shown or optional(block, "signature", _signed, path) or "")
            case "redacted_thinking":
                thinking.append(required(block, "data", _signed, path))
            case "tool_use" | "server_tool_use":
                calls.append(_call(block, path))
                names[calls[-1]["id"]] = calls[-1]["function"]["name"]
            case kind:
                raise unsupported(kind, path, "a message of the assistant")
    if said or thinking or calls or not messages:
        messages.append(_said(said, thinking, calls))
    return messages


def _said(said: list[Part], thinking: list[str], calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Make a message of the assistant."""
    message: dict[str, Any] = {"role": "assistant", "content": as_content(said)}
    if calls:
        message["tool_calls"] = calls
    if reasoning := "".join(thinking):
        message["reasoning_content"] = reasoning
    return message


def _call(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    name = required(block, "name", filled, path)
    if toolset := optional(block, "toolset_name", text, path):
        name = Member(toolset, name).function
    function = {"name": name, "arguments": sse.encode(required(block, "input", mapping, path))}
    return {"id": required(block, "id", text, path), "type": "function", "function": function}


def _user(role: str, blocks: list[Block], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Read a turn of the user or the system: results of tools and what is said, in their order."""
    messages: list[dict[str, Any]] = []
    said: list[Part] = []
    owner, kinds = f"a message of the {role}", KINDS if role == "user" else ("text",)

    def say() -> None:
        if said:
            messages.append({"role": role, "content": as_content(said.copy())})
            said.clear()

    for path, block in blocks:
        if block.get("type") == "tool_result" and role == "user":
            say()
            messages.append(_result(block, path, names))
        elif _is_said(block):
            said += parts_of([(path, block)], owner, kinds)
    say()
    return messages


#: Blocks that only the results of tools have, and that become texts.
_TEXTS_OF_RESULTS = ("tool_reference", "browser_state")


def _result(block: Mapping[str, Any], path: str, names: Mapping[str, str]) -> dict[str, Any]:
    id_ = required(block, "tool_use_id", text, path)
    blocks = blocks_of(optional(block, "content", content_of, path) or (), f"{path}.content")
    parts = parts_of(blocks, "the result of a tool", (*KINDS, *_TEXTS_OF_RESULTS))
    if optional(block, "is_error", boolean, path):
        parts.insert(0, {"type": "text", "text": ERROR_MARK})
    content: str | list[Part] = parts
    if all(each["type"] in ("text", *_TEXTS_OF_RESULTS) for _, each in blocks):
        content = "".join(part["text"] for part in parts)
    return _tool_message(id_, content, names)


def _tool_message(id_: str, content: str | list[Part], names: Mapping[str, str]) -> dict[str, Any]:
    message = {"role": "tool", "tool_call_id": id_, "content": content}
    return {**message, "name": names[id_]} if id_ in names else message


def filled(value: Any) -> str:
    """Take a string that is not empty."""
    if not text(value):
        raise MismatchError("a string, and not empty")
    return str(value)
