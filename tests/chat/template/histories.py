"""Histories that clients send, each with the texts that a prompt must have, in their order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

Message = dict[str, Any]


@attrs.define
class History:
    """A conversation, and what its prompt must have.

    Attributes:
        messages: as a client sends them.
        tools: likewise.
        texts: that the prompt has, in this order.
        is_ordered: False: a result may come before another call, and after it.
        thoughts: of assistants, which a template may drop.
    """

    messages: list[Message] = attrs.field(factory=list)
    tools: list[dict[str, Any]] | None = None
    texts: list[str] = attrs.field(factory=list)
    is_ordered: bool = True
    thoughts: list[str] = attrs.field(factory=list)

    # -- texts

    def text(self) -> str:
        """Make a text that the prompt must have."""
        self.texts.append(f"text{len(self.texts):02}x")
        return self.texts[-1]

    def thought(self) -> str:
        """Make a text that the template may drop."""
        self.thoughts.append(f"thought{len(self.thoughts):02}x")
        return self.thoughts[-1]

    # -- messages

    def add(self, role: str, **fields: Any) -> History:
        """Add a message."""
        self.messages.append({"role": role, **fields})
        return self

    def say(self, *roles: str) -> History:
        """Add a message of text for each role."""
        for role in roles:
            self.add(role, content=self.text())
        return self

    def parts(self, role: str, n: int = 2, **fields: Any) -> History:
        """Add a message whose content has several parts."""
        content = [{"type": "text", "text": self.text()} for _ in range(n)]
        return self.add(role, content=content, **fields)

    def call(
        self,
        *names: str,
        content: str | None = None,
        arguments: Sequence[object] | None = None,
        ids: Sequence[object] | None = None,
        **fields: Any,
    ) -> History:
        """Add calls; each has a text among its arguments unless they are given."""
        calls = []
        self.is_ordered &= len(names) < 2
        for i, name in enumerate(names):
            given = arguments[i] if arguments else json.dumps({"city": self.text()})
            id_ = ids[i] if ids else f"call_{len(self.messages)}_{i}"
            function = {"name": name, "arguments": given}
            calls.append({"id": id_, "type": "function", "function": function})
            if id_ is None:
                del calls[-1]["id"]
        return self.add("assistant", content=content, tool_calls=calls, **fields)

    def results(self, order: Sequence[int] | None = None, *, content: Any = None) -> History:
        """Add a result for each of the last calls."""
        called = next(one["tool_calls"] for one in reversed(self.messages) if "tool_calls" in one)
        for i in order or range(len(called)):
            fields = {"tool_call_id": called[i]["id"]} if "id" in called[i] else {}
            self.add("tool", content=self.text() if content is None else content, **fields)
        return self

    def with_tools(self, *tools: dict[str, Any]) -> History:
        """Offer tools."""
        self.tools = list(tools or (tool("weather"), tool("clock")))
        return self


def tool(name: str, **fields: Any) -> dict[str, Any]:
    """A tool as most clients describe one."""
    function = {
        "name": name,
        "description": "Looks it up.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Where."}},
            "required": ["city"],
        },
    }
    return {"type": "function", "function": {**function, **fields}}


def without(name: str, *fields: str) -> dict[str, Any]:
    """A tool that lacks some fields."""
    made = tool(name)
    for field in fields:
        del made["function"][field]
    return made


def properties(**given: Any) -> dict[str, Any]:
    """A tool with these parameters."""
    return tool("weather", parameters={"type": "object", "properties": given})


#: Arguments of calls that are no object, and the text in them that the prompt must have.
_ODD_ARGUMENTS: dict[str, tuple[Any, str]] = {
    "cut": ('{"city": "odd7x', "odd7x"),
    "cut-key": ('{"odd7x', "odd7x"),
    "brace": ("{", ""),
    "list": ('["odd7x"]', "odd7x"),
    "null": ("null", ""),
    "absent": (None, ""),
    "empty": ("", ""),
    "text": ('"odd7x"', "odd7x"),
    "number": ("1272", "1272"),
    "words": ("odd7x, please", "odd7x"),
    "two": ('{"city": "odd7x"}{"city": "b"}', "odd7x"),
    "nested": ('{"city": {"name": "odd7x", "at": [1, null, true]}}', "odd7x"),
    "long-number": ('{"odd7x": 123456789012345678901234567890}', "odd7x"),
    "half-character": ('{"city": "odd7x \\ud83d"}', "odd7x"),
    "deep": ('{"odd7x": ' + "[" * 95 + "]" * 95 + "}", "odd7x"),
    "nan": ('{"city": NaN, "odd7x": 1}', "odd7x"),
}

_TOOLS: dict[str, list[dict[str, Any]]] = {
    "no-description": [without("weather", "description")],
    "no-parameters": [without("weather", "parameters")],
    "name-alone": [without("weather", "description", "parameters")],
    "empty-parameters": [tool("weather", parameters={})],
    "null-parameters": [tool("weather", parameters=None)],
    "null-description": [tool("weather", description=None)],
    "no-properties": [tool("weather", parameters={"type": "object"})],
    "empty-properties": [properties()],
    "null-members": [
        tool("weather", parameters={"type": "object", "properties": None, "required": None})
    ],
    "null-keywords": [properties(city={"type": None, "description": None, "enum": None})],
    "nested-nulls": [properties(city={"type": "object", "properties": None, "items": None})],
    "null-type": [properties(city={"type": "null"})],
    "bare-property": [properties(city={"type": "string"})],
    "untyped": [properties(city={})],
    "true": [properties(city=True)],
    "two-types": [properties(city={"type": ["string", "null"]})],
    "any-of": [properties(city={"anyOf": [{"type": "string"}, {"type": "null"}]})],
    "enum": [properties(city={"enum": ["a", 1, None]})],
    "const": [properties(city={"const": "a"})],
    "array": [properties(city={"type": "array"})],
    "array-of": [properties(city={"type": "array", "items": {"type": ["integer", "null"]}})],
    "nested": [
        properties(city={"type": "object", "properties": {"name": {"type": ["string", "null"]}}})
    ],
    "open": [properties(city={"type": "object", "additionalProperties": True})],
    "ref": [
        tool(
            "weather",
            parameters={
                "type": "object",
                "properties": {"city": {"$ref": "#/$defs/City"}},
                "$defs": {"City": {"type": "object", "properties": {"name": {"type": "string"}}}},
            },
        )
    ],
    "root-any-of": [tool("weather", parameters={"anyOf": [{"type": "object"}]})],
    "strict": [tool("weather", strict=True)],
    "mcp-names": [tool("mcp.server/get:weather"), tool("mcp__server__clock-2")],
    "many": [tool(f"tool{i}") for i in range(8)],
}


def _kinds() -> Iterator[tuple[str, History]]:
    # 1. Arguments.
    for name, (given, text) in _ODD_ARGUMENTS.items():
        made = History().with_tools().say("user").call("weather", arguments=[given])
        made.texts += [text] * bool(text)
        yield f"arguments: {name}", made.results().say("assistant", "user")
    made = History().with_tools().say("user").call("weather", arguments=['{"city": "odd7x'])
    made.texts.append("odd7x")
    yield "arguments: cut, last", made.results()

    # 2. Text, thinking and calls.
    for thinking in ("", "reasoning_content", "reasoning"):
        for content in (False, True):
            made = History().with_tools().say("user")
            fields = {thinking: made.thought()} if thinking else {}
            made.call("weather", content=made.text() if content else None, **fields)
            name = f"call: {'text, ' * content}{thinking or 'no thinking'}"
            yield name, made.results()
            made = History().with_tools().say("user")
            fields = {thinking: made.thought()} if thinking else {}
            made.call("weather", content=made.text() if content else None, **fields)
            yield f"{name}, answered", made.results().say("assistant", "user")
    made = History().with_tools().say("user")
    for _ in range(3):
        thought = made.thought()
        made.call("weather", content=made.text(), reasoning_content=thought).results()
    yield "call: three steps", made
    yield "call: no result", History().with_tools().say("user").call("weather").say("user")
    made = History().with_tools().say("user").call("weather").results()
    made.messages.pop(1)
    made.texts.pop(1)
    yield "call: a result alone", made.say("user")
    yield "call: no tools", History().say("user").call("weather").results().say("assistant", "user")

    # 3. Tools.
    for name, tools in _TOOLS.items():
        yield f"tools: {name}", History().with_tools(*tools).say("user")
    made = History().with_tools(*_TOOLS["mcp-names"]).say("user").call("mcp.server/get:weather")
    yield "tools: mcp-names, called", made.results().say("assistant", "user")
    made = History().with_tools(without("weather", "description", "parameters")).say("user")
    yield "tools: name-alone, called", made.call("weather", arguments=["{}"]).results()
    yield "tools: system", History().with_tools().say("system", "user")
    made = History().with_tools().say("user").call("other").results()
    yield "tools: another called", made.say("assistant", "user")

    # 4. Turns.
    for name, roles in {
        "two users": "user user",
        "three users": "user user user assistant user",
        "users later": "user assistant user user assistant user",
        "assistant first": "assistant user",
        "assistant first, later": "assistant user assistant user",
        "system, assistant": "system assistant user",
        "two assistants": "user assistant assistant user",
        "two assistants at the end": "user assistant assistant",
        "system alone": "system",
        "developer alone": "developer",
        "two systems alone": "system system",
    }.items():
        yield f"turns: {name}", History().say(*roles.split())
    yield (
        "turns: result, user",
        History().with_tools().say("user").call("weather").results().say("user"),
    )
    made = History().with_tools().say("user").call("weather").results().say("user", "assistant")
    yield "turns: result, user, later", made.say("user").call("weather").results().say("user")
    yield (
        "turns: two users, call",
        History().with_tools().say("user", "user").call("weather").results(),
    )
    made = History().with_tools().say("assistant", "user").call("weather")
    yield "turns: assistant first, call", made.results()

    # 5. System and developer messages.
    for name, roles in {
        "first": "system user",
        "developer": "developer user",
        "two": "system system user",
        "and developer": "system developer user",
        "developer and system": "developer system user",
        "three": "system developer system user assistant user",
        "after user": "system user system",
        "after user, no first": "user system",
        "after assistant": "system user assistant system user",
        "after assistant, no first": "user assistant system user",
        "developers": "developer user developer assistant user developer assistant user developer",
        "at the end": "user assistant user system",
        "developer at the end": "user assistant user developer",
        "between users": "user system user",
        "two in the middle": "user assistant system system user",
        "each turn": "system user system assistant user system assistant user system",
    }.items():
        yield f"system: {name}", History().say(*roles.split())
        if roles.startswith(("system", "developer")):
            yield f"system: {name}, tools", History().with_tools().say(*roles.split())
    for role in ("system", "developer"):
        made = History().with_tools().say("system", "user").call("weather").results().say(role)
        yield f"system: {role} after result", made
        made = History().with_tools().say("system", "user").call("weather").results().say(role)
        yield f"system: {role} after result, later", made.say("assistant", "user")
    made = History().with_tools().say("system", "user").call("weather").results()
    yield "system: before user, after call", made.say("assistant", "system", "user")

    # 6. Parts.
    for role in ("system", "developer", "user", "assistant"):
        roles = {"user": ["user"], "assistant": ["user", "assistant", "user"]}.get(
            role, [role, "user"]
        )
        for n in (1, 2, 3):
            made = History()
            for each in roles:
                made.parts(each, n) if each == role else made.say(each)
            yield f"parts: {role} {n}", made
    for then in ((), ("assistant", "user")):
        made = History().with_tools().say("user").call("weather")
        yield (
            f"parts: tool{', later' * bool(then)}",
            made.parts("tool", tool_call_id="call_1_0").say(*then),
        )
    made = History().with_tools().say("user")
    made.call("weather", content=[{"type": "text", "text": made.text()}]).results()  # type: ignore[arg-type]
    yield "parts: call", made
    made = History().say("user")
    thought = {"type": "thinking", "thinking": made.thought()}
    made.add("assistant", content=[thought, {"type": "text", "text": made.text()}])
    yield "parts: thinking", made.say("user")
    made = History().say("user")
    thought = {"type": "reasoning", "text": made.thought()}
    made.add("assistant", content=[thought, {"type": "text", "text": made.text()}])
    yield "parts: reasoning", made.say("user")
    yield "parts: empty", History().say("user").add("assistant", content="").say("user")
    yield "parts: none", History().say("user").add("assistant", content=[]).say("user")
    yield (
        "parts: everywhere",
        History().parts("system").parts("user").parts("assistant").parts("user"),
    )

    # 7. Ids.
    for name, ids in {
        "openai": ["call_Ab1Cd2Ef3Gh4Ij5Kl6Mn7Op8", "call_Xb1Cd2Ef3Gh4Ij5Kl6Mn7Op8"],
        "anthropic": ["toolu_01A09q90qw90lq917835lq9", "toolu_01B09q90qw90lq917835lq9"],
        "uuid": ["9b2f0c1e-6f0a-4c43-8d7c-0d8e5f6a7b8c", "0b2f0c1e-6f0a-4c43-8d7c-0d8e5f6a7b8c"],
        "kimi": ["functions.weather:0", "functions.clock:1"],
        "short": ["1", "2"],
        "nine": ["abcdefgh1", "abcdefgh2"],
        "none": [None, None],
        "odd": ["a b/c", "ä"],
        "same": ["x", "x"],
    }.items():
        made = History().with_tools().say("user").call("weather", ids=ids[:1]).results()
        yield f"ids: {name}", made.say("assistant", "user")
        made = History().with_tools().say("user").call("weather", ids=ids[:1]).results()
        made.call("clock", ids=ids[1:]).results()
        yield f"ids: {name}, two", made.say("assistant", "user")

    made = History().with_tools().say("user").call("weather", ids=["x"])
    made.add("tool", tool_call_id="y", content=made.text())
    yield "ids: of no call", made.say("assistant", "user")

    # 8. Several calls.
    both = ("weather", "clock")
    yield "calls: two", History().with_tools().say("user").call(*both).results()
    made = History().with_tools().say("user").call(*both)
    yield "calls: two, answered", made.results().say("assistant", "user")
    made = History().with_tools().say("user")
    yield "calls: text", made.call(*both, content=made.text()).results().say("assistant", "user")
    made = History().with_tools().say("user")
    thought = made.thought()
    made.call(*both, content=made.text(), reasoning_content=thought)
    yield "calls: thinking, text", made.results()
    yield "calls: three of one", History().with_tools().say("user").call(*["weather"] * 3).results()
    made = History().with_tools().say("user").call(*both).results().call(*both).results()
    yield "calls: twice", made.say("assistant", "user")
    yield (
        "calls: result, user",
        History().with_tools().say("user").call(*both).results().say("user"),
    )
    yield "calls: one result", History().with_tools().say("user").call(*both).results([0])
    yield (
        "calls: one result, user",
        History().with_tools().say("user").call(*both).results([1]).say("user"),
    )
    yield "calls: no tools", History().say("user").call(*both).results().say("assistant", "user")
    made = History().with_tools().say("user").call(*both).results([1, 0])
    yield "calls: other order", made.say("assistant", "user")

    made = History().with_tools().say("user").call("weather", ids=["x"]).call("clock", ids=["y"])
    for id_ in ("x", "y"):
        made.add("tool", tool_call_id=id_, content=made.text())
    yield "calls: in two messages", made.say("assistant", "user")

    made = History().with_tools().say("user")
    made.add("assistant", function_call={"name": "weather", "arguments": made.text()})
    made.add("function", name="weather", content=made.text())
    yield "calls: of functions", made.say("assistant", "user")

    # 9. The last message is the assistant's.
    yield "end: text", History().say("user", "assistant")
    yield "end: later", History().say("system", "user", "assistant", "user", "assistant")
    yield "end: alone", History().say("assistant")
    yield "end: system", History().say("system", "assistant")
    yield "end: tools", History().with_tools().say("user", "assistant")
    yield (
        "end: result",
        History().with_tools().say("user").call("weather").results().say("assistant"),
    )
    made = History().say("user")
    yield "end: thinking", made.add("assistant", content="", reasoning_content=made.text())
    made = History().say("user")
    thought = made.thought()
    made.add("assistant", content=made.text(), reasoning_content=thought)
    yield "end: thinking, text", made
    yield "end: parts", History().say("user").parts("assistant")
    yield "end: empty", History().say("user").add("assistant", content="")


HISTORIES: dict[str, History] = dict(_kinds())
