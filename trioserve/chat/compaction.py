"""Compaction: a summary in place of a conversation, and what of it stays as it is.

::

    | system | turns that are summed up                     | last turns |   before
    | system | summary, as a message of the user |  open calls, last turns |   after

A cut never parts a call from its result. What is kept is part of the compaction, so that a client
needs nothing else to continue: `Compaction.written` is JSON that comes back with later requests, to
this server or another one.
"""

from __future__ import annotations

import binascii
import json
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from operator import itemgetter
from typing import Any, Self

import attrs

from trioserve.chat.messages import Message, Messages, parse_messages, text_part
from trioserve.errors import InvalidRequestError
from trioserve.types import DocumentSource, MediaSource

#: Asks the model for a summary of the conversation before it.
TASK = """\
This conversation gets too long, and will be replaced by a summary that you write now. Do not go \
on with the task, call no tools, and do not answer the messages above. Write a summary from which \
the conversation can be continued by someone who has not read it:

1. What the user wants: every request, instruction, constraint and preference; the latest request \
in the user's own words.
2. Facts that may still be needed: names, numbers, paths, identifiers, code, errors.
3. What has been done and found so far, with the results of tools that still matter, and decisions \
with their reasons.
4. What is in progress, what is still open, and the next step.

Write the summary only."""

#: Precedes the summary in later prompts.
PREFACE = "What came before in this conversation was replaced by this summary of it:\n\n"

#: Bytes of files in base64 that a compaction keeps. The model reads a note in place of more.
MAX_FILES = 2**20

#: The mark of a compaction that this server wrote.
_MARK = "trioserve.compaction"

_RULES = ("system", "developer")


@attrs.frozen(kw_only=True)
class Compaction:
    """The replacement of a conversation, or of its beginning.

    Attributes:
        summary: of all of it.
        kept: messages that follow the summary as they were: open calls, and the last turns.
        spares_users: the client keeps what users have said: messages before the compaction that are
            not the assistant's nor results of tools stay. If not, rules at the beginning do.
    """

    summary: str
    kept: Messages = attrs.field(factory=Messages)
    spares_users: bool = False

    def messages(self) -> list[Message]:
        return [{"role": "user", "content": PREFACE + self.summary}, *self.kept]

    def stays(self, before: Sequence[Mapping[str, Any]]) -> list[int]:
        """Give the places of the messages before it that it does not replace."""
        if self.spares_users:
            return [i for i, one in enumerate(before) if one["role"] not in ("assistant", "tool")]
        return [*range(n_rules(before))]

    def written(self) -> str:
        """Write it as JSON, for a client to send back."""
        fields = {"type": _MARK, "summary": self.summary, "spares_users": self.spares_users}
        return json.dumps({**fields, "kept": written(self.kept)}, ensure_ascii=False)

    @staticmethod
    def is_one(text: str) -> bool:
        return text.startswith(json.dumps({"type": _MARK})[:-1])

    @classmethod
    def read(cls, text: str, param: str) -> Self:
        """Read the result of `written`.

        Raises:
            InvalidRequestError: another server wrote it, or it was changed; names `param`.
        """
        try:
            match json.loads(text):
                case {"type": str(mark), "summary": str(summary), "kept": list(kept)} as fields:
                    if mark == _MARK:
                        messages = parse_messages(kept, param) if kept else Messages()
                        spares = fields.get("spares_users") is True
                        return cls(summary=summary, kept=messages, spares_users=spares)
        except (ValueError, RecursionError):
            pass
        raise InvalidRequestError.at(
            param,
            "was not written by this server, and cannot be read here. Leave out the item, and send "
            "the conversation that it replaced, or a summary of it.",
        )


def written(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Write messages as clients of chats do, with files up to `MAX_FILES`."""
    room, found = MAX_FILES, list[dict[str, Any]]()
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            parts: list[dict[str, Any]] = []
            for part in content:
                each = list(_written(part, room))
                room -= sum(len(json.dumps(one)) for one in each if one["type"] != "text")
                parts += each
            message = {**message, "content": parts}
        found.append(message)
    return found


def _written(part: Mapping[str, Any], room: int) -> Iterator[dict[str, Any]]:
    """Write a part of a content as clients of chats do; a file that is too long as a note."""
    source: MediaSource | DocumentSource
    match part:
        case {"media": MediaSource() as source}:
            kind = source.kind or "file"
        case {"document": DocumentSource() as source}:
            kind = "file"
            if source.about:
                yield text_part(source.about)
        case _:
            yield dict(part)
            return
    if source.data is not None and 4 * len(source.data) <= 3 * room:
        where = binascii.b2a_base64(source.data, newline=False).decode()
    elif source.url is not None:
        where = source.url
    else:
        yield text_part(note_of(part))
        return
    if kind == "file":
        field = "file_url" if source.data is None else "file_data"
        name = source.name if isinstance(source, DocumentSource) else ""
        yield {"type": "file", "file": {field: where, "filename": name}}
    else:
        name, field = ("image_url", "url") if kind == "image" else (f"input_{kind}", "data")
        yield {"type": name, name: {field: where}}


def note_of(part: Mapping[str, Any]) -> str:
    """The note in place of a file."""
    if part["type"] == "document":
        return f"[document {part['document'].name}]".replace(" ]", "]")
    return f"[{part['media'].kind or 'file'}]"


def text_of(message: Mapping[str, Any], between: str = "") -> str:
    """The text of a message, with notes in place of files."""
    content: str | list[dict[str, Any]] = message["content"]
    if isinstance(content, str):
        return content
    parts = (part["text"] if part["type"] == "text" else note_of(part) for part in content)
    return between.join(parts)


# -- the parts of a conversation


def n_rules(messages: Sequence[Mapping[str, Any]]) -> int:
    """The number of messages at the beginning that are the system's or the developer's."""
    return next((i for i, one in enumerate(messages) if one["role"] not in _RULES), len(messages))


def groups_of(messages: Sequence[Message]) -> list[list[Message]]:
    """Divide messages where a cut may be: a call and its result are in one group."""
    starts: list[int] = []  # the places where groups begin
    callers: dict[str, int] = {}  # the places of calls, by their ids
    for place, message in enumerate(messages):
        if message["role"] == "tool" and starts:
            caller = callers.get(message.get("tool_call_id", ""), place - 1)
            del starts[bisect_right(starts, caller) :]
            continue
        for call in message.get("tool_calls", ()):
            callers[call.get("id", "")] = place
        starts.append(place)
    return [list(messages[i:j]) for i, j in pairwise([*starts, len(messages)])]


def open_calls(messages: Iterable[Message]) -> list[Message]:
    """The messages of the assistant with calls that have no result, without all else in them."""
    waiting: dict[str, deque[tuple[int, Any]]] = {}  # by ids, which may be used again, or empty
    for place, message in enumerate(messages):
        if message["role"] == "tool" and (same := waiting.get(message.get("tool_call_id", ""))):
            same.popleft()
        for call in message.get("tool_calls", ()):
            same = waiting.setdefault(call.get("id", ""), deque())
            if call.get("id"):
                same.clear()
            same.append((place, call))
    calls: dict[int, list[Any]] = {}
    for place, call in sorted(chain.from_iterable(waiting.values()), key=itemgetter(0)):
        calls.setdefault(place, []).append(call)
    return [{"role": "assistant", "content": "", "tool_calls": each} for each in calls.values()]


def without(messages: Sequence[Message], calls: Sequence[Message]) -> list[Message]:
    """Messages without some of their calls, which `open_calls` gave."""
    gone = {id(call) for message in calls for call in message["tool_calls"]}
    kept = []
    for message in messages:
        if "tool_calls" in message:
            rest = [call for call in message["tool_calls"] if id(call) not in gone]
            message = {name: value for name, value in message.items() if name != "tool_calls"}
            if rest:
                message["tool_calls"] = rest
            elif not message["content"]:
                continue
        kept.append(message)
    return kept


def transcript(messages: Iterable[Mapping[str, Any]]) -> str:
    """Write messages as text: what was said, called and found, without reasoning."""
    lines: list[str] = []
    for message in messages:
        content, role = text_of(message, "\n"), message["role"]
        who = f"result of {message.get('name', 'the call')}" if role == "tool" else role
        if content or role == "tool":
            lines.append(f"{who}: {content}")
        for call in message.get("tool_calls", ()):
            function = call["function"]
            lines.append(f"{role} calls {function['name']}: {function['arguments']}")
    return "\n\n".join(lines)
