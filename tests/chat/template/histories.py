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
        content: Any = None,
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


_ROLES = ("system", "developer", "user", "assistant")


def history(script: str) -> History:
    """Make a history of steps.

    ``user`` says a text, ``user:2`` one of two parts. ``weather+clock`` calls both tools,
    ``weather:thought,text`` one after a thought and a text. ``results`` are those of all calls,
    ``results:10`` those of the second one and of the first. ``tools`` offers tools.
    """
    made = History()
    for step in script.split():
        name, _, how = step.partition(":")
        if name == "tools":
            made.with_tools()
        elif name == "results":
            made.results([int(i) for i in how])
        elif name in _ROLES:
            made.parts(name, int(how)) if how else made.say(name)
        else:
            fields = {"reasoning_content": made.thought()} if "thought" in how else {}
            content = made.text() if "text" in how else None
            made.call(*name.split("+"), content=content, **fields)
    return made


_SCRIPTS: dict[str, str] = {
    "call: no result": "tools user weather user",
    "call: no tools": "user weather results assistant user",
    "call: three steps": "tools user" + 3 * " weather:thought,text results",
    "tools: system": "tools system user",
    "tools: another called": "tools user other results assistant user",
    "turns: two users": "user user",
    "turns: three users": "user user user assistant user",
    "turns: users later": "user assistant user user assistant user",
    "turns: assistant first": "assistant user",
    "turns: assistant first, later": "assistant user assistant user",
    "turns: system, assistant": "system assistant user",
    "turns: two assistants": "user assistant assistant user",
    "turns: two assistants at the end": "user assistant assistant",
    "turns: system alone": "system",
    "turns: developer alone": "developer",
    "turns: two systems alone": "system system",
    "turns: result, user": "tools user weather results user",
    "turns: result, user, later": "tools user weather results user"
    " assistant user weather results user",
    "turns: two users, call": "tools user user weather results",
    "turns: assistant first, call": "tools assistant user weather results",
    "system: first": "system user",
    "system: developer": "developer user",
    "system: two": "system system user",
    "system: and developer": "system developer user",
    "system: developer and system": "developer system user",
    "system: three": "system developer system user assistant user",
    "system: after user": "system user system",
    "system: after user, no first": "user system",
    "system: after assistant": "system user assistant system user",
    "system: after assistant, no first": "user assistant system user",
    "system: developers": "developer user developer assistant user developer assistant user"
    " developer",
    "system: at the end": "user assistant user system",
    "system: developer at the end": "user assistant user developer",
    "system: between users": "user system user",
    "system: two in the middle": "user assistant system system user",
    "system: each turn": "system user system assistant user system assistant user system",
    "system: before user, after call": "tools system user weather results assistant system user",
    "parts: everywhere": "system:2 user:2 assistant:2 user:2",
    "calls: two": "tools user weather+clock results",
    "calls: two, answered": "tools user weather+clock results assistant user",
    "calls: text": "tools user weather+clock:text results assistant user",
    "calls: thinking, text": "tools user weather+clock:thought,text results",
    "calls: three of one": "tools user weather+weather+weather results",
    "calls: twice": "tools user weather+clock results weather+clock results assistant user",
    "calls: result, user": "tools user weather+clock results user",
    "calls: one result": "tools user weather+clock results:0",
    "calls: one result, user": "tools user weather+clock results:1 user",
    "calls: no tools": "user weather+clock results assistant user",
    "calls: other order": "tools user weather+clock results:10 assistant user",
    "end: text": "user assistant",
    "end: later": "system user assistant user assistant",
    "end: alone": "assistant",
    "end: system": "system assistant",
    "end: tools": "tools user assistant",
    "end: result": "tools user weather results assistant",
    "end: parts": "user assistant:2",
}

_IDS: dict[str, list[str | None]] = {
    "openai": ["call_Ab1Cd2Ef3Gh4Ij5Kl6Mn7Op8", "call_Xb1Cd2Ef3Gh4Ij5Kl6Mn7Op8"],
    "anthropic": ["toolu_01A09q90qw90lq917835lq9", "toolu_01B09q90qw90lq917835lq9"],
    "uuid": ["9b2f0c1e-6f0a-4c43-8d7c-0d8e5f6a7b8c", "0b2f0c1e-6f0a-4c43-8d7c-0d8e5f6a7b8c"],
    "kimi": ["functions.weather:0", "functions.clock:1"],
    "short": ["1", "2"],
    "nine": ["abcdefgh1", "abcdefgh2"],
    "none": [None, None],
    "odd": ["a b/c", "ä"],
    "same": ["x", "x"],
}


def _kinds() -> Iterator[tuple[str, History]]:
    for name, script in _SCRIPTS.items():
        yield name, history(script)
        if name.startswith("system: ") and script.startswith(("system", "developer")):
            yield f"{name}, tools", history(f"tools {script}")

    for name, (given, text) in _ODD_ARGUMENTS.items():
        for end, then in (("", ("assistant", "user")), (", last", ())):
            if end and name != "cut":
                continue
            made = history("tools user").call("weather", arguments=[given])
            made.texts += [text] * bool(text)
            yield f"arguments: {name}{end}", made.results().say(*then)

    for thinking in ("", "reasoning_content", "reasoning"):
        for content in (False, True):
            for end, then in (("", ()), (", answered", ("assistant", "user"))):
                made = history("tools user")
                fields = {thinking: made.thought()} if thinking else {}
                made.call("weather", content=made.text() if content else None, **fields)
                name = f"call: {'text, ' * content}{thinking or 'no thinking'}{end}"
                yield name, made.results().say(*then)
    made = history("tools user weather results")
    made.messages.pop(1)
    made.texts.pop(1)
    yield "call: a result alone", made.say("user")

    for name, tools in _TOOLS.items():
        yield f"tools: {name}", History().with_tools(*tools).say("user")
    made = History().with_tools(*_TOOLS["mcp-names"]).say("user").call("mcp.server/get:weather")
    yield "tools: mcp-names, called", made.results().say("assistant", "user")
    made = History().with_tools(*_TOOLS["name-alone"]).say("user")
    yield "tools: name-alone, called", made.call("weather", arguments=["{}"]).results()

    for role in ("system", "developer"):
        script = f"tools system user weather results {role}"
        yield f"system: {role} after result", history(script)
        yield f"system: {role} after result, later", history(f"{script} assistant user")

    for role, script in {
        "system": "system{} user",
        "developer": "developer{} user",
        "user": "user{}",
        "assistant": "user assistant{} user",
    }.items():
        for n in (1, 2, 3):
            yield f"parts: {role} {n}", history(script.format(f":{n}"))
    for then in ((), ("assistant", "user")):
        made = history("tools user weather").parts("tool", tool_call_id="call_1_0").say(*then)
        yield f"parts: tool{', later' * bool(then)}", made
    made = history("tools user")
    made.call("weather", content=[{"type": "text", "text": made.text()}]).results()
    yield "parts: call", made
    for kind, field in (("thinking", "thinking"), ("reasoning", "text")):
        made = history("user")
        thought = {"type": kind, field: made.thought()}
        made.add("assistant", content=[thought, {"type": "text", "text": made.text()}])
        yield f"parts: {kind}", made.say("user")
    yield "parts: empty", history("user").add("assistant", content="").say("user")
    yield "parts: none", history("user").add("assistant", content=[]).say("user")

    for name, ids in _IDS.items():
        made = history("tools user").call("weather", ids=ids[:1]).results()
        yield f"ids: {name}", made.say("assistant", "user")
        made = history("tools user").call("weather", ids=ids[:1]).results()
        made.call("clock", ids=ids[1:]).results()
        yield f"ids: {name}, two", made.say("assistant", "user")
    made = history("tools user").call("weather", ids=["x"])
    made.add("tool", tool_call_id="y", content=made.text())
    yield "ids: of no call", made.say("assistant", "user")

    made = history("tools user").call("weather", ids=["x"]).call("clock", ids=["y"])
    for id_ in ("x", "y"):
        made.add("tool", tool_call_id=id_, content=made.text())
    yield "calls: in two messages", made.say("assistant", "user")
    made = history("tools user")
    made.add("assistant", function_call={"name": "weather", "arguments": made.text()})
    made.add("function", name="weather", content=made.text())
    yield "calls: of functions", made.say("assistant", "user")

    made = history("user")
    yield "end: thinking", made.add("assistant", content="", reasoning_content=made.text())
    made = history("user")
    thought = made.thought()
    made.add("assistant", content=made.text(), reasoning_content=thought)
    yield "end: thinking, text", made
    yield "end: empty", history("user").add("assistant", content="")


HISTORIES: dict[str, History] = dict(_kinds())
