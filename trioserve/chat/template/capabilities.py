"""The capabilities of a chat template, found out by rendering small conversations with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from trioserve.chat.messages import Message, Tool
from trioserve.chat.template.thinking import ThinkingVariables, find as find_thinking

#: Renders messages with tools and variables as they are; None when the template refuses.
Probe = Callable[..., str | None]

_NEEDLE = "q7needle"
_NEEDLES = (_NEEDLE, "q7second")
KEY = "q7key"
CALL_IDS = ("call00001", "call00002")  # nine letters and digits, which some templates insist on

#: Variables that make templates keep the reasoning of earlier turns.
PRESERVE_REASONING: Mapping[str, Any] = {
    "preserve_thinking": True,
    "clear_thinking": False,
    "truncate_history_thinking": False,
    "drop_thinking": False,
}


@attrs.frozen(kw_only=True)
class Capabilities:
    """The features that a template uses. The ``supports_…`` names are those of llama-server."""

    supports_string_content: bool = False
    supports_typed_content: bool = False
    supports_tools: bool = False
    supports_tool_calls: bool = False
    supports_parallel_tool_calls: bool = False
    supports_system_role: bool = False
    supports_preserve_reasoning: bool = False
    supports_reasoning_effort: bool = False
    #: Tool calls carry their arguments as an object, not as text.
    supports_object_arguments: bool = False
    supports_tool_results: bool = False  # messages of the role "tool"
    supports_enable_thinking: bool = False
    #: Roles whose content may be a list of parts, and roles whose content may be text.
    typed_roles: frozenset[str] = frozenset()
    string_roles: frozenset[str] = frozenset()
    #: The variables that turn reasoning on and off, and up and down.
    thinking: ThinkingVariables = attrs.field(factory=ThinkingVariables)
    #: The field of a message that holds the reasoning, if the template shows it. `content`: it is a
    #: part of the content, of the type "thinking".
    reasoning_field: str | None = None

    def as_flags(self) -> dict[str, bool]:
        """Return llama-server's report about a template."""
        fields = attrs.asdict(self, recurse=False)
        return {name: value for name, value in fields.items() if name.startswith("supports_")}


def find(probe: Probe) -> Capabilities:
    """Render a template with probes to find out what it supports."""
    typed = frozenset(role for role in _CONTENT_ROLES if _takes(probe, role, typed=True))
    strings = frozenset(role for role in _CONTENT_ROLES if _takes(probe, role, typed=False))
    thinking = find_thinking(lambda variables: probe([_USER], **variables))
    objects = _shows_arguments(probe, as_object=True)
    texts = _shows_arguments(probe, as_object=False)
    field = _reasoning_field(probe)
    return Capabilities(
        supports_string_content="user" in strings,
        supports_typed_content="user" in typed,
        supports_tools=_shows_tools(probe),
        supports_tool_calls=objects or texts,
        supports_parallel_tool_calls=_shows_second_call(probe, as_object=objects),
        supports_system_role="system" in typed | strings,
        supports_preserve_reasoning=field is not None and _keeps_reasoning(probe, field),
        supports_reasoning_effort=_differs(probe, "reasoning_effort", "low", "high"),
        supports_object_arguments=objects,
        supports_tool_results="tool" in typed | strings,
        supports_enable_thinking=thinking.switch is not None,
        typed_roles=typed,
        string_roles=strings,
        thinking=thinking,
        reasoning_field=field,
    )


_CONTENT_ROLES = ("system", "user", "assistant", "tool")


def said(role: str, text: str, **fields: Any) -> Message:
    """Make a message of a probe."""
    return {"role": role, "content": text, **fields}


_USER, _ASSISTANT = said("user", "Hello"), said("assistant", "Hello")


def probe_tool(**fields: Any) -> Tool:
    """Make the tool of probes; fields that are None are left out."""
    parameters = {
        "type": "object",
        "properties": {KEY: {"type": "string", "description": "An argument"}},
        "required": [KEY],
    }
    function = {"name": "tool1", "description": "A tool", "parameters": parameters, **fields}
    kept = {key: value for key, value in function.items() if value is not None}
    return {"type": "function", "function": kept}


PROBE_TOOL = probe_tool()


def probe_call(i: int, arguments: Any, *, name: str = "tool1", id_: str = "") -> dict[str, Any]:
    """Make a call of the tool of probes."""
    function = {"name": name, "arguments": arguments}
    return {"id": id_ or CALL_IDS[i], "type": "function", "function": function}


def _call(i: int, value: str, *, as_object: bool) -> dict[str, Any]:
    return probe_call(i, {KEY: value} if as_object else json.dumps({KEY: value}))


def _conversation(calls: list[dict[str, Any]], results: list[Any]) -> list[Message]:
    """A user's question, the assistant's calls, the tools' results, and an answer."""
    answers = [
        {"role": "tool", "name": "tool1", "tool_call_id": call_id, "content": result}
        for call_id, result in zip(CALL_IDS, results, strict=False)
    ]
    called = said("assistant", "", tool_calls=calls)
    return [_USER, called, *answers, _ASSISTANT, _USER]


def _in_both_forms(probe: Probe, shows: Callable[[str], bool], make: Callable[..., Any]) -> bool:
    """True if a conversation with tool calls is rendered as it should be, in either form."""
    return any(
        shows(probe(make(as_object=as_object), tools=[PROBE_TOOL]) or "")
        for as_object in (True, False)
    )


def _takes(probe: Probe, role: str, *, typed: bool) -> bool:
    """True if the content may be text, or a list of parts that are all shown, none as JSON."""
    parts = [{"type": "text", "text": text} for text in _NEEDLES]
    content: Any = parts if typed else "".join(_NEEDLES)

    def shows(shown: str) -> bool:
        return (
            all(needle in shown for needle in _NEEDLES)
            and (role == "tool" or "'type'" not in shown)
            and f"'text': '{_NEEDLE}" not in shown
            and f'"text": "{_NEEDLE}' not in shown
        )

    if role == "tool":
        calls = {form: [_call(0, "x", as_object=form)] for form in (True, False)}
        return _in_both_forms(
            probe, shows, lambda as_object: _conversation(calls[as_object], [content])
        )
    messages = [_USER, _ASSISTANT, _USER]
    if role == "system":
        messages.insert(0, {"role": "system", "content": content})
    else:
        place = {"user": 0, "assistant": 1}[role]
        messages[place] = {"role": role, "content": content}
    return shows(probe(messages) or "")


def _shows_tools(probe: Probe) -> bool:
    system: Message = {"role": "system", "content": "Help"}
    chats = ([_USER], [system, _USER])
    return any("tool1" in (probe(messages, tools=[PROBE_TOOL]) or "") for messages in chats)


def _shows_arguments(probe: Probe, *, as_object: bool) -> bool:
    call = _call(0, _NEEDLE, as_object=as_object)
    shown = probe(_conversation([call], ["result"]), tools=[PROBE_TOOL])
    if shown is None or _NEEDLE not in shown:
        return False
    if as_object:
        return f"'{KEY}': '{_NEEDLE}'" not in shown  # Python's way to print a dict
    return f'\\"{_NEEDLE}' not in shown  # text written as JSON once more


def _shows_second_call(probe: Probe, *, as_object: bool) -> bool:
    calls = [_call(0, "x", as_object=as_object), _call(1, _NEEDLE, as_object=as_object)]
    chats = (_conversation(calls, results) for results in (["one"], ["one", "two"]))
    return any(_NEEDLE in (probe(messages, tools=[PROBE_TOOL]) or "") for messages in chats)


def _differs(probe: Probe, name: str, one: Any, other: Any) -> bool:
    first, second = (probe([_USER], **{name: value}) for value in (one, other))
    return first is not None and second is not None and first != second


def with_reasoning(field: str, message: Message, reasoning: str) -> Message:
    """Put reasoning into the field of a message; see `Capabilities.reasoning_field`."""
    if field != "content":
        return {**message, field: reasoning}
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**message, "content": [{"type": "thinking", "thinking": reasoning}, *parts]}


def _reasoning_field(probe: Probe) -> str | None:
    for field in ("reasoning_content", "reasoning", "thinking", "content"):
        answered = with_reasoning(field, _ASSISTANT, _NEEDLE)

        def after_call(as_object: bool, field: str = field) -> list[Message]:
            calls = [_call(0, "x", as_object=as_object)]
            called = with_reasoning(field, said("assistant", "", tool_calls=calls), _NEEDLE)
            result = {"role": "tool", "tool_call_id": CALL_IDS[0], "content": "result"}
            return [_USER, called, {**result, "name": "tool1"}]

        if _in_both_forms(probe, _shows_needle, after_call):
            return field
        for messages in ([_USER, answered], [_USER, answered, _USER]):
            if _shows_needle(probe(messages) or ""):
                return field
    return None


def _shows_needle(shown: str) -> bool:
    as_it_is = (f"'thinking': '{_NEEDLE}", f'"thinking": "{_NEEDLE}')
    return _NEEDLE in shown and not any(text in shown for text in as_it_is)


def _keeps_reasoning(probe: Probe, field: str) -> bool:
    early, late = (with_reasoning(field, _ASSISTANT, text) for text in (_NEEDLE, "later"))
    messages = [_USER, early, _USER, late, _USER]
    return _NEEDLE in (probe(messages, enable_thinking=True, **PRESERVE_REASONING) or "")
