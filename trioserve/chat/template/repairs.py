"""Repairs of conversations: what OpenAI's API takes, in the forms that a template takes.

A template refuses some conversations, and loses a part of others. Each repair changes one of these
forms, and has small conversations that tell whether a template needs it: those whose texts the
prompt has, in their order, with the repair only. `find` renders them once for each template.

A repair moves no text to the front, so that the prompt of a turn begins with that of the turn
before.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import attrs

from trioserve.chat.messages import Message, Tool, as_text

#: Messages in normal form, each with its place in the request.
Turns: TypeAlias = list[tuple[int, Message]]

#: What the user says where a template wants the user to speak first, or between two messages.
FILLER = "Hello."

#: Marks what another role than the user says in a message of the user.
_TAGGED = "<{0}>\n{1}\n</{0}>"


@attrs.frozen
class Conversation:
    """Messages and tools whose prompt must have some texts, in this order.

    With `n_before`, the prompt begins as that of so many first messages, up to the last text there.
    """

    turns: tuple[Message, ...]
    texts: tuple[str, ...]
    tools: tuple[Tool, ...] = ()
    n_before: int = 0

    def is_shown(self, render: Callable[[Conversation], str | None]) -> bool:
        """Whether the prompt has all of it."""
        prompt = render(self)
        if prompt is None or not re.search(".*".join(self.texts), prompt, re.DOTALL):
            return False
        if any(tool["function"]["name"] not in prompt for tool in self.tools):
            return False
        if not self.n_before:
            return True
        before = render(attrs.evolve(self, turns=self.turns[: self.n_before]))
        if before is None:
            return True
        end = max(before.rfind(text) + len(text) for text in self.texts if text in before)
        return prompt.startswith(before[:end])


@attrs.frozen
class Repair:
    """One change to conversations that a template cannot show as they are."""

    name: str
    about: str
    #: A template needs the repair if one of them works with it only, and none without it only.
    probes: tuple[Conversation, ...]
    messages: Callable[[Turns], Turns] | None = None
    tool: Callable[[Tool], Tool] | None = None
    #: The probes of a repair may need those that are tried before.
    tried: int = 1


class Render(Protocol):
    """Renders a conversation."""

    def __call__(self, conversation: Conversation, /, repairs: Sequence[Repair]) -> str | None:
        """Give the prompt; None: the template refuses the conversation."""


def find(render: Render) -> tuple[Repair, ...]:
    """Find the repairs that a template needs, in the order in which they are made."""
    needed: list[Repair] = []
    for repair in _IN_ORDER_OF_PROBES:
        before = [one.is_shown(partial(render, repairs=needed)) for one in repair.probes]
        if all(before):
            continue
        tried = sorted([*needed, repair], key=REPAIRS.index)
        after = [one.is_shown(partial(render, repairs=tried)) for one in repair.probes]
        if all(map(operator.ge, after, before)) and after != before:
            needed = tried
    return tuple(needed)


# -- ids of calls


def _with_ids(turns: Turns, form: Callable[[str, str, int], str]) -> Turns:
    """Give each call an id, and its result the same.

    Args:
        turns: with ids or without.
        form: makes an id of that of the client, the name of the function and the number of calls
            before it.
    """
    made: Turns = []
    pending: list[tuple[str, str]] = []  # of calls without a result: the client's, and the new one
    n_calls = 0
    for place, message in turns:
        if "tool_calls" in message:
            pending, calls = [], []
            for call in message["tool_calls"]:
                given = call.get("id", "")
                pending.append((given, form(given, call["function"]["name"], n_calls)))
                calls.append({**call, "id": pending[-1][1]})
                n_calls += 1
            message = {**message, "tool_calls": calls}
        elif message["role"] in ("tool", "function"):
            given = message.get("tool_call_id", "")
            own = [pair for pair in pending if pair[0] == given] or pending[: not given]
            if own:
                pending.remove(own[0])
                id_ = own[0][1]
            else:
                id_ = form(given, message.get("name", ""), n_calls)
            message = {**message, "tool_call_id": id_}
        made.append((place, message))
    return made


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
    """Give calls that have no id one, and those that have that of an earlier call another."""
    used: set[str] = set()

    def form(given: str, _name: str, n_before: int) -> str:
        free = (f"call{n:05}" for n in itertools.count(n_before))
        id_ = next(one for one in itertools.chain([given], free) if one and one not in used)
        used.add(id_)
        return id_

    return _with_ids(turns, form)


# -- calls


def results_alone(turns: Turns) -> Turns:
    """Make the result of a tool that nobody has called a tagged message of the user."""
    made: Turns = []
    n_open = 0  # calls without a result
    for place, message in turns:
        if "tool_calls" in message:
            n_open = len(message["tool_calls"])
        elif message["role"] not in ("tool", "function"):
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
        results: Turns = []
        while i < len(turns) and turns[i][1]["role"] in ("tool", "function"):
            results.append(turns[i])
            i += 1
        for call in calls:
            made.append((place, {**message, "tool_calls": [call]}))
            message = {"role": message["role"], "content": ""}
            own = next((one for one in results if _answers(one[1], call)), None)
            if own is not None:
                results.remove(own)
                made.append(own)
        made += results
    return made


def _answers(result: Message, call: Mapping[str, Any]) -> bool:
    return "id" not in call or result.get("tool_call_id", call["id"]) == call["id"]


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


def read_object(text: str) -> dict[str, Any] | str:
    """Read the arguments of a call; those that are no object are given as they are."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return {} if value is None else value if isinstance(value, dict) else text


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
    """How many system messages a conversation begins with."""
    return next((i for i, (_, one) in enumerate(turns) if not _is_system(one)), len(turns))


def _joined(one: Message, other: Message, separator: str = "\n\n") -> Message:
    """Put the content of a message at the end of that of another."""
    first, second = one["content"], other["content"]
    if isinstance(first, str) and isinstance(second, str):
        content: Any = separator.join(filter(None, (first, second)))
    else:
        content = [*_parts(first), *_parts(second)]
    return {**other, **one, "content": content}


def _parts(content: Any) -> list[dict[str, Any]]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _tagged(tag: str, content: Any) -> Any:
    """Mark a content as that of another role."""
    if isinstance(content, str):
        return _TAGGED.format(tag, content)
    begin, end = _TAGGED.split("{1}")
    return [*_parts(begin.format(tag)), *content, *_parts(end.format(tag))]


def one_system_message(turns: Turns) -> Turns:
    """Join the system messages at the beginning."""
    n = _n_leading(turns)
    if n < 2:
        return turns
    place, first = turns[0]
    for _, other in turns[1:n]:
        first = _joined(first, other)
    return [(place, first), *turns[n:]]


def later_system_messages(turns: Turns) -> Turns:
    """Make system messages after the beginning tagged messages of the user, where they are."""
    n = _n_leading(turns)
    return [
        *turns[:n],
        *(
            (place, {"role": "user", "content": _tagged("system-reminder", one["content"])})
            if _is_system(one)
            else (place, one)
            for place, one in turns[n:]
        ),
    ]


def system_in_user(turns: Turns) -> Turns:
    """Put system messages at the beginning of the first message of the user."""
    n = _n_leading(turns)
    if not n:
        return turns
    system: Message = {"role": "user", "content": ""}
    for _, one in turns[:n]:
        system = _joined(system, {"content": one["content"]})
    if n == len(turns) or turns[n][1]["role"] != "user":
        return [(0, system), *turns[n:]]
    place, user = turns[n]
    return [(place, {**user, **_joined(system, user, "\n")}), *turns[n + 1 :]]


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
    made: Turns = []
    is_users = True  # whose turn it is
    for place, message in turns:
        role, last = message["role"], made[-1][1] if made else None
        if role == "user" and not is_users and last is not None:
            if last["role"] == "user":
                made[-1] = made[-1][0], _joined(last, message)
            elif last["role"] in ("tool", "function"):
                said = {"content": _tagged("user", message["content"])}
                made[-1] = made[-1][0], _joined(last, said)
            elif "tool_calls" in last:  # without a result
                id_ = last["tool_calls"][-1].get("id")
                result = {"role": "tool", "content": _tagged("user", message["content"])}
                made.append((place, result if id_ is None else {**result, "tool_call_id": id_}))
            else:
                made.append((place, message))
            continue
        if role == "assistant" and is_users:
            if last is not None and last["role"] == "assistant" and "tool_calls" not in message:
                made[-1] = made[-1][0], _joined(last, message)
                continue
            made.append((place, {"role": "user", "content": FILLER}))
            is_users = False
        made.append((place, message))
        if role == "user":
            is_users = False
        elif role == "assistant" and "tool_calls" not in message:
            is_users = True
    return made


# -- tools


def described(tool: Tool) -> Tool:
    """Give a function and its parameters descriptions."""
    function = _with_description(tool["function"])
    return {**tool, "function": {**function, "parameters": _described(function["parameters"])}}


def _described(schema: Any) -> Any:
    if not isinstance(schema.get("properties"), Mapping):
        return schema
    properties = {
        name: _with_description(_described(one)) if isinstance(one, Mapping) else one
        for name, one in schema["properties"].items()
    }
    return {**schema, "properties": properties}


def _with_description(given: Mapping[str, Any]) -> dict[str, Any]:
    return {**given, "description": given.get("description", "")}


def completed(tool: Tool) -> Tool:
    """Give the parameters of a function the keywords of an object."""
    function = tool["function"]
    parameters = dict(function["parameters"])
    for keyword, value in {"type": "object", "properties": {}, "required": []}.items():
        parameters.setdefault(keyword, value)
    return {**tool, "function": {**function, "parameters": parameters}}


def open_objects(tool: Tool) -> Tool:
    """Say of parameters that are objects which other members they have."""
    function = tool["function"]
    parameters = function["parameters"]
    properties = {name: _opened(one) for name, one in parameters.get("properties", {}).items()}
    return {
        **tool,
        "function": {**function, "parameters": {**parameters, "properties": properties}},
    }


def _opened(schema: Any) -> Any:
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        return schema
    others = schema.get("additionalProperties", {"type": "string"})
    properties = {name: _opened(one) for name, one in schema.get("properties", {}).items()}
    return {**schema, "properties": properties, "additionalProperties": others}


def typed(tool: Tool) -> Tool:
    """Give each parameter of a function one type."""
    function = tool["function"]
    return {**tool, "function": {**function, "parameters": _typed(function["parameters"])}}


def _typed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return {"type": "string"}
    made = {**schema, "type": _type_of(schema)}
    if isinstance(schema.get("properties"), Mapping):
        made["properties"] = {name: _typed(one) for name, one in schema["properties"].items()}
    if made["type"] == "array":
        made["items"] = _typed(schema.get("items", {}))
    return made


def _type_of(schema: Mapping[str, Any]) -> str:
    """Choose the type that a template is told."""
    match schema:
        case {"type": str(name)}:
            return name
        case {"type": [*names]}:
            found: Iterator[Any] = (name for name in names if isinstance(name, str))
        case {"anyOf": [*others]} | {"oneOf": [*others]} | {"allOf": [*others]}:
            found = (_type_of(one) for one in others if isinstance(one, Mapping))
        case {"enum": [*values]} | {"const": values}:
            values = values if isinstance(values, list) else [values]
            found = (_TYPES.get(type(value), "string") for value in values)
        case {"$ref": _} | {"properties": _}:
            return "object"
        case _:
            return "string"
    return next((name for name in found if name != "null"), "string")


_TYPES: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}


# -- what tells that a template needs them


def _said(role: str, text: str, **fields: Any) -> Message:
    return {"role": role, "content": text, **fields}


def _talk(roles: str, n_before: int = 0) -> Conversation:
    """A conversation with a text of each role."""
    texts = tuple(f"q7text{i}" for i in range(len(roles.split())))
    return Conversation(tuple(map(_said, roles.split(), texts)), texts, n_before=n_before)


_IDS = ("call00001", "call00002")  # which templates take that want nine letters and digits


def _call(i: int = 0, *, name: str = "tool1", id_: str = "", text: str = "") -> dict[str, Any]:
    arguments = text or json.dumps({"q7key": f"q7argument{i}"})
    function = {"name": name, "arguments": arguments}
    call = {"id": id_ or _IDS[i], "type": "function", "function": function}
    if id_ == "none":
        del call["id"]
    return call


def _tool(**fields: Any) -> Tool:
    parameters = {
        "type": "object",
        "properties": {"q7key": {"type": "string", "description": "An argument"}},
        "required": ["q7key"],
    }
    function = {"name": "tool1", "description": "A tool", "parameters": parameters, **fields}
    kept = {key: value for key, value in function.items() if value is not None}
    return {"type": "function", "function": kept}


def _loop(
    *calls: dict[str, Any],
    texts: Sequence[str] = ("q7argument0", "q7result0"),
    then: str = "assistant user",
    **fields: Any,
) -> Conversation:
    """A question, calls, their results, and what follows."""
    after = _talk(then)
    turns = (_said("user", "Hi"), *_answered(calls, **fields), *after.turns)
    return Conversation(turns, (*texts, *after.texts), (_tool(),))


def _answered(calls: Sequence[dict[str, Any]], first: int = 0, **fields: Any) -> list[Message]:
    """A message of calls, and their results, which are counted from `first` on."""
    turns = [_said("assistant", fields.pop("content", ""), tool_calls=list(calls), **fields)]
    for i, call in enumerate(calls, first):
        id_ = {"tool_call_id": call["id"]} if "id" in call else {}
        turns.append(_said("tool", f"q7result{i}", **id_))
    return turns


def _same_ids() -> Iterator[Conversation]:
    """Conversations in which several calls have one id."""
    one, other = _call(name="q7one"), _call(name="q7two", id_=_IDS[0])
    question, texts = _said("user", "Hi"), ("q7result0", "q7result1")
    turns = (question, *_answered([one]), *_answered([other], 1))
    yield Conversation(turns, texts, (_tool(),), n_before=3)
    yield Conversation((question, *_answered([one, other])), texts, (_tool(),))
    both = [_call(0), _call(1)]
    turns = (question, *_answered(both), *_answered([both[1], both[1]], 2))
    yield Conversation(turns, (*texts, "q7result2", "q7result3"), (_tool(),))


def _offered(*tools: Tool) -> Conversation:
    return Conversation((_said("user", "q7text"),), ("q7text",), tools)


def _parameter(schema: Any) -> Tool:
    return _tool(parameters={"type": "object", "properties": {"q7key": schema}, "required": []})


#: In the order in which they are made.
REPAIRS: tuple[Repair, ...] = (
    Repair(
        "developer-as-system",
        "the developer's messages become those of the system",
        (_talk("developer user"), _talk("system developer user"), _talk("developer system user")),
        developer_as_system,
    ),
    Repair(
        "ids-of-their-own",
        "calls without an id, or with that of an earlier one, get another",
        (_loop(_call(id_="none")), *_same_ids()),
        ids_of_their_own,
        tried=2,
    ),
    Repair(
        "ids-of-nine",
        "calls and results get ids of nine letters and digits",
        (_loop(_call(id_="call_Ab1Cd2Ef3Gh4")), _loop(_call(id_="none"))),
        ids_of_nine,
        tried=2,
    ),
    Repair(
        "ids-with-names",
        "calls get ids that tell the function",
        (_loop(_call(name="q7name"), texts=("q7name", "q7argument0", "q7result0")),),
        ids_with_names,
        tried=2,
    ),
    Repair(
        "results-alone",
        "results without a call become tagged messages of the user",
        (
            Conversation((*_talk("user").turns, _said("tool", "q7result0")), ("q7result0",)),
            Conversation(
                (_said("user", "Hi"), _said("tool", "q7result0"), _said("user", "q7text")),
                ("q7result0", "q7text"),
            ),
        ),
        results_alone,
        tried=2,
    ),
    Repair(
        "one-call-each",
        "several calls of a message become messages of one call, each before its result",
        (
            _loop(_call(0), _call(1), texts=("q7argument1", "q7result1")),
            _loop(_call(0), _call(1), texts=("q7argument0", "q7result0"), then=""),
        ),
        one_call_each,
        tried=2,
    ),
    Repair(
        "arguments-in-objects",
        "arguments that are no JSON object become the argument `arguments`",
        (
            _loop(_call(text='{"q7key": "q7cut'), texts=("q7cut", "q7result0")),
            _loop(_call(text='["q7list"]'), texts=("q7list", "q7result0")),
        ),
        arguments_in_objects,
        tried=2,
    ),
    Repair(
        "text-in-thinking",
        "text between thinking and calls, after the last message of the user, joins the thinking",
        (
            _loop(
                _call(),
                content="q7said",
                reasoning_content="q7thought",
                texts=("q7thought", "q7said", "q7argument0", "q7result0"),
                then="",
            ),
        ),
        text_in_thinking,
        tried=3,
    ),
    Repair(
        "text-before-calls",
        "text beside calls becomes a message of its own before them",
        (_loop(_call(), content="q7said", texts=("q7said", "q7argument0", "q7result0")),),
        text_before_calls,
        tried=2,
    ),
    Repair(
        "one-system-message",
        "system messages at the beginning are joined",
        (_talk("system system user"), _talk("system system system user assistant user")),
        one_system_message,
    ),
    Repair(
        "later-system-messages",
        "system messages that come later become tagged messages of the user, where they are",
        (
            _talk("system user assistant system user"),
            _talk("user system"),
            _talk("system user system assistant user"),
            _talk("user assistant system", n_before=2),
        ),
        later_system_messages,
    ),
    Repair(
        "system-in-user",
        "system messages begin the first message of the user",
        (_talk("system user"), _talk("system user assistant user")),
        system_in_user,
    ),
    Repair(
        "user-first",
        f"where the user does not speak first after system messages, the user says `{FILLER}`",
        (
            _talk("system"),
            _talk("assistant user"),
            _talk("system assistant user"),
            *(
                attrs.evolve(_talk(role), texts=("q7text0",), tools=(_tool(),))
                for role in ("system", "assistant")
            ),
        ),
        user_first,
    ),
    Repair(
        "no-empty-messages",
        "empty messages of the assistant are left out",
        (
            Conversation(
                (*_talk("user").turns, _said("assistant", ""), _said("user", "q7")), ("q7",)
            ),
        ),
        no_empty_messages,
    ),
    Repair(
        "alternating",
        "messages that follow one of the same role are joined to it, and those of the user after "
        "the result of a tool to the result",
        (
            _talk("user user"),
            _talk("user assistant user user assistant user"),
            _talk("user assistant assistant user"),
            _loop(_call(), then="user"),
        ),
        alternating,
        tried=0,
    ),
    Repair(
        "completed-tools",
        "parameters of tools get `properties` and `required`",
        (_offered(_tool(parameters={})), _offered(_tool(parameters={"type": "object"}))),
        tool=completed,
    ),
    Repair(
        "typed-tools",
        "parameters of several types, or none, get one",
        tuple(
            _offered(_parameter(schema))
            for schema in (
                {"type": ["string", "null"], "description": ""},
                {"description": ""},
                True,
            )
        ),
        tool=typed,
    ),
    Repair(
        "open-objects",
        "parameters that are objects say that other members are strings",
        (_offered(_parameter({"type": "object", "description": "", "properties": {}})),),
        tool=open_objects,
    ),
    Repair(
        "described-tools",
        "tools and parameters without a description get an empty one",
        (_offered(_tool(description=None)), _offered(_parameter({"type": "string"}))),
        tool=described,
    ),
)

_IN_ORDER_OF_PROBES = tuple(sorted(REPAIRS, key=lambda one: one.tried))
