"""Repairs of messages: pure functions from the messages of a conversation to others.

`trioserve.chat.template.repairs` tells which a template needs.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from trioserve.chat.messages import Message, Tool, as_text
from trioserve.chat.template.sandbox import MAX_INPUT_INT

#: Messages in normal form, each with its place in the request.
Turns: TypeAlias = list[tuple[int, Message]]

#: The user's message where a template wants the user to speak first, or between two messages.
FILLER = "Hello."

#: Marks what another role than the user says in a message of the user.
_TAGGED = "<{0}>\n{1}\n</{0}>"
_REMINDER = "system-reminder"


# -- tools and calls as text

_INSTRUCTIONS = """\
You can call these functions:
{tools}

To call some, write nothing but JSON in this form:
{{"tool_calls": [{{"name": "<name>", "arguments": {{<arguments>}}}}]}}
Their results come in the next message. When you need none, answer in plain words."""


def with_tools(turns: Turns, tools: Sequence[Tool]) -> Turns:
    """Tell the model of its tools in the first system message, or in one before all others."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    instructions = _INSTRUCTIONS.format(tools="\n".join(lines))
    place, first = turns[0]
    if first["role"] not in ("system", "developer"):
        return [(0, {"role": "system", "content": instructions}), *turns]
    content = f"{as_text(first['content'])}\n\n{instructions}"
    return [(place, {**first, "content": content}), *turns[1:]]


def with_calls_as_text(message: Message) -> Message:
    """Write the tool calls of a message as the model would have written them."""
    calls = [
        f'{{"name": {json.dumps(call["function"]["name"], ensure_ascii=False)}, '
        f'"arguments": {call["function"]["arguments"]}}}'
        for call in message["tool_calls"]
    ]
    text = f'{{"tool_calls": [{", ".join(calls)}]}}'
    content = as_text(message["content"])
    changed = {**message, "content": f"{content}\n\n{text}" if content else text}
    del changed["tool_calls"]
    return changed


def with_results_as_text(turns: Turns) -> Turns:
    """Write results of tools, one after the other, as one message of the user."""
    made: Turns = []
    for is_result, run in itertools.groupby(turns, lambda turn: turn[1]["role"] == "tool"):
        each = [*run]
        if is_result:
            text = "\n\n".join(_result_as_text(message) for _, message in each)
            each = [(each[0][0], {"role": "user", "content": text})]
        made += each
    return made


def _result_as_text(message: Message) -> str:
    result: dict[str, Any] = {"result": as_text(message["content"])}
    for field in ("name", "tool_call_id"):
        if field in message:
            result[field] = message[field]
    return json.dumps({"tool_response": result}, ensure_ascii=False)


# -- ids of calls


def _with_ids(turns: Turns, form: Callable[[str, str, int], str]) -> Turns:
    """Give each call an id by the client's, its function and the number of calls before.

    A result gets that of its call.
    """
    made: Turns = []
    pending = _Pending()
    n_calls = 0
    for i, (place, message) in enumerate(turns):
        if "tool_calls" in message:
            if not _follows_calls(turns, i):
                pending = _Pending()
            calls = []
            for call in message["tool_calls"]:
                given = call.get("id", "")
                id_ = form(given, call["function"]["name"], n_calls)
                pending.add(given, id_)
                calls.append({**call, "id": id_})
                n_calls += 1
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            given = message.get("tool_call_id", "")
            own = pending.take(given)
            if own is None and not given:
                own = pending.take_oldest()
            id_ = form(given, message.get("name", ""), n_calls) if own is None else own
            message = {**message, "tool_call_id": id_}
        made.append((place, message))
    return made


class _Pending:
    """Values that wait to be taken by their ids, which may be empty."""

    def __init__(self) -> None:
        self._all: dict[int, tuple[str, Any]] = {}  # by number, the oldest first
        self._of: defaultdict[str, deque[int]] = defaultdict(deque)  # numbers by id
        self._numbers = itertools.count()

    def add(self, id_: str, value: Any) -> None:
        number = next(self._numbers)
        self._all[number] = id_, value
        self._of[id_].append(number)

    def take(self, id_: str) -> Any:
        """Take the oldest value with an id; None without one."""
        numbers = self._of.get(id_)
        return self._all.pop(numbers.popleft())[1] if numbers else None

    def take_oldest(self) -> Any:
        return self.take(next(iter(self._all.values()))[0]) if self._all else None

    def __iter__(self) -> Iterator[Any]:
        return (value for _, value in self._all.values())


def ids_of_nine(turns: Turns) -> Turns:
    """Give calls ids of nine letters and digits: the same for the same id."""

    def form(given: str, _name: str, n_before: int) -> str:
        if re.fullmatch("[a-zA-Z0-9]{9}", given):
            return given
        return hashlib.sha256(given.encode() or b"%d" % n_before).hexdigest()[:9]

    return _with_ids(turns, form)


def ids_with_names(turns: Turns) -> Turns:
    """Give calls ids that tell the function, as Kimi K2 writes them."""

    def form(given: str, name: str, n_before: int) -> str:
        return given if name in given else f"functions.{name}:{n_before}"

    return _with_ids(turns, form)


def ids_of_their_own(turns: Turns) -> Turns:
    """Give new ids to calls without an id, or with the id of an earlier call."""
    used: set[str] = set()
    numbers = itertools.count()

    def form(given: str, _name: str, _n_before: int) -> str:
        id_ = given
        while not id_ or id_ in used:
            id_ = f"call{next(numbers):05}"
        used.add(id_)
        return id_

    return _with_ids(turns, form)


def named_results(turns: Turns) -> Turns:
    """Give results the name of the function that was called."""
    made: Turns = []
    names: dict[str, str] = {}
    last = ""
    for place, message in turns:
        for call in message.get("tool_calls", ()):
            names[call.get("id", "")] = last = call["function"]["name"]
        name = names.get(message.get("tool_call_id", ""), last)
        if message["role"] == "tool" and name:
            message = {"name": name, **message}
        made.append((place, message))
    return made


# -- calls


def _follows_calls(turns: Turns, i: int) -> bool:
    """True right after a message of calls: the results of both follow."""
    return i > 0 and "tool_calls" in turns[i - 1][1]


def results_alone(turns: Turns) -> Turns:
    """Make the result of a tool without a call a tagged message of the user."""
    made: Turns = []
    n_open = 0  # calls without a result
    for i, (place, message) in enumerate(turns):
        if "tool_calls" in message:
            n_open = n_open * _follows_calls(turns, i) + len(message["tool_calls"])
        elif message["role"] != "tool":
            n_open = 0
        elif n_open:
            n_open -= 1
        else:
            message = {"role": "user", "content": _tagged("tool-result", message["content"])}
        made.append((place, message))
    return made


def one_call_each(turns: Turns) -> Turns:
    """Split several calls into a message for each, followed by its result."""
    made: Turns = []
    i = 0
    while i < len(turns):
        place, message = turns[i]
        i += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            made.append((place, message))
            continue
        results = _Pending()
        while i < len(turns) and turns[i][1]["role"] == "tool":
            results.add(turns[i][1].get("tool_call_id", ""), turns[i])
            i += 1
        for call in calls:
            made.append((place, {**message, "tool_calls": [call]}))
            message = {"role": message["role"], "content": ""}
            if "id" in call:
                own = results.take(call["id"]) or results.take("")
            else:
                own = results.take_oldest()
            if own is not None:
                made.append(own)
        made += results
    return made


def text_before_calls(turns: Turns) -> Turns:
    """Split text and calls of one message: the text in a message before."""
    made: Turns = []
    for place, message in turns:
        if "tool_calls" in message and message["content"]:
            said = {key: value for key, value in message.items() if key != "tool_calls"}
            made.append((place, said))
            message = {"role": message["role"], "content": "", "tool_calls": message["tool_calls"]}
        made.append((place, message))
    return made


def text_in_thinking(turns: Turns) -> Turns:
    """Join text beside calls to the thinking, from the last message of the user on.

    Before it, a template drops both.
    """
    last = max((i for i, (_, one) in enumerate(turns) if one["role"] == "user"), default=-1)
    made = turns[: last + 1]
    for place, message in turns[last + 1 :]:
        if "tool_calls" in message and message["content"] and "reasoning_content" in message:
            thought = f"{message['reasoning_content']}\n\n{as_text(message['content'])}"
            message = {**message, "reasoning_content": thought, "content": ""}
        made.append((place, message))
    return made


def arguments_in_objects(turns: Turns) -> Turns:
    """Put arguments that are no object into one."""
    return [
        (place, _with_arguments(message) if "tool_calls" in message else message)
        for place, message in turns
    ]


def _with_arguments(message: Message) -> Message:
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        value = read_object(function["arguments"])
        if isinstance(value, str):
            function = {**function, "arguments": json.dumps({"arguments": value})}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


#: May be in values that a template cannot be given: a long number, or half of a character.
_LONG_OR_HALF = re.compile(r"\d{21}|\\u[dD][89a-fA-F]")
_MAX_DEPTH = 80  # a template that is given a call wraps it a little


def read_object(text: str) -> dict[str, Any] | str:
    """Read the arguments of a call, and give them as they are if they are not an object.

    So are objects with values that no template can be given.
    """
    try:
        value = json.loads(text)
        if _LONG_OR_HALF.search(text) or text.count("[") + text.count("{") > _MAX_DEPTH:
            _check_values(value)
    except (ValueError, RecursionError):
        return text
    return {} if value is None else value if isinstance(value, dict) else text


def _check_values(value: Any, depth: int = 0) -> None:
    """Raise ValueError: a value is one that a template cannot be given."""
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, dict | list):
        if depth > _MAX_DEPTH:
            raise ValueError
        for one in [*value, *value.values()] if isinstance(value, dict) else value:
            _check_values(one, depth + 1)
    elif isinstance(value, int) and abs(value) >= MAX_INPUT_INT:
        raise ValueError


# -- roles


def developer_as_system(turns: Turns) -> Turns:
    """Let the system say what the developer says."""
    return [
        (place, {**one, "role": "system"} if one["role"] == "developer" else one)
        for place, one in turns
    ]


def _is_system(message: Message) -> bool:
    return message["role"] in ("system", "developer")


def _n_leading(turns: Turns) -> int:
    """Count the system messages at the beginning."""
    return next((i for i, (_, one) in enumerate(turns) if not _is_system(one)), len(turns))


def _joined(one: Message, *others: Message, separator: str = "\n\n") -> Message:
    """Append the contents of messages to the content of the first."""
    if not others:
        return one
    contents = (message["content"] for message in (one, *others))
    joined: list[Any] = []
    for is_text, run in itertools.groupby(contents, lambda each: isinstance(each, str)):
        each = [*run]
        joined += [separator.join(filter(None, each))] if is_text else each
    content = joined[0] if len(joined) == 1 else [*itertools.chain(*map(_parts, joined))]
    fields: Message = {}
    for message in (*reversed(others), one):
        fields |= message
    return {**fields, "content": content}


def _parts(content: Any) -> list[dict[str, Any]]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _tagged(tag: str, content: Any) -> Any:
    """Tag a content that belongs to another role."""
    if isinstance(content, str):
        is_tagged = content.startswith(f"<{_REMINDER}>")
        return content if is_tagged else _TAGGED.format(tag, content)
    begin, end = _TAGGED.split("{1}")
    return [*_parts(begin.format(tag)), *content, *_parts(end.format(tag))]


def one_system_message(turns: Turns) -> Turns:
    """Join the system messages at the beginning."""
    n = _n_leading(turns)
    if n < 2:
        return turns
    place, first = turns[0]
    return [(place, _joined(first, *(one for _, one in turns[1:n]))), *turns[n:]]


def later_system_messages(turns: Turns) -> Turns:
    """Make system messages after the beginning tagged messages of the user, where they are."""
    n = _n_leading(turns)
    return [
        *turns[:n],
        *(
            (place, {"role": "user", "content": _tagged(_REMINDER, one["content"])})
            if _is_system(one)
            else (place, one)
            for place, one in turns[n:]
        ),
    ]


def system_in_user(turns: Turns, separator: str = "\n") -> Turns:
    """Put system messages at the beginning of the first message of the user."""
    n = _n_leading(turns)
    if not n:
        return turns
    contents = ({"content": one["content"]} for _, one in turns[:n])
    system = _joined({"role": "user", "content": ""}, *contents)
    if n == len(turns) or turns[n][1]["role"] != "user":
        return [(0, system), *turns[n:]]
    place, user = turns[n]
    return [(place, {**user, **_joined(system, user, separator=separator)}), *turns[n + 1 :]]


def user_first(turns: Turns) -> Turns:
    """Let the user speak before the assistant."""
    n = _n_leading(turns)
    if n < len(turns) and turns[n][1]["role"] == "user":
        return turns
    return [*turns[:n], (max(0, n - 1), {"role": "user", "content": FILLER}), *turns[n:]]


def no_empty_messages(turns: Turns) -> Turns:
    """Leave out messages of the assistant that have nothing in them."""
    return [
        (place, one)
        for place, one in turns
        if one["role"] != "assistant" or as_text(one["content"]) or "tool_calls" in one
    ]


def alternating(turns: Turns) -> Turns:
    """Let user and assistant alternate; calls and their results belong to the assistant's turn.

    Messages that follow one of the same role are joined to it. What the user says after the result
    of a tool is joined to the result.
    """
    made: list[tuple[int, Message, list[Message]]] = []  # and what is joined to each
    is_users = True  # whose turn it is
    for place, message in turns:
        role, last = message["role"], made[-1][1] if made else None
        if role == "user" and not is_users and last is not None:
            if last["role"] == "user":
                made[-1][2].append(message)
            elif last["role"] == "tool":
                made[-1][2].append({"content": _tagged("user", message["content"])})
            elif "tool_calls" in last:  # without a result
                id_ = last["tool_calls"][-1].get("id")
                result = {"role": "tool", "content": _tagged("user", message["content"])}
                made.append((place, result if id_ is None else {**result, "tool_call_id": id_}, []))
            else:
                made.append((place, message, []))
            continue
        if role == "assistant" and is_users:
            if last is not None and last["role"] == "assistant" and "tool_calls" not in message:
                made[-1][2].append(message)
                continue
            made.append((place, {"role": "user", "content": FILLER}, []))
            is_users = False
        made.append((place, message, []))
        if role == "user":
            is_users = False
        elif role == "assistant" and "tool_calls" not in message:
            is_users = True
    return [(place, _joined(message, *others)) for place, message, others in made]
