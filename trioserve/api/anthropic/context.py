"""Context management of Anthropic's API: what is cleared from a conversation, and compaction.

Edits apply in the order of Anthropic's API: results of tools, thinking, then the compaction. Their
triggers are also met where a prompt leaves no room for an answer, as their defaults are beyond the
context of most models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import attrs
from msgspec import UNSET, UnsetType

from trioserve.api.base import limits
from trioserve.api.base.answers import Answer
from trioserve.api.base.fields import (
    ARGUMENTS,
    NAME,
    PART,
    MismatchError,
    field,
    integer_in,
    json_type,
    list_schema,
    mapping,
    named,
    object_schema,
    objects,
    required,
    strings,
    structure,
    text,
)
from trioserve.chat.compaction import TASK, text_of
from trioserve.chat.messages import MAX_TOOLS, Message, Messages
from trioserve.chat.params import ChatParams
from trioserve.errors import InvalidRequestError, UnsupportedFieldError
from trioserve.server.compaction import CompactionPlan, length_of, limit_of
from trioserve.server.model_server import ModelServer
from trioserve.types import GenerationParams

#: When edits apply by default, and what they keep: the numbers of Anthropic's API.
_CLEAR_AT, _COMPACT_AT = 100_000, 150_000
_KEPT_USES, _KEPT_THINKING = 3, 1

#: The text that takes the place of a cleared result.
CLEARED = "[cleared to save room]"

_count = integer_in(0)


@attrs.frozen(kw_only=True)
class Amount:
    """A number of tokens, or of something else that is counted."""

    type: Literal["input_tokens", "tool_uses", "thinking_turns"]
    value: int = field(read=_count)


@json_type(list_schema(NAME, MAX_TOOLS))
def _names(value: Any) -> frozenset[str]:
    return frozenset(strings(value))


@attrs.frozen(kw_only=True)
class ClearToolUses:
    """``clear_tool_uses_*``: the results of tools are cleared, but for the last ones."""

    type: str
    trigger: Amount = attrs.field(factory=lambda: Amount(type="input_tokens", value=_CLEAR_AT))
    keep: Amount = attrs.field(factory=lambda: Amount(type="tool_uses", value=_KEPT_USES))
    clear_at_least: Amount | None = None
    clear_tool_inputs: bool | frozenset[str] = field(
        read=lambda value: value if isinstance(value, bool) else _names(value),
        schema={"type": ["boolean", "array"], "items": NAME, "maxItems": MAX_TOOLS},
        default=False,
    )
    exclude_tools: frozenset[str] = field(read=_names, default=frozenset())


@json_type(PART)
def _keep_thinking(value: Any) -> int | None:
    """Read the number of turns that keep their thinking; None: all."""
    kind = value if value == "all" else required(mapping(value), "type", text)
    if kind == "all":
        return None
    if kind != "thinking_turns":
        raise MismatchError('"all", or an object of the type "thinking_turns"')
    return required(value, "value", _count)


@attrs.frozen(kw_only=True)
class ClearThinking:
    """``clear_thinking_*``: the thinking of turns is cleared, but for the last ones."""

    type: str
    keep: int | None = field(read=_keep_thinking, default=_KEPT_THINKING)


@attrs.frozen(kw_only=True)
class Compact:
    """``compact_*``: a summary takes the place of the conversation."""

    type: str
    trigger: Amount = attrs.field(factory=lambda: Amount(type="input_tokens", value=_COMPACT_AT))
    instructions: str | None = None
    pause_after_compaction: bool = False


Edit: TypeAlias = ClearToolUses | ClearThinking | Compact

_KINDS: Mapping[str, type[Edit]] = {
    "clear_tool_uses_": ClearToolUses,
    "clear_thinking_": ClearThinking,
    "compact_": Compact,
}


@json_type(object_schema(edits=list_schema(ARGUMENTS, limits.MAX_INCLUDED)))
def read_edits(value: Any) -> tuple[Edit, ...]:
    """Read ``context_management``: its edits, in the order in which they apply."""
    path, found = "context_management.edits", list[Edit]()
    given = mapping(value).get("edits")
    for i, edit in enumerate(named(objects, given or [], path)):
        kind = required(edit, "type", text, f"{path}[{i}]")
        cls = next((cls for head, cls in _KINDS.items() if kind.startswith(head)), None)
        if cls is None:
            raise UnsupportedFieldError.at(
                f"{path}[{i}].type", f"is {kind!r:.80}; it must begin with {', '.join(_KINDS)}."
            )
        if any(isinstance(one, cls) for one in found):
            raise InvalidRequestError.at(f"{path}[{i}].type", "is there twice.")
        found.append(structure(cls, edit, f"{path}[{i}]."))
    return tuple(sorted(found, key=lambda one: [*_KINDS.values()].index(type(one))))


@attrs.frozen(kw_only=True)
class CompactionOptions:
    """``compaction``: the answer is a compaction, and nothing else."""

    type: Literal["summarize"]
    instructions: str | None = None

    def plan(self, limit: int) -> CompactionPlan:
        """Say how the conversation is compacted."""
        task = (self.instructions or "").strip() or TASK
        return CompactionPlan(task=task, limit=limit, answers=False, may_fail=True)


# -- what becomes of a conversation


class AppliedEdit(Answer, kw_only=True):
    """An edit that has changed the conversation."""

    is_open = True
    type: str
    cleared_input_tokens: int
    cleared_tool_uses: int | UnsetType = UNSET
    cleared_thinking_turns: int | UnsetType = UNSET


@attrs.define(eq=False)
class Context:
    """The conversation of a request, as its edits leave it.

    Attributes:
        messages: those that the edits leave.
        applied: the edits that have changed something.
        plan: how it is compacted; None: it is not.
    """

    server: ModelServer
    chat: ChatParams
    limit: int  # tokens of a prompt that leave room for an answer
    messages: Messages
    applied: list[AppliedEdit] = attrs.field(factory=list)
    plan: CompactionPlan | None = None

    @classmethod
    async def of(
        cls,
        edits: Sequence[Edit],
        server: ModelServer,
        messages: Messages,
        params: GenerationParams,
        chat: ChatParams,
    ) -> Context:
        """Apply edits."""
        context = cls(server, chat, limit_of(server, params), messages)
        for edit in edits:
            match edit:
                case ClearToolUses():
                    await context._clear_tool_uses(edit)
                case ClearThinking():
                    await context._clear_thinking(edit)
                case Compact() if await context._reaches(edit.trigger):
                    more = f"\n\n{edit.instructions}" if edit.instructions else ""
                    context.plan = CompactionPlan(
                        task=TASK + more,
                        limit=min(context.limit, max(1, edit.trigger.value)),
                        answers=not edit.pause_after_compaction,
                        may_fail=True,
                    )
        return context

    async def _reaches(self, trigger: Amount) -> bool:
        most = min(self.limit, trigger.value)
        return await length_of(self.server, self.messages, self.chat) >= most

    async def _clear_tool_uses(self, edit: ClearToolUses) -> None:
        """Clear the results of tools and, with `clear_tool_inputs`, the inputs of their calls."""
        results = [
            i
            for i, one in enumerate(self.messages)
            if one["role"] == "tool" and one.get("name") not in edit.exclude_tools
        ]
        if edit.trigger.type == "tool_uses":
            is_due = len(results) > edit.trigger.value
        else:
            is_due = await self._reaches(edit.trigger)
        old = results[: max(0, len(results) - edit.keep.value)]
        if not is_due or not old:
            return
        messages = list(self.messages)
        for i in old:
            messages[i] = {**messages[i], "content": CLEARED}
        if edit.clear_tool_inputs:
            ids = {self.messages[i].get("tool_call_id") for i in old}
            messages = [_without_inputs(one, ids, edit.clear_tool_inputs) for one in messages]
        least = edit.clear_at_least.value if edit.clear_at_least else 0
        await self._apply(messages, edit.type, least, cleared_tool_uses=len(old))

    async def _clear_thinking(self, edit: ClearThinking) -> None:
        thinking = [i for i, one in enumerate(self.messages) if "reasoning_content" in one]
        if edit.keep is None or not (old := thinking[: max(0, len(thinking) - edit.keep)]):
            return
        messages = list(self.messages)
        for i in old:
            messages[i] = {k: v for k, v in messages[i].items() if k != "reasoning_content"}
        await self._apply(messages, edit.type, cleared_thinking_turns=len(old))

    async def _apply(
        self, messages: Sequence[Message], kind: str, least: int = 0, **cleared: int
    ) -> None:
        """Replace the conversation, if that saves enough tokens."""
        saved = 0
        for before, after in zip(self.messages, messages, strict=True):
            if before is not after:
                saved += await self._n_tokens(before) - await self._n_tokens(after)
        if saved >= least:
            self.messages = Messages(messages)
            self.applied.append(
                AppliedEdit(type=kind, cleared_input_tokens=max(0, saved), **cleared)
            )

    async def _n_tokens(self, message: Message) -> int:
        """About how many tokens a message has."""
        content = text_of(message)
        calls = "".join(call["function"]["arguments"] for call in message.get("tool_calls", ()))
        whole = message.get("reasoning_content", "") + content + calls
        return len(await self.server.tokenize(whole, add_special=False, parse_special=False))


def _without_inputs(
    message: Message, ids: set[str | None], tools: bool | frozenset[str]
) -> Message:
    calls = message.get("tool_calls", ())
    cleared = [
        {**call, "function": {**call["function"], "arguments": "{}"}}
        if call["id"] in ids and (tools is True or call["function"]["name"] in (tools or ()))
        else call
        for call in calls
    ]
    is_same = all(one is other for one, other in zip(cleared, calls, strict=True))
    return message if is_same else {**message, "tool_calls": cleared}
