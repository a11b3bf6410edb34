"""Repairs of conversations: what OpenAI's API takes, in the forms that a template takes.

A template refuses some conversations, and loses a part of others. Each repair changes one of these
forms, and has small conversations that tell whether a template needs it: those whose texts the
prompt has, in their order, with the repair only. `find` renders them once for each template.

A repair moves no text to the front, so that each prompt begins with the prompt of the turn before.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import attrs

from trioserve.chat.messages import Message, Tool
from trioserve.chat.template import tools, turns
from trioserve.chat.template.capabilities import (
    CALL_IDS,
    KEY,
    PROBE_TOOL,
    probe_call,
    probe_tool,
    said,
)
from trioserve.chat.template.turns import Turns


@attrs.frozen
class Conversation:
    """Messages and tools whose prompt must have some texts, in this order.

    With `n_before`, it begins as the prompt of the first `n_before` messages, up to the last text.
    """

    turns: tuple[Message, ...]
    texts: tuple[str, ...]
    tools: tuple[Tool, ...] = ()
    n_before: int = 0

    def is_shown(self, render: Callable[[Conversation], str | None]) -> bool:
        """Check that the prompt has all of it."""
        prompt = render(self)
        if prompt is None or not _in_order(self.texts, prompt):
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


def _in_order(texts: Sequence[str], prompt: str) -> bool:
    end = 0
    for text in texts:
        place = prompt.find(text, end)
        if place < 0:
            return False
        end = place + len(text)
    return True


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


# -- what tells that a template needs them


def _talk(roles: str, n_before: int = 0) -> Conversation:
    """A conversation with a text of each role."""
    texts = tuple(f"q7text{i}" for i in range(len(roles.split())))
    return Conversation(tuple(map(said, roles.split(), texts)), texts, n_before=n_before)


def _call(i: int = 0, *, text: str = "", **fields: str) -> dict[str, Any]:
    return probe_call(i, text or json.dumps({KEY: f"q7argument{i}"}), **fields)


def _call_without_id() -> dict[str, Any]:
    return {key: value for key, value in _call().items() if key != "id"}


def _loop(
    *calls: dict[str, Any],
    texts: Sequence[str] = ("q7argument0", "q7result0"),
    then: str = "assistant user",
    **fields: Any,
) -> Conversation:
    """A question, calls, their results, and what follows."""
    after = _talk(then)
    turns = (said("user", "Hi"), *_answered(calls, **fields), *after.turns)
    return Conversation(turns, (*texts, *after.texts), (PROBE_TOOL,))


def _answered(calls: Sequence[dict[str, Any]], first: int = 0, **fields: Any) -> list[Message]:
    """A message of calls, and their results, which are counted from `first` on."""
    turns = [said("assistant", fields.pop("content", ""), tool_calls=list(calls), **fields)]
    for i, call in enumerate(calls, first):
        id_ = {"tool_call_id": call["id"]} if "id" in call else {}
        turns.append(said("tool", f"q7result{i}", **id_))
    return turns


def _called(*calls: list[dict[str, Any]], ids: Sequence[str]) -> Conversation:
    """Messages of calls, and after the last one results with these ids."""
    turns = [said("user", "Hi"), *(said("assistant", "", tool_calls=one) for one in calls)]
    results = [said("tool", f"q7result{i}", tool_call_id=id_) for i, id_ in enumerate(ids)]
    texts = tuple(one["content"] for one in results)
    return Conversation((*turns, *results), texts, (PROBE_TOOL,))


def _same_ids() -> Iterator[Conversation]:
    """Conversations in which several calls have one id."""
    one, other = _call(name="q7one"), _call(name="q7two", id_=CALL_IDS[0])
    question, texts = said("user", "Hi"), ("q7result0", "q7result1")
    turns = (question, *_answered([one]), *_answered([other], 1))
    yield Conversation(turns, texts, (PROBE_TOOL,), n_before=3)
    yield Conversation((question, *_answered([one, other])), texts, (PROBE_TOOL,))
    both = [_call(0), _call(1)]
    turns = (question, *_answered(both), *_answered([both[1], both[1]], 2))
    yield Conversation(turns, (*texts, "q7result2", "q7result3"), (PROBE_TOOL,))


def _offered(*tools: Tool) -> Conversation:
    return Conversation((said("user", "q7text"),), ("q7text",), tools)


def _parameter(schema: Any) -> Tool:
    return probe_tool(
        parameters={"type": "object", "properties": {"q7key": schema}, "required": []}
    )


#: In the order in which they are made.
REPAIRS: tuple[Repair, ...] = (
    Repair(
        "developer-as-system",
        "the developer's messages become those of the system",
        (_talk("developer user"), _talk("system developer user"), _talk("developer system user")),
        turns.developer_as_system,
    ),
    Repair(
        "ids-of-their-own",
        "calls without an id, or with the id of an earlier call, get a new one",
        (_loop(_call_without_id()), *_same_ids()),
        turns.ids_of_their_own,
        tried=2,
    ),
    Repair(
        "ids-of-nine",
        "calls and results get ids of nine letters and digits",
        (_loop(_call(id_="call_Ab1Cd2Ef3Gh4")), _loop(_call_without_id())),
        turns.ids_of_nine,
        tried=2,
    ),
    Repair(
        "ids-with-names",
        "calls get ids that tell the function",
        (_loop(_call(name="q7name"), texts=("q7name", "q7argument0", "q7result0")),),
        turns.ids_with_names,
        tried=2,
    ),
    Repair(
        "named-results",
        "results get the name of the function that was called",
        (
            _called([_call(0)], ids=CALL_IDS[1:]),
            _called([_call(0)], [_call(1)], ids=CALL_IDS),
        ),
        turns.named_results,
        tried=2,
    ),
    Repair(
        "results-alone",
        "results without a call become tagged messages of the user",
        (
            Conversation((*_talk("user").turns, said("tool", "q7result0")), ("q7result0",)),
            Conversation(
                (said("user", "Hi"), said("tool", "q7result0"), said("user", "q7text")),
                ("q7result0", "q7text"),
            ),
        ),
        turns.results_alone,
        tried=2,
    ),
    Repair(
        "one-call-each",
        "several calls of a message become messages of one call, each before its result",
        (
            _loop(_call(0), _call(1), texts=("q7argument1", "q7result1")),
            _loop(_call(0), _call(1), texts=("q7argument0", "q7result0"), then=""),
        ),
        turns.one_call_each,
        tried=2,
    ),
    Repair(
        "arguments-in-objects",
        "arguments that are no JSON object become the argument `arguments`",
        (
            _loop(_call(text='{"q7key": "q7cut'), texts=("q7cut", "q7result0")),
            _loop(_call(text='["q7list"]'), texts=("q7list", "q7result0")),
        ),
        turns.arguments_in_objects,
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
        turns.text_in_thinking,
        tried=3,
    ),
    Repair(
        "text-before-calls",
        "text beside calls becomes a message before them",
        (_loop(_call(), content="q7said", texts=("q7said", "q7argument0", "q7result0")),),
        turns.text_before_calls,
        tried=2,
    ),
    Repair(
        "one-system-message",
        "system messages at the beginning are joined",
        (_talk("system system user"), _talk("system system system user assistant user")),
        turns.one_system_message,
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
        turns.later_system_messages,
    ),
    Repair(
        "system-in-user",
        "system messages begin the first message of the user",
        (_talk("system user"),),
        turns.system_in_user,
    ),
    Repair(
        "system-in-first-user",
        "system messages begin the first message of the user, not the last one",
        (_talk("system user assistant user"),),
        partial(turns.system_in_user, separator="\n\n"),
    ),
    Repair(
        "user-first",
        "a conversation that the user does not begin, but for system messages, gets the user's "
        f"`{turns.FILLER}`",
        (
            _talk("system"),
            _talk("assistant user"),
            _talk("system assistant user"),
            *(
                attrs.evolve(_talk(role), texts=("q7text0",), tools=(PROBE_TOOL,))
                for role in ("system", "assistant")
            ),
        ),
        turns.user_first,
    ),
    Repair(
        "no-empty-messages",
        "empty messages of the assistant are left out",
        (Conversation((*_talk("user").turns, said("assistant", ""), said("user", "q7")), ("q7",)),),
        turns.no_empty_messages,
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
        turns.alternating,
        tried=0,
    ),
    Repair(
        "tools-without-nulls",
        "null values in tools are left out",
        (
            _offered(
                probe_tool(parameters={"type": "object", "properties": None, "required": None})
            ),
            _offered(_parameter({"type": "string", "description": None})),
            _offered(
                _parameter({"type": "string", "description": "", "enum": None, "items": None})
            ),
        ),
        tool=tools.without_nulls,
        tried=2,
    ),
    Repair(
        "completed-tools",
        "parameters of tools get `properties` and `required`",
        (_offered(probe_tool(parameters={})), _offered(probe_tool(parameters={"type": "object"}))),
        tool=tools.completed,
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
        tool=tools.typed,
    ),
    Repair(
        "open-objects",
        "parameters that are objects say that other members are strings",
        (_offered(_parameter({"type": "object", "description": "", "properties": {}})),),
        tool=tools.open_objects,
    ),
    Repair(
        "described-tools",
        "tools without a description get an empty one",
        (_offered(probe_tool(description=None)),),
        tool=tools.described,
    ),
    Repair(
        "described-parameters",
        "parameters without a description get an empty one",
        (_offered(_parameter({"type": "string"})),),
        tool=tools.with_described_parameters,
    ),
)

_IN_ORDER_OF_PROBES = tuple(sorted(REPAIRS, key=lambda one: one.tried))
